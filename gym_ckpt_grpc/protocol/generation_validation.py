"""Field rules of every request of GenerationService, as one table. See `validation`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gym_ckpt_grpc.protocol import rules
from gym_ckpt_grpc.protocol.errors import Violation
from gym_ckpt_grpc.protocol.ids import MAX_ATTEMPT, rollout_id_problem
from gym_ckpt_grpc.protocol.rules import Rule
from gym_ckpt_grpc.protocol.validation import validate

MAX_CUTS = 4096
"""Cuts that one CheckCuts or ReleaseCuts may name."""
MAX_CALL_ID = 128
"""Bytes of a ticket or model call id."""
MAX_CUT_ID = 256
"""Bytes of a cut id."""
_HEX = set("0123456789abcdef")


def validate_generation(method: str, request: Any) -> None:
    """Raise InvalidArgument with all violations of a request of this RPC of GenerationService."""
    validate(method, request, RULES)


def _sized(path: str, value: str, most: int) -> Iterator[Violation]:
    size = len(value.encode())
    if not 1 <= size <= most:
        yield Violation(path, f"has {size} bytes, 1 to {most} are allowed")


def _digest(path: str, value: str) -> Iterator[Violation]:
    if len(value) != 64 or set(value) - _HEX:
        yield Violation(path, "is no sha256 in lower-case hex")


def _number(field: str) -> Rule:
    def check(request: Any) -> Iterator[Violation]:
        if getattr(request, field) < 1:
            yield Violation(field, "must be above 0")

    return check


def _calls(request: Any) -> Iterator[Violation]:
    tickets: set[str] = set()
    for i, call in enumerate(request.calls):
        path = f"calls[{i}]"
        yield from _sized(f"{path}.ticket_id", call.ticket_id, MAX_CALL_ID)
        yield from _sized(f"{path}.model_call_id", call.model_call_id, MAX_CALL_ID)
        yield from _digest(f"{path}.request_digest", call.request_digest)
        if not call.HasField("episode"):
            yield Violation(f"{path}.episode", "is required")
        else:
            yield from rules.text(f"{path}.episode.rollout_id", call.episode.rollout_id, rollout_id_problem)
            if call.episode.attempt > MAX_ATTEMPT:
                yield Violation(f"{path}.episode.attempt", f"is above {MAX_ATTEMPT}")
        for violation in rules.duration("age", positive=False)(call):
            yield Violation(f"{path}.{violation.field}", violation.description)
        if call.ticket_id in tickets:
            yield Violation(f"{path}.ticket_id", "stands twice")
        tickets.add(call.ticket_id)


def _count(field: str, count: int) -> Iterator[Violation]:
    if count > MAX_CUTS:
        yield Violation(field, f"has {count} entries, at most {MAX_CUTS} are allowed")


def _cuts(request: Any) -> Iterator[Violation]:
    yield from _count("cuts", len(request.cuts))
    for i, cut in enumerate(request.cuts):
        yield from _sized(f"cuts[{i}].cut_id", cut.cut_id, MAX_CUT_ID)
        yield from _digest(f"cuts[{i}].prefix_digest", cut.prefix_digest)
        if not cut.staging_keys:
            yield Violation(f"cuts[{i}].staging_keys", "is empty")
        elif "" in cut.staging_keys or len(set(cut.staging_keys)) != len(cut.staging_keys):
            yield Violation(f"cuts[{i}].staging_keys", "has an empty key or one that stands twice")


def _cut_ids(request: Any) -> Iterator[Violation]:
    yield from _count("cut_ids", len(request.cut_ids))
    for i, cut_id in enumerate(request.cut_ids):
        yield from _sized(f"cut_ids[{i}]", cut_id, MAX_CUT_ID)


RULES: dict[str, tuple[Rule, ...]] = {
    "GetBackend": (),
    "CutGenerations": (
        rules.checkpoint_id("checkpoint_id"),
        rules.checkpoint_id("service"),
        _number("closing"),
        _number("sweep"),
        _calls,
    ),
    "CheckCuts": (_cuts,),
    "ReleaseCuts": (_cut_ids,),
}
"""RPC of GenerationService -> its rules."""
