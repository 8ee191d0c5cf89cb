"""The conversation of a rollout, as far as the records of this project's kinds tell it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.participants.policy_records import PolicyModelRecord
from gym_ckpt_grpc.participants.records import AgentRecord, EnvironmentRecord
from gym_ckpt_grpc.protocol.errors import GymCkptError
from gym_ckpt_grpc.storage import Record

_ITEMS = {"function_call": "assistant", "function_call_output": "tool", "reasoning": "assistant"}
"""Types of items of the Responses API that have no role, and whose they are."""
_DEPTH = 6
"""How deep in an author's state a conversation is looked for."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. calls: tools called, as `name(arguments)`."""

    role: str
    text: str
    calls: tuple[str, ...] = ()

    def described(self) -> dict[str, Any]:
        """For programs."""
        return {"role": self.role, "text": self.text, "calls": list(self.calls)}


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A captured call of the policy model, or a cut that the next one goes on from. tokens: 0 if the row has none."""

    participant: str
    kind: str
    text: str

    def described(self) -> dict[str, Any]:
        """For programs; the row itself stands in the record's payloads."""
        return {"participant": self.participant, "kind": self.kind, "text": self.text}


def turns_of(record: Record) -> list[Turn]:
    """The longest conversation in an agent's or environment's record; none in others, or if it cannot be decoded."""
    if record.schema not in (AgentRecord.SCHEMA, EnvironmentRecord.SCHEMA):
        return []
    found: list[Turn] = []
    for name in record.payloads:
        try:
            value = record.decode(name)
        except GymCkptError:
            continue
        for messages in _conversations(value, 0):
            if len(messages) > len(found):
                found = [_turn(message) for message in messages]
    return found


def _conversations(value: Any, depth: int) -> Iterator[list[dict[str, Any]]]:
    if is_conversation(value):
        yield value
        return
    if isinstance(value, list):
        inner: Any = value
    elif isinstance(value, dict):
        inner = value.values()
    else:
        return
    if depth < _DEPTH:
        for item in inner:
            yield from _conversations(item, depth + 1)


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, of chat completions or of responses."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and (isinstance(item.get("role"), str) or _kind(item) in _ITEMS)


def _kind(message: dict[str, Any]) -> str:
    """Its type; empty if it has none that is a text."""
    kind = message.get("type")
    return kind if isinstance(kind, str) else ""


def _turn(message: dict[str, Any]) -> Turn:
    kind, called = _kind(message), message.get("tool_calls")
    role = message.get("role") or _ITEMS.get(kind, "")
    calls = [_call(call) for call in (called if isinstance(called, list) else ()) if isinstance(call, dict)]
    if kind == "function_call":
        calls.append(_call(message))
    content = message.get("output") if kind == "function_call_output" else message.get("content")
    return Turn(str(role), _text(content), tuple(calls))


def _call(call: dict[str, Any]) -> str:
    function = call.get("function")
    named = function if isinstance(function, dict) else call
    arguments = named.get("arguments", "")
    return f"{named.get('name', '?')}({arguments if isinstance(arguments, str) else _text(arguments)})"


def _text(content: Any) -> str:
    """What a message says: its text, its parts' texts, or whatever else it has, as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return json.dumps(content, ensure_ascii=False, default=repr)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(text := part.get("text"), str):
        return text
    if isinstance(part, str):
        return part
    return f"[{part.get('type', '?')}]" if isinstance(part, dict) else "[?]"


def model_calls(participant: str, record: Record) -> list[ModelCall]:
    """The rows and cuts of a policy model's record, in order; none of another schema, or if it cannot be read."""
    if record.schema != PolicyModelRecord.SCHEMA:
        return []
    try:
        found = PolicyModelRecord.from_record(record)
    except (GymCkptError, InvalidState):
        return []
    calls = [ModelCall(participant, str(row.get("kind", "call")), _row(row)) for row in found.rows]
    for cut in found.cuts:
        state = f"finished: {cut.finish_reason}" if cut.finish_reason else "cut"
        text = f"{cut.source_call_id}: {state} after {cut.prefix_tokens:,} of at most {cut.output_limit:,} tokens"
        calls.append(ModelCall(participant, "cut", f"{text}, weights {cut.weight_version}"))
    return calls


def _count(row: Any, name: str) -> str:
    count = row.get(name, 0)
    return f"{count:,}" if type(count) is int else str(count)


def _row(row: Any) -> str:
    """A row of the ledger of this project; of another ledger, its call."""
    text = str(row.get("call_id", "?"))
    if "total_length" in row:
        previous, added, total = (_count(row, f"{name}_length") for name in ("previous", "added", "total"))
        text += f": {previous} + {added} = {total} tokens"
        text += f", {row.get('mode', '?')}, weights {row.get('weight_version', '?')}"
    if row.get("parent_id"):
        text += f", after {row['parent_id']}"
    return f"{text}: {row['reason']}" if row.get("reason") else text
