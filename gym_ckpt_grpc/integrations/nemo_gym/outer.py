"""The outer middleware: finds out whose a request is, and changes nothing of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gym_ckpt_grpc.integrations.asgi import STATE_KEY, App, Counted, Message, Receive, Refusal, Scope, Send
from gym_ckpt_grpc.integrations.body_identity import whole_body
from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES, UNTAGGED_HEADER, episode_of_body
from gym_ckpt_grpc.protocol.errors import InvalidArgument
from gym_ckpt_grpc.protocol.ids import EpisodeId

SEED_KEY = "gymckpt_seed"
"""Where the kept fields of a seed's body stand in the ASGI scope's `state`."""

_UNTAGGED = UNTAGGED_HEADER.encode()


class IdentityMiddleware:
    """Puts the episode of a request into the scope's state, under STATE_KEY; None if it names none.

    It is the path's, else what the body names on the routes of `bodies` (ends of paths). honours_untagged: a request
    marked with UNTAGGED_HEADER has no episode. kept: fields of those bodies that are put there under SEED_KEY as well.
    counted: told of a refusal, since the gate never sees such a request.
    """

    def __init__(
        self,
        app: App,
        *,
        bodies: Sequence[str] = (),
        honours_untagged: bool = False,
        kept: Sequence[str] = (),
        counted: Counted | None = None,
    ) -> None:
        self._app = app
        self._bodies = tuple(bodies)
        self._honours_untagged = honours_untagged
        self._kept = tuple(kept)
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = dict(scope.get("state") or {})
        try:
            episode, path = NAMES.split(scope["path"])
            if (episode is None or self._kept) and self._bodies and path.endswith(self._bodies):
                messages: list[Message] = []
                body = await whole_body(receive, messages)
                if body is None:
                    return  # the client has left
                content = _object(body)
                if episode is None:
                    episode = episode_of_body(content)
                if self._kept:
                    state[SEED_KEY] = {name: content[name] for name in self._kept if name in content}
                receive = _again(messages, receive)
        except InvalidArgument as error:
            await Refusal(error, counted=self._counted)(scope, receive, send)
            return
        state[STATE_KEY] = None if self._honours_untagged and _is_untagged(scope) else episode
        await self._app({**scope, "state": state}, receive, send)


def _object(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; an empty one if it is something else, which the application is to judge."""
    try:
        content = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:
        try:
            content = json.loads(body)  # which takes NaN, as the application does
        except (ValueError, RecursionError):
            return {}
    return content if isinstance(content, dict) else {}


def _again(messages: Sequence[Message], receive: Receive) -> Receive:
    """A `receive` that gives what was read already, and then goes on."""
    read = iter(messages)

    async def again() -> Message:
        message = next(read, None)
        return await receive() if message is None else message

    return again


def _is_untagged(scope: Scope) -> bool:
    return any(name == _UNTAGGED and value == b"1" for name, value in scope["headers"])


def found_episode(scope: Mapping[str, Any]) -> EpisodeId | None:
    """The episode that the middleware found for a request, or None."""
    episode = (scope.get("state") or {}).get(STATE_KEY)
    return episode if isinstance(episode, EpisodeId) else None
