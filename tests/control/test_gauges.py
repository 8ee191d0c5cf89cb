"""The gauges of a participant: what they show in each phase, on which thread, and when there are none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import ControlPlane
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.catalogue import GAUGES, Instrument
from tests.control.scripted import Clock, Participant, ScriptedOwner, eventually, running
from tests.telemetry.kept import Kept

A, B = EpisodeId("a"), EpisodeId("b")


class Held(ScriptedOwner):
    """Holds requests, and says so; remembers the threads that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_in: set[int] = set()

    def gauges(self) -> Mapping[Instrument, float]:
        self.asked_in.add(threading.get_ident())
        return {catalogue.HELD_REQUESTS: 3, catalogue.HELD_RESPONSES: 2}


def shown(kept: Kept) -> dict[str, float]:
    """Short name of a gauge -> its value; of the phase, the one that is 1."""
    found = {}
    for gauge in GAUGES:
        for labels, value in kept.points(gauge):
            name = gauge.name.removeprefix("gym.checkpoint.")
            if gauge in (catalogue.PHASE, catalogue.OLDEST_TASK_AGE):
                if value:
                    found[f"{name} {labels.get('phase', labels.get('task'))}"] = value
            else:
                found[name] = value
    return found


@pytest.mark.behaviour("C308", "C77")
async def test_what_they_show(tmp_path: Path) -> None:
    """In IDLE, while blockers hold a checkpoint up, and after it, on the participant's clock."""
    kept, clock = Kept(), Clock()
    async with Participant(tmp_path, clock=clock, owner=Held(), telemetry=kept.telemetry) as p:
        idle = {
            "phase IDLE": 1,
            "closed_seconds": 0,
            "marks_held": 0,
            "oldest_mark_age_seconds": 0,
            "blockers": 0,
            "oldest_blocker_age_seconds": 0,
            "restored_pending": 0,
            "held_requests": 3,
            "held_responses": 2,
            "loop_lag_ms": 0,
        }
        assert shown(kept) == idle
        p.add(*(f"run-{number}" for number in range(120)), running=True)
        p.owner.pending = {B}
        await p.retire([A])
        await p.prepare(within=0, ttl=30)
        clock.now += 12
        preparing = {
            "phase PREPARING": 1,
            "closed_seconds": 12,
            "lease_remaining_seconds": 18,
            "marks_held": 1,
            "oldest_mark_age_seconds": 12,
            "blockers": 120,
            "oldest_blocker_age_seconds": 1,
            "restored_pending": 1,
        }
        now = shown(kept)
        assert {name: now[name] for name in preparing} == preparing
        assert "phase IDLE" not in now
        await p.resume()
        now = shown(kept)
        assert (now["phase IDLE"], now["closed_seconds"]) == (1, 0)
        assert "lease_remaining_seconds" not in now
        kept.check_declared()


