"""Between an agent's application and its owner: what requests are an episode's work, and the handler's whole reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import orjson

from gym_ckpt_grpc.integrations.asgi import App, Message, Receive, Scope, Send
from gym_ckpt_grpc.integrations.body_identity import whole_body
from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES
from gym_ckpt_grpc.integrations.nemo_gym.outer import found_episode
from gym_ckpt_grpc.integrations.nemo_gym.peers import RESPONSES, Peers
from gym_ckpt_grpc.integrations.nemo_gym.recorded import ReplyRecord, bytes_of, text_or_bytes
from gym_ckpt_grpc.integrations.nemo_gym.steps import AGENT_SEED, CURRENT, UnrecordedSteps
from gym_ckpt_grpc.participants import run_key
from gym_ckpt_grpc.participants.names import header
from gym_ckpt_grpc.protocol.errors import RolloutIdRequired
from gym_ckpt_grpc.protocol.ids import EpisodeId

RUN = "/run"
AGENT_CLOSE = "/v1/agent_sessions/close"
SESSION_ID = "agent_session_id"
"""Under which the framework keeps an agent session's id: in bodies, and in the session of a request."""

Handle = Callable[[], Awaitable[Message]]
"""Runs the handler of a request and gives its whole reply: status, headers, body."""


class Work(Protocol):
    """What a captured agent does with the requests of its episodes. Each gives the handler's reply."""

    async def run(self, episode: EpisodeId, handle: Handle) -> Message:
        """A legacy run."""

    async def activation(self, episode: EpisodeId, key: str, index: str | None, handle: Handle) -> Message:
        """An activation of a session, or of a run that is under way."""

    async def seed(self, episode: EpisodeId, key: str, handle: Handle) -> Message:
        """A session is seeded."""

    async def close(self, episode: EpisodeId, key: str, handle: Handle) -> Message:
        """A session is closed."""

    def episode_of(self, key: str) -> EpisodeId | None:
        """The episode of a session, None if there is none of this id."""


class TaggingDriver:
    """Lets the calls of a handler carry the episode of its request. A refusal that one meets is the answer."""

    def __init__(self, app: App, peers: Peers) -> None:
        self._app = app
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        episode = found_episode(scope) if scope["type"] == "http" else None
        if episode is None:
            await self._app(scope, receive, send)
            return
        steps = UnrecordedSteps(episode, self._peers)
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if begun or steps.refusal is None:
                begun = True
                await send(message)

        token = CURRENT.set(steps)
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if not begun and steps.refusal is not None and error is not steps.refusal:
                raise steps.refusal from error
            raise
        finally:
            CURRENT.reset(token)
        if not begun and steps.refusal is not None:
            raise steps.refusal


Drive = Callable[[EpisodeId, Scope, bytes, Handle], Awaitable[Message]]


class AgentDriver:
    """Innermost: hands the requests that are an episode's work to the participant, and runs the handler under it."""

    def __init__(self, app: App, work: Work) -> None:
        self._app = app
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = NAMES.split(scope["path"])[1] if scope["type"] == "http" and scope["method"] == "POST" else ""
        drive = self._drive(path)
        episode = self._episode(scope) if drive is not None else None
        if drive is None or (episode is None and path != RUN):
            await self._app(scope, receive, send)  # a call of nobody's, or one that the handler will refuse
            return
        if episode is None:
            raise RolloutIdRequired(f"{path} names no rollout")
        body = await whole_body(receive, [], limit=None)  # the handler would read all of it as well
        if body is None:
            return  # the client has left
        reply = await drive(episode, scope, body, WholeReply(self._app, scope, body))
        await send({"type": "http.response.start", "status": reply["status"], "headers": reply["headers"]})
        await send({"type": "http.response.body", "body": reply["body"]})

    def _episode(self, scope: Scope) -> EpisodeId | None:
        marker = _marker(scope)
        return found_episode(scope) or (self._work.episode_of(marker) if marker else None)

    def _drive(self, path: str) -> Drive | None:
        if path.endswith(RESPONSES):  # behind a segment for token capture, perhaps
            return self._respond
        return {RUN: self._run, AGENT_SEED: self._seed, AGENT_CLOSE: self._close}.get(path)

    async def _run(self, episode: EpisodeId, scope: Scope, body: bytes, handle: Handle) -> Message:
        return await self._work.run(episode, handle)

    async def _respond(self, episode: EpisodeId, scope: Scope, body: bytes, handle: Handle) -> Message:
        key = _marker(scope) or run_key(episode)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        index = header(headers, NAMES.activation_header)
        return await self._work.activation(episode, key, index, handle)

    async def _seed(self, episode: EpisodeId, scope: Scope, body: bytes, handle: Handle) -> Message:
        key = _session_id(body)
        return await (self._work.seed(episode, key, handle) if key else handle())

    async def _close(self, episode: EpisodeId, scope: Scope, body: bytes, handle: Handle) -> Message:
        key = _session_id(body)
        return await (self._work.close(episode, key, handle) if key else handle())


class WholeReply:
    """Runs the application for one request, as often as it is called, and gives the whole reply."""

    def __init__(self, app: App, scope: Scope, body: bytes) -> None:
        self._app = app
        self._scope = scope
        self._body = body

    async def __call__(self) -> Message:
        given = False
        sent: list[Message] = []

        async def receive() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # the one who waits for the reply is seen to by those in front
            given = True
            return {"type": "http.request", "body": self._body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(self._scope, receive, send)
        start = next(each for each in sent if each["type"] == "http.response.start")
        body = b"".join(each.get("body", b"") for each in sent if each["type"] == "http.response.body")
        return {"status": start["status"], "headers": list(start.get("headers", ())), "body": body}


def plain_reply(reply: Message) -> ReplyRecord:
    """A reply as a checkpoint keeps it."""
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in reply["headers"]]
    return {"status": reply["status"], "headers": headers, "body": text_or_bytes(reply["body"])}


def reply_of(kept: Mapping[str, Any]) -> Message:
    """The reply that `plain_reply` was given."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept["headers"]]
    return {"status": kept["status"], "headers": headers, "body": bytes_of(kept["body"])}


def json_reply(content: Mapping[str, Any]) -> Message:
    """A reply of our own."""
    body = orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return {"status": 200, "headers": headers, "body": body}


def _marker(scope: Scope) -> str | None:
    """The agent session that a request's cookie names."""
    marker = (scope.get("session") or {}).get(SESSION_ID)
    return marker if isinstance(marker, str) and marker else None


def _session_id(body: bytes) -> str | None:
    """The session that a body is about; None if it names none, which the handler will refuse."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    found = content.get(SESSION_ID) if isinstance(content, dict) else None
    return found if isinstance(found, str) and found else None
