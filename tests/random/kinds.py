"""The servers that a sequence can run against, by name."""

from __future__ import annotations

from tests.random.more_subjects import LegacyAgent, ReplayedVerify, RestartOnly, Stateless
from tests.random.policy import Policy
from tests.random.subjects import Agent, Environment, Resources, Scripted, Subject

KINDS: dict[str, type[Subject]] = {
    "scripted": Scripted,
    "environment": Environment,
    "agent": Agent,
    "legacy": LegacyAgent,
    "resources": Resources,
    "replayed": ReplayedVerify,
    "stateless": Stateless,
    "restart_only": RestartOnly,
    "policy": Policy,
}
