"""`gym-ckpt episode`: one rollout of a checkpoint, with its state at every participant and its conversation."""

from __future__ import annotations

import base64
from typing import Any, TypeVar

from gym_ckpt_grpc.cli.conversation import ModelCall, Turn, model_calls, turns_of
from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import print_json, size
from gym_ckpt_grpc.cli.roots import described_troubles, open_root, tell, tell_lines, tell_troubles
from gym_ckpt_grpc.cli.state_text import json_lines, raw_lines, shortened, state_lines
from gym_ckpt_grpc.participants.policy_records import PolicyModelRecord
from gym_ckpt_grpc.protocol.errors import GymCkptError, StateCorrupt, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Codec, Record
from gym_ckpt_grpc.storage.episode_view import PayloadView, RecordView, RolloutView, view_rollout
from gym_ckpt_grpc.storage.payloads import tagged
from gym_ckpt_grpc.storage.viewing import CheckpointView, view_checkpoint

PRETTY = 256 << 10
"""Bytes of state beyond which --full prints JSON, since Python's own pretty printer takes seconds for a megabyte."""
TURN = 600
"""Characters of one turn that are shown without --full."""
NEWEST = 100
"""Turns, and calls of the policy model, that are shown without --full."""

T = TypeVar("T")


def episode(
    root: str, rollout: str, *, checkpoint: str, attempt: int | None, raw: bool, full: bool, as_json: bool
) -> Exit:
    """Print one rollout; FAILED if it is not in the checkpoint, or something that may hold it cannot be read."""
    try:
        named = EpisodeId.from_capture_key(rollout)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if named.attempt:
        if attempt not in (None, named.attempt):
            raise UsageError(f"{rollout!r} names attempt {named.attempt}, --attempt says {attempt}")
        attempt = named.attempt
    view = view_checkpoint(open_root(root), checkpoint)
    found = view_rollout(view, named.rollout_id, attempt=attempt)
    there = bool(found.records or found.continued or found.restarts)
    broken = bool(found.troubles) or any(each.problem for each in found.records) or not found.lists_known
    code = Exit.OK if there and not broken else Exit.FAILED
    turns, calls = _told(found)
    if as_json:
        print_json(_described(view, found, turns, calls))
        return code
    _tell_standing(view, found)
    if turns and not raw:
        _tell_turns(turns, full=full)
    if calls and not raw:
        _tell_calls(calls, full=full)
    for each in found.records:
        _tell_record(each, view.checkpoint_id, raw=raw, full=full)
    tell_troubles(found.troubles)
    return code


def _told(found: RolloutView) -> tuple[list[Turn], list[ModelCall]]:
    records = [(each.participant, each.record) for each in found.records if each.record is not None]
    turns = max((turns_of(record) for _, record in records), key=len, default=[])
    return turns, [call for name, record in records for call in model_calls(name, record)]


# ---- for people


def _tell_standing(view: CheckpointView, found: RolloutView) -> None:
    tell((found.rollout_id, "bold"), f"  in {view.checkpoint_id}")
    for standing in _standings(found):
        tell(f"{standing['episode']}: {_words(standing)}")


def _words(standing: dict[str, Any]) -> str:
    if standing["standing"] == "restart":
        return f"starts over from its input: {standing['reason']}"
    return {
        "continued": "continues",
        "not_in_scope": "has state here, and neither continues nor starts over by the episode lists",
        "absent": "is not in this checkpoint",
        "unknown": "the episode lists cannot be read: whether it continues is not known",
    }[str(standing["standing"])]


def _standings(found: RolloutView) -> list[dict[str, Any]]:
    """Each attempt that the checkpoint knows, and where it stands."""
    episodes = {found.continued} if found.continued else set()
    episodes |= {*found.restarts, *(each.episode for each in found.records)}
    standings = []
    for each in sorted(episodes):
        word = "unknown" if not found.lists_known else "not_in_scope"
        word = "continued" if each == found.continued else "restart" if each in found.restarts else word
        standings.append(_standing(str(each), each.attempt, word, found.restarts.get(each, "")))
    if not standings:
        word = "absent" if found.lists_known else "unknown"
        standings.append(_standing(found.rollout_id, None, word, ""))
    return standings


def _standing(name: str, attempt: int | None, word: str, reason: str) -> dict[str, Any]:
    return {"episode": name, "attempt": attempt, "standing": word, "reason": reason}


