"""Field rules of every request, as one table, checked all at once.

The rules stand in the comments of `protos/gymckpt/v1`; this module and `coordinator_validation` are the only places
that enforce them, and a test keeps their keys equal to the RPCs of the descriptor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_ckpt_grpc.protocol import rules
from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.rules import MAX_FORGET as MAX_FORGET
from gym_ckpt_grpc.protocol.rules import MAX_RETIRE as MAX_RETIRE
from gym_ckpt_grpc.protocol.rules import Rule
from gym_ckpt_grpc.protocol.rules import seconds_of as seconds_of

MAX_VIOLATIONS = 50
"""Bad fields collected from one request; a list of a million bad ids needs no million lines."""


def validate(method: str, request: Any, table: Mapping[str, tuple[Rule, ...]] | None = None) -> None:
    """Raise InvalidArgument with all violations (the first MAX_VIOLATIONS) of a request of this RPC.

    table: of another service than the ParticipantService.
    """
    found: list[Violation] = []
    for rule in (RULES if table is None else table)[method]:
        for violation in rule(request):
            found.append(violation)
            if len(found) >= MAX_VIOLATIONS:
                break
    if found:
        fields = ", ".join(f"{v.field} {v.description}" for v in found[:5])
        raise InvalidArgument(f"{method}: {fields}", violations=found[:MAX_VIOLATIONS])


_LEASE = rules.duration("lease_ttl", positive=True)

RULES: dict[str, tuple[Rule, ...]] = {
    "GetStatus": (),
    "WatchStatus": (),
    "Prepare": (rules.context(), rules.duration("ready_within", positive=False), _LEASE),
    "Capture": (rules.context(), rules.scope, rules.checkpoint_id("expected_incarnation_id", required=False)),
    "Commit": (
        rules.context(),
        rules.scope,
        rules.checkpoint_id("expected_incarnation_id", required=False),
        rules.uri("storage_uri", required=True),
        rules.uri("base_checkpoint_uri", required=False),
    ),
    "Resume": (rules.context(),),
    "Restore": (
        rules.context(),
        _LEASE,
        rules.uri("storage_uri", required=True),
        rules.checkpoint_id("source_checkpoint_id"),
        rules.manifest_digest,
        rules.restore_scope,
    ),
    "Retire": (rules.context(checkpoint=False), rules.retire_episodes),
    "Forget": (rules.context(checkpoint=False), rules.forget_rollouts),
    "RenewLease": (rules.context(),),
    "ListEpisodes": (rules.list_kind,),
}
"""RPC of ParticipantService -> its rules."""
