"""Replaying a handler's outside calls under an owner: those of a protocol (`RunSteps`); of a loop: loop_steps.py.

    steps = RunSteps(context, peers)
    return await steps.run(lambda: handler(request))

While the handler runs, the server's StepClient finds the steps in CURRENT and hands every call to them. Each is made
behind a boundary, the list of replies so far; after a restore the recorded ones are not made again. A refusal of the
control layer ends the handler whatever it makes of it: it is remembered, no further call is made, and `run` raises it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from gym_ckpt_grpc.integrations.nemo_gym.call_log import CallLog, key_of
from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES
from gym_ckpt_grpc.integrations.nemo_gym.peers import RESPONSES, Peers
from gym_ckpt_grpc.integrations.nemo_gym.recorded import RecordedReply, ReplyRecord, read_record, record_of
from gym_ckpt_grpc.participants import EpisodeContext, RunContext, StepMode
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.ids import EpisodeId

T = TypeVar("T")

RESOURCES_SEEDS = ("/seed_session", "/reset")
AGENT_SEED = "/v1/agent_sessions"

Send = Callable[[str, str, Mapping[str, Any]], Awaitable[Any]]
"""(method, path, options) -> the framework's reply: sends to the call's server."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of another server. path: without the rollout prefix. kwargs: as the framework's client was given it."""

    server: str
    method: str
    path: str
    kwargs: Mapping[str, Any]
    send: Send

    async def make(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """Send it. path: with the prefix. headers: added to the caller's."""
        options = dict(self.kwargs)
        if headers:
            options["headers"] = {**(options.get("headers") or {}), **headers}
        return await self.send(self.method, path, options)


class Steps(Protocol):
    """What a StepClient hands its calls to."""

    @property
    def peers(self) -> Peers:
        """The servers that may be called."""

    async def call(self, call: Call) -> Any:
        """Make a call, or replay it, and give its reply."""


CURRENT: ContextVar[Steps | None] = ContextVar("nemo_gym_steps", default=None)
"""The steps of the handler that runs."""


class UnrecordedSteps:
    """Calls of a server whose episodes cannot be captured. They carry the episode; who runs the handler answers the
    refusal that one meets, whatever the handler makes of it."""

    def __init__(self, episode: EpisodeId, peers: Peers) -> None:
        self.episode = episode
        self.refusal: ControlError | None = None
        """The first refusal that a call met."""
        self.peers = peers

    async def call(self, call: Call) -> Any:
        """Make a call and give its reply. Raises the ControlError that it carries."""
        response = await call.make(self.peers.path_for(self.episode, call.server, call.path))
        if response.status < 400:
            return response
        try:
            reply = RecordedReply(await record_of(response), call.method, str(response.url))
        except ControlError as error:
            self.refusal = self.refusal or error
            raise
        reply.headers = response.headers
        return reply


class ReplayingSteps:
    """What protocols and loops share: the log, the refusal, the way of one call."""

    def __init__(self, episode: EpisodeId, peers: Peers, log: CallLog) -> None:
        self.episode = episode
        self.refusal: ControlError | None = None
        """The first refusal that a call met."""
        self.peers = peers
        self._log = log

    def pinned(self) -> Callable[[], Mapping[str, Any]]:
        """The boundary as of now."""
        return self._log.pinned()

    async def call(self, call: Call) -> Any:
        """Make a call, or replay it, and give its reply. Raises the ControlError that it met, ReplayDiverged too."""
        if self.refusal is not None:
            raise self.refusal
        try:
            if self._log.fresh_ids:
                call = self._with_known_ids(call)
            key = key_of(
                call.method,
                call.server,
                call.path,
                call.kwargs,
                fresh_ids=self._log.fresh_ids,
                portable=self.peers.portable,
            )
            record = await self._log.recorded(key)
            if record is None:
                record = self._log.add(key, await self.live(call))
            self._seen(call, record)
            return RecordedReply(self._log.inward(record), call.method, self._url(call))
        except ControlError as error:
            if self.refusal is None:
                self.refusal = error
            raise

    async def handled(self, handler: Callable[[], Awaitable[T]]) -> T:
        """Run the handler under these steps.

        Raises what it raises, the refusal that a call of it met, or ReplayDiverged if recorded calls are left.
        """
        token = CURRENT.set(self)
        try:
            result = await handler()
        except Exception as error:
            if self.refusal is not None and error is not self.refusal:
                raise self.refusal from error
            if self.refusal is None:
                self._log.check_spent()
            raise
        finally:
            CURRENT.reset(token)
        if self.refusal is not None:
            raise self.refusal
        self._log.check_spent()
        return result

    async def live(self, call: Call) -> ReplyRecord:
        """Make a call behind a boundary, and give its record."""
        raise NotImplementedError

    def _seen(self, call: Call, record: ReplyRecord) -> None:
        """A reply is given to the handler, made or replayed."""

    def path_of(self, call: Call) -> str:
        """The path that tells the callee whose call it is."""
        return self.peers.path_for(self.episode, call.server, call.path)

    def _url(self, call: Call) -> str:
        return f"{self.peers.base_url(call.server) or 'http://' + call.server}{call.path}"

    def _with_known_ids(self, call: Call) -> Call:
        kwargs = dict(call.kwargs)
        if "json" in kwargs:
            kwargs["json"] = self._log.outward_json(kwargs["json"])
        return replace(call, path=self._log.outward(call.path), kwargs=kwargs)


class RunSteps(ReplayingSteps):
    """The calls of a protocol: an agent's `/run`, an environment's episode. Calls made in parallel go one by one.

    fresh_ids: whether the handler makes uuid4 ids of its own. generate: makes a policy call as an activation of the
    run's session, so that its reply is never lost; None where there is no such session.
    """

    def __init__(
        self,
        context: EpisodeContext,
        peers: Peers,
        *,
        fresh_ids: bool = False,
        generate: Callable[[Call, str], Awaitable[ReplyRecord]] | None = None,
    ) -> None:
        super().__init__(context.episode, peers, CallLog(context.episode, context.restored, fresh_ids=fresh_ids))
        self._context = context
        self._generate = generate
        self._verify: dict[str, StepMode] = {}
        self._activations: dict[str, int] = {}
        self._one_by_one = asyncio.Lock()
        self._cleaning = False

    async def run(self, handler: Callable[[], Awaitable[T]]) -> T:
        """Run the handler with its calls replayed and recorded, up to a last boundary behind all of them.

        Raises what the handler raises, or the refusal that a call of it met.
        """
        result = await self.handled(handler)
        await self._context.boundary(self.pinned())
        return result

    def cleaning(self) -> None:
        """From now on the handler cleans up: its calls are made, and neither recorded nor awaited by a checkpoint."""
        self._cleaning = True

    async def call(self, call: Call) -> Any:
        if not self._cleaning:
            return await super().call(call)
        if self._log.fresh_ids:
            call = self._with_known_ids(call)
        record = await read_record(await call.make(self.path_of(call)))
        return RecordedReply(self._log.inward(record), call.method, self._url(call))

    async def live(self, call: Call) -> ReplyRecord:
        async with self._one_by_one:
            await self._context.boundary(self.pinned())
            if self._generate is not None and self.peers.generates(call.server, call.path):
                async with self._context.step(call.path, mode=StepMode.REPLAY):
                    return await self._generate(call, self._next_activation(self.peers.own))
            async with self._context.step(call.path, mode=self._mode(call)):
                return await self._made(call)

    async def _made(self, call: Call) -> ReplyRecord:
        response = await call.make(self.path_of(call), self._activation_header(call))
        record = await record_of(response)
        if self._is_seed(call) and record["status"] < 300:
            mode = await self._context.seed_reply(response.headers)
            if self.peers.kind(call.server) == "resources":
                record["verify"] = mode.value
        return record

    def _mode(self, call: Call) -> StepMode:
        if self._is_seed(call) or self._is_activation(call) or self.peers.generates(call.server, call.path):
            return StepMode.REPLAY
        if call.path == "/verify":
            return self._verify.get(call.server, StepMode.WAIT)
        return StepMode.WAIT

    def _seen(self, call: Call, record: ReplyRecord) -> None:
        if "verify" in record:
            self._verify[call.server] = StepMode(record["verify"])
        if self._is_activation(call):
            self._activations[call.server] = self._activations.get(call.server, 0) + 1
        elif self._generate is not None and self.peers.generates(call.server, call.path):
            self._activations[self.peers.own] = self._activations.get(self.peers.own, 0) + 1

    def _is_seed(self, call: Call) -> bool:
        if self.peers.kind(call.server) == "agent":
            return call.path == AGENT_SEED
        return call.path in RESOURCES_SEEDS

    def _is_activation(self, call: Call) -> bool:
        return self.peers.kind(call.server) == "agent" and call.path.endswith(RESPONSES)

    def _next_activation(self, server: str) -> str:
        return str(self._activations.get(server, 0) + 1)

    def _activation_header(self, call: Call) -> dict[str, str]:
        if not self._is_activation(call):
            return {}
        index = self._next_activation(call.server)
        if isinstance(self._context, RunContext) and call.server == self.peers.own:
            return self._context.self_call_headers(int(index))
        return {NAMES.activation_header: index}
