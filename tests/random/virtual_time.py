"""An event loop whose time jumps to the next timer when there is nothing else to do.

Work in threads takes real time, during which virtual time stands still; a thread that a test holds up does not
count as work.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

REAL_LIMIT = 20.0
"""Real seconds that the loop waits for one thread before it calls the sequence hung."""
SPINNING = 10_000
"""Turns in a row without sleep, from which on time passes in each."""


class Deadlock(AssertionError):
    """Nothing can happen any more: no timer, no thread at work, and the test waits."""


class CountingLoop(asyncio.SelectorEventLoop):
    """A loop in real time that knows whether threads are at work for it."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        self._threads = 0
        self._held = 0
        self._lock = threading.Lock()
        super().__init__(selector)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        if executor is None:  # gRPC and the standard library; not work of the participant
            return super().run_in_executor(executor, func, *args)
        work: Future[T] = executor.submit(func, *args)
        self._count(threads=1)
        result = asyncio.wrap_future(work, loop=self)
        work.add_done_callback(lambda _: self._count(threads=-1))  # after the result was handed over
        return result

    def hold(self, by: int) -> None:
        """Threads begin (1) or end (-1) to wait for the test."""
        self._count(held=by)

    def _count(self, *, threads: int = 0, held: int = 0) -> None:
        with self._lock:
            self._threads += threads
            self._held += held
        if not self.is_closed():
            self.call_soon_threadsafe(lambda: None)

    @property
    def threads_work(self) -> bool:
        with self._lock:
            return self._threads > self._held


class VirtualLoop(CountingLoop):
    """`settle` waits until all that can happen without time passing has happened."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._idle: list[asyncio.Future[None]] = []
        self._turns = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now

    async def settle(self) -> None:
        """Wait until nothing is left to do but to let time pass."""
        idle = self.create_future()
        self._idle.append(idle)
        await idle

    def turned(self) -> None:
        """Called each turn that does not sleep. A wait too short for a float to tell must end all the same."""
        self._turns += 1
        if self._turns > SPINNING:
            self.now += 1e-6

    def nothing_ready(self, timeout: float | None) -> None:
        """Called instead of sleeping: tell who waits for quiet, or let time jump."""
        self._turns = 0
        if self._idle:
            idle, self._idle = self._idle, []
            for waiter in idle:
                if not waiter.done():
                    waiter.set_result(None)
        elif timeout is None:
            raise Deadlock("nothing can happen any more")
        else:
            self.now += timeout


class _JumpingSelector(selectors.BaseSelector):
    """A selector that asks the loop what to do instead of sleeping."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._inner = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        busy = self._loop.threads_work  # asked first: what a thread hands over before it ends is seen below
        found = self._inner.select(0)
        if found or (timeout is not None and timeout <= 0):
            self._loop.turned()
            return found
        if busy:
            found = self._inner.select(REAL_LIMIT)
            if not found and self._loop.threads_work:
                raise Deadlock("a thread hangs that no test holds")
            return found
        self._loop.nothing_ready(timeout)
        return found

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class CountedThread(ThreadPoolExecutor):
    """One thread whose work a CountingLoop knows of, however it is given to it. Made and used on the loop."""

    def __init__(self) -> None:
        super().__init__(1)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        self._loop = loop

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        result: Future[T] = Future()

        def work() -> None:
            try:
                if result.set_running_or_notify_cancel():
                    try:
                        made = fn(*args, **kwargs)
                    except BaseException as error:
                        result.set_exception(error)
                    else:
                        result.set_result(made)
            finally:
                self._loop._count(threads=-1)  # after the result was handed over

        self._loop._count(threads=1)
        super().submit(work)
        return result


def run(make: Callable[[], Coroutine[Any, Any, T]], *, virtual: bool) -> T:
    """Run a coroutine on a loop of its own, and end all that it leaves behind."""
    with asyncio.Runner(loop_factory=VirtualLoop if virtual else CountingLoop) as runner:
        return runner.run(make())
