"""Who a participant is. Source: protocol section 3."""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass, field

PROTOCOL_MINOR = 1
"""The minor version of `gymckpt.v1` that this package speaks. It rises with each added field or RPC."""


class ParticipantKind(enum.StrEnum):
    """The four owners of a rollout's state. The value is the word used in files, YAML, metrics and the CLI."""

    ENVIRONMENT = "environment"
    POLICY_MODEL = "policy_model"
    AGENT = "agent"
    RESOURCES = "resources"


def new_incarnation() -> str:
    """A fresh incarnation id: one per process start, never used again."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class ParticipantIdentity:
    """The identity block of every reply.

    service and instance name a place in the deployment and outlive restarts; incarnation_id names one process.
    workers: serving processes behind this participant, 1 and up.
    """

    kind: ParticipantKind
    service: str
    instance: str = "0"
    incarnation_id: str = field(default_factory=new_incarnation)
    protocol_minor: int = PROTOCOL_MINOR
    workers: int = 1
    capabilities: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[ParticipantKind, str, str]:
        """(kind, service, instance): what a manifest and a fleet are compared by."""
        return (self.kind, self.service, self.instance)

    def __str__(self) -> str:
        return f"{self.kind}/{self.service}/{self.instance}"
