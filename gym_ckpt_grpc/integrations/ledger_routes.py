"""Routes of the capture ledger for the training framework, as an ASGI application without a framework.

    GET  <prefix>/manifest/<capture key>                         what is known of one attempt (capture/manifest.py)
    POST <prefix>/retire   {"capture_keys": ["r1-a1", ...]}      -> {"removed": [...], "absent": [...]}
    POST <prefix>/delete   {"rollout_ids": ["r1", ...]}          -> {}

A call has at most 4,096 ids, and one bad id refuses it whole. Refusals are those of the data plane: 400 for a bad id,
401 without the bearer token, 409 for a retired attempt or a poisoned manifest, 503 with Retry-After for a removal
while a checkpoint or restore has admission closed. `LedgerClient` is the other end.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from gym_ckpt_grpc.auth import TokenSource
from gym_ckpt_grpc.capture import CaptureLedger, all_rollouts
from gym_ckpt_grpc.integrations.asgi import App, Receive, Refusal, Scope, Send
from gym_ckpt_grpc.protocol.errors import (
    AdmissionClosed,
    ControlError,
    InvalidArgument,
    StateNotFound,
    Unauthenticated,
    Violation,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId

PREFIX = "/ledger"
MAX_IDS = 4096
"""Ids in one call."""
MAX_BODY = 2 << 20
"""Bytes of a request's body: 4,096 of the longest ids fit."""
RETRY_AFTER = 1.0
"""Seconds that a removal is asked to wait while admission is closed."""


class LedgerRoutes:
    """Serves a ledger under a path prefix.

    closed: whether a checkpoint or restore has admission closed; asked in any thread. token: what callers must
    present; None admits everyone, which is for loopback only. inner: the application for all other paths.
    """

    def __init__(
        self,
        ledger: CaptureLedger,
        *,
        closed: Callable[[], bool],
        token: TokenSource | None,
        inner: App,
        prefix: str = PREFIX,
    ) -> None:
        self._ledger = ledger
        self._closed = closed
        self._token = token
        self._inner = inner
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(f"{self._prefix}/"):
            await self._inner(scope, receive, send)
            return
        try:
            await self._authenticate(scope)
            content = await self._answer(scope["method"], scope["path"].removeprefix(f"{self._prefix}/"), receive)
        except _CallerLeft:
            return
        except ControlError as error:
            await Refusal(error)(scope, receive, send)
            return
        await _send(content, send)

    async def _authenticate(self, scope: Scope) -> None:
        """Before anything else is looked at."""
        if self._token is None:
            return
        if self._token.stale():
            await asyncio.to_thread(self._token.refresh)
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        scheme, _, presented = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(presented, self._token.token()):
            raise Unauthenticated("no valid credentials")

    async def _answer(self, method: str, route: str, receive: Receive) -> Any:
        if method == "GET" and route.startswith("manifest/"):
            episode = _episode(route.removeprefix("manifest/"), "capture_key")
            return await asyncio.to_thread(self._ledger.manifest, episode)
        if method == "POST" and route == "retire":
            keys = await _read_ids(receive, "capture_keys")
            episodes = [_episode(key, f"capture_keys[{at}]") for at, key in enumerate(keys)]
            found = await asyncio.to_thread(self._remove, self._ledger.retire, episodes)
            return {"removed": [str(each) for each in found.removed], "absent": [str(each) for each in found.absent]}
        if method == "POST" and route == "delete":
            rollouts = all_rollouts(await _read_ids(receive, "rollout_ids"))
            await asyncio.to_thread(self._remove, self._ledger.delete, rollouts)
            return {}
        raise StateNotFound(f"the ledger has no route {method} {route[:80]!r}")

    def _remove(self, remove: Callable[[Any], Any], ids: Sequence[Any]) -> Any:
        """Asked in the thread that removes: one that had to wait for its turn may find admission closed by now."""
        if self._closed():
            raise AdmissionClosed("nothing is removed while a checkpoint is open", retry_after=RETRY_AFTER)
        return remove(ids)


class _CallerLeft(Exception):
    """The client went away before its request was there."""


def _episode(key: str, field: str) -> EpisodeId:
    try:
        return EpisodeId.from_capture_key(key)
    except ValueError as error:
        raise InvalidArgument(f"{field}: {error}", violations=[Violation(field, str(error))]) from None


async def _read_ids(receive: Receive, field: str) -> list[str]:
    """The one field of a request's body: a list of texts."""
    problem = "must be a list of texts, the only field of a JSON object"
    try:
        content = orjson.loads(await _read_body(receive))
    except orjson.JSONDecodeError:
        content = None
    ids = content.get(field) if isinstance(content, Mapping) and set(content) == {field} else None
    if isinstance(ids, list) and all(isinstance(each, str) for each in ids):
        if len(ids) <= MAX_IDS:
            return ids
        problem = f"has {len(ids)} ids, at most {MAX_IDS} are allowed"
    raise InvalidArgument(f"{field} {problem}", violations=[Violation(field, problem)])


async def _read_body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _CallerLeft
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY:
            raise InvalidArgument(f"the body is longer than {MAX_BODY} bytes")
    return body


async def _send(content: Any, send: Send) -> None:
    body = orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
