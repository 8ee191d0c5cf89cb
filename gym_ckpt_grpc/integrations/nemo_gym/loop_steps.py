"""Replaying the outside calls of a loop, an agent's `/v1/responses`, in an activation of a session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from gym_ckpt_grpc.integrations.nemo_gym.call_log import CallLog
from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES
from gym_ckpt_grpc.integrations.nemo_gym.peers import Peers
from gym_ckpt_grpc.integrations.nemo_gym.recorded import ReplyRecord, record_of
from gym_ckpt_grpc.integrations.nemo_gym.steps import Call, ReplayingSteps
from gym_ckpt_grpc.participants import PolicyClient, PolicyReply, PolicyRequest, SessionContext

T = TypeVar("T")


log = logging.getLogger(__name__)

PROBED_WITHIN = 30.0
"""Seconds that the first policy calls of a process wait to learn whether their service has a gate."""


class LoopSteps(ReplayingSteps):
    """The calls of a loop: an agent's `/v1/responses`, in an activation of a session.

    clients: of the policy's instances. state: what a restored activation continues at, or None. Policy calls may be
    made in parallel; any other one is made alone, since a checkpoint waits for its end.
    """

    def __init__(
        self,
        session: SessionContext,
        state: Any,
        peers: Peers,
        clients: Mapping[str, PolicyCalls],
        *,
        fresh_ids: bool = False,
    ) -> None:
        super().__init__(session.episode, peers, CallLog(session.episode, state, fresh_ids=fresh_ids))
        self._session = session
        self._clients = clients
        self._lane = _Lane()

    async def run(self, handler: Callable[[], Awaitable[T]]) -> T:
        """Run the handler with its calls replayed and recorded; as for RunSteps, without a last boundary."""
        return await self.handled(handler)

    async def live(self, call: Call) -> ReplyRecord:
        if self.peers.generates(call.server, call.path):
            async with self._lane.shared():
                await self._reach_boundary()
                return await self._clients[call.server].call(self._session, call)
        async with self._lane.alone():
            await self._session.boundary(self.pinned())
            return await record_of(await call.make(self.path_of(call)))

    async def _reach_boundary(self) -> None:
        """Record a boundary, unless calls beside this one stand at one already: it would drop what they keep."""
        while self._session.checkpoint_open and self._lane.shared_by > 1:
            await self._session.stay()
        await self._session.boundary(self.pinned())


class PolicyCalls:
    """Policy calls of one model instance, through the one PolicyClient of its service."""

    def __init__(self, service: str) -> None:
        self._client = PolicyClient(_transport, service=service, names=NAMES)
        self._service = service
        self._probe: asyncio.Task[None] | None = None

    async def call(self, session: SessionContext, call: Call) -> ReplyRecord:
        """Make a call for a session that counts as waiting meanwhile, and give its record."""
        token = _SENDING.set(call)
        try:
            if not self._client.gated:
                await self._probed()
            record: ReplyRecord = (await self._client.call(session, call.path, _body(call))).body
            return record
        finally:
            _SENDING.reset(token)

    async def _probed(self) -> None:
        """Look once whether the service has a gate: else the first calls of this process would hold up a checkpoint."""
        if self._probe is None:
            self._probe = asyncio.create_task(self._look())
        await asyncio.wait({self._probe})

    async def _look(self) -> None:
        try:
            # The framework's client tries for ever. A call that goes out unprobed may hold up a checkpoint, no more.
            async with asyncio.timeout(PROBED_WITHIN):
                await self._client.probe()
        except TimeoutError:
            log.warning("policy model %s has not answered its health route in %g s", self._service, PROBED_WITHIN)


_SENDING: ContextVar[Call] = ContextVar("nemo_gym_policy_call")


def _body(call: Call) -> Any:
    """What a call asks for, as JSON."""
    data = call.kwargs.get("data")
    if data is None:
        return call.kwargs.get("json")
    return {"data": data.decode("latin-1") if isinstance(data, bytes) else data}


async def _transport(request: PolicyRequest) -> PolicyReply:
    call = _SENDING.get()
    if request.method == "GET":
        response = await call.send("GET", request.path, {})
    else:
        response = await call.make(request.path, request.headers)
    record = await record_of(response)
    return PolicyReply(record["status"], record, {name.lower(): value for name, value in response.headers.items()})


class _Lane:
    """Calls of one loop: those that share the lane, or one alone."""

    def __init__(self) -> None:
        self.shared_by = 0
        self._free = asyncio.Event()
        self._free.set()
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._one:  # behind a call that is alone
            self.shared_by += 1
            self._free.clear()
        try:
            yield
        finally:
            self.shared_by -= 1
            if not self.shared_by:
                self._free.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._one:
            await self._free.wait()
            yield
