"""Roles, and the one table method -> roles that may call it. A method that is not in it is denied."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """observer reads; controller does everything on the two services; peer is for servers among themselves."""

    OBSERVER = "observer"
    CONTROLLER = "controller"
    PEER = "peer"


_READERS = frozenset({Role.OBSERVER, Role.CONTROLLER})
_WRITERS = frozenset({Role.CONTROLLER})

_PARTICIPANT = {
    "GetStatus": _READERS,
    "WatchStatus": _READERS,
    "ListEpisodes": _READERS,
    "Prepare": _WRITERS,
    "Capture": _WRITERS,
    "Commit": _WRITERS,
    "Resume": _WRITERS,
    "Restore": _WRITERS,
    "Retire": _WRITERS,
    "Forget": _WRITERS,
    "RenewLease": _WRITERS,
}
_COORDINATOR = {
    "ListParticipants": _READERS,
    "GetCheckpoint": _READERS,
    "ListCheckpoints": _READERS,
    "ListCheckpointEpisodes": _READERS,
    "VerifyCheckpoint": _READERS,
    "WatchEvents": _READERS,
    "PrepareCheckpoint": _WRITERS,
    "CommitCheckpoint": _WRITERS,
    "PublishCheckpoint": _WRITERS,
    "ResumeCheckpoint": _WRITERS,
    "RestoreCheckpoint": _WRITERS,
    "RenewCheckpoint": _WRITERS,
    "RetireEpisodes": _WRITERS,
    "ForgetRollouts": _WRITERS,
    "DeleteCheckpoint": _WRITERS,
    "RunCheckpoint": _WRITERS,
}
_GENERATION = dict.fromkeys(("GetBackend", "CutGenerations", "CheckCuts", "ReleaseCuts"), frozenset({Role.PEER}))
_DEBUGGING = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/List",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.channelz.v1.Channelz/GetTopChannels",
    "/grpc.channelz.v1.Channelz/GetServers",
    "/grpc.channelz.v1.Channelz/GetServer",
    "/grpc.channelz.v1.Channelz/GetServerSockets",
    "/grpc.channelz.v1.Channelz/GetChannel",
    "/grpc.channelz.v1.Channelz/GetSubchannel",
    "/grpc.channelz.v1.Channelz/GetSocket",
)

ROLES: dict[str, frozenset[Role]] = {
    **{f"/gymckpt.v1.ParticipantService/{name}": roles for name, roles in _PARTICIPANT.items()},
    **{f"/gymckpt.v1.CoordinatorService/{name}": roles for name, roles in _COORDINATOR.items()},
    **{f"/gymckpt.v1.GenerationService/{name}": roles for name, roles in _GENERATION.items()},
    **dict.fromkeys(_DEBUGGING, _READERS),
}
"""Full method name -> roles that may call it."""

HEALTH_PREFIX = "/grpc.health.v1.Health/"

_PEER_READS = frozenset(f"/gymckpt.v1.GenerationService/{name}" for name in ("GetBackend", "CheckCuts"))


def is_reading(method: str) -> bool:
    """Whether a method is known to change nothing. One that is in no table is taken for one that may."""
    return Role.OBSERVER in ROLES.get(method, ()) or method in _PEER_READS
