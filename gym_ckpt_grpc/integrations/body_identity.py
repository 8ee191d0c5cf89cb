"""For servers whose clients name the rollout in the body: gives such a request the rollout prefix.

    served = BodyIdentity(CheckpointMiddleware(app, owner.gate()), owner.names)

It stands outside the CheckpointMiddleware, which finds the prefix as if the client had sent it. The application
gets its own path and the whole body; it may be anybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from gym_ckpt_grpc.integrations.asgi import App, CheckpointMiddleware, Message, Receive, Refusal, Scope, Send
from gym_ckpt_grpc.participants import DataPlaneNames
from gym_ckpt_grpc.protocol.errors import InvalidArgument
from gym_ckpt_grpc.protocol.ids import EpisodeId

IdentityOf = Callable[[Mapping[str, Any]], EpisodeId | None]
"""JSON object of a request -> its episode, or None if it names none. Raises ValueError for an illegal one."""

BODY_LIMIT = 64 << 20
"""Bytes of a body that is read for its identity; a longer one is refused."""


def rollout_in_body(body: Mapping[str, Any]) -> EpisodeId | None:
    """The episode of `rollout_id` (text) and `attempt` (integer, 0 if absent)."""
    rollout_id, attempt = body.get("rollout_id"), body.get("attempt", 0)
    if not isinstance(rollout_id, str):
        return None
    if type(attempt) is not int:
        raise ValueError(f"attempt is {attempt!r:.80}, not an integer")
    return EpisodeId(rollout_id, attempt)


class BodyIdentity:
    """Reads the body of requests without the rollout prefix, and puts the prefix of what it names before their path.

    paths: ends of the paths that are looked into. A request that names nobody goes on as it is.
    """

    def __init__(
        self,
        app: App,
        names: DataPlaneNames,
        *,
        paths: Sequence[str] = ("/run", "/v1/responses"),
        identity_of: IdentityOf = rollout_in_body,
    ) -> None:
        self._app = app
        self._names = names
        self._paths = tuple(paths)
        self._identity_of = identity_of
        self._counted = app.refused if isinstance(app, CheckpointMiddleware) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        looked_into = scope["type"] == "http" and scope["path"].endswith(self._paths)
        if not looked_into or scope["path"].startswith(f"{self._names.rollout_prefix}/"):
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        try:
            body = await whole_body(receive, messages)
            if body is None:
                return  # the client has left
            episode = self._episode(body)
        except InvalidArgument as error:
            await Refusal(error, counted=self._counted)(scope, receive, send)
            return
        replay = iter(messages)

        async def again() -> Message:
            message = next(replay, None)
            return await receive() if message is None else message

        await self._app(self._prefixed(scope, episode) if episode is not None else scope, again, send)

    def _episode(self, body: bytes) -> EpisodeId | None:
        try:
            content = orjson.loads(body) if body else None
        except orjson.JSONDecodeError:
            return None
        try:
            return self._identity_of(content) if isinstance(content, dict) else None
        except ValueError as error:
            raise InvalidArgument(f"the body names no rollout: {error}") from None

    def _prefixed(self, scope: Scope, episode: EpisodeId) -> Scope:
        raw = scope.get("raw_path") or scope["path"].encode()
        prefix = self._names.path_of(episode, "")
        return {**scope, "path": prefix + scope["path"], "raw_path": prefix.encode() + raw}


async def whole_body(receive: Receive, messages: list[Message], *, limit: int | None = BODY_LIMIT) -> bytes | None:
    """The body, and the messages it came in; None if the client left. Raises InvalidArgument past the limit."""
    pieces: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        messages.append(message)
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if limit is not None and size > limit:
            raise InvalidArgument(f"the body is longer than {limit} bytes")
        more = message.get("more_body", False)
    return b"".join(pieces)
