"""Which attempt is sent when, without the framework: scripted servers answer, lose, refuse and hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gym_ckpt_grpc.integrations.nemo_gym import dispatch as module
from gym_ckpt_grpc.integrations.nemo_gym.dispatch import Dispatch, Lost, NotSent
from gym_ckpt_grpc.integrations.nemo_gym.dispatch_gate import DispatchGate
from gym_ckpt_grpc.protocol.errors import (
    AdmissionClosed,
    InternalError,
    InvalidArgument,
    OutOfTime,
    RetireIncomplete,
    StaleAttempt,
    StateCorrupt,
    WorkerUnavailable,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId

ROW = EpisodeId("7-0")
OTHER = EpisodeId("8-0")


class Servers:
    """Answers each attempt as it is told; an attempt that it is told nothing of is held."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._answers: dict[str, list[str | Exception]] = {}
        self._came = asyncio.Condition()

    def script(self, attempt: str, *answers: str | Exception) -> None:
        self._answers[attempt] = list(answers)

    async def send(self, episode: EpisodeId) -> str:
        async with self._came:
            self.sent.append(str(episode))
            self._came.notify_all()
        waiting = self._answers.get(str(episode))
        if not waiting:
            await asyncio.Event().wait()
            raise AssertionError
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def has_got(self, *attempts: str) -> None:
        async with self._came:
            await self._came.wait_for(lambda: set(attempts) <= set(self.sent))


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN", 0.001)


@pytest.fixture
def dispatch() -> Dispatch:
    return Dispatch(DispatchGate())


