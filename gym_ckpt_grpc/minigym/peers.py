"""How minigym's servers call each other: JSON over HTTP, one pool per server, refusals passed on unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from fastapi import Request, Response

from gym_ckpt_grpc.participants import raise_refusal

CALL_LIMIT = 240.0
"""Seconds for one call. It may be held through a whole checkpoint, so this is far above any of them."""


class PeerFailed(RuntimeError):
    """Another server answered with an error that is not one of the control layer."""

    def __init__(self, url: str, status: int, body: Any) -> None:
        super().__init__(f"{url} answered {status}: {str(body)[:300]}")
        self.status = status


async def answer_peer_failure(request: Request, error: Exception) -> Response:
    """Exception handler: 502 with what the other server said. Never an episode's result."""
    body = {"error": {"code": "PEER_FAILED", "detail": str(error)}}
    return Response(orjson.dumps(body), status_code=502, media_type="application/json")


@dataclass(frozen=True, slots=True)
class Reply:
    """A decoded answer; header names are in lower case."""

    status: int
    body: Any
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """An answer whose body is read as it comes; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


class Peers:
    """Calls to other servers. Made by `open_peers`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(
        self, method: str, url: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send one request; any status is a reply. Raises aiohttp.ClientError or TimeoutError without one."""
        data = None if body is None else orjson.dumps(body)
        async with self._session.request(method, url, data=data, headers=headers) as answer:
            raw = await answer.read()
            found = {name.lower(): value for name, value in answer.headers.items()}
            return Reply(answer.status, orjson.loads(raw) if raw else None, found)

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[StreamedReply]:
        """Send one request and read its body inside the block. Raises aiohttp.ClientError or TimeoutError."""
        data = None if body is None else orjson.dumps(body)
        async with self._session.request(method, url, data=data, headers=headers) as answer:
            found = {name.lower(): value for name, value in answer.headers.items()}
            yield StreamedReply(answer.status, found, answer.content.iter_any())

    async def post(self, url: str, body: Any, *, headers: Mapping[str, str] | None = None) -> Reply:
        """POST that must succeed: a refusal of a gate is raised as itself, another error as PeerFailed."""
        reply = await self.request("POST", url, body, headers=headers)
        raise_refusal(reply.status, reply.body, reply.headers)
        if reply.status >= 300:
            raise PeerFailed(url, reply.status, reply.body)
        return reply


@asynccontextmanager
async def open_peers() -> AsyncIterator[Peers]:
    """Peers with a pool of their own. No limit on connections: calls must not queue unseen behind held ones."""
    timeout = aiohttp.ClientTimeout(total=CALL_LIMIT)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Peers(session)


def cookie(session_id: str) -> dict[str, str]:
    """The header that names a resources session."""
    return {"cookie": f"session={session_id}"}
