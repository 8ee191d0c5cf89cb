"""What a Commit writes over a base, what it asks of the root before, and a write that goes on after the release."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.control import ControlSettings
from gym_ckpt_grpc.protocol.errors import CheckpointConflict, InvalidArgument, StateUnwritable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import FAST, Participant, running, typed, unreplayed
from tests.control.test_capture_commit import stored

NAMES = [f"r{number:02}" for number in range(40)]
EPISODES = [EpisodeId(name) for name in NAMES]


def fill(p: Participant) -> None:
    for episode in EPISODES:
        p.owner.live[episode] = {"name": episode.rollout_id, "text": f"{episode} " * 3000}


async def checkpoint(p: Participant, id: str, *, base: str = "") -> pb.CommitResponse:
    await p.prepare(id)
    reply = await p.commit(EPISODES, id, base=base)
    await p.resume(id)
    return reply


def size(p: Participant, id: str) -> int:
    return sum(path.stat().st_size for path in (p.root / "checkpoints" / id).rglob("*") if path.is_file())


@pytest.mark.behaviour("C183")
async def test_over_a_base_only_what_changed_is_written(tmp_path: Path) -> None:
    """The reply's bytes are those written; what is stored is the whole; and a Restore is told of no base."""
    async with Participant(tmp_path) as p:
        fill(p)
        full = await checkpoint(p, "c1")
        p.owner.live[EPISODES[7]] = {"name": "r07", "text": "new " * 3000}
        thin = await checkpoint(p, "c2", base="c1")
        assert (full.record_count, thin.record_count) == (40, 40)
        assert thin.bytes < full.bytes / 10
        assert size(p, "c2") < size(p, "c1") / 5
        want = dict(p.owner.live)
        assert stored(p, "c2") == want
        p.owner.live.clear()
        await p.restore(EPISODES, source="c2")
        await p.resume("r1")
        assert p.owner.live == {EpisodeId(each.rollout_id, 1): state for each, state in want.items()}


async def test_the_same_commit_again_and_another_base(tmp_path: Path) -> None:
    """The base is a part of what makes two Commits the same."""
    async with Participant(tmp_path) as p:
        fill(p)
        await checkpoint(p, "c0")
        await checkpoint(p, "c1")
        await p.prepare("c2")
        first = await p.commit(EPISODES, "c2", base="c1")
        again = await p.commit(EPISODES, "c2", base="c1")
        assert again.replayed
        assert unreplayed(again) == unreplayed(first)
        for base in ("", "c0"):
            with pytest.raises(CheckpointConflict):
                await p.commit(EPISODES, "c2", base=base)


async def test_a_base_that_is_not_there_makes_a_full_checkpoint(tmp_path: Path) -> None:
    """It is a saving, not a need."""
    async with Participant(tmp_path) as p:
        fill(p)
        reply = await checkpoint(p, "c1", base="never-written")
        assert reply.bytes > 40 * 3000
        assert stored(p) == p.owner.live


@pytest.mark.behaviour("C186")
async def test_a_base_outside_the_roots_is_refused_before_anything_is_captured(tmp_path: Path) -> None:
    async with Participant(tmp_path) as p:
        fill(p)
        await p.prepare()
        outside = pb.CommitRequest(storage_uri=p.uri("c1"), base_checkpoint_uri="file:///elsewhere/checkpoints/c0")
        outside.context.checkpoint_id, outside.context.controller_id, outside.context.epoch = "c1", "t", 1
        outside.scope.all = True
        with pytest.raises(InvalidArgument, match="base_checkpoint_uri"):
            await typed(p.stub.Commit(outside, timeout=5))
        assert (p.owner.exports.count, await p.phase(), p.files.calls) == (0, "PREPARED", [])


