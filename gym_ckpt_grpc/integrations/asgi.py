"""Pure ASGI middleware in front of a server's application: it asks a gate, and nothing else.

    owner = ResourcesOwner(hooks, settings)
    app = FastAPI()
    app.add_exception_handler(ControlError, answer_refusal)
    served = CheckpointMiddleware(app, owner.gate())

No framework is imported. It takes the rollout prefix off the path, holds a request before its body reaches the
application, notices a client that leaves meanwhile, answers refusals, and lets the gate hold replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from gym_ckpt_grpc.participants import (
    CALLER,
    Caller,
    CallerLeft,
    DataPlaneNames,
    Gate,
    GateRequest,
    Reply,
    Visit,
    refusal_reply,
)
from gym_ckpt_grpc.protocol.errors import ControlError, RolloutIdRequired, StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Counted = Callable[[ControlError], None]
"""Counts a refusal that becomes an answer. Does not raise."""

BYPASS = ("/health", "/healthz", "/livez", "/readyz", "/metrics")
"""Routes that always answer."""
STATE_KEY = "gymckpt_episode"
"""Where the episode of a request stands in the ASGI scope's `state`."""
VISIT_KEY = "gymckpt_visit"
"""Where the gate's visit of a request stands there."""
WATCHED_BODY = 64 << 10
"""Bytes of a held request's body that are read ahead, to notice a client that leaves behind them."""

log = logging.getLogger(__name__)


def episode_of(scope: Mapping[str, Any]) -> EpisodeId:
    """The episode of a request, from its rollout prefix. Raises RolloutIdRequired if it has none."""
    episode = (scope.get("state") or {}).get(STATE_KEY)
    if isinstance(episode, EpisodeId):
        return episode
    raise RolloutIdRequired("the request names no rollout: send it under the rollout prefix")


def visit_of(scope: Mapping[str, Any]) -> Visit:
    """What the gate admitted a request as; without a gate in front, a visit that only passes through."""
    visit = (scope.get("state") or {}).get(VISIT_KEY)
    return visit if isinstance(visit, Visit) else Visit()


class CheckpointMiddleware:
    """Puts a gate in front of an application. With checkpointing off it is not installed at all.

    bypass: further paths, behind the rollout prefix, that are never held; one that ends in `/*` stands for all below.
    keep_path: the application sees the path with its prefix. post_only: paths at which, and below which, only POST is
    gated. Installing it twice with the same gate changes nothing.

    An episode in the scope's state, put there by a middleware outside, goes before the path's; None there as well.
    """

    def __init__(
        self,
        app: App,
        gate: Gate,
        *,
        bypass: Sequence[str] = (),
        keep_path: bool = False,
        post_only: Sequence[str] = (),
    ) -> None:
        self._app = app.inner_of(gate) if isinstance(app, CheckpointMiddleware) else app
        self._gate = gate
        self._bypass = frozenset(path for path in (*BYPASS, *bypass) if not path.endswith("/*"))
        self._bypass_below = tuple(path.removesuffix("*") for path in bypass if path.endswith("/*"))
        self._keep_path = keep_path
        self._post_only = tuple(f"{path}/" for path in post_only)
        self.refused = _counting(gate)
        """Counts a refusal that is about to be answered: for what stands outside and answers some itself."""

    def inner_of(self, gate: Gate) -> App:
        """The application behind this middleware, if it asks the same gate; else this middleware itself."""
        return self._app if gate is self._gate else self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = _ReplySender(send, self._gate)
        try:
            episode, path = self._gate.names.split(scope["path"])
            inner = scope if self._keep_path else _inner_scope(scope, self._gate.names, episode, path)
            if self._is_bypass(scope["method"], path):
                await self._app(inner, receive, reply)
            else:
                await self._visit(inner, receive, reply, path, episode)
        except CallerLeft:
            return  # nobody is there to be answered
        except ControlError as error:
            if reply.begun:
                raise
            self.refused(error)
            await _send_refusal(error, reply)

    def _is_bypass(self, method: str, path: str) -> bool:
        if path in self._bypass or path.startswith(self._bypass_below):
            return True
        return method != "POST" and f"{path}/".startswith(self._post_only)

    async def _visit(
        self, scope: Scope, receive: Receive, reply: _ReplySender, path: str, episode: EpisodeId | None
    ) -> None:
        """Enter the gate, run the application, leave the gate."""
        body = _WatchedBody(receive, self.refused)
        token = CALLER.set(body.caller)
        try:
            state = scope.get("state") or {}
            episode = state.get(STATE_KEY, episode)
            visit = await self._gate.enter(_request(scope, path, episode))
            reply.visit = visit
            seen = {**scope, "state": {**state, STATE_KEY: episode, VISIT_KEY: visit}}
            try:
                await self._app(seen, body, reply)
            except asyncio.CancelledError:
                if not visit.absorbs():
                    raise
                whose: EpisodeId | None = getattr(visit, "episode", None) or episode  # perhaps only the session's
                if reply.begun:
                    # Too late for an answer: the server cuts the connection of a reply that ends half way.
                    log.info("%s was retired in the middle of a reply", whose)
                    return
                raise StaleAttempt(
                    f"attempt {whose} was retired while it was served", episodes=[whose] if whose else []
                ) from None
            finally:
                reply.visit = Visit()
                visit.leave()
        finally:
            CALLER.reset(token)
            await body.close()