def _tell_turns(turns: list[Turn], *, full: bool) -> None:
    tell(("conversation", "bold"))
    for turn in _newest(turns, full=full):
        text = turn.text if full or len(turn.text) <= TURN else f"{turn.text[:TURN]}... {len(turn.text) - TURN:,} more"
        first, *rest = text.strip().splitlines() or [""]
        tell((f"  {turn.role}: ", "cyan"), first)
        for line in rest:
            tell(f"    {line}")
        for call in turn.calls:
            tell(f"    calls {call if full else call[:TURN]}")


def _tell_calls(calls: list[ModelCall], *, full: bool) -> None:
    tell(("calls of the policy model", "bold"))
    for call in _newest(calls, full=full):
        tell(f"  {call.kind} {call.text if full else call.text[:TURN]}")


def _newest(told: list[T], *, full: bool) -> list[T]:
    """The last of them, or all; says how many there were before."""
    earlier = 0 if full else max(0, len(told) - NEWEST)
    if earlier:
        tell(f"  ... {earlier:,} earlier; --full shows all")
    return told[earlier:]


def _tell_record(each: RecordView, checkpoint_id: str, *, raw: bool, full: bool) -> None:
    facts = [f"{each.schema} v{each.schema_version}"]
    facts += [f"revision {each.revision}"] if each.revision is not None else []
    facts += [f"held by {each.owner}"] if each.owner else []
    tell((each.participant, "bold"), f"  {each.episode}  {', '.join(facts)}")
    for name, value in each.fields.items():
        tell(f"  {name if full else name[:TURN]}: {value if full else shortened(value)}")
    for payload in each.payloads:
        content = f" {payload.content_type}" if payload.content_type else ""
        there = "" if payload.stored_in == checkpoint_id else f", stored in {payload.stored_in}"
        tell(f"  {payload.name}  {payload.codec.name}{content}, {size(payload.length)}{there}")
        if each.record is not None:
            tell_lines(_state(each.record, payload, raw=raw, full=full), indent=4)
    if each.problem:
        tell(("  problem: ", "red"), each.problem)


def _state(record: Record, payload: PayloadView, *, raw: bool, full: bool) -> list[str]:
    if record.schema == PolicyModelRecord.SCHEMA and not (raw or full):
        return ["told above; --full shows it"]
    if payload.codec is Codec.RAW:
        return raw_lines(record.payloads[payload.name], full=full or raw)
    try:
        value = record.decode(payload.name)
    except StateCorrupt as error:
        return [f"cannot be decoded: {error.message}"]
    return json_lines(value) if raw or (full and payload.length > PRETTY) else state_lines(value, full=full)


# ---- for programs


def _described(view: CheckpointView, found: RolloutView, turns: list[Turn], calls: list[ModelCall]) -> dict[str, Any]:
    return {
        "checkpoint_id": view.checkpoint_id,
        "rollout_id": found.rollout_id,
        "attempts": _standings(found),
        "records": [_described_record(each) for each in found.records],
        "conversation": [turn.described() for turn in turns],
        "model_calls": [call.described() for call in calls],
        "problems": described_troubles(found.troubles),
    }


def _described_record(each: RecordView) -> dict[str, Any]:
    return {
        "participant": each.participant,
        "episode": str(each.episode),
        "schema": each.schema,
        "schema_version": each.schema_version,
        "owner": each.owner,
        "revision": each.revision,
        "fields": dict(each.fields),
        "payloads": [_described_payload(each, payload) for payload in each.payloads],
        "problem": each.problem,
    }


def _described_payload(each: RecordView, payload: PayloadView) -> dict[str, Any]:
    """value: tagged JSON, as storage.proto describes it; base64: of RAW bytes. Neither, if it cannot be read."""
    told: dict[str, Any] = {
        "name": payload.name,
        "codec": payload.codec.name,
        "content_type": payload.content_type,
        "bytes": payload.length,
        "sha256": payload.sha256,
        "stored_in": payload.stored_in,
    }
    if each.record is None:
        return told
    if payload.codec is Codec.RAW:
        return {**told, "base64": base64.b64encode(each.record.payloads[payload.name].data).decode("ascii")}
    try:
        return {**told, "value": tagged(each.record.decode(payload.name))}
    except GymCkptError as error:
        return {**told, "problem": str(error)}
