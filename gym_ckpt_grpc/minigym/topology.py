"""Which servers a minigym has, and how they behave: the topologies that demo and end-to-end tests choose from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from gym_ckpt_grpc.protocol.identity import ParticipantKind

Role = Literal[
    "environment",
    "agent",
    "policy_model",
    "inference",
    "judge",
    "counter",
    "blackjack",
    "weather",
    "office",
    "inbox",
    "tally",
    "frozen_lake",
    "proofs",
]
"""What a server is; `serve.py` has a builder for each."""

Protocol = Literal["native", "legacy", "proof"]
"""native: the environment owns the episode, the agent its session. legacy: the agent owns both, and the environment
only passes `/run` on. proof: as legacy, with the proof refinement agent."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One server of a topology. kind: as a participant, or None. controlled: whether it has a control port."""

    name: str
    role: Role
    kind: ParticipantKind | None = None
    controlled: bool = True


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a deployment.

    resources: the resources servers, each of which serves the tasks of its name. inference_workers: >= 1, chosen
    among by rollout. judge: a judge, which is no participant, scores weather tasks. capture: the policy model has a
    ledger and the workers stage tokens. cuts: running generations are cut by a checkpoint and continued after a
    restore; needs capture. controls: servers answer under `/control/`, for tests.
    checkpointing: False serves the same routes without owners, gates and control planes; then there is neither
    capture nor a cut, and no controls. mtls: control planes know their callers by certificates, and by no token.
    audit: control planes append to an audit log.
    """

    protocol: Protocol = "native"
    resources: tuple[Role, ...] = ("counter", "blackjack")
    inference_workers: int = 1
    judge: bool = False
    capture: bool = True
    cuts: bool = True
    controls: bool = False
    checkpointing: bool = True
    mtls: bool = False
    audit: bool = False

    def __post_init__(self) -> None:
        if self.inference_workers < 1:
            raise ValueError(f"inference_workers is {self.inference_workers}, not an integer >= 1")
        if self.cuts and not self.capture:
            raise ValueError("cuts need capture: a cut is made of staged tokens")
        if not self.checkpointing and (self.capture or self.controls):
            raise ValueError("with checkpointing off there is no capture, and no controls")

    def servers(self) -> list[Wanted]:
        """The servers, in the order in which they are listed everywhere."""
        wanted = self._servers()
        if self.checkpointing:
            return wanted
        return [Wanted(server.name, server.role, controlled=False) for server in wanted]

    def _servers(self) -> list[Wanted]:
        relay = self.protocol != "native"
        return [
            Wanted("environment", "environment", None if relay else ParticipantKind.ENVIRONMENT, controlled=not relay),
            Wanted("agent", "agent", ParticipantKind.AGENT),
            Wanted("policy_model", "policy_model", ParticipantKind.POLICY_MODEL),
            *(Wanted(role, role, ParticipantKind.RESOURCES) for role in self.resources),
            *([Wanted("judge", "judge", controlled=False)] if self.judge else []),
            *(Wanted(name, "inference") for name in self.worker_names()),
        ]

    def worker_names(self) -> list[str]:
        """Names of the inference workers: `inference` for one, else numbered from 0."""
        count = self.inference_workers
        return ["inference"] if count == 1 else [f"inference-{number}" for number in range(count)]
