"""Field rules of every request of CoordinatorService, as one table. See `validation`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gym_ckpt_grpc.protocol import rules
from gym_ckpt_grpc.protocol.errors import Violation
from gym_ckpt_grpc.protocol.rules import Rule
from gym_ckpt_grpc.protocol.validation import validate

MAX_TRAINER_STATE = 1 << 20
MAX_PAGE = 1000
LATEST = "latest"


def validate_coordinator(method: str, request: Any) -> None:
    """Raise InvalidArgument with all violations of a request of this RPC of CoordinatorService."""
    validate(method, request, RULES)


def _episodes(field: str, *, least: int = 0) -> Rule:
    def check(request: Any) -> Iterator[Violation]:
        if not request.HasField(field):
            yield Violation(field, "is required")
            return
        episodes = getattr(request, field)
        if len(episodes.rollout_ids) < least:
            yield Violation(field, f"has {len(episodes.rollout_ids)} entries, at least {least} is needed")
        yield from rules.episode_columns(field, episodes)

    return check


def _restore_scope(request: Any) -> Iterator[Violation]:
    if request.HasField("scope"):
        yield from rules.scope(request)


def _trainer_state(request: Any) -> Iterator[Violation]:
    if len(request.trainer_state) > MAX_TRAINER_STATE:
        yield Violation("trainer_state", f"has {len(request.trainer_state)} bytes, {MAX_TRAINER_STATE} are allowed")


def _stop(request: Any) -> Iterator[Violation]:
    if request.stop and request.reopen_when_captured:
        yield Violation("reopen_when_captured", "cannot be with stop: what stops stays closed until it is published")


def _page(request: Any) -> Iterator[Violation]:
    if request.page_size > MAX_PAGE:
        yield Violation("page_size", f"is above {MAX_PAGE}")
    token = request.page_token
    if token and not (token.isascii() and token.isdecimal() and len(token) <= 20 and int(token) > 0):
        yield Violation("page_token", "is none that was given out; begin anew without one")


def _not_latest(request: Any) -> Iterator[Violation]:
    if request.checkpoint_id == LATEST:
        yield Violation("checkpoint_id", "must be an id: what is newest may change before it is deleted")


def _which(request: Any) -> Iterator[Violation]:
    if request.kind not in (1, 2):
        yield Violation("kind", "is unspecified or unknown")


_ID = rules.checkpoint_id("checkpoint_id")
_NEW_ID = rules.checkpoint_id("checkpoint_id", required=False)
_READY = rules.duration("ready_within", positive=True)
_LEASE = rules.duration("lease_ttl", positive=True)

RULES: dict[str, tuple[Rule, ...]] = {
    "ListParticipants": (),
    "PrepareCheckpoint": (_NEW_ID, _READY, _LEASE),
    "CommitCheckpoint": (_ID, _episodes("scope"), _trainer_state, _stop),
    "PublishCheckpoint": (_ID,),
    "ResumeCheckpoint": (_ID,),
    "RestoreCheckpoint": (_ID, _restore_scope, _LEASE, rules.checkpoint_id("restore_id", required=False)),
    "RenewCheckpoint": (_ID,),
    "RetireEpisodes": (_episodes("episodes", least=1),),
    "ForgetRollouts": (rules.forget_rollouts,),
    "GetCheckpoint": (_ID,),
    "ListCheckpoints": (_page,),
    "ListCheckpointEpisodes": (_ID, _which),
    "VerifyCheckpoint": (_ID,),
    "DeleteCheckpoint": (_ID, _not_latest),
    "WatchEvents": (),
    "RunCheckpoint": (_NEW_ID, _READY, _LEASE, _episodes("in_flight"), _trainer_state, _stop),
}
"""RPC of CoordinatorService -> its rules."""
