"""Restore: verify, stage, make live, all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import HookFailed, InvalidState
from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    InstallFailed,
    InvalidArgument,
    InvalidPhase,
    OutOfTime,
    StaleAttempt,
    StaleCheckpoint,
    StateCorrupt,
    StateNotFound,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId, RestoreScope
from gym_ckpt_grpc.storage import Record
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import Participant, ScriptedOwner, running, unreplayed

A, B = EpisodeId("a"), EpisodeId("b")
A1, B1 = EpisodeId("a", 1), EpisodeId("b", 1)


class WatchingOwner(ScriptedOwner):
    """Notes what `stage` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.staged: list[EpisodeId] = []
        self.targets: dict[EpisodeId, EpisodeId] = {}

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> dict[EpisodeId, Any]:
        assert not self.open
        self.staged = [record.episode for record in records]
        self.targets = dict(scope.targets)
        return await super().stage(records, scope)


@pytest.fixture
async def digest(tmp_path: Path) -> str:
    """A checkpoint c1 of a and b, written by an earlier life of the same server."""
    async with Participant(tmp_path) as p:
        p.add("a", "b")
        await p.prepare()
        return (await p.commit()).manifest_digest


async def assert_untouched(p: Participant) -> None:
    """Phase IDLE, open, nothing active, nothing installed, no marks."""
    status = await p.status()
    assert (status.phase, status.active_checkpoint_id) == (pb.PHASE_IDLE, "")
    assert (status.marks_held, status.restored_pending) == (0, 0)
    assert p.is_open()
    assert p.owner.live == {}


@pytest.mark.behaviour("C130", "C131", "C132", "C74")
async def test_commit_and_restore_in_a_fresh_participant(tmp_path: Path, digest: str) -> None:
    """RESTORED, the source id and the next attempts; closed until Resume; no marks; retired like any other state."""
    async with Participant(tmp_path) as p:
        reply = await p.restore([A, B], digest=digest)
        assert (reply.phase, reply.source_checkpoint_id) == (pb.PHASE_RESTORED, "c1")
        assert (reply.record_count, reply.without_record_count, reply.installed_count) == (2, 0, 2)
        assert list(zip(reply.installed.rollout_ids, reply.installed.attempts, strict=True)) == [("a", 1), ("b", 1)]
        assert p.owner.live == {A1: {"name": "a"}, B1: {"name": "b"}}
        assert not p.is_open()
        status = await p.status()
        assert (status.restored_pending, status.marks_held) == (2, 0)
        assert await p.listed(pb.EPISODE_LIST_KIND_RESTORED_PENDING) == [A1, B1]
        await p.retire([A1], "r1")
        await p.resume("r1")
        assert p.is_open()
        assert set(p.owner.live) == {B1}
        await p.retire([B1])
        assert p.owner.live == {}


@pytest.mark.behaviour("C136", "C137", "C138")
async def test_only_what_the_scope_names(tmp_path: Path, digest: str) -> None:
    """Records in scope alone are handed over, with every episode of the scope; without a record is counted."""
    owner = WatchingOwner()
    async with Participant(tmp_path, owner=owner) as p:
        elsewhere = EpisodeId("elsewhere", 4)
        reply = await p.restore([B, elsewhere], install_as=[7, 5])
        assert owner.staged == [B]
        assert owner.targets == {B: EpisodeId("b", 7), elsewhere: EpisodeId("elsewhere", 5)}
        assert (reply.record_count, reply.without_record_count, reply.installed_count) == (1, 1, 2)
        assert set(p.owner.live) == {EpisodeId("b", 7)}


async def test_an_empty_scope_installs_nothing(tmp_path: Path, digest: str) -> None:
    """Legal: a participant with nothing to continue is closed and opened with the others."""
    async with Participant(tmp_path) as p:
        assert (await p.restore([])).installed_count == 0
        assert await p.phase() == "RESTORED"


