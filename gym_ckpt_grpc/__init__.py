"""Consistent checkpoints of reinforcement-learning rollouts across all servers that hold them.

A trainer needs `Coordinator` and `Fleet`; a server's author an owner from `gym_ckpt_grpc.participants` and the
`ParticipantServer`. Names are imported at first use, so that a room alone stays as light as it is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_ckpt_grpc.auth import Authenticator as Authenticator
    from gym_ckpt_grpc.auth import Role as Role
    from gym_ckpt_grpc.auth import TokenFile as TokenFile
    from gym_ckpt_grpc.control import ControlPlane as ControlPlane
    from gym_ckpt_grpc.control import ParticipantServer as ParticipantServer
    from gym_ckpt_grpc.coordinator import Coordinator as Coordinator
    from gym_ckpt_grpc.coordinator import Fleet as Fleet
    from gym_ckpt_grpc.coordinator import Server as Server
    from gym_ckpt_grpc.protocol import ControlError as ControlError
    from gym_ckpt_grpc.protocol import EpisodeId as EpisodeId
    from gym_ckpt_grpc.protocol import ErrorCode as ErrorCode
    from gym_ckpt_grpc.protocol import ParticipantIdentity as ParticipantIdentity
    from gym_ckpt_grpc.protocol import ParticipantKind as ParticipantKind

_ROOMS = {
    "auth": ("Authenticator", "Role", "TokenFile"),
    "control": ("ControlPlane", "ParticipantServer"),
    "coordinator": ("Coordinator", "Fleet", "Server"),
    "protocol": ("ControlError", "EpisodeId", "ErrorCode", "ParticipantIdentity", "ParticipantKind"),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Import a public name from its room."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
