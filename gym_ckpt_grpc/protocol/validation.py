"""Field rules of every request, as one table, checked all at once.

The rules stand in the comments of `protos/gymckpt/v1`; this module is the only place that enforces them. It
reads messages by attribute and by `HasField`, so it needs no generated code, and a test keeps its keys equal to
the RPCs of the descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.ids import MAX_ATTEMPT, checkpoint_id_problem, rollout_id_problem

MAX_RETIRE = 1000
MAX_FORGET = 100_000
MAX_DURATION = 365 * 24 * 3600.0
MAX_URI = 4096
MAX_VIOLATIONS = 50
"""Bad fields collected from one request; a list of a million bad ids needs no million lines."""

Rule = Callable[[Any], Iterator[Violation]]
"""One rule: a check over the whole request, which yields the violations it finds."""


def validate(method: str, request: Any) -> None:
    """Raise InvalidArgument with all violations (the first MAX_VIOLATIONS) of a request of this RPC."""
    found: list[Violation] = []
    for rule in RULES[method]:
        for violation in rule(request):
            found.append(violation)
            if len(found) >= MAX_VIOLATIONS:
                break
    if found:
        fields = ", ".join(f"{v.field} {v.description}" for v in found[:5])
        raise InvalidArgument(f"{method}: {fields}", violations=found[:MAX_VIOLATIONS])


def seconds_of(duration: Any) -> float:
    """Seconds of a google.protobuf.Duration."""
    return float(duration.seconds) + float(duration.nanos) / 1e9


def _text(path: str, value: str, problem: Callable[[str], str | None]) -> Iterator[Violation]:
    if found := problem(value):
        yield Violation(path, found)


def _context(*, checkpoint: bool = True) -> Rule:
    def check(request: Any) -> Iterator[Violation]:
        if not request.HasField("context"):
            yield Violation("context", "is required")
            return
        context = request.context
        if checkpoint or context.checkpoint_id:
            yield from _text("context.checkpoint_id", context.checkpoint_id, checkpoint_id_problem)
        yield from _text("context.controller_id", context.controller_id, checkpoint_id_problem)

    return check


def _duration(field: str, *, positive: bool) -> Rule:
    def check(request: Any) -> Iterator[Violation]:
        if not request.HasField(field):
            return
        value = getattr(request, field)
        well_formed = abs(value.nanos) < 1_000_000_000 and value.seconds * value.nanos >= 0
        if not well_formed or abs(seconds_of(value)) > MAX_DURATION:
            yield Violation(field, "is no duration of at most a year")
        elif seconds_of(value) < 0 or (positive and seconds_of(value) == 0):
            yield Violation(field, "must be above 0" if positive else "must not be negative")

    return check


def _episode_columns(path: str, episodes: Any) -> Iterator[Violation]:
    if len(episodes.rollout_ids) != len(episodes.attempts):
        yield Violation(path, f"has {len(episodes.rollout_ids)} rollout_ids and {len(episodes.attempts)} attempts")
        return
    seen: set[str] = set()
    for i, (rollout, attempt) in enumerate(zip(episodes.rollout_ids, episodes.attempts, strict=True)):
        yield from _text(f"{path}.rollout_ids[{i}]", rollout, rollout_id_problem)
        if attempt > MAX_ATTEMPT:
            yield Violation(f"{path}.attempts[{i}]", f"is above {MAX_ATTEMPT}")
        if rollout in seen:
            yield Violation(f"{path}.rollout_ids[{i}]", "stands twice")
        seen.add(rollout)


def _scope(request: Any) -> Iterator[Violation]:
    which = request.scope.WhichOneof("scope") if request.HasField("scope") else None
    if which is None:
        yield Violation("scope", "needs all or episodes")
    elif which == "all":
        if not request.scope.all:
            yield Violation("scope.all", "must be true where it is given")
    else:
        yield from _episode_columns("scope.episodes", request.scope.episodes)


def _restore_scope(request: Any) -> Iterator[Violation]:
    if not request.HasField("scope"):
        yield Violation("scope", "is required")
        return
    faulty = False
    for fault in _episode_columns("scope", request.scope):
        faulty = True
        yield fault
    if faulty:
        return
    if not request.install_as:
        for i, attempt in enumerate(request.scope.attempts):
            if attempt >= MAX_ATTEMPT:
                yield Violation(f"scope.attempts[{i}]", "has no next attempt")
        return
    if len(request.install_as) != len(request.scope.rollout_ids):
        yield Violation("install_as", "must have one entry per episode of the scope, or none")
        return
    for i, (target, source) in enumerate(zip(request.install_as, request.scope.attempts, strict=True)):
        if not source < target <= MAX_ATTEMPT:
            yield Violation(f"install_as[{i}]", f"must be above the attempt {source} and at most {MAX_ATTEMPT}")


def _retire_episodes(request: Any) -> Iterator[Violation]:
    count = len(request.episodes.rollout_ids)
    if not 1 <= count <= MAX_RETIRE:
        yield Violation("episodes", f"has {count} entries, 1 to {MAX_RETIRE} are allowed")
    else:
        yield from _episode_columns("episodes", request.episodes)


def _forget_rollouts(request: Any) -> Iterator[Violation]:
    count = len(request.rollouts)
    if not 1 <= count <= MAX_FORGET:
        yield Violation("rollouts", f"has {count} entries, 1 to {MAX_FORGET} are allowed")
        return
    seen: set[str] = set()
    for i, entry in enumerate(request.rollouts):
        yield from _text(f"rollouts[{i}].rollout_id", entry.rollout_id, rollout_id_problem)
        if entry.rollout_id in seen:
            yield Violation(f"rollouts[{i}].rollout_id", "stands twice")
        seen.add(entry.rollout_id)


def _uri(field: str, *, required: bool) -> Rule:
    def check(request: Any) -> Iterator[Violation]:
        value: str = getattr(request, field)
        if not value:
            if required:
                yield Violation(field, "is required")
        elif len(value) > MAX_URI or any(ord(c) < 32 or ord(c) == 127 for c in value):
            yield Violation(field, f"is longer than {MAX_URI} characters or has control characters")

    return check


def _checkpoint_id(field: str, *, required: bool = True) -> Rule:
    def check(request: Any) -> Iterator[Violation]:
        value: str = getattr(request, field)
        if value or required:
            yield from _text(field, value, checkpoint_id_problem)

    return check


def _digest(request: Any) -> Iterator[Violation]:
    value: str = request.expected_manifest_digest
    if value and (len(value) != 64 or set(value) - set("0123456789abcdef")):
        yield Violation("expected_manifest_digest", "is no sha256 in lower-case hex")


_LIST_KINDS = range(1, 6)
_LIST_COMMITTED = 1


def _list_kind(request: Any) -> Iterator[Violation]:
    if request.kind not in _LIST_KINDS:
        yield Violation("kind", "is unspecified or unknown")
    if request.kind == _LIST_COMMITTED:
        yield from _text("checkpoint_id", request.checkpoint_id, checkpoint_id_problem)


_LEASE = _duration("lease_ttl", positive=True)

RULES: dict[str, tuple[Rule, ...]] = {
    "GetStatus": (),
    "WatchStatus": (),
    "Prepare": (_context(), _duration("ready_within", positive=False), _LEASE),
    "Capture": (_context(), _scope, _checkpoint_id("expected_incarnation_id", required=False)),
    "Commit": (
        _context(),
        _scope,
        _checkpoint_id("expected_incarnation_id", required=False),
        _uri("storage_uri", required=True),
        _uri("base_checkpoint_uri", required=False),
    ),
    "Resume": (_context(),),
    "Restore": (
        _context(),
        _LEASE,
        _uri("storage_uri", required=True),
        _checkpoint_id("source_checkpoint_id"),
        _digest,
        _restore_scope,
    ),
    "Retire": (_context(checkpoint=False), _retire_episodes),
    "Forget": (_context(checkpoint=False), _forget_rollouts),
    "RenewLease": (_context(),),
    "ListEpisodes": (_list_kind,),
}
"""RPC of ParticipantService -> its rules."""
