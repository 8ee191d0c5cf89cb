"""Requests of a minigym server held for a test: `/control/...` on its own port, only when started with controls.

    POST /control/hold      {"path": "/verify", "outside": false}   hold requests of a route from now on
    POST /control/release   {"path": "/verify"}                  let what is held go, and hold no more
    GET  /control/held?path=/verify&count=1&within=10            wait until `count` are held; 408 if they are not
    GET  /control/seen?path=/verify                              how many were let in since the process began

Requests are held inside the admission gate, where one counts as a request whose handler takes long; or outside, where
it is still on its way. The control routes are outside, so they answer while a checkpoint is open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from urllib.parse import parse_qs

import orjson

PREFIX = "/control/"
MOST = 30.0
"""Seconds that one question may wait."""


class HeldRoutes:
    """Which routes are held, and who waits. `inner` wraps the application, `outer` the gate around it."""

    def __init__(self) -> None:
        self._outside: dict[str, bool] = {}
        """Held route -> whether it is held outside the gate."""
        self._waiting: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    def inner(self, app: Any) -> Any:
        """The application, with requests held that were admitted."""

        async def holding(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                async with self._changed:
                    self._seen[_route(scope["path"])] += 1
                await self._hold(scope["path"], outside=False)
            await app(scope, receive, send)

        return holding

    def outer(self, app: Any) -> Any:
        """The whole server, with the control routes beside it, and requests held that are on their way to it."""

        async def controlled(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"].startswith(PREFIX):
                await self._control(scope, receive, send)
                return
            if scope["type"] == "http":
                await self._hold(scope["path"], outside=True)
            await app(scope, receive, send)

        return controlled

    async def _hold(self, path: str, *, outside: bool) -> None:
        """Wait as long as the route is held on this side of the gate."""
        route = _route(path)

        def held() -> bool:
            return self._outside.get(route) is outside

        async with self._changed:
            if not held():
                return
            self._waiting[route] += 1
            self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: not held())
            finally:
                self._waiting[route] -= 1

    async def _control(self, scope: Any, receive: Any, send: Any) -> None:
        action = scope["path"].removeprefix(PREFIX)
        asked = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode()).items()}
        if scope["method"] == "POST":
            asked |= orjson.loads((await receive())["body"] or b"{}")
        status, body = 200, {}
        async with self._changed:
            if action == "hold":
                self._outside[asked["path"]] = bool(asked.get("outside", False))
            elif action == "release":
                self._outside.pop(asked["path"], None)
                self._changed.notify_all()
            elif action == "held":
                status = 200 if await self._until_held(asked) else 408
                body = {"held": self._waiting[asked["path"]]}
            elif action == "seen":
                body = {"seen": self._seen[asked["path"]]}
            else:
                status = 404
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": orjson.dumps(body)})

    async def _until_held(self, asked: dict[str, str]) -> bool:
        path, count = asked["path"], int(asked.get("count", 1))
        within = min(float(asked.get("within", 10)), MOST)
        try:
            async with asyncio.timeout(within):
                await self._changed.wait_for(lambda: self._waiting[path] >= count)
        except TimeoutError:
            return False
        return True


def _route(path: str) -> str:
    """The last part of a path, with its slash: the same with and without a rollout prefix."""
    return "/" + path.rpartition("/")[2]
