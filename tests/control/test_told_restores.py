"""Races of a Restore, as telemetry tells them: its install outlives its caller, fails, or meets a Resume."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import Budget, HookFailed
from gym_ckpt_grpc.protocol.errors import InstallFailed, OutOfTime, StaleCheckpoint
from gym_ckpt_grpc.protocol.ids import EpisodeId, RestoreScope
from gym_ckpt_grpc.protocol.machine import Call
from gym_ckpt_grpc.protocol.phases import Operation
from gym_ckpt_grpc.storage import LocalFiles, resolve_checkpoint
from gym_ckpt_grpc.telemetry import catalogue
from tests.control.scripted import Participant, running
from tests.control.test_told_races import DONE, EVENTS, OK, STALE, STEP, told
from tests.telemetry.kept import Kept

A = EpisodeId("a")


async def restore_briefly(p: Participant) -> None:
    """A Restore that runs out of time; its install goes on."""
    location = await asyncio.to_thread(resolve_checkpoint, p.uri("c1"), [str(p.root)], files=LocalFiles())
    call, scope = Call(Operation.RESTORE, "r1", "t", 1), RestoreScope.plan([A])
    with pytest.raises(OutOfTime):
        await p.plane.restore(call, scope, location, expected_digest="", lease_ttl=30, budget=Budget(0.2))


async def to_restore(p: Participant) -> None:
    p.add("a")
    await p.prepare("c1")
    await p.commit(id="c1")
    await p.resume("c1")
    p.owner.live.clear()


@pytest.mark.behaviour("C307")
async def test_a_resume_while_an_install_runs(tmp_path: Path) -> None:
    """The install is cut off and counts nothing; its restore is stale."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await to_restore(p)
        p.owner.activates.hold()
        async with running(p.restore([A])) as restore:
            await p.owner.activates.reached(1)
            await p.resume("r1")
            with pytest.raises(StaleCheckpoint):
                await restore
        assert p.owner.live == {}
        assert kept.value(EVENTS, event="preempted", operation="restore") == 1
        assert kept.value(catalogue.RECORDS_TOTAL, operation="restore") == 0
        assert kept.value(catalogue.PAUSE, cause="aborted") == 1
    kept.all_ended()
    assert told(kept, catalogue.RESTORE, catalogue.READ, catalogue.INSTALL) == {
        "restore": STALE,
        "read": OK,
        "install": STALE,
    }


@pytest.mark.behaviour("C307")
@pytest.mark.parametrize("first", ["failure", "resume"])
async def test_a_restore_that_fails_while_a_resume_comes(tmp_path: Path, first: str) -> None:
    """Its install runs on after its caller ran out of time, then fails, before or after the Resume: each span ends
    once, one pause is told, nothing was installed and nothing counts."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await to_restore(p)
        paused = kept.value(catalogue.PAUSE)
        p.owner.activates.hold()
        p.owner.activates.error = HookFailed("no room", A)
        await restore_briefly(p)
        await p.owner.activates.reached(1)
        assert kept.of(catalogue.INSTALL) == []
        if first == "failure":
            p.owner.opens.hold()
            p.owner.activates.open.set()
            await p.owner.opens.reached(2)  # the failed install is opening the doors
            async with running(p.resume("r1")) as resume:
                await p.until("RESUMING")
                p.owner.opens.open.set()
                await resume
        else:
            await p.resume("r1")
        assert (p.is_open(), p.owner.live, await p.phase()) == (True, {}, "IDLE")
        assert kept.value(catalogue.PAUSE) == paused + 1
        assert kept.value(catalogue.RECORDS_TOTAL, operation="restore") == 0
        assert kept.value(DONE, operation="restore") == 1
        assert kept.value(EVENTS, event="preempted", operation="restore") == 1
    kept.all_ended()
    found = told(kept, catalogue.RESTORE, catalogue.READ, catalogue.INSTALL)
    assert found == {
        "restore": [("DEADLINE_EXCEEDED", "ERROR")],
        "read": OK,
        "install": [("INSTALL_FAILED", "ERROR")] if first == "failure" else STALE,
    }
    assert told(kept, catalogue.RESUME) == {"resume": [*OK, *OK]}


async def test_a_restore_nobody_waits_for(tmp_path: Path) -> None:
    """Its install is discarded when it ends: a failed step, no volume; the next one installs and counts once."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await to_restore(p)
        p.owner.stages.hold()
        await restore_briefly(p)
        await p.owner.stages.reached(1)
        p.owner.stages.open.set()
        await p.until("IDLE")
        assert kept.value(STEP, step="install", outcome="INSTALL_FAILED") == 1
        assert kept.value(catalogue.RECORDS_TOTAL, operation="restore") == 0
        await p.restore([A])
        assert kept.value(catalogue.RECORDS_TOTAL, operation="restore") == 1
        assert kept.value(DONE, operation="restore", outcome="ok") == 1
    kept.all_ended()


@pytest.mark.parametrize("error", [InstallFailed("x"), HookFailed("x")])
async def test_a_close_that_fails_in_a_restore(tmp_path: Path, error: Exception) -> None:
    """Nothing was read: the restore alone is told of, with one code."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await to_restore(p)
        p.owner.closes.error = error
        with pytest.raises(InstallFailed):
            await p.restore([A])
        assert kept.value(DONE, operation="restore", outcome="INSTALL_FAILED") == 1
        assert kept.value(catalogue.ATTEMPTS_TOTAL, step="install") == 0
    kept.all_ended()
    assert kept.of(catalogue.READ) == []


async def test_a_read_whose_storage_cancels_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file layer with a loop of its own may raise that; nobody cancelled the install, which fails and opens."""
    kept = Kept()

    def read_part(*arguments: object, **more: object) -> None:
        raise asyncio.CancelledError

    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await to_restore(p)
        monkeypatch.setattr("gym_ckpt_grpc.control.installing.read_part", read_part)
        with pytest.raises(InstallFailed):
            await p.restore([A])
        assert (p.is_open(), await p.phase()) == (True, "IDLE")
        assert kept.value(DONE, operation="restore", outcome="INSTALL_FAILED") == 1
    kept.all_ended()
