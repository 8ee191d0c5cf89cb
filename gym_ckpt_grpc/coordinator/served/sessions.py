"""Sessions: what a client has open, its operations one at a time, and its end. Source: coordination section 12.

A handler is cancelled when its client goes away. So operations are tasks that are owned here, and handlers wait for
them: the same call again joins.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.message import Message

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.tasks import TaskOwner, await_within
from gym_ckpt_grpc.coordinator.coordinator import Coordinator
from gym_ckpt_grpc.coordinator.events import EventKind
from gym_ckpt_grpc.coordinator.fanout import until_done
from gym_ckpt_grpc.coordinator.restoration import Restoration
from gym_ckpt_grpc.coordinator.served.ending import Ended, end_checkpoint, end_restore
from gym_ckpt_grpc.coordinator.transaction import Checkpoint
from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    ControlError,
    StaleCheckpoint,
    StateNotFound,
    UsageError,
    WorkerUnavailable,
)

R = TypeVar("R", bound=Message)
SESSION_TTL = 30.0
"""Seconds that a session outlives its client's last call."""
REMEMBERED = 256
"""Ended checkpoints and Restores whose result is kept for repeated calls."""


class Open:
    """One open checkpoint or Restore. Operations run one at a time; each is done once for the same arguments."""

    def __init__(self, block: Checkpoint | Restoration, ttl: float, tasks: TaskOwner) -> None:
        self.id = block.id
        self.block = block
        self.end: asyncio.Task[Ended] | None = None
        self._ttl = ttl
        self._tasks = tasks
        self._calls = 0
        self._last = time.monotonic()
        self._running: tuple[str, Hashable, asyncio.Task[Any]] | None = None
        self._recorded: dict[str, tuple[Hashable, Any]] = {}

    @property
    def checkpoint(self) -> Checkpoint:
        """Raises CheckpointConflict if it is a Restore."""
        if not isinstance(self.block, Checkpoint):
            raise CheckpointConflict(f"{self.id} is a Restore", active_checkpoint_id=self.id)
        return self.block

    @property
    def restoration(self) -> Restoration:
        """Raises CheckpointConflict if it is a checkpoint."""
        if not isinstance(self.block, Restoration):
            raise CheckpointConflict(f"{self.id} is a checkpoint", active_checkpoint_id=self.id)
        return self.block

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the client: the session lives while it lasts, and its time begins anew at its end."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._last = time.monotonic()

    def remaining(self) -> float:
        """Seconds that are left of the session; all of them while a call is under way."""
        return self._ttl if self._calls else self._ttl - (time.monotonic() - self._last)

    async def once(
        self, name: str, arguments: Hashable, work: Callable[[], Coroutine[Any, Any, tuple[R, bool]]], budget: Budget
    ) -> R:
        """Do an operation, join the one under way, or give its recorded reply.

        work gives the reply, and whether it is recorded: one that failed is done again. Raises CheckpointConflict for
        other arguments, or while another operation is under way; StaleCheckpoint once it is being ended; OutOfTime.
        """
        if self._running and not self._running[2].done():
            running, given, task = self._running
            if running != name:
                raise CheckpointConflict(f"{running} of {self.id} is under way", active_checkpoint_id=self.id)
        elif name in self._recorded:
            given, reply = self._recorded[name]
            self._compare(name, given, arguments)
            recorded: R = reply
            return recorded
        elif self.end is not None:
            raise StaleCheckpoint(f"{self.id} is being ended", active_checkpoint_id=self.id)
        else:
            given, task = arguments, self._tasks.own(self._do(name, arguments, work), f"{name} of {self.id}")
            self._running = (name, arguments, task)
        self._compare(name, given, arguments)
        joined: R = await await_within(task, budget, name)
        return joined

    async def _do(self, name: str, arguments: Hashable, work: Callable[[], Coroutine[Any, Any, tuple[R, bool]]]) -> R:
        reply, final = await work()
        if final:
            self._recorded[name] = (arguments, reply)
        return reply

    def _compare(self, name: str, first: Hashable, again: Hashable) -> None:
        if first != again:
            raise CheckpointConflict(f"{name} of {self.id} had other arguments", active_checkpoint_id=self.id)

    async def stop_running(self) -> None:
        """Cancel the operation under way, and wait until nothing of it is."""
        if self._running:
            self._running[2].cancel()
            await until_done([self._running[2]])