def begun(run: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
    return asyncio.create_task(run)


async def turn_of_the_loop() -> None:
    """Let every task that can run come to its next wait."""
    for _ in range(10):
        await asyncio.sleep(0)


# ---- the gate --------------------------------------------------------------------------------------------


async def test_the_gate_is_a_semaphore_that_counts_as_given() -> None:
    gate = DispatchGate()
    assert bool(gate) is True  # the framework takes `semaphore or nullcontext()`
    async with gate as entered:
        assert entered is gate


async def test_a_row_waits_until_nobody_keeps_the_gate_closed() -> None:
    gate = DispatchGate()
    first, second = gate.close("a checkpoint"), gate.close("a restore")
    waiting = asyncio.create_task(gate.__aenter__())
    first()
    first()  # again changes nothing
    await turn_of_the_loop()
    assert not waiting.done()
    assert gate.reasons == ("a restore",)
    second()
    await waiting
    assert gate.is_open


async def test_the_gate_names_who_keeps_it_closed_for_too_long() -> None:
    gate = DispatchGate(limit=1, patience=0.01)
    with gate.closed("checkpoint ckpt-7"), pytest.raises(OutOfTime, match=r"0.01 s .* checkpoint ckpt-7"):
        await gate.__aenter__()
    async with gate:  # its place was given back
        pass


async def test_the_gate_lets_so_many_in_and_no_more() -> None:
    gate = DispatchGate(limit=2)
    async with gate, gate:
        third = asyncio.create_task(gate.__aenter__())
        await turn_of_the_loop()
        assert not third.done()
    await third
    with pytest.raises(InvalidArgument, match="limit is 0"):
        DispatchGate(limit=0)


async def test_a_row_that_is_cancelled_at_the_gate_gives_its_place_back() -> None:
    gate = DispatchGate(limit=1)
    with gate.closed("a checkpoint"):
        waiting = asyncio.create_task(gate.__aenter__())
        await turn_of_the_loop()
        waiting.cancel()
        await asyncio.wait({waiting})
    async with asyncio.timeout(5), gate:
        pass


# ---- rows ------------------------------------------------------------------------------------------------


async def test_a_row_is_in_flight_until_its_reply(servers: Servers, dispatch: Dispatch) -> None:
    row = begun(dispatch.run(ROW, servers.send))
    await servers.has_got("7-0")
    assert list(dispatch.in_flight) == [ROW]
    row.cancel()
    await asyncio.wait({row})
    assert not dispatch.in_flight
    assert not dispatch.delivered
    servers.script("7-0", "done")
    assert await dispatch.run(ROW, servers.send) == "done"
    assert not dispatch.in_flight
    assert dispatch.delivered == {"7-0"}


async def test_one_rollout_is_not_under_way_twice(servers: Servers, dispatch: Dispatch) -> None:
    row = begun(dispatch.run(ROW, servers.send))
    await servers.has_got("7-0")
    with pytest.raises(InvalidArgument, match="7-0 is under way already"):
        await dispatch.run(ROW.next(), servers.send)
    assert list(dispatch.in_flight) == [ROW]
    row.cancel()


async def test_a_lost_attempt_is_never_sent_again(servers: Servers, dispatch: Dispatch) -> None:
    """And no other row is sent while the controller has not decided: it would meet servers without state."""
    servers.script("7-0", Lost("the server went away"), "from scratch")
    servers.script("7-0-a1", "restored")
    row = begun(dispatch.run(ROW, servers.send))
    assert await dispatch.loss() == (ROW,)
    fresh = begun(dispatch.run(OTHER, servers.send))
    await turn_of_the_loop()
    assert servers.sent == ["7-0"]
    assert "7-0 (the server went away)" in dispatch.gate.reasons[0]
    dispatch.move_on([ROW.next()], installed=True)
    assert await row == "restored"
    await servers.has_got("8-0")
    assert servers.sent == ["7-0", "7-0-a1", "8-0"]
    assert not dispatch.lost
    assert dispatch.gate.is_open
    fresh.cancel()


async def test_rows_wait_until_the_last_lost_one_is_decided(servers: Servers, dispatch: Dispatch) -> None:
    for attempt in ("7-0", "8-0"):
        servers.script(attempt, Lost("gone"))
    rows = [begun(dispatch.run(episode, servers.send)) for episode in (ROW, OTHER)]
    await turn_of_the_loop()
    assert set(dispatch.lost) == {ROW, OTHER}
    dispatch.move_on([ROW.next()], installed=True)
    await turn_of_the_loop()
    assert servers.sent == ["7-0", "8-0"]
    assert dispatch.lost == (OTHER,)
    dispatch.move_on([OTHER.next()], installed=False)
    await servers.has_got("7-0-a1", "8-0-a1")
    for row in rows:
        row.cancel()


async def test_nobody_decides(servers: Servers) -> None:
    """The row fails by name, and with a type that no collection takes for a failed rollout; others go on."""
    dispatch = Dispatch(DispatchGate(patience=0.01))
    servers.script("7-0", Lost("gone"))
    with pytest.raises(OutOfTime, match=r"rollout 7-0 waited .* lost, to be restored or restarted: 7-0") as told:
        await dispatch.run(ROW, servers.send)
    assert told.value.episodes == (ROW,)
    assert not isinstance(told.value, TimeoutError)
    assert dispatch.gate.is_open
    assert not dispatch.in_flight


async def test_a_recall_takes_what_is_on_the_wire_back(servers: Servers, dispatch: Dispatch) -> None:
    servers.script("8-0", "done")
    servers.script("7-0-a1", "restored")
    row, answered = (begun(dispatch.run(episode, servers.send)) for episode in (ROW, OTHER))
    await servers.has_got("7-0", "8-0")
    await answered
    assert dispatch.recall() == (ROW,)
    await turn_of_the_loop()
    assert dispatch.lost == (ROW,)
    assert servers.sent == ["7-0", "8-0"]
    dispatch.move_on([ROW.next()], installed=True)
    assert await row == "restored"


async def test_what_a_late_loss_says_after_a_decision_changes_nothing(servers: Servers, dispatch: Dispatch) -> None:
    """The recall and the decision in one turn of the loop: the attempt that is cancelled was decided already."""
    servers.script("7-0-a1", "restored")
    row = begun(dispatch.run(ROW, servers.send))
    await servers.has_got("7-0")
    dispatch.recall()
    dispatch.move_on([ROW.next()], installed=True)
    assert await row == "restored"
    assert not dispatch.lost


async def test_a_restored_row_that_comes_later_is_sent_as_it_was_installed(
    servers: Servers, dispatch: Dispatch
) -> None:
    dispatch.move_on([EpisodeId("7-0", 3)], installed=True)
    dispatch.move_on([EpisodeId("8-0", 2)], installed=False)
    assert dispatch.in_flight == (EpisodeId("7-0", 3),)
    servers.script("7-0-a3", "restored")
    servers.script("8-0-a2", "over")
    assert await dispatch.run(ROW, servers.send) == "restored"
    assert await dispatch.run(OTHER, servers.send) == "over"
    assert not dispatch.in_flight


async def test_a_server_that_does_not_listen_yet(servers: Servers, dispatch: Dispatch) -> None:
    """Nothing has begun: the same attempt again. But one that was installed may have lost its state meanwhile."""
    servers.script("7-0", NotSent("no"), NotSent("no"), "done")
    assert await dispatch.run(ROW, servers.send) == "done"
    dispatch.move_on([OTHER.next()], installed=True)
    servers.script("8-0-a1", NotSent("no"), "from scratch")
    row = begun(dispatch.run(OTHER, servers.send))
    assert await dispatch.loss() == (OTHER.next(),)
    row.cancel()


@pytest.mark.parametrize("error", [NotSent("counter does not listen"), AdmissionClosed("closed", retry_after=0.001)])
async def test_nobody_takes_a_row(servers: Servers, error: Exception) -> None:
    """A row does not wait for ever for a server that never comes, and says which."""
    dispatch = Dispatch(DispatchGate(patience=0.02))
    servers.script("7-0", *[error] * 1000)
    with pytest.raises(OutOfTime, match=r"rollout 7-0 was taken by no server for 0.02 s: .*(listen|closed)"):
        await asyncio.wait_for(dispatch.run(ROW, servers.send), 30)
    assert 1 < len(servers.sent) < 1000
    assert not dispatch.in_flight


async def test_refusals(servers: Servers, dispatch: Dispatch) -> None:
    """Closed: the same attempt. Retired: the next one. Anything else is raised as it is."""
    servers.script("7-0", AdmissionClosed("closed", retry_after=0.001), StaleAttempt("7-0 was retired"))
    servers.script("7-0-a1", "done")
    assert await dispatch.run(ROW, servers.send) == "done"
    assert servers.sent == ["7-0", "7-0", "7-0-a1"]
    servers.script("8-0", InternalError("incident 7"))
    with pytest.raises(InternalError, match="incident 7"):
        await dispatch.run(OTHER, servers.send)


async def test_a_row_does_not_start_over_for_ever(servers: Servers) -> None:
    dispatch = Dispatch(DispatchGate(), max_restarts=2)
    for attempt in ("7-0", "7-0-a1", "7-0-a2", "7-0-a3"):
        servers.script(attempt, StaleAttempt(f"{attempt} was retired"))
    with pytest.raises(StaleAttempt, match="7-0-a2 was retired") as told:
        await dispatch.run(ROW, servers.send)
    assert told.value.__notes__ == ["rollout 7-0 has started over 2 times"]


@pytest.mark.parametrize("error", [WorkerUnavailable("the sandbox is gone"), StateCorrupt("the replay diverged")])
@pytest.mark.parametrize("works", [True, False])
async def test_an_attempt_that_cannot_go_on(servers: Servers, works: bool, error: Exception) -> None:
    """What may still run is retired before the next attempt is sent; where that fails the controller decides."""
    retired: list[EpisodeId] = []

    async def retire(episode: EpisodeId) -> None:
        assert servers.sent == ["7-0"]
        retired.append(episode)
        if not works:
            raise RetireIncomplete("the agent is down")

    dispatch = Dispatch(DispatchGate(), retire=retire)
    servers.script("7-0", error)
    servers.script("7-0-a1", "done")
    row = begun(dispatch.run(ROW, servers.send))
    if works:
        assert await row == "done"
    else:
        assert await dispatch.loss() == (ROW,)
        assert "the agent is down" in dispatch.gate.reasons[0]
        row.cancel()
    assert retired == [ROW]


async def test_a_decision_while_an_attempt_is_retired(servers: Servers) -> None:
    """The controller restores meanwhile: the row goes on as what was installed, not one above it."""
    dispatch: Dispatch

    async def retire(episode: EpisodeId) -> None:
        dispatch.move_on([episode.next()], installed=True)

    dispatch = Dispatch(DispatchGate(), retire=retire)
    servers.script("7-0", WorkerUnavailable("the sandbox is gone"))
    servers.script("7-0-a1", "restored")
    assert await dispatch.run(ROW, servers.send) == "restored"


async def test_nothing_is_sent_while_the_gate_is_closed(servers: Servers, dispatch: Dispatch) -> None:
    servers.script("7-0", AdmissionClosed("closed", retry_after=0.001), "done")
    close: Callable[[], None]
    with dispatch.gate.closed("a checkpoint"):
        row = begun(dispatch.run(ROW, servers.send))
        await turn_of_the_loop()
        assert servers.sent == []
    await servers.has_got("7-0")
    close = dispatch.gate.close("another")
    await turn_of_the_loop()
    assert servers.sent == ["7-0"]
    close()
    assert await row == "done"
