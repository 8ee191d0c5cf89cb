"""The training framework's end of the ledger's routes, over any HTTP client.

async def send(method: str, path: str, headers: Mapping[str, str], body: bytes) -> HttpReply: ...
client = LedgerClient(send, token=TokenFile(path))
await client.retire(episodes)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gym_ckpt_grpc.auth import TokenSource
from gym_ckpt_grpc.capture import Manifest, all_episodes, all_rollouts
from gym_ckpt_grpc.control import Removed
from gym_ckpt_grpc.integrations.ledger_routes import MAX_IDS, PREFIX
from gym_ckpt_grpc.participants import raise_refusal
from gym_ckpt_grpc.protocol.errors import InternalError
from gym_ckpt_grpc.protocol.ids import EpisodeId


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What a transport got. headers: names in any case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Transport = Callable[[str, str, Mapping[str, str], bytes], Awaitable[HttpReply]]
"""Sends one request: method, path, headers, body. Raises what its HTTP client raises."""


class LedgerClient:
    """Reads manifests and removes ledgers. Lists may have any length: the whole list is checked before the first
    call, and sent 4,096 ids at a time. Raises the ControlError that a reply carries.
    """

    def __init__(self, send: Transport, *, token: TokenSource | None = None, prefix: str = PREFIX) -> None:
        self._send = send
        self._token = token
        self._prefix = prefix

    async def manifest(self, episode: EpisodeId) -> Manifest:
        """The manifest of one attempt. Raises StaleAttempt for a retired one, StateCorrupt for a poisoned one."""
        found: Manifest = await self._call("GET", f"/manifest/{episode.capture_key}")
        return found

    async def retire(self, episodes: Sequence[EpisodeId]) -> Removed:
        """Fence these attempts and all below them, and remove their ledgers. Safe to repeat, so also after an error.

        Raises TypeError for what is no list of EpisodeId; AdmissionClosed while a checkpoint is open.
        """
        removed: list[EpisodeId] = []
        absent: list[EpisodeId] = []
        for some in _parts([each.capture_key for each in all_episodes(episodes)]):
            found = await self._call("POST", "/retire", {"capture_keys": some})
            removed += map(EpisodeId.from_capture_key, found["removed"])
            absent += map(EpisodeId.from_capture_key, found["absent"])
        return Removed(tuple(removed), tuple(absent))

    async def delete(self, rollouts: Sequence[str]) -> None:
        """Remove all ledgers and the fence of each rollout, so that its ids can be used again. Safe to repeat.

        Raises TypeError, InvalidArgument for a bad id, with nothing sent; AdmissionClosed while a checkpoint is open.
        """
        for some in _parts(all_rollouts(rollouts)):
            await self._call("POST", "/delete", {"rollout_ids": some})

    async def _call(self, method: str, route: str, content: Any = None) -> Any:
        headers: dict[str, str] = {}
        if content is not None:
            headers["content-type"] = "application/json"
        if self._token is not None:
            if self._token.stale():
                await asyncio.to_thread(self._token.refresh)
            headers["authorization"] = f"Bearer {self._token.token().decode()}"
        body = b"" if content is None else orjson.dumps(content)
        reply = await self._send(method, f"{self._prefix}{route}", headers, body)
        try:
            decoded = orjson.loads(reply.body)
        except orjson.JSONDecodeError:
            decoded = None
        raise_refusal(reply.status, decoded, reply.headers)
        if reply.status != 200 or not isinstance(decoded, dict):
            raise InternalError(f"the ledger answered {method} {route[:80]} with status {reply.status}")
        return decoded


def _parts(ids: Sequence[str]) -> list[list[str]]:
    return [list(ids[start : start + MAX_IDS]) for start in range(0, len(ids), MAX_IDS)]