class Sessions:
    """The session that is open, if any, and how the last ones ended."""

    def __init__(self, coordinator: Coordinator, ttl: float = SESSION_TTL) -> None:
        self.current: Open | None = None
        self.tasks = TaskOwner()
        self._coordinator = coordinator
        self._ttl = ttl
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._closing = False

    def ended(self, checkpoint_id: str) -> Ended | None:
        """How one has ended here, if that is remembered."""
        return self._ended.get(checkpoint_id)

    def remember(self, ended: Ended) -> Ended:
        """Keep a result for repeated calls."""
        self._ended[ended.checkpoint_id] = ended
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return ended

    def find(self, checkpoint_id: str) -> Open:
        """The open one of this id. Raises StaleCheckpoint for one that has ended, StateNotFound."""
        if self.current and self.current.id == checkpoint_id:
            return self.current
        if self.ended(checkpoint_id):
            raise StaleCheckpoint(f"{checkpoint_id} has ended here")
        active = self.current.id if self.current else ""
        raise StateNotFound(f"{checkpoint_id!r} is not open here", active_checkpoint_id=active)

    @contextmanager
    def touched(self) -> Iterator[None]:
        """A call of the client that names no checkpoint."""
        if self.current is None:
            yield
            return
        with self.current.call():
            yield

    def begin(self, checkpoint_id: str, make: Callable[[], Checkpoint | Restoration]) -> Open:
        """Open a session for a new checkpoint or Restore, which is not entered yet.

        Raises CheckpointConflict naming what is open, StaleCheckpoint for an id that has ended.
        """
        if self._closing:
            raise WorkerUnavailable("this service is stopping")
        active = self.current.id if self.current else self._coordinator.open_id
        if active:
            raise CheckpointConflict(f"{active} is open; resume it first", active_checkpoint_id=active)
        if checkpoint_id and self.ended(checkpoint_id):
            raise StaleCheckpoint(f"{checkpoint_id} has ended here; take a new id")
        opened = self.current = Open(make(), self._ttl, self.tasks)
        self.tasks.own(self._watch(opened), f"session of {opened.id}")
        return opened

    def drop(self, opened: Open, ended: Ended | None = None) -> None:
        """It has ended, or never came to be open: its id is then free again."""
        if self.current is opened:
            self.current = None
        if ended:
            self.remember(ended)

    async def _watch(self, opened: Open) -> None:
        while opened.end is None and self.current is opened:
            left = opened.remaining()
            if left > 0:
                await asyncio.sleep(left)
                continue
            text = f"its client made no call for {self._ttl:.1f} s: the session ends"
            self._coordinator.events.add(EventKind.LEASE, text, checkpoint_id=opened.id)
            self.end(opened, discard=True)

    def end(self, opened: Open, *, discard: bool = False) -> asyncio.Task[Ended]:
        """Begin to end it, whatever runs, or join that: resumed, aborted, or (a Restore) discarded."""
        if opened.end is None:
            opened.end = self.tasks.own(self._end(opened, discard), f"end {opened.id}")
        return opened.end

    async def _end(self, opened: Open, discard: bool) -> Ended:
        await opened.stop_running()
        try:
            if isinstance(opened.block, Checkpoint):
                ended = await end_checkpoint(opened.block)
            else:
                ended = await end_restore(opened.block, discard=discard)
        except (ControlError, UsageError) as error:
            self.drop(opened, Ended.failed(opened.id, error))
            raise
        self.drop(opened, ended)
        return ended

    async def close(self) -> None:
        """End what is open, then everything that is under way."""
        self._closing = True
        if self.current:
            await until_done([self.end(self.current, discard=True)])
        await self.tasks.close()
