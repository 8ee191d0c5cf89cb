"""The one gate: hold, admit, refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_ckpt_grpc.participants.admission import CALLER, HELD, Admission, Caller, CallerLeft, Cancellable
from gym_ckpt_grpc.protocol import UsageError
from gym_ckpt_grpc.protocol.errors import AdmissionClosed, StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.participants.fakes import FakePort, R, S, spin


class Door:
    """A gate with a counter behind it: what an owner does, at its simplest."""

    def __init__(self, **options: Any) -> None:
        self.admission = Admission(**options)
        self.port = FakePort()
        self.admission.attach(self.port)
        self.ran: list[EpisodeId] = []

    def attempt(self, episode: EpisodeId) -> Any:
        self.admission.check_mark(episode)
        if self.admission.closed:
            return HELD
        self.ran.append(episode)
        return None

    def send(self, episode: EpisodeId) -> asyncio.Task[None]:
        return asyncio.create_task(self.admission.admit(lambda: self.attempt(episode), episode))


async def test_an_open_gate_admits_without_a_turn_of_the_loop() -> None:
    door = Door()
    await door.admission.admit(lambda: door.attempt(R), R)
    assert door.ran == [R]


@pytest.mark.behaviour("P47")
async def test_a_request_overtaken_by_a_new_close_is_held_again() -> None:
    door = Door()
    door.admission.close()
    request = door.send(R)
    await spin()
    door.admission.open()
    door.admission.close()
    await spin()
    assert (door.ran, door.admission.waiting) == ([], 1)
    door.admission.open()
    await request
    assert (door.ran, door.admission.waiting) == ([R], 0)


async def test_a_mark_wakes_and_refuses_a_held_request_and_no_other() -> None:
    door = Door()
    door.admission.close()
    stale, other = door.send(R), door.send(S)
    await spin()
    door.port.marks.raise_to(R)
    door.admission.wake("r")
    with pytest.raises(StaleAttempt):
        await stale
    assert (door.admission.waiting, other.done()) == (1, False)
    door.admission.open()
    await other


@pytest.mark.behaviour("P48")
async def test_past_the_cap_a_request_is_refused_and_counted() -> None:
    door = Door(max_waiting=2)
    door.admission.close()
    held = [door.send(R), door.send(R)]
    await spin()
    with pytest.raises(AdmissionClosed) as caught:
        await door.send(R)
    assert caught.value.retry_after
    assert door.admission.counts() == {"waiting": 2, "waiting_overflow": 1}
    door.admission.open()
    await asyncio.gather(*held)
    with pytest.raises(UsageError, match="max_waiting"):
        Admission(max_waiting=0)


async def test_a_held_request_whose_client_left_never_runs() -> None:
    """Also if the client leaves in the very turn in which the gate opens."""
    for opens_first in (False, True):
        door = Door()
        door.admission.close()
        caller = Caller()
        CALLER.set(caller)
        request = door.send(R)
        await spin()
        if opens_first:
            door.admission.open()
        caller.leave()
        with pytest.raises(CallerLeft):
            await request
        assert (door.ran, door.admission.waiting) == ([], 0)


async def test_a_cancelled_hold_is_not_counted_any_more() -> None:
    door = Door()
    door.admission.close()
    request = door.send(R)
    await spin()
    request.cancel()
    await asyncio.wait({request})
    assert (request.cancelled(), door.admission.waiting) == (True, 0)
    door.admission.open()


@pytest.mark.behaviour("P50")
async def test_of_64_clients_racing_a_close_none_runs_between_the_cut_and_the_opening() -> None:
    """Each is either counted before the cut or held; random moments, 200 closes."""
    door = Door()
    stop = asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            await door.admission.admit(lambda: door.attempt(R), R)
            await asyncio.sleep(0)

    clients = [asyncio.create_task(client()) for _ in range(64)]
    for _ in range(200):
        await asyncio.sleep(0)
        door.admission.close()
        at_the_cut = len(door.ran)
        await spin(5)
        assert len(door.ran) == at_the_cut
        door.admission.open()
    stop.set()
    await asyncio.gather(*clients)
    assert door.admission.waiting == 0


async def test_changed_is_told_once_per_turn_and_only_while_closed() -> None:
    door = Door()
    door.admission.changed()
    await spin()
    assert door.port.changes == 0
    door.admission.close()
    for _ in range(5):
        door.admission.changed()
    await spin()
    assert door.port.changes == 1
    door.admission.changed()
    door.admission.open()
    await spin()
    assert door.port.changes == 1


async def test_a_task_is_cancelled_once_and_tells_that_cancel_from_others() -> None:
    seen: list[bool] = []
    started: list[Cancellable] = []

    async def work() -> None:
        runs = Cancellable()
        started.append(runs)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(runs.absorb())
            if not seen[-1]:
                raise

    ours = asyncio.create_task(work())
    await spin()
    started[0].cancel()
    started[0].cancel()
    await ours
    other = asyncio.create_task(work())
    await spin()
    other.cancel()
    await asyncio.wait({other})
    both = asyncio.create_task(work())
    await spin()
    started[2].cancel()
    both.cancel()
    await asyncio.wait({both})
    assert seen == [True, False, False]
    assert (other.cancelled(), both.cancelled()) == (True, True)
