"""Checks of single fields, from which the tables of field rules are made.

They read messages by attribute and by `HasField`, so they need no generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gym_ckpt_grpc.protocol.errors import Violation
from gym_ckpt_grpc.protocol.ids import MAX_ATTEMPT, checkpoint_id_problem, episode_ids, rollout_id_problem

MAX_RETIRE = 1000
MAX_FORGET = 100_000
MAX_DURATION = 365 * 24 * 3600.0
MAX_URI = 4096

Rule = Callable[[Any], Iterator[Violation]]
"""One rule: a check over the whole request, which yields the violations it finds."""


def seconds_of(duration: Any) -> float:
    """Seconds of a google.protobuf.Duration."""
    return float(duration.seconds) + float(duration.nanos) / 1e9


def text(path: str, value: str, problem: Callable[[str], str | None]) -> Iterator[Violation]:
    """One text field, by its own check."""
    if found := problem(value):
        yield Violation(path, found)


def context(*, checkpoint: bool = True) -> Rule:
    """The ControlContext; checkpoint: whether its checkpoint_id is required."""

    def check(request: Any) -> Iterator[Violation]:
        if not request.HasField("context"):
            yield Violation("context", "is required")
            return
        context = request.context
        if checkpoint or context.checkpoint_id:
            yield from text("context.checkpoint_id", context.checkpoint_id, checkpoint_id_problem)
        yield from text("context.controller_id", context.controller_id, checkpoint_id_problem)

    return check


def duration(field: str, *, positive: bool) -> Rule:
    """A well-formed duration of at most a year, where it is given."""

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


def episode_columns(path: str, episodes: Any) -> Iterator[Violation]:
    """An EpisodeList: columns of one length, legal ids, no rollout twice."""
    if len(episodes.rollout_ids) != len(episodes.attempts):
        yield Violation(path, f"has {len(episodes.rollout_ids)} rollout_ids and {len(episodes.attempts)} attempts")
        return
    if _all_legal(episodes):
        return
    seen: set[str] = set()
    for i, (rollout, attempt) in enumerate(zip(episodes.rollout_ids, episodes.attempts, strict=True)):
        yield from text(f"{path}.rollout_ids[{i}]", rollout, rollout_id_problem)
        if attempt > MAX_ATTEMPT:
            yield Violation(f"{path}.attempts[{i}]", f"is above {MAX_ATTEMPT}")
        if rollout in seen:
            yield Violation(f"{path}.rollout_ids[{i}]", "stands twice")
        seen.add(rollout)


def _all_legal(episodes: Any) -> bool:
    """Whether there is nothing to say: the common case, and a scope may have a hundred thousand episodes."""
    try:
        episode_ids(episodes.rollout_ids, episodes.attempts)
    except ValueError:
        return False
    return len(set(episodes.rollout_ids)) == len(episodes.rollout_ids)


def scope(request: Any) -> Iterator[Violation]:
    """An EpisodeScope of a Capture or Commit."""
    which = request.scope.WhichOneof("scope") if request.HasField("scope") else None
    if which is None:
        yield Violation("scope", "needs all or episodes")
    elif which == "all":
        if not request.scope.all:
            yield Violation("scope.all", "must be true where it is given")
    else:
        yield from episode_columns("scope.episodes", request.scope.episodes)


def restore_scope(request: Any) -> Iterator[Violation]:
    """Scope and install_as of a Restore."""
    if not request.HasField("scope"):
        yield Violation("scope", "is required")
        return
    faulty = False
    for fault in episode_columns("scope", request.scope):
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


def retire_episodes(request: Any) -> Iterator[Violation]:
    """The episodes of a Retire."""
    count = len(request.episodes.rollout_ids)
    if not 1 <= count <= MAX_RETIRE:
        yield Violation("episodes", f"has {count} entries, 1 to {MAX_RETIRE} are allowed")
    else:
        yield from episode_columns("episodes", request.episodes)


def forget_rollouts(request: Any) -> Iterator[Violation]:
    """The rollouts of a Forget."""
    count = len(request.rollouts)
    if not 1 <= count <= MAX_FORGET:
        yield Violation("rollouts", f"has {count} entries, 1 to {MAX_FORGET} are allowed")
        return
    seen: set[str] = set()
    for i, entry in enumerate(request.rollouts):
        yield from text(f"rollouts[{i}].rollout_id", entry.rollout_id, rollout_id_problem)
        if entry.rollout_id in seen:
            yield Violation(f"rollouts[{i}].rollout_id", "stands twice")
        seen.add(entry.rollout_id)


def uri(field: str, *, required: bool) -> Rule:
    """The form of a URI; whether it lies under a root is checked elsewhere."""

    def check(request: Any) -> Iterator[Violation]:
        value: str = getattr(request, field)
        if not value:
            if required:
                yield Violation(field, "is required")
        elif len(value) > MAX_URI or any(ord(c) < 32 or ord(c) == 127 for c in value):
            yield Violation(field, f"is longer than {MAX_URI} characters or has control characters")

    return check


def checkpoint_id(field: str, *, required: bool = True) -> Rule:
    """A field with an id."""

    def check(request: Any) -> Iterator[Violation]:
        value: str = getattr(request, field)
        if value or required:
            yield from text(field, value, checkpoint_id_problem)

    return check


def manifest_digest(request: Any) -> Iterator[Violation]:
    """expected_manifest_digest, where it is given."""
    value: str = request.expected_manifest_digest
    if value and (len(value) != 64 or set(value) - set("0123456789abcdef")):
        yield Violation("expected_manifest_digest", "is no sha256 in lower-case hex")


_LIST_KINDS = range(1, 7)
_LISTS_OF_A_COMMIT = (1, 6)


def list_kind(request: Any) -> Iterator[Violation]:
    """Kind of a ListEpisodes, and the checkpoint that it needs."""
    if request.kind not in _LIST_KINDS:
        yield Violation("kind", "is unspecified or unknown")
    if request.kind in _LISTS_OF_A_COMMIT:
        yield from text("checkpoint_id", request.checkpoint_id, checkpoint_id_problem)
