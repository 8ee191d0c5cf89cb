"""Lease renewal: a thread with its own loop, channels and connections.

So a blocked trainer loop, a long write or hundreds of open calls do not delay it. Each participant is renewed
apart from the others every `ttl / 3`, with a deadline of `ttl / 6`. Source: coordination section 7.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable

import grpc

from gym_ckpt_grpc.coordinator.calls import failure_of, identity_of, identity_problem
from gym_ckpt_grpc.coordinator.holds import Hold, Holds
from gym_ckpt_grpc.coordinator.member import Connections, Credentials, Member
from gym_ckpt_grpc.protocol.errors import ControlError, ErrorCode, LeaseLost, StaleController
from gymckpt.v1 import participant_pb2

log = logging.getLogger("gym_ckpt_grpc.coordinator")

GONE = frozenset(
    {
        ErrorCode.STALE_CHECKPOINT,
        ErrorCode.INVALID_PHASE,
        ErrorCode.CHECKPOINT_CONFLICT,
        ErrorCode.INCARNATION_CHANGED,
    }
)
"""Refusals of a renewal that say at once that the lease is gone."""


class Renewal:
    """Renews the holds of one coordinator. `start` and `stop` are called on the coordinator's loop.

    within: the context of the block whose leases begin now, so that renewals belong to its trace; None for no trace.
    """

    def __init__(
        self,
        holds: Holds,
        credentials: Credentials,
        context: Callable[[str], participant_pb2.ControlContext],
    ) -> None:
        self.holds = holds
        self.within: contextvars.Context | None = None
        self._credentials = credentials
        self._context = context
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._ended: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: Connections | None = None

    async def start(self) -> None:
        """Start the thread and wait until its loop runs."""
        self._thread = threading.Thread(target=self._run, name="gym-ckpt-renewal", daemon=True)
        self._thread.start()
        await asyncio.to_thread(self._ready.wait)

    async def stop(self) -> None:
        """End every renewal and the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        await asyncio.to_thread(self._ready.wait)
        if thread.is_alive() and self._loop and self._ended:
            self._loop.call_soon_threadsafe(self._ended.set)
        await asyncio.to_thread(thread.join)

    def begin(self, member: Member, checkpoint_id: str, ttl: float) -> Hold:
        """Watch a lease from before its Prepare or Restore is sent; renew it from `ttl / 3` on."""
        known = self.holds.get(member, checkpoint_id)
        hold = self.holds.begin(member, checkpoint_id, ttl)
        if hold is not known and self._loop is not None:
            # Not the operation's context: its span ends, and the renewals go on.
            context = None if self.within is None else self.within.copy()
            self._loop.call_soon_threadsafe(self._own, hold, context=context)
        return hold

    def accepted(self, member: Member, checkpoint_id: str, sent_at: float) -> None:
        """A call of the checkpoint was accepted: the lease counts from its sending."""
        if hold := self.holds.get(member, checkpoint_id):
            self.holds.count(hold, sent_at)

    def release(self, member: Member, checkpoint_id: str) -> None:
        """The participant's own Resume is about to be sent."""
        self.holds.release(member, checkpoint_id)

    # On the renewal thread.

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException:
            log.exception("lease renewal ended unexpectedly; leases run out by the holder's count")
            raise
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._connections = Connections(self._credentials, dedicated=True)
        self._ready.set()
        try:
            await self._ended.wait()
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await self._connections.close()

    def _own(self, hold: Hold) -> None:
        task = asyncio.get_running_loop().create_task(self._keep(hold), name=f"renew {hold.member.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, hold: Hold) -> None:
        """Renew until released or lost; after a failed try sooner than after a good one."""
        clock, next_at = self.holds.clock, hold.begun + hold.ttl / 3
        while not hold.released and self.holds.check(hold):
            pause = min(next_at, hold.expires) - clock()
            if pause > 0:
                await asyncio.sleep(pause)
                continue
            sent_at = clock()
            good = await self._renew(hold, sent_at)
            next_at = (sent_at if good else clock()) + hold.ttl / (3 if good else 12)

    async def _renew(self, hold: Hold, sent_at: float) -> bool:
        assert self._connections is not None
        member = hold.member
        seconds = min(hold.ttl / 6, max(0.001, hold.expires - sent_at))
        request = participant_pb2.RenewLeaseRequest(context=self._context(hold.checkpoint_id))
        try:
            reply = await self._connections.stub(member.address).RenewLease(request, timeout=seconds)
            changed = identity_problem(member.identity, identity_of(reply))
        except grpc.aio.AioRpcError as failure:
            error, transport = failure_of(failure, member.name, member.address)
            self._refused(hold, error, transport, sent_at)
            return False
        if changed:
            self.holds.lose(hold, LeaseLost(changed.message, participant=member.name))
            return False
        self.holds.count(hold, sent_at)
        return True

    def _refused(self, hold: Hold, error: ControlError, transport: str, sent_at: float) -> None:
        if transport:
            return  # tried again until the count says that it is gone
        self.holds.hear(hold, sent_at)
        if isinstance(error, StaleController):
            self.holds.lose(hold, error)
        elif hold.accepted and error.code in GONE:
            self.holds.lose(hold, LeaseLost(f"a renewal was refused: {error.message}", participant=hold.member.name))
