"""`NemoLedger`: the framework's capture ledger, kept so that a checkpoint has its rows and a restore brings them back.

    token_id_capture:
      enabled: true
      external_staging: true
      rebuild_response: false
      lineage_store: gym_ckpt_grpc.integrations.nemo_gym.ledger:NemoLedger
      lineage_store_kwargs: {directory: /state/ledger}

One object is both what the framework calls (`nemo_gym.token_id_capture.protocols.CaptureLedger`) and what a policy
model owner exports, stages, activates and fences (`control.Ledger`). A row is the framework's own call record word for
word, with what finds it again as a parent; tokens stay with the inference worker that staged them.

After a restore attempt N+1 has the rows of attempt N under its own capture key: its calls find their parents there,
and the manifest of the new key lists them. Attempt N is fenced: what it still records is dropped with a warning, none
of its calls finds a parent, and reading it is StaleAttempt. The records of calls that were carried over name their
staged tokens by the key that staged them, and those say that they belong to attempt N: `carried_over` (carried.py) is
for who assembles them.

**The internal path** (token arrays, without `external_staging`) is not carried over. The framework keeps those in
`<dir>/<capture key>.tokens.jsonl`, beside no checkpoint. Attempt N+1 begins an empty file under its own key; its first
call that continues a conversation finds no parent there, is recorded unresolved, and the framework masks that rollout:
it finishes and is not trained on. This ledger has no part in that path, and PolicyMixin refuses it there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import orjson
from nemo_gym.token_id_capture.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint, conversation_digest
from nemo_gym.token_id_capture.protocols import LineageMatch, LineageResolution
from nemo_gym.token_id_capture.records import ParentResolutionStatus
from nemo_gym.token_id_capture.staging.records import CallRecord, CaptureLedgerCommit, ManifestFailure, RolloutManifest

from gym_ckpt_grpc.capture import AttemptRows
from gym_ckpt_grpc.control import Row, StagedRows
from gym_ckpt_grpc.protocol.errors import StaleAttempt, StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId

CALL_NAMED: ContextVar[Callable[[str], None] | None] = ContextVar("gymckpt_call_named", default=None)
"""What to tell the id of a model call to, before there is a row of it. Set per request, by PolicyMixin's gate."""

_STRIPES = 64
_LEDGERS: WeakValueDictionary[str, NemoLedger] = WeakValueDictionary()

log = logging.getLogger(__name__)


def ledger_at(directory: str | os.PathLike[str]) -> NemoLedger | None:
    """The ledger that this process has made for a directory, or None."""
    return _LEDGERS.get(os.path.realpath(directory))


