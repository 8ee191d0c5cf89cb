"""Running work side by side: nothing is under way once the caller has its answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.fanout import all_of, until_done
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.protocol.errors import OutOfTime


class Work:
    """Work that a test lets end, and whose clean-up a test lets end."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.may_clean = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ended = False

    async def run(self, result: int, error: Exception | None = None) -> int:
        self.begun.set()
        try:
            await self.may_end.wait()
            if error:
                raise error
            return result
        except asyncio.CancelledError:
            await self.may_clean.wait()
            raise
        finally:
            self.ended = True


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.behaviour("C216")
async def test_a_failure_waits_for_the_siblings() -> None:
    slow, failing = Work(), Work()
    task = asyncio.create_task(all_of([slow.run(1), failing.run(2, ValueError("two"))]))
    await slow.begun.wait()
    failing.may_end.set()
    await turns()
    assert not task.done()
    slow.may_end.set()
    with pytest.raises(ValueError, match="two"):
        await task
    assert slow.ended


@pytest.mark.behaviour("C216")
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancellation_waits_for_every_task_to_end(times: int) -> None:
    works = [Work(), Work()]
    task = asyncio.create_task(all_of([work.run(1) for work in works]))
    await works[1].begun.wait()
    for _ in range(times):
        task.cancel()
        await turns()
    assert not task.done()
    for work in works:
        work.may_clean.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(work.ended for work in works)


async def test_results_come_in_the_order_of_the_work() -> None:
    first, second = Work(), Work()
    task = asyncio.create_task(all_of([first.run(1), second.run(2)]))
    second.may_end.set()
    await turns()
    first.may_end.set()
    assert await task == [1, 2]
    assert await all_of([]) == []


async def test_waiting_for_the_end_raises_the_cancellation_afterwards() -> None:
    work = Work()
    inner = asyncio.create_task(work.run(1))
    task = asyncio.create_task(until_done([inner]))
    await work.begun.wait()
    task.cancel()
    await turns()
    assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inner.result() == 1


async def test_storage_that_does_not_answer_is_out_of_time() -> None:
    gate = threading.Event()
    try:
        with pytest.raises(OutOfTime, match="writing the intent"):
            await in_thread(gate.wait, "writing the intent", Deadline(0.05))
    finally:
        gate.set()
