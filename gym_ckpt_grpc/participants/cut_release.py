"""Giving up cuts that no durable checkpoint names: which, and how. Source: participants section 8.5.

A cut belongs to the checkpoint it was made for until the fate of that checkpoint's records is known. A backend may
give the same cut again, in a later sweep, late, or for a later checkpoint: what one checkpoint has no use for is not
given up while another has. Cuts that a restore brought back, and those of a call's own coordinates, are never in this
book: nothing here gives them up.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import GenerationBackends
from gym_ckpt_grpc.control.tasks import TaskOwner
from gym_ckpt_grpc.participants.blocking import Clock
from gym_ckpt_grpc.telemetry.propagation import leave_trace

log = logging.getLogger("gym_ckpt_grpc.participants")

FIRST_BACKOFF, LAST_BACKOFF = 0.1, 30.0
"""Seconds between two tries to give cuts up."""
CALL_LIMIT = 10.0
"""Seconds that one try may take."""
BATCH = 4096
"""Cuts that one call gives up at most."""

MAX_KEPT = 65_536
"""Cuts in durable records that are remembered, the latest: backends that give them again give them soon."""

CutName = tuple[str, str]
"""(backend, cut id)."""


class Releaser:
    """Gives cuts up in the background, with back-off; the backends forget them whenever they can be reached.

    retry_for: seconds for which a cut is tried. sleep: waits so many seconds.
    """

    def __init__(
        self,
        backends: GenerationBackends,
        retry_for: float,
        *,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._backends = backends
        self._retry_for = retry_for
        self._clock = clock
        self._sleep = sleep
        self._tasks = TaskOwner()
        self._owed: dict[str, dict[str, float]] = {}  # by backend: cut id -> when to stop trying
        self._running: set[str] = set()
        self._asking: dict[str, frozenset[str]] = {}  # by backend: cuts that it is being asked to give up
        self._given_up = 0

    @property
    def unreleased(self) -> int:
        """Cuts that are not known to be gone: still tried, or tried for too long."""
        return self._given_up + sum(map(len, self._owed.values()))

    def release(self, backend: str, cut_ids: Iterable[str]) -> None:
        """Give cuts up, now and until it works. Does not wait."""
        ends = self._clock() + self._retry_for
        owed = self._owed.setdefault(backend, {})
        for cut_id in cut_ids:
            owed.setdefault(cut_id, ends)
        if owed and backend not in self._running:
            self._running.add(backend)
            self._tasks.own(self._run(backend, owed), f"release cuts of {backend}")

    def keep(self, backend: str, cut_id: str) -> bool:
        """A backend has given a cut again: do not give it up any more. False if that happens at this moment."""
        if cut_id in self._asking.get(backend, ()):
            return False
        self._owed.get(backend, {}).pop(cut_id, None)
        return True

    async def _run(self, name: str, owed: dict[str, float]) -> None:
        backoff = FIRST_BACKOFF
        while owed:
            batch = list(owed)[:BATCH]
            gone = await self._try(name, batch)
            leave_trace()  # tries that follow, and cuts of later calls, are no part of the first one's
            if gone:
                for cut_id in batch:
                    del owed[cut_id]
                backoff = FIRST_BACKOFF
                continue
            if late := [cut_id for cut_id, ends in owed.items() if ends <= self._clock()]:
                log.error("%d cuts of backend %s could not be released and stay there", len(late), name)
                self._given_up += len(late)
                for cut_id in late:
                    del owed[cut_id]
            if owed:
                await self._sleep(backoff * random.uniform(0.8, 1.2))
                backoff = min(backoff * 2, LAST_BACKOFF)
        self._running.discard(name)

    async def _try(self, name: str, cut_ids: list[str]) -> bool:
        backend = self._backends.get(name)
        self._asking[name] = frozenset(cut_ids)
        try:
            if backend is None:
                raise LookupError("there is no such backend")
            await backend.release(cut_ids, Budget(CALL_LIMIT, self._clock))
        except Exception as error:
            log.warning("releasing %d cuts of backend %s failed: %s", len(cut_ids), name, error)
            return False
        finally:
            del self._asking[name]
        return True

    async def close(self) -> None:
        """End what runs. Only at the end of the process: what is owed stays owed."""
        await self._tasks.close()


@dataclass(slots=True)
class _Made:
    """The cuts made for one checkpoint that are not given up. named: those that its frozen records name. replaced:
    named ones whose call has another cut by now. closed: whether admission still is. settled: whether the fate of
    its records is known."""

    cuts: set[CutName] = field(default_factory=set)
    named: set[CutName] = field(default_factory=set)
    replaced: set[CutName] = field(default_factory=set)
    closed: bool = True
    settled: bool = False


class MadeCuts:
    """Which cuts were made for which checkpoint, and when nobody needs them. release: gives up what is due."""

    def __init__(self, release: Callable[[str, Iterable[str]], None]) -> None:
        self._release = release
        self._made: dict[str, _Made] = {}
        self._current = _Made()
        self._kept: dict[CutName, None] = {}  # named by durable records, in the order of these

    def begin(self, checkpoint_id: str) -> None:
        """Admission closed for a checkpoint: the cuts made from now on are for it."""
        self._current = self._made[checkpoint_id] = _Made()

    def made(self, cut: CutName) -> None:
        """A backend has made a cut."""
        self._current.cuts.add(cut)

    def replaced(self, backend: str, cut_ids: Iterable[str]) -> None:
        """No call has these cuts any more. Those that frozen records name share the fate of the records."""
        cuts = {(backend, cut_id) for cut_id in cut_ids}
        self._current.replaced |= cuts & self._current.named
        self._give_up(self._current, cuts - self._current.named)

    def begin_export(self) -> None:
        """Records are frozen anew: what an export that failed had named is named no more."""
        current = self._current
        replaced, current.named, current.replaced = current.replaced, set(), set()
        self._give_up(current, replaced)

    def name(self, cut: CutName) -> None:
        """Records that are being frozen name this cut. One that was not made for this checkpoint is not ours."""
        if cut in self._current.cuts:
            self._current.named.add(cut)

    def opened(self) -> None:
        """Admission opens: what no frozen record names is given up."""
        current, self._current = self._current, _Made(closed=False)
        current.closed = False
        self._give_up(current, current.cuts - current.named)
        self._forget_done()

    def ended(self, checkpoint_id: str, durable: bool) -> None:
        """The fate of a checkpoint's records: what they name belongs to storage from now on, or to nobody."""
        made = self._made.get(checkpoint_id)
        if made is None or made.settled:
            return
        made.settled = True
        if durable:
            self._kept |= dict.fromkeys(made.named)
            for cut in list(self._kept)[:-MAX_KEPT]:
                del self._kept[cut]
        else:
            self._give_up(made, made.named)
        self._forget_done()

    def _forget_done(self) -> None:
        """Nothing is left to decide about a checkpoint that is over, and whose records' fate is known or is none."""
        over = [name for name, made in self._made.items() if not made.closed and (made.settled or not made.named)]
        for name in over:
            del self._made[name]

    def _give_up(self, made: _Made, cuts: Collection[CutName]) -> None:
        made.cuts -= set(cuts)
        others = [self._kept, *(other.cuts for other in self._made.values())]
        by_backend: dict[str, list[str]] = {}
        for backend, cut_id in sorted(cuts):
            if not any((backend, cut_id) in other for other in others):
                by_backend.setdefault(backend, []).append(cut_id)
        for backend, cut_ids in by_backend.items():
            self._release(backend, cut_ids)
