"""Every RPC whose reply is lost and asked for again: the same answer, and the work is done once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from gym_ckpt_grpc.control import open_channel
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry import method_name
from gymckpt.v1 import participant_pb2_grpc
from tests.control.scripted import Clock, Participant, unreplayed

A, B = EpisodeId("a"), EpisodeId("b")


class LosesReplies(grpc.aio.UnaryUnaryClientInterceptor):
    """Throws the first reply of each method away after the server has done its work, and sends the call again."""

    def __init__(self) -> None:
        self.lost: dict[str, Any] = {}

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        method = method_name(client_call_details.method)
        call = await continuation(client_call_details, request)
        if method not in self.lost:
            self.lost[method] = await call
            call = await continuation(client_call_details, request)
        return call


async def with_losses(p: Participant) -> LosesReplies:
    losing = LosesReplies()
    assert p.channel is not None
    await p.channel.close()
    p.channel = open_channel(p.server.address)
    p.channel._unary_unary_interceptors.append(losing)  # type: ignore[attr-defined]
    p.stub = participant_pb2_grpc.ParticipantServiceStub(p.channel)
    return losing


def hooks(p: Participant) -> dict[str, int]:
    """How often each hook ran."""
    names = ("closes", "opens", "exports", "stages", "activates", "deletes", "releases")
    return {name: getattr(p.owner, name).count for name in names}


Call = Callable[[Participant], Awaitable[Any]]
ROAD: list[tuple[str, Call, dict[str, int]]] = [
    ("Prepare", lambda p: p.prepare(), {"closes": 1}),
    ("Capture", lambda p: p.capture([A, B]), {"exports": 1}),
    ("RenewLease", lambda p: p.renew(), {}),
    ("Commit", lambda p: p.commit([B, A], stop=True), {"releases": 1}),
    ("Resume", lambda p: p.resume(), {"opens": 1}),
    ("Retire", lambda p: p.retire([A, B]), {}),
    ("Forget", lambda p: p.forget({"a": 0, "b": 0}), {}),
    ("Restore", lambda p: p.restore([A, B]), {"closes": 1, "stages": 1, "activates": 1}),
]


@pytest.mark.behaviour("C36", "C31", "C34", "C84")
async def test_lost_replies(tmp_path: Path) -> None:
    """The whole road of a checkpoint and a restore, each reply lost once."""
    async with Participant(tmp_path, clock=Clock()) as p:
        losing = await with_losses(p)
        p.add("a", "b")
        for method, call, worked in ROAD:
            before = hooks(p)
            second = await call(p)
            first = losing.lost[f"/gymckpt.v1.ParticipantService/{method}"]
            assert not getattr(first, "replayed", False), method
            if hasattr(first, "replayed"):
                assert second.replayed, method
                assert unreplayed(second) == first
            else:
                assert second == first, method
            assert {name: count - before[name] for name, count in hooks(p).items() if count != before[name]} == worked
        assert p.owner.live == {EpisodeId("a", 1): {"name": "a"}, EpisodeId("b", 1): {"name": "b"}}
        assert len([c for c in p.files.calls if c.startswith("publish") and c.endswith("manifest.json")]) == 1
