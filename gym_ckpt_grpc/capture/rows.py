"""Rows of the ledger: what is known of each captured call, without its tokens.

    staged    tokens of a call stand in the token store, and count in the manifest
    lineage   the same, for a call that later calls build upon and nobody trains on: never in a manifest
    failure   a call whose tokens were not kept, with the reason

On disk a row is one JSON object with these fields; fields that have their default are left out. Source:
participants section 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from gym_ckpt_grpc.capture.ledger_files import END, LedgerFiles, whole_lines
from gym_ckpt_grpc.control import Row
from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class _TokenRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What rows of calls with staged tokens have.

    number: order of admission in the attempt that made it. Lengths in tokens. response_id and the hashes are empty
    if the backend gave none; such a row poisons the manifest. output, continuation: fingerprints of the reply, and
    of all assistant turns up to and with it (parents.py). context_length, context_digest: of the request, in
    messages. capture_key: who staged it, set by a restore; empty: the attempt whose ledger it is in.
    """

    call_id: Text
    number: Positive
    mode: Literal["token_in", "text"]
    staging_key: Text
    staging_chain: tuple[Text, ...]
    weight_version: Natural
    previous_length: Natural
    added_length: Natural
    total_length: Natural
    context_length: Natural
    context_digest: str
    output: str
    continuation: Text
    fingerprint_version: Positive
    parent_id: str = ""
    staging_digest: str = ""
    extras_digest: str = ""
    chain_hash: str = ""
    cumulative_hash: str = ""
    response_id: str = ""
    capture_key: str = ""

    def missing(self) -> list[str]:
        """What a manifest needs of it and it does not have."""
        needed = ("response_id", "staging_digest", "extras_digest", "chain_hash", "cumulative_hash")
        return [name for name in needed if not getattr(self, name)]


class StagedRow(_TokenRow, frozen=True, kw_only=True, tag_field="kind", tag="staged"):
    """A call that counts in the manifest."""


class LineageRow(_TokenRow, frozen=True, kw_only=True, tag_field="kind", tag="lineage"):
    """A call that only resolves parents."""


class FailureRow(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="kind",
    tag="failure",
):
    """A call whose tokens were not kept. number: order of its admission."""

    call_id: Text
    number: Positive
    reason: str


AnyRow = StagedRow | LineageRow | FailureRow

_DECODER: msgspec.json.Decoder[AnyRow] = msgspec.json.Decoder(AnyRow)


def line_of(row: AnyRow) -> bytes:
    """The line of a row, with its end."""
    return msgspec.json.encode(row) + END


def from_fields(fields: Row) -> AnyRow:
    """The row that JSON-able fields stand for. Raises ValueError."""
    row: AnyRow = msgspec.convert(dict(fields), AnyRow)
    check(row)
    return row


def to_fields(row: AnyRow) -> dict[str, Any]:
    """A row as JSON-able fields; what `from_fields` reads."""
    fields: dict[str, Any] = msgspec.to_builtins(row)
    if isinstance(row, _TokenRow):
        fields["staging_chain"] = list(row.staging_chain)  # as it comes back from JSON
    return fields


def row_staging_key(row: Row) -> tuple[str, str] | None:
    """(capture key of its stamp or "", staging key) of a row with tokens; None for a failure."""
    return (row.get("capture_key", ""), row["staging_key"]) if "staging_key" in row else None


def check(row: AnyRow) -> None:
    """Raise ValueError if the fields of a row contradict each other."""
    if not isinstance(row, _TokenRow):
        return
    if row.previous_length + row.added_length != row.total_length:
        raise ValueError(f"row {row.call_id} has lengths that do not add up")
    if not row.staging_chain or row.staging_chain[-1] != row.staging_key:
        raise ValueError(f"row {row.call_id} has a staging chain that does not end in its own key")
    if row.capture_key:
        EpisodeId.from_capture_key(row.capture_key)


def problem_of(row: AnyRow) -> str:
    """Say why a row could not be read back, "" if it can."""
    try:
        from_fields(to_fields(row))
    except (ValueError, TypeError) as error:
        return f"its coordinates cannot be kept: {error}"
    return ""


def check_fields(rows: Sequence[Row]) -> list[AnyRow]:
    """The rows of one attempt. Raises ValueError naming the first bad one, or a call that stands twice."""
    found: list[AnyRow] = []
    seen: set[str] = set()
    for at, fields in enumerate(rows):
        try:
            row = from_fields(fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"rows[{at}]: {error}") from error
        if row.call_id in seen:
            raise ValueError(f"rows[{at}]: call {row.call_id} stands twice")
        seen.add(row.call_id)
        found.append(row)
    return found


def decode_lines(data: bytes, episode: EpisodeId) -> Iterable[tuple[int, int, AnyRow]]:
    """Each row of bytes of a file: where its line begins, its length, and the row.

    A torn line is left out. Raises StateCorrupt naming the episode for any other bad line.
    """
    for at, line in whole_lines(data):
        try:
            row = _DECODER.decode(line)
            check(row)
        except ValueError as error:
            problem = f"the ledger of {episode} has a bad line at byte {at}: {error}"
            raise StateCorrupt(problem, episodes=[episode]) from error
        yield at, len(line), row


def _read_bytes(files: LedgerFiles, path: str) -> bytes:
    try:
        source = files.open(path)
    except StateNotFound:
        return b""
    try:
        return source.read(0, source.size)
    finally:
        source.close()


def read_rows(files: LedgerFiles, path: str, episode: EpisodeId) -> list[AnyRow]:
    """All rows of an attempt, in the order they were appended. Raises StateCorrupt naming the episode.

    Of a call that has several the last one counts: an append that failed may have left its row all the same.
    """
    return list({row.call_id: row for _, _, row in decode_lines(_read_bytes(files, path), episode)}.values())
