"""Requests held for a test, on either side of a gate."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from gym_ckpt_grpc.minigym.held_routes import HeldRoutes


class Rig:
    """An application that notes what reached it, behind something that stands for a gate."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.entered: list[str] = []
        held = HeldRoutes()
        inner = held.inner(self._app)

        async def gate(scope: Any, receive: Any, send: Any) -> None:
            self.entered.append(scope["path"])
            await inner(scope, receive, send)

        self.app = held.outer(gate)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.ran.append(scope["path"])

    async def ask(self, method: str, path: str, body: Any = None, query: str = "") -> tuple[int, Any]:
        """One request: status and decoded body."""
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": orjson.dumps(body) if body is not None else b""}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
        await self.app(scope, receive, send)
        return (sent[0]["status"], orjson.loads(sent[1]["body"])) if sent else (0, None)

    async def held(self, count: int, within: float = 5) -> tuple[int, Any]:
        """Wait for held verifications."""
        return await self.ask("GET", "/control/held", query=f"path=/verify&count={count}&within={within}")


async def test_a_held_route_waits_behind_the_gate_until_it_is_released() -> None:
    rig = Rig()
    await rig.ask("POST", "/control/hold", {"path": "/verify"})
    asked = asyncio.create_task(rig.ask("POST", "/rollout/r-a0/verify"))
    assert await rig.held(1) == (200, {"held": 1})
    await rig.ask("POST", "/increment")
    assert (rig.entered, rig.ran) == (["/rollout/r-a0/verify", "/increment"], ["/increment"])
    assert await rig.ask("GET", "/control/seen", query="path=/verify") == (200, {"seen": 1})
    await rig.ask("POST", "/control/release", {"path": "/verify"})
    await asked
    assert rig.ran == ["/increment", "/rollout/r-a0/verify"]


async def test_one_held_outside_has_not_reached_the_gate() -> None:
    rig = Rig()
    await rig.ask("POST", "/control/hold", {"path": "/verify", "outside": True})
    asked = asyncio.create_task(rig.ask("POST", "/verify"))
    assert await rig.held(1) == (200, {"held": 1})
    assert rig.entered == []
    await rig.ask("POST", "/control/release", {"path": "/verify"})
    await asked
    assert rig.ran == ["/verify"]


async def test_a_caller_that_leaves_is_held_no_more_and_what_does_not_come_is_said() -> None:
    rig = Rig()
    await rig.ask("POST", "/control/hold", {"path": "/verify"})
    asked = asyncio.create_task(rig.ask("POST", "/verify"))
    assert (await rig.held(1))[0] == 200
    assert await rig.held(2, within=0.01) == (408, {"held": 1})
    asked.cancel()
    await asyncio.wait({asked})
    assert await rig.held(0) == (200, {"held": 0})
    assert (await rig.ask("POST", "/control/nonsense", {}))[0] == 404