@pytest.mark.behaviour("C308")
async def test_one_series_for_each_phase(tmp_path: Path) -> None:
    """Nine, of which one is 1; labels say which service, and nothing with an id."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await p.prepare()
        points = kept.points(catalogue.PHASE)
        place = {"participant_kind": "resources", "service": "scripted"}
        assert [(labels, value) for labels, value in points if value] == [({**place, "phase": "PREPARED"}, 1)]
        assert len(points) == 9
        assert len(kept.points(catalogue.OLDEST_TASK_AGE)) == 5


async def test_ages_of_background_tasks(tmp_path: Path) -> None:
    """By kind: a write for as long as its thread runs, also after its checkpoint; a reopening while it is tried."""
    kept, clock = Kept(), Clock()
    async with Participant(tmp_path, clock=clock, telemetry=kept.telemetry) as p:
        p.add("a")
        await p.prepare(ttl=600)
        p.files.hold("create")
        async with running(p.commit()):
            await p.files.wait_entered()
            clock.now += 7
            assert kept.value(catalogue.OLDEST_TASK_AGE, task="write") == 7
            p.owner.opens.hold()
            async with running(p.resume()):
                await p.owner.opens.reached(1)
                clock.now += 2
                assert kept.value(catalogue.OLDEST_TASK_AGE, task="write") == 9
                assert kept.value(catalogue.OLDEST_TASK_AGE, task="reopen") == 2
                p.owner.opens.open.set()
            await p.until("IDLE")
        assert kept.value(catalogue.OLDEST_TASK_AGE, task="reopen") == 0
        assert kept.value(catalogue.OLDEST_TASK_AGE, task="write") == 9
        p.files.release()
        await eventually(lambda: kept.value(catalogue.OLDEST_TASK_AGE, task="write") == 0)


async def test_two_participants_are_two_series(tmp_path: Path) -> None:
    """Of one process, told apart by their service."""
    kept = Kept()
    planes = [
        ControlPlane(ScriptedOwner(), ParticipantIdentity(ParticipantKind.RESOURCES, name), telemetry=kept.telemetry)
        for name in ("tools", "shop")
    ]
    services = sorted(str(labels["service"]) for labels, _ in kept.points(catalogue.CLOSED_SECONDS))
    assert services == ["shop", "tools"]
    for plane in planes:
        await plane.close()


async def test_none_after_the_close(tmp_path: Path) -> None:
    """A control plane that was closed shows nothing; nor does one that is gone."""
    kept = Kept()
    plane = ControlPlane(
        ScriptedOwner(), ParticipantIdentity(ParticipantKind.RESOURCES, "tools"), telemetry=kept.telemetry
    )
    assert shown(kept) != {}
    await plane.close()
    assert shown(kept) == {}


async def test_an_exporter_on_its_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is asked on the loop alone, once for all gauges; the exporter gets what it sees there."""
    monkeypatch.setattr("gym_ckpt_grpc.control.gauges.FRESH", 60)
    monkeypatch.setattr("gym_ckpt_grpc.control.gauges.PATIENCE", 10)
    kept, owner = Kept(), Held()
    async with Participant(tmp_path, owner=owner, telemetry=kept.telemetry) as p:
        p.add("a", "b", running=True)
        await p.prepare(within=0)
        reports = owner.reports
        now = await asyncio.to_thread(shown, kept)
        assert (now["blockers"], now["phase PREPARING"], now["held_requests"]) == (2, 1, 3)
        assert owner.asked_in == {threading.get_ident()}
        assert owner.reports == reports + 1


async def test_a_loop_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter waits once, not for each gauge, and gets the last values, with ages that go on."""
    kept, clock = Kept(), Clock()
    async with Participant(tmp_path, clock=clock, telemetry=kept.telemetry) as p:
        p.add("a", running=True)
        await p.prepare(within=0, ttl=600)
        assert shown(kept)["blockers"] == 1
        gauges = p.plane._gauges
        gauges._seen_at = float("-inf")
        clock.now += 5
        found: list[dict[str, float]] = []
        asked: list[object] = []
        ask = gauges._loop.call_soon_threadsafe

        def asking(callback: Callable[..., object], *args: Any) -> object:
            asked.append(callback)
            return ask(callback, *args)

        monkeypatch.setattr(gauges._loop, "call_soon_threadsafe", asking)
        thread = threading.Thread(target=lambda: found.append(shown(kept)))
        thread.start()
        thread.join(10)  # the loop stands still meanwhile
        monkeypatch.undo()
        assert len(asked) == 1
        assert (found[0]["blockers"], found[0]["closed_seconds"], found[0]["oldest_blocker_age_seconds"]) == (1, 5, 6)
        await asyncio.sleep(0)
        assert await asyncio.to_thread(lambda: shown(kept)["blockers"]) == 1


async def test_an_owner_without_gauges_or_with_broken_ones(tmp_path: Path) -> None:
    """The participant's own are shown all the same."""
    kept = Kept()

    class Broken(ScriptedOwner):
        def gauges(self) -> Mapping[Instrument, float]:
            raise RuntimeError("no")

    async with Participant(tmp_path, owner=Broken(), telemetry=kept.telemetry) as p:
        p.add("a", running=True)
        assert shown(kept)["blockers"] == 1
        assert "held_requests" not in shown(kept)