class RolloutPrefix:
    """With checkpointing off: takes the rollout prefix off the path, so that routes find `episode_of`; no gate."""

    def __init__(self, app: App, names: DataPlaneNames | None = None) -> None:
        self._app = app
        self._names = names or DataPlaneNames()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            episode, path = self._names.split(scope["path"])
        except ControlError as error:
            await _send_refusal(error, send)
            return
        await self._app(_inner_scope(scope, self._names, episode, path), receive, send)


class _ReplySender:
    """The application's `send`: adds the gate's headers, and lets the visit hold what is sent."""

    __slots__ = ("_gate", "_send", "begun", "visit")

    def __init__(self, send: Send, gate: Gate) -> None:
        self.begun = False
        self.visit = Visit()
        self._send = send
        self._gate = gate

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            head = Reply(message["status"], _decode(message.get("headers", ())), dict(self._gate.reply_headers()))
            await self.visit.starting(head)
            added = [(name.lower().encode(), value.encode()) for name, value in head.add.items()]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
            self.begun = True
        elif message["type"] == "http.response.body":
            await self.visit.sending(message.get("body", b""))
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.visit.delivered()


class _WatchedBody:
    """The application's `receive`. While the request is held it reads ahead, to notice that the client left.

    What it read is given to the application afterwards, unchanged. A receive under way is never cancelled while
    the request lives, so no message is lost.
    """

    __slots__ = ("_arrived", "_messages", "_receive", "_watch", "caller")

    def __init__(self, receive: Receive, refused: Counted) -> None:
        self.caller = Caller(self._start, refused)
        self._receive = receive
        self._messages: deque[Message] = deque()
        self._watch: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()

    async def __call__(self) -> Message:
        while not self._messages and self._watch is not None and not self._watch.done():
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft() if self._messages else await self._receive()

    def _start(self) -> None:
        self._watch = asyncio.create_task(self._read_ahead())

    async def _read_ahead(self) -> None:
        size = 0
        try:
            while size < WATCHED_BODY:
                message = await self._receive()
                self._messages.append(message)
                self._arrived.set()
                if message["type"] == "http.disconnect":
                    self.caller.leave()
                    return
                size += len(message.get("body", b""))
        finally:
            self._arrived.set()

    async def close(self) -> None:
        """The request has ended: watch no more."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
            if not self._watch.cancelled():
                self._watch.exception()  # the application has met the same, or has ended before it


# ---- refusals --------------------------------------------------------------------------------------------


class Refusal:
    """A ControlError as an ASGI response. Counted as a refusal by the gate in front, or by `counted`."""

    def __init__(self, error: ControlError, *, counted: Counted | None = None) -> None:
        self._error = error
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = CALLER.get()
        counted = self._counted or (caller and caller.on_refusal)
        if counted:
            counted(self._error)
        await _send_refusal(self._error, send)


async def answer_refusal(request: object, error: Exception) -> Any:
    """An exception handler for FastAPI and Starlette: `app.add_exception_handler(ControlError, answer_refusal)`.

    Gives a `Refusal`, typed as Any: those frameworks run any ASGI application here, but their types want a Response
    of their own. Raises what is no ControlError again.
    """
    if not isinstance(error, ControlError):
        raise error
    return Refusal(error)


def _counting(gate: Gate) -> Counted:
    """The gate's count of refusals. Whatever becomes of it, the refusal is answered."""

    def refused(error: ControlError) -> None:
        with contextlib.suppress(Exception):
            gate.refused(error)

    return refused


async def _send_refusal(error: ControlError, send: Send) -> None:
    status, headers, body = refusal_reply(error)
    headers["content-length"] = str(len(body))
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


# ---- taking a scope apart --------------------------------------------------------------------------------


def _inner_scope(scope: Scope, names: DataPlaneNames, episode: EpisodeId | None, path: str) -> Scope:
    """The scope as the application sees it: without the rollout prefix, with the episode in its state."""
    if episode is None:
        return scope
    raw = scope.get("raw_path") or scope["path"].encode()
    tail = path.encode()
    slashes = names.rollout_prefix.count("/") + 2  # before the path proper: of the prefix, the capture key, its own
    raw = tail if raw.endswith(tail) else b"/" + b"/".join(raw.split(b"/")[slashes:])
    state = {**(scope.get("state") or {}), STATE_KEY: episode}
    return {**scope, "path": path, "raw_path": raw, "state": state}


def _request(scope: Scope, path: str, episode: EpisodeId | None) -> GateRequest:
    return GateRequest(scope["method"], path, episode, _decode(scope["headers"]), scope)


def _decode(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by lower-case name; values of one name are joined, as HTTP allows."""
    found: dict[str, str] = {}
    for name, value in headers:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key in found:
            text = f"{found[key]}{'; ' if key == 'cookie' else ', '}{text}"
        found[key] = text
    return found
