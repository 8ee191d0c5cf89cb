"""What rides with a captured call: the admission to the inference worker, and the coordinates back.

Source: participants sections 12 and 13.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from gym_ckpt_grpc.capture.continuation import check_reasons, continuation_from_json, continuation_to_json
from gym_ckpt_grpc.capture.json_fields import Fields, call_id_problem, capture_key_problem, digest_problem
from gym_ckpt_grpc.control import Continuation
from gym_ckpt_grpc.protocol.errors import Violation

Mode = Literal["token_in", "text"]
"""`token_in`: the prompt begins with the parent's tokens. `text`: a root, or a call whose parent is unresolved."""


@dataclass(frozen=True, slots=True)
class CaptureAdmission:
    """Permission to stage one call, made by the ledger before the call reaches its backend.

    capture_key: the attempt that calls. call_id: unique. number: order of admission in the attempt, 1 and up.
    With mode `token_in`: parent_id, previous_length > 0 (tokens of the parent's whole sequence), the parent's
    chain_hash, and either exactly that many inline ids or the staging keys of the chain, oldest first.
    """

    capture_key: str
    call_id: str
    mode: Mode
    number: int
    parent_id: str = ""
    previous_length: int = 0
    parent_chain_hash: str = ""
    prefix_ids: tuple[int, ...] | None = None
    staging_chain: tuple[str, ...] = ()
    continuation: Continuation | None = None

    def fresh(self) -> Self:
        """The same without its continuation: the call is generated from its first token."""
        return replace(self, continuation=None)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where the tokens of a completed call stand, without the tokens. Hashes and digests are lower-case hex.

    staging_chain: keys of the whole sequence, oldest first, this call's own last. previous, added and total
    length in tokens: total = previous + added. capture_failed: why nothing was staged, "" if it was.
    """

    capture_key: str
    call_id: str
    mode: Mode
    staging_key: str
    staging_chain: tuple[str, ...]
    weight_version: int
    previous_length: int
    added_length: int
    total_length: int
    staging_digest: str
    extras_digest: str
    chain_hash: str
    cumulative_hash: str
    prefix_tokens: int
    prefix_digest: str
    output_limit: int
    finish_reason: str
    stop_reason: str = ""
    capture_failed: str = ""


MODES = ("token_in", "text")
_EXTRAS = ("parent_id", "parent_chain_hash", "staging_chain")


def admission_problems(admission: CaptureAdmission, path: str = "admission") -> list[Violation]:
    """What an admission has that its mode does not allow, or lacks that it needs."""
    extras = [name for name in _EXTRAS if getattr(admission, name)]
    if admission.mode == "text":
        given = extras + ["previous_length"] * (admission.previous_length != 0)
        given += ["prefix_ids"] * (admission.prefix_ids is not None)
        return [Violation(f"{path}.{name}", "is not allowed with mode text") for name in given]
    found = [
        Violation(f"{path}.{name}", "is required with mode token_in")
        for name in ("parent_id", "parent_chain_hash")
        if name not in extras
    ]
    if admission.previous_length < 1:
        found.append(Violation(f"{path}.previous_length", "must be above 0 with mode token_in"))
    ids = admission.prefix_ids
    if ids is None and not admission.staging_chain:
        found.append(Violation(f"{path}.staging_chain", "is required with mode token_in without prefix_ids"))
    if ids is not None and len(ids) != admission.previous_length:
        found.append(Violation(f"{path}.prefix_ids", f"are {len(ids)}, previous_length is {admission.previous_length}"))
    return found


def admission_to_json(admission: CaptureAdmission) -> dict[str, Any]:
    """JSON-able fields of an admission; what its mode does not have is left out."""
    value: dict[str, Any] = {
        "capture_key": admission.capture_key,
        "call_id": admission.call_id,
        "mode": admission.mode,
        "number": admission.number,
    }
    if admission.mode == "token_in":
        value["parent_id"] = admission.parent_id
        value["previous_length"] = admission.previous_length
        value["parent_chain_hash"] = admission.parent_chain_hash
        if admission.prefix_ids is not None:
            value["prefix_ids"] = list(admission.prefix_ids)
        if admission.staging_chain:
            value["staging_chain"] = list(admission.staging_chain)
    if admission.continuation is not None:
        value["continuation"] = continuation_to_json(admission.continuation)
    return value


def admission_from_json(value: object, path: str = "admission") -> CaptureAdmission:
    """The admission of decoded JSON. Raises InvalidArgument naming every bad field."""
    fields = Fields(value, path)
    admission = CaptureAdmission(
        capture_key=fields.text("capture_key", capture_key_problem),
        call_id=fields.text("call_id", call_id_problem),
        mode=_mode(fields),
        number=fields.number("number", least=1),
        parent_id=fields.text("parent_id", call_id_problem, required=False),
        previous_length=fields.number("previous_length", required=False),
        parent_chain_hash=fields.text("parent_chain_hash", digest_problem, required=False),
        prefix_ids=fields.token_ids("prefix_ids"),
        staging_chain=fields.texts("staging_chain"),
        continuation=fields.inner("continuation", continuation_from_json),
    )
    if not fields.found:
        fields.found += admission_problems(admission, path)
    fields.done()
    return admission


def coordinates_to_json(coordinates: Coordinates) -> dict[str, Any]:
    """JSON-able fields of coordinates; all of them, in their order."""
    value = {name: getattr(coordinates, name) for name in Coordinates.__dataclass_fields__}
    return value | {"staging_chain": list(coordinates.staging_chain)}


def coordinates_from_json(value: object, path: str = "coordinates") -> Coordinates:
    """The coordinates of decoded JSON. Raises InvalidArgument naming every bad field.

    Those of a call that was not captured have neither keys nor hashes.
    """
    fields = Fields(value, path)
    failed = fields.text("capture_failed", required=False)
    staged = not failed

    def digest(name: str) -> str:
        return fields.text(name, digest_problem, required=staged)

    coordinates = Coordinates(
        capture_key=fields.text("capture_key", capture_key_problem),
        call_id=fields.text("call_id", call_id_problem),
        mode=_mode(fields),
        staging_key=fields.text("staging_key", required=staged),
        staging_chain=fields.texts("staging_chain", least=int(staged)),
        weight_version=fields.number("weight_version"),
        previous_length=fields.number("previous_length"),
        added_length=fields.number("added_length"),
        total_length=fields.number("total_length"),
        staging_digest=digest("staging_digest"),
        extras_digest=digest("extras_digest"),
        chain_hash=digest("chain_hash"),
        cumulative_hash=digest("cumulative_hash"),
        prefix_tokens=fields.number("prefix_tokens"),
        prefix_digest=digest("prefix_digest"),
        output_limit=fields.number("output_limit", least=1),
        finish_reason=fields.text("finish_reason", required=staged),
        stop_reason=fields.text("stop_reason", required=False),
        capture_failed=failed,
    )
    if staged and not fields.found:
        _check_staged(fields, coordinates)
    fields.done()
    return coordinates


def _mode(fields: Fields) -> Mode:
    mode = fields.text("mode")
    if mode and mode not in MODES:
        fields.bad("mode", "is neither token_in nor text")
    return "token_in" if mode == "token_in" else "text"


def _check_staged(fields: Fields, coordinates: Coordinates) -> None:
    check_reasons(fields, coordinates.finish_reason, coordinates.stop_reason)
    if coordinates.staging_chain[-1] != coordinates.staging_key:
        fields.bad("staging_chain", "does not end with the staging_key")
    if coordinates.total_length != coordinates.previous_length + coordinates.added_length:
        fields.bad("total_length", "is not previous_length and added_length")
    if coordinates.prefix_tokens > coordinates.added_length:
        fields.bad("prefix_tokens", "is above added_length")