@pytest.mark.behaviour("C133", "C134", "C137")
@pytest.mark.parametrize("name", ["manifest.json", "records"])
async def test_changed_bytes(tmp_path: Path, digest: str, name: str) -> None:
    """STATE_CORRUPT naming the file; nothing was decoded, nothing is installed, open."""
    (path,) = (tmp_path / "checkpoints" / "c1").rglob(f"{name}*")
    data = bytearray(path.read_bytes())
    middle = data.find(b"name") if name == "records" else len(data) // 2
    data[middle if middle >= 0 else len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    owner = WatchingOwner()
    async with Participant(tmp_path, owner=owner) as p:
        with pytest.raises(StateCorrupt, match=name) as caught:
            await p.restore([A, B], digest=digest)
        assert caught.value.episodes == ((A,) if name == "records" else ())
        assert owner.stages.count == 0
        await assert_untouched(p)


@pytest.mark.behaviour("C135", "C139", "C146")
@pytest.mark.parametrize(
    ("error", "kind", "episodes"),
    [
        (InvalidState("bad record", A), StateCorrupt, (A,)),
        (HookFailed("x", B), InstallFailed, (B,)),
        (KeyError("a secret"), InstallFailed, ()),
        (InvalidPhase("live work", episodes=[A]), InvalidPhase, (A,)),
    ],
)
@pytest.mark.parametrize("step", ["stages", "activates"])
async def test_a_failing_hook(
    tmp_path: Path, digest: str, step: str, error: Exception, kind: type[Exception], episodes: tuple[EpisodeId, ...]
) -> None:
    """The right code naming the episode, nothing installed, open; the id is not fenced, and works afterwards."""
    async with Participant(tmp_path) as p:
        gate = getattr(p.owner, step)
        gate.error = error
        with pytest.raises(kind) as caught:
            await p.restore([A, B])
        assert caught.value.episodes == episodes  # type: ignore[attr-defined]
        assert "secret" not in str(caught.value)
        await assert_untouched(p)
        gate.error = None
        assert (await p.restore([A, B])).record_count == 2


@pytest.mark.behaviour("C140", "C146")
async def test_a_close_that_fails(tmp_path: Path, digest: str) -> None:
    """Phase IDLE and open; a Resume of the id fences it, the failure alone does not."""
    async with Participant(tmp_path) as p:
        p.owner.closes.error = HookFailed("no")
        with pytest.raises(InstallFailed):
            await p.restore([A])
        await assert_untouched(p)
        p.owner.closes.error = None
        await p.resume("r1")
        with pytest.raises(StaleCheckpoint):
            await p.restore([A])


@pytest.mark.parametrize("hook", ["closes", "stages", "activates"])
async def test_a_hook_that_cancels_itself_has_failed(tmp_path: Path, digest: str, hook: str) -> None:
    """A task that it awaited was cancelled, and nobody else was: nothing stays closed by that."""
    async with Participant(tmp_path) as p:
        getattr(p.owner, hook).error = asyncio.CancelledError()
        with pytest.raises(InstallFailed):
            await p.restore([A])
        await assert_untouched(p)


@pytest.mark.behaviour("C141", "C142", "C13", "C145")
async def test_an_install_that_outlives_its_call(tmp_path: Path, digest: str) -> None:
    """DEADLINE_EXCEEDED, RESTORING, closed, for as long as it runs; the same Restore joins it and is replayed then."""
    async with Participant(tmp_path) as p:
        p.owner.stages.hold()
        with pytest.raises(OutOfTime, match="install"):
            await p.restore([A, B], digest=digest, timeout=0.8)
        assert await p.phase() == "RESTORING"
        assert not p.is_open()
        with pytest.raises(CheckpointConflict):
            await p.restore([A], digest=digest)
        async with running(p.restore([B, A], digest=digest)) as call:
            await p.waiters(1)
            p.owner.stages.open.set()
            first = await call
        assert (first.record_count, first.replayed) == (2, False)
        second = await p.restore([A, B], digest=digest)
        assert second.replayed
        assert unreplayed(second) == first
        assert p.owner.stages.count == 1
        for other in (p.restore([A], digest=digest), p.restore([A, B]), p.restore([A, B], digest=digest, source="c2")):
            with pytest.raises(CheckpointConflict):
                await other


@pytest.mark.behaviour("C143")
@pytest.mark.parametrize("step", ["stages", "activates"])
async def test_an_install_nobody_waits_for(tmp_path: Path, digest: str, step: str) -> None:
    """Discarded, also if it had been made live already; then admission opens."""
    async with Participant(tmp_path) as p:
        gate = getattr(p.owner, step)
        gate.hold()
        with pytest.raises(OutOfTime):
            await p.restore([A, B], timeout=0.8)
        gate.open.set()
        await p.until("IDLE")
        await assert_untouched(p)
        assert p.owner.activates.count == (0 if step == "stages" else 1)
        assert (await p.restore([A, B])).record_count == 2


@pytest.mark.behaviour("C109")
@pytest.mark.parametrize("step", ["closes", "stages", "activates"])
async def test_resume_pre_empts_it(tmp_path: Path, digest: str, step: str) -> None:
    """STALE_CHECKPOINT within a second, nothing installed, open; the id is fenced."""
    async with Participant(tmp_path) as p:
        gate = getattr(p.owner, step)
        gate.hold()
        async with running(p.restore([A, B])) as call:
            await gate.entered.wait()
            async with asyncio.timeout(1):
                await p.resume("r1")
                with pytest.raises(StaleCheckpoint):
                    await call
        await assert_untouched(p)
        with pytest.raises(StaleCheckpoint):
            await p.restore([A, B])


async def test_resume_pre_empts_a_read_that_hangs(tmp_path: Path, digest: str) -> None:
    """Storage that does not answer holds up nobody."""
    async with Participant(tmp_path) as p:
        p.files.hold("open")
        async with running(p.restore([A, B])) as call:
            await p.files.wait_entered()
            async with asyncio.timeout(1):
                await p.resume("r1")
                with pytest.raises(StaleCheckpoint):
                    await call
        p.files.release()
        await assert_untouched(p)


@pytest.mark.behaviour("C144")
async def test_a_retire_waits_for_the_install(tmp_path: Path, digest: str) -> None:
    """And leaves nothing of the attempt; cut short before the install ended, it goes on by itself after it."""
    async with Participant(tmp_path) as p:
        p.owner.stages.hold()
        async with running(p.restore([A, B])) as restore:
            await p.owner.stages.entered.wait()
            reply = await p.retire([A1], "r1", timeout=0.8)
            assert reply.outcomes[0].state == pb.RETIRE_STATE_INCOMPLETE
            assert p.owner.retires.count == 0
            p.owner.retires.hold()
            async with running(p.retire([A1], "r1")) as retire:
                p.owner.stages.open.set()
                await restore
                await p.owner.retires.entered.wait()
                await p.status()
                p.owner.retires.open.set()
                assert (await retire).outcomes[0].state == pb.RETIRE_STATE_RETIRED
        assert p.owner.retires.count == 1
        assert set(p.owner.live) == {B1}
        assert p.owner.pending == {B1}


async def test_a_retired_target_is_refused(tmp_path: Path, digest: str) -> None:
    """STALE_ATTEMPT naming it; a higher attempt passes; nothing is closed."""
    async with Participant(tmp_path) as p:
        await p.retire([EpisodeId("a", 3)])
        with pytest.raises(StaleAttempt) as caught:
            await p.restore([A, B], epoch=9)
        assert caught.value.episodes == (A1,)
        assert p.owner.closes.count == 0
        assert (await p.status()).highest_epoch == 1
        assert (await p.restore([A, B], install_as=[4, 1])).record_count == 2
        assert (await p.restore([A, B], install_as=[4, 1])).replayed


@pytest.mark.behaviour("C147")
async def test_another_manifest_than_expected(tmp_path: Path, digest: str) -> None:
    """STATE_CORRUPT before anything is staged."""
    async with Participant(tmp_path) as p:
        with pytest.raises(StateCorrupt):
            await p.restore([A], digest="0" * 64)
        assert p.owner.stages.count == 0
        await assert_untouched(p)
        (tmp_path / "checkpoints" / "c1").rename(tmp_path / "checkpoints" / "c9")
        with pytest.raises(StateCorrupt):
            await p.restore([A], source="c9")
        await assert_untouched(p)


@pytest.mark.behaviour("C148")
async def test_nothing_for_this_participant(tmp_path: Path) -> None:
    """STATE_NOT_FOUND, and open again."""
    async with Participant(tmp_path) as p:
        with pytest.raises(StateNotFound):
            await p.restore([A], source="nowhere")
        await assert_untouched(p)


async def test_a_source_that_is_not_where_it_says(tmp_path: Path, digest: str) -> None:
    """INVALID_ARGUMENT before anything is closed; an attempt that has no next one as well."""
    async with Participant(tmp_path) as p:
        with pytest.raises(InvalidArgument):
            await p.restore([EpisodeId("a", 2**32 - 2)])
        p.uri = lambda checkpoint_id: (tmp_path / "checkpoints" / "c1").as_uri()  # type: ignore[method-assign]
        with pytest.raises(InvalidArgument, match="names checkpoint c1, not c2"):
            await p.restore([A], source="c2")
        assert p.owner.closes.count == 0


@pytest.mark.behaviour("C145", "C36")
async def test_a_cancelled_restore_is_joined_while_it_runs(tmp_path: Path, digest: str) -> None:
    """The client went away and came back: one install."""
    async with Participant(tmp_path) as p:
        p.owner.stages.hold()
        async with running(p.restore([A, B])):
            await p.owner.stages.entered.wait()
        await p.waiters(0)
        async with running(p.restore([A, B])) as again:
            await p.waiters(1)
            p.owner.stages.open.set()
            assert (await again).record_count == 2
        assert p.owner.stages.count == 1
