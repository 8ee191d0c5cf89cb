"""The decode loop: many sequences at once, one token each a tick."""

from __future__ import annotations

import asyncio

import pytest

from gym_ckpt_grpc.minigym import engine as engine_module
from gym_ckpt_grpc.minigym.engine import Advance, Engine


def _sequence(name: str, length: int, made: list[str]) -> Advance:
    def advance() -> bool:
        made.append(name)
        return made.count(name) == length

    return advance


async def test_concurrent_sequences_progress_together() -> None:
    """Every tick gives each active sequence one token, whatever their lengths."""
    made: list[str] = []
    async with Engine(tick=0) as engine:
        lengths = {"a": 2, "b": 3, "c": 1}
        await asyncio.gather(*(engine.run(_sequence(name, length, made)) for name, length in lengths.items()))
        assert engine.active == 0
    assert made == ["a", "b", "c", "a", "b", "b"]


async def test_a_sequence_joins_while_others_are_decoded() -> None:
    made: list[str] = []
    async with Engine(tick=0) as engine, asyncio.TaskGroup() as group:

        def first() -> bool:
            made.append("a")
            if len(made) == 2:
                group.create_task(engine.run(_sequence("b", 2, made)))
            return made.count("a") == 6

        await engine.run(first)
    assert made.count("b") == 2
    assert made.index("b") < len(made) - 1 - made[::-1].index("a")


async def test_a_cancelled_sequence_gets_no_more_tokens_and_the_others_finish() -> None:
    made: list[str] = []
    async with Engine(tick=0) as engine:
        victim = asyncio.create_task(engine.run(_sequence("v", 1000, made)))

        def other() -> bool:
            made.append("o")
            if made.count("o") == 3:
                victim.cancel()
            return made.count("o") == 10

        await engine.run(other)
        with pytest.raises(asyncio.CancelledError):
            await victim
        assert engine.active == 0
    assert made.count("v") < 6


async def test_an_error_ends_only_its_own_sequence() -> None:
    made: list[str] = []

    def broken() -> bool:
        raise LookupError("no weights")

    async with Engine(tick=0) as engine:
        good = asyncio.create_task(engine.run(_sequence("g", 3, made)))
        with pytest.raises(LookupError, match="no weights"):
            await engine.run(broken)
        await good
    assert made == ["g"] * 3


async def test_closing_the_engine_cancels_what_is_active() -> None:
    began = asyncio.Event()

    def endless() -> bool:
        began.set()
        return False

    async with Engine(tick=0) as engine:
        task = asyncio.create_task(engine.run(endless))
        await began.wait()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(RuntimeError, match="not running"):
        await engine.run(endless)


async def test_the_loop_sleeps_a_tick_between_tokens_and_idles_without_work() -> None:
    """The length of a tick is real time: ten tokens take at least ten ticks."""
    clock = asyncio.get_running_loop().time
    async with Engine(tick=0.002) as engine:
        for _ in range(2):  # the second begins after an idle loop
            made: list[str] = []
            began = clock()
            await engine.run(_sequence("a", 10, made))
            assert clock() - began >= 0.0199


def test_a_negative_tick_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Engine(tick=-1)


async def test_a_tick_in_which_everything_stands_still_leaves_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tick the loop would spin: each turn would be a tick, and no thread would get its turn."""
    monkeypatch.setattr(engine_module, "STILL", 60.0)
    ticked, ticks = asyncio.Event(), 0

    def stand() -> None:
        nonlocal ticks
        ticks += 1
        ticked.set()

    async with Engine(tick=0) as engine:
        standing = asyncio.create_task(engine.run(stand))
        await ticked.wait()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert ticks == 1
        standing.cancel()
        await asyncio.gather(standing, return_exceptions=True)