@pytest.mark.behaviour("C173")
async def test_a_root_without_room_is_refused_before_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is there, the checkpoint before is whole, and once there is room the same records are stored."""
    async with Participant(tmp_path) as p:
        fill(p)
        await checkpoint(p, "c1")
        before = stored(p)
        room = 20 << 20  # too little for the records, more than a preflight wants for itself
        monkeypatch.setattr(p.files, "free_bytes", lambda path: room)
        p.owner.live[EPISODES[0]] = {"text": "x" * (8 << 20)}
        frozen = dict(p.owner.live)
        await p.prepare("c2")
        with pytest.raises(StateUnwritable, match="bytes left"):
            await p.commit(EPISODES, "c2")
        assert await p.phase() == "CAPTURED"
        assert not list((tmp_path / "checkpoints" / "c2").rglob("*"))
        p.owner.live[EPISODES[1]] = {"text": "later"}
        room = 1 << 30
        await p.commit(EPISODES, "c2")
        assert (stored(p, "c2"), stored(p)) == (frozen, before)


@pytest.mark.behaviour("C182")
async def test_compression_is_a_setting_of_the_participant(tmp_path: Path) -> None:
    """Off by default. What is read back is the same; the base of a compressed checkpoint may be a plain one."""
    sizes = {}
    for compress in (False, True):
        root = tmp_path / str(compress)
        root.mkdir()
        settings = ControlSettings(watch_interval=0.01, status_interval=0.01, compress=compress)
        async with Participant(root, settings=settings) as p:
            fill(p)
            sizes[compress] = (await checkpoint(p, "c1")).bytes
            assert stored(p) == p.owner.live
    assert sizes[True] < sizes[False] / 3
    assert not FAST.compress


# ---- a write that goes on after the release


async def released(p: Participant, id: str = "c1") -> None:
    """Captured, and open again; the records are kept for their Commit."""
    await p.prepare(id)
    await p.capture(EPISODES, id)
    await p.resume(id, keep_write=True)


async def test_a_write_after_the_release_shows_in_the_status(tmp_path: Path) -> None:
    """In IDLE: its id, how long it has run, records and bytes done and in all; and nothing once it has ended."""
    async with Participant(tmp_path) as p:
        fill(p)
        await released(p)
        assert not (await p.status()).HasField("progress")
        p.files.hold("publish", "manifest.json")
        async with running(p.commit(EPISODES)) as commit:
            await p.files.wait_entered()
            status = await p.status()
            assert (status.phase, list(status.writes_under_way)) == (pb.PHASE_IDLE, ["c1"])
            progress = status.progress
            assert (progress.operation, progress.records_done, progress.records_total) == ("commit", 40, 40)
            assert progress.bytes_done == progress.bytes_total > 40 * 3000
            p.files.release()
            await commit
        status = await p.status()
        assert (list(status.writes_under_way), status.HasField("progress")) == ([], False)


async def test_the_open_checkpoint_is_told_before_an_earlier_write(tmp_path: Path) -> None:
    """Progress is of the operation under way; an earlier checkpoint's write is told where there is none."""
    async with Participant(tmp_path) as p:
        fill(p)
        await released(p)
        p.files.hold("publish", "manifest.json")
        async with running(p.commit(EPISODES)) as commit:
            await p.files.wait_entered()
            p.owner.running.add(EPISODES[0])
            async with running(p.prepare("c2", within=4)):
                await p.until("PREPARING")
                status = await p.status()
                assert (status.progress.operation, list(status.writes_under_way)) == ("prepare", ["c1"])
                p.owner.park(EPISODES[0])
                await p.until("PREPARED")
            assert (await p.status()).progress.operation == "commit"
            p.files.release()
            await commit


@pytest.mark.parametrize("released_when", ["captured", "committing"])
async def test_a_write_that_fails_after_the_release_is_the_typed_reply_of_its_commit(
    tmp_path: Path, released_when: str
) -> None:
    """The checkpoint before is whole, nothing half-written is there, and a retry stores the records of the cut."""
    async with Participant(tmp_path) as p:
        fill(p)
        await checkpoint(p, "c1")
        before = stored(p)
        frozen = dict(p.owner.live)
        p.files.hold("create")
        p.files.fail("create", StateUnwritable("no space left on '/x'"))
        if released_when == "captured":
            await released(p, "c2")
        else:
            await p.prepare("c2")
        async with running(p.commit(EPISODES, "c2")) as commit:
            await p.files.wait_entered()
            if released_when == "committing":
                await p.resume("c2", keep_write=True)
            assert p.is_open()
            p.owner.live[EPISODES[3]] = {"text": "after the release"}
            p.files.release()
            with pytest.raises(StateUnwritable, match="no space"):
                await commit
        assert not list((tmp_path / "checkpoints" / "c2").rglob("*.gck"))
        assert (list((await p.status()).writes_under_way), stored(p)) == ([], before)
        p.files.fail("create", None)
        assert (await p.commit(EPISODES, "c2")).record_count == 40
        assert (stored(p, "c2"), stored(p)) == (frozen, before)