class NemoLedger(AttemptRows):
    """The ledger in one directory. See the module.

    directory: made if missing, on a file system with `flock`; several processes may work on it. sync_rows: whether a
    row is durable when `record` returns; else it survives the death of the process and not that of the machine.
    """

    def __init__(self, directory: str | os.PathLike[str], *, sync_rows: bool = True) -> None:
        super().__init__(directory, sync_rows=sync_rows)
        self._recording = [threading.Lock() for _ in range(_STRIPES)]
        _LEDGERS[os.path.realpath(directory)] = self

    # ---- CaptureLedger of the framework

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """The call that a request goes on from, if that is certain. Raises ValueError for an illegal capture key."""
        return await asyncio.to_thread(self._resolve, EpisodeId.from_capture_key(rollout_id), request_items)

    def _resolve(self, episode: EpisodeId, items: list[dict[str, Any]]) -> LineageResolution:
        fingerprint = assistant_fingerprint(items)
        if not fingerprint:
            return LineageResolution(ParentResolutionStatus.ROOT)
        try:
            rows = self._rows(episode)
        except StaleAttempt:
            return LineageResolution(ParentResolutionStatus.UNRESOLVED, reason="the attempt was retired")
        candidates = [row for row in rows if row.get("fingerprint") == fingerprint]
        found = [row["record"] for row in candidates if _continues(row, items)]
        if len({(record["cumulative_hash"], record["cum_len"]) for record in found}) != 1:
            reason = "ambiguous" if found else "no_match"
            return LineageResolution(ParentResolutionStatus.UNRESOLVED, reason=reason)
        parent = min(found, key=_id_of)  # of equal ones any will do
        chain = _chain_of(parent, rows)
        if chain is None:
            return LineageResolution(ParentResolutionStatus.UNRESOLVED, reason="no_ancestor")
        match = LineageMatch(
            model_call_id=parent["model_call_id"],
            cumulative_token_ids=(),
            digest=parent["cumulative_hash"],
            staging_chain=chain,
            prev_len=parent["cum_len"],
            chain_hash=parent["chain_hash"],
        )
        return LineageResolution(ParentResolutionStatus.RESOLVED, match=match)

    def is_process_shared(self) -> bool:
        """Every process on the directory sees what another has recorded."""
        return True

    async def record(self, commit: CaptureLedgerCommit) -> None:
        """Keep the row of a staged call; one of a fenced attempt is dropped. Repeating it changes nothing.

        Raises ValueError for another row under a call id that has one, or a chain that is not its parent's and itself.
        """
        episode = EpisodeId.from_capture_key(commit.rollout_id)
        row = {
            "record": commit.record.model_dump(mode="json"),
            "fingerprint": assistant_fingerprint([*commit.request_items, *commit.response_items]),
            "context_length": len(commit.request_items),
            "context_digest": conversation_digest(commit.request_items),
        }
        _tell_name(commit.record.model_call_id)
        await asyncio.to_thread(self._record, episode, row, tuple(commit.staging_chain))

    def _record(self, episode: EpisodeId, row: dict[str, Any], chain: tuple[str, ...]) -> None:
        record = row["record"]
        with self._recording[hash(episode) % _STRIPES]:
            rows = self._read(episode)
            same = [each for each in rows if "record" in each and _id_of(each["record"]) == _id_of(record)]
            if same:
                if {**same[0], "capture_key": None} != {**row, "capture_key": None}:
                    raise ValueError(f"call {_id_of(record)} of {episode} has another row already")
                return
            if _chain_of(record, rows) != chain and not self.is_fenced(episode):
                raise ValueError(f"call {_id_of(record)} of {episode} has not the staging chain of its parent")
            self._append(episode, row, f"; its tokens are staged under {record['staging_key']}")

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Keep that a call's tokens were not staged; of a fenced attempt it is dropped."""
        row = {"model_call_id": model_call_id, "failure_reason": reason}
        _tell_name(model_call_id)
        await asyncio.to_thread(self._append, EpisodeId.from_capture_key(rollout_id), row)

    def _append(self, episode: EpisodeId, row: Row, tokens: str = "") -> None:
        if not self.append_line(episode, _line(row)):
            log.warning("a row of call %s of %s was dropped: it is fenced%s", self.call_id(row), episode, tokens)

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """All calls of an attempt as the framework's RolloutManifest; empty for one without rows.

        Raises ValueError for an illegal capture key, StaleAttempt if the attempt is fenced.
        """
        rows = await asyncio.to_thread(self._rows, EpisodeId.from_capture_key(rollout_id))
        failures = {(row["model_call_id"], row["failure_reason"]): None for row in rows if "record" not in row}
        manifest = RolloutManifest(
            rollout_id=rollout_id,
            records=[CallRecord.model_validate(row["record"]) for row in rows if "record" in row],
            failures=[ManifestFailure(model_call_id=call_id, reason=reason) for call_id, reason in failures],
        )
        found: dict[str, Any] = manifest.model_dump(mode="json")
        return found

    async def has_rows(self, rollout_id: str) -> bool:
        """Whether anything is known of an attempt. A fenced one says yes, so that no call of it becomes a root."""
        episode = EpisodeId.from_capture_key(rollout_id)
        return await asyncio.to_thread(lambda: bool(self.lines_of(episode)) or self.is_fenced(episode))

    async def close(self) -> None:
        """Nothing is open between calls."""

    # ---- control.Ledger; the rest of it is AttemptRows

    def export(self, episodes: Iterable[EpisodeId]) -> dict[EpisodeId, list[Row]]:
        """All rows of each attempt; empty for one without. Raises StaleAttempt naming the fenced ones."""
        return {episode: list(rows) for episode, rows in self.read(episodes, self._read).items()}

    def call_id(self, row: Row) -> str:
        """The model call that a row is about."""
        return _id_of(row.get("record", row))

    def staging_keys(self, row: Row) -> tuple[str, str] | None:
        """(capture key of its stamp or "", staging key) of a row with tokens; None for a failure."""
        return (row.get("capture_key", ""), row["record"]["staging_key"]) if "record" in row else None

    def tokens(self, row: Row) -> int:
        """Tokens that its call has added; 0 for a failure."""
        return int(row["record"].get("delta_len", 0)) if "record" in row else 0

    def stamped(self, row: Row, episode: EpisodeId) -> Row:
        """The row with the capture key of `episode` as who staged it; a stamp is kept, failures have none."""
        if "record" not in row or row.get("capture_key"):
            return row
        return {**row, "capture_key": episode.capture_key}

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise ValueError saying what is wrong with the rows of one record."""
        seen: set[str] = set()
        for at, row in enumerate(rows):
            try:
                _check(row)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"rows[{at}]: {error}") from error
            if "record" in row:
                if self.call_id(row) in seen:
                    raise ValueError(f"rows[{at}]: call {self.call_id(row)} stands twice")
                seen.add(self.call_id(row))

    def stage(self, rows: Mapping[EpisodeId, Sequence[Row]]) -> StagedRows:
        """Write rows for their targets aside; empty ones clear what the target has. Touches nothing live.

        Raises ValueError naming target and row. End it with `activate` or `drop`.
        """
        for target, of_target in rows.items():
            try:
                self.check_rows(of_target)
            except ValueError as error:
                raise ValueError(f"{target}: {error}") from error
        return self.stage_lines({target: [_line(row) for row in of_target] for target, of_target in rows.items()})

    # ---- rows

    def _rows(self, episode: EpisodeId) -> list[dict[str, Any]]:
        return self.read([episode], self._read)[episode]

    def _read(self, episode: EpisodeId) -> list[dict[str, Any]]:
        """Rows in the order they came, each once: an append that failed may have left its row all the same."""
        try:
            rows: list[dict[str, Any]] = [orjson.loads(line) for line in dict.fromkeys(self.lines_of(episode))]
        except orjson.JSONDecodeError as error:
            problem = f"the ledger of {episode} has a bad line: {error}"
            raise StateCorrupt(problem, episodes=[episode]) from error
        return rows


def _continues(row: Row, items: Sequence[dict[str, Any]]) -> bool:
    """Whether a request begins with the very request that this row answered."""
    if row["record"]["fingerprint_version"] != FINGERPRINT_VERSION or len(items) < row["context_length"]:
        return False
    return bool(conversation_digest(list(items[: row["context_length"]])) == row["context_digest"])


def _chain_of(record: Row, rows: Sequence[Row]) -> tuple[str, ...] | None:
    """The staging keys from the root to this call; None if one of its ancestors is not among the rows."""
    by_id = {_id_of(row["record"]): row["record"] for row in rows if "record" in row}
    chain, at = [record["staging_key"]], record["parent_call_id"]
    while at is not None:
        parent = by_id.pop(at, None)  # taken out, so that a circle ends
        if parent is None:
            return None
        chain.append(parent["staging_key"])
        at = parent["parent_call_id"]
    return tuple(reversed(chain))


def _check(row: Row) -> None:
    if "record" not in row:
        if set(row) != {"model_call_id", "failure_reason"}:
            raise ValueError(f"is neither a call nor a failure, but has {', '.join(sorted(row))}")
        ManifestFailure(model_call_id=row["model_call_id"], reason=row["failure_reason"])
        return
    if unknown := set(row) - {"record", "fingerprint", "context_length", "context_digest", "capture_key"}:
        raise ValueError(f"has unknown fields {', '.join(sorted(unknown))}")
    CallRecord.model_validate(row["record"])
    if type(row["context_length"]) is not int or not all(
        type(row[name]) is str for name in ("fingerprint", "context_digest")
    ):
        raise ValueError("has a context that is none")
    if row.get("capture_key"):
        EpisodeId.from_capture_key(row["capture_key"])


def _id_of(record: Row) -> str:
    return str(record["model_call_id"])


def _line(row: Row) -> bytes:
    return orjson.dumps(row) + b"\n"


def _tell_name(call_id: str) -> None:
    """On the loop, in the request's own context, before the row can be seen."""
    if (named := CALL_NAMED.get()) is not None:
        named(call_id)
