"""What an owner is told of the fate of its records, and what it adds to a commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import CommitExtra, StagingKeys
from gym_ckpt_grpc.protocol.errors import InternalError, InvalidArgument, StateUnwritable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointLocation, LocalFiles, Record, read_part
from tests.control.scripted import FAST, Clock, Participant, ScriptedOwner, eventually, running
from tests.control.test_resume import SHORT

A = EpisodeId("a")


class Told(ScriptedOwner):
    """Remembers each fate, and whether admission was open then. extra: what it adds to a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.fates: list[tuple[str, bool]] = []
        self.open_then: list[bool] = []
        self.fate_error: Exception | None = None
        self.extra = CommitExtra()
        self.asked_in: list[threading.Thread] = []

    def write_ended(self, checkpoint_id: str, durable: bool) -> None:
        self.fates.append((checkpoint_id, durable))
        self.open_then.append(self.open)
        if self.fate_error is not None:
            raise self.fate_error

    def commit_extra(self, records: Sequence[Record]) -> CommitExtra:
        self.asked_in.append(threading.current_thread())
        return self.extra


def served(tmp_path: Path, **options: Any) -> tuple[Participant, Told]:
    owner = Told()
    owner.live[A] = {"name": "a"}
    return Participant(tmp_path, owner=owner, **options), owner


@pytest.mark.behaviour("P155")
async def test_a_commit_tells_durable_once(tmp_path: Path) -> None:
    """Before the reply; a replay and the Resume afterwards tell nothing more."""
    p, owner = served(tmp_path)
    async with p:
        await p.prepare()
        await p.commit()
        assert owner.fates == [("c1", True)]
        await p.commit()
        await p.resume()
        assert (owner.fates, owner.open_then) == ([("c1", True)], [False])


@pytest.mark.parametrize("reached", ["prepared", "captured", "failed"])
async def test_a_resume_without_a_commit_tells_that_nothing_is_durable(tmp_path: Path, reached: str) -> None:
    """Before admission opens; a failed write alone tells nothing, as it may be tried again."""
    p, owner = served(tmp_path)
    async with p:
        await p.prepare()
        if reached != "prepared":
            await p.capture()
        if reached == "failed":
            p.files.fail("create", StateUnwritable("full"))
            with pytest.raises(StateUnwritable):
                await p.commit()
        assert owner.fates == []
        await p.resume()
        await p.resume()
        assert (owner.fates, owner.open_then) == ([("c1", False)], [False])


async def test_a_close_that_fails_tells_it_too(tmp_path: Path) -> None:
    """The owner may have begun something for this checkpoint; a Restore, which writes nothing, tells nothing."""
    p, owner = served(tmp_path)
    async with p:
        owner.closes.error = RuntimeError("no")
        with pytest.raises(InternalError):
            await p.prepare()
        await eventually(lambda: owner.open)
        assert (owner.fates, owner.open_then) == ([("c1", False)], [False])
        owner.closes.error = None
        await p.prepare("c2")
        await p.commit(id="c2")
        await p.resume("c2")
        owner.live.clear()
        await p.restore([A], source="c2")
        await p.resume("r1")
        assert owner.fates == [("c1", False), ("c2", True)]


async def test_a_lease_that_ends_tells_it_too(tmp_path: Path) -> None:
    clock = Clock()
    p, owner = served(tmp_path, clock=clock)
    async with p:
        await p.prepare(ttl=10)
        clock.now += 11
        await eventually(lambda: owner.open)
        assert owner.fates == [("c1", False)]


async def test_a_retried_write_tells_durable(tmp_path: Path) -> None:
    p, owner = served(tmp_path)
    async with p:
        await p.prepare()
        p.files.fail("create", StateUnwritable("full"))
        with pytest.raises(StateUnwritable):
            await p.commit()
        p.files.fail("create", None)
        await p.commit()
        await p.resume()
        assert owner.fates == [("c1", True)]


@pytest.mark.behaviour("P155")
async def test_kept_records_tell_only_once_they_are_written_or_dropped(tmp_path: Path) -> None:
    """Neither the Resume that keeps them nor a write that failed: the same Commit may still come."""
    clock = Clock()
    p, owner = served(tmp_path, clock=clock)
    async with p:
        for id in ("lost", "late"):
            await p.prepare(id, ttl=10)
            await p.capture(id=id)
            await p.resume(id, keep_write=True)
        p.files.fail("create", StateUnwritable("full"))
        for id in ("lost", "late"):
            with pytest.raises(StateUnwritable):
                await p.commit(id=id)
        assert owner.fates == []
        p.files.fail("create", None)
        await p.commit(id="late")
        assert owner.fates == [("late", True)]
        clock.now += 11
        await eventually(lambda: len(owner.fates) == 2)
        await asyncio.sleep(5 * FAST.watch_interval)
        assert owner.fates == [("late", True), ("lost", False)]


async def test_a_write_whose_naming_hangs_counts_as_durable(tmp_path: Path) -> None:
    """What it names may appear yet."""
    p, owner = served(tmp_path, settings=SHORT)
    async with p:
        await p.prepare()
        p.files.hold("publish", "manifest.json")
        async with running(p.commit()):
            await p.files.wait_entered()
            await p.resume()
        assert owner.fates == [("c1", True)]


async def test_a_write_resumed_over_after_its_naming_counts_as_durable(tmp_path: Path) -> None:
    """Its Commit is refused, but its manifest is there."""
    p, owner = served(tmp_path)
    async with p:
        await p.prepare()
        p.files.hold("publish", "manifest.json")
        async with running(p.commit()):
            await p.files.wait_entered()
            async with running(p.resume()) as resume:
                await p.until("RESUMING")
                p.files.release()
                await resume
        assert (owner.fates, "manifest.json" in p.written()) == ([("c1", True)], True)


async def test_a_named_write_whose_last_sync_hangs_counts_as_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest has its name already, and may survive."""
    p, owner = served(tmp_path)
    sync_dir = p.files.sync_dir

    def held(path: str) -> None:
        if "manifest.json" in p.written():
            p.files._step("sync", path)
        sync_dir(path)

    monkeypatch.setattr(p.files, "sync_dir", held)
    async with p:
        await p.prepare()
        p.files.hold("sync")
        async with running(p.commit()):
            await p.files.wait_entered()
            await p.resume()
        assert owner.fates == [("c1", True)]


async def test_a_restore_tells_no_fate_and_a_failing_owner_hinders_nothing(tmp_path: Path) -> None:
    p, owner = served(tmp_path)
    async with p:
        owner.fate_error = RuntimeError("no")
        await p.prepare()
        await p.commit()
        await p.resume()
        owner.live.clear()
        await p.restore([A])
        await p.resume("r1")
        assert owner.fates == [("c1", True)]
        assert p.is_open()


@pytest.mark.behaviour("P111")
async def test_an_owner_adds_facts_files_and_keys_to_a_commit(tmp_path: Path) -> None:
    """Facts and files stand in the part, keys in the reply and its replay; it is asked off the loop."""
    p, owner = served(tmp_path)
    keys = [f"k{number:04d}" for number in range(1200)]
    owner.extra = CommitExtra({"shape": 3}, {"index": {"a": keys}}, StagingKeys(1200, "d" * 64, tuple(keys)))
    async with p:
        await p.prepare()
        reply = await p.commit()
        assert (reply.staging_keys.count, reply.staging_keys.digest) == (1200, "d" * 64)
        assert list(reply.staging_keys.first) == keys[:1000]
        assert (await p.commit()).staging_keys == reply.staging_keys
        assert threading.main_thread() not in owner.asked_in
    location = CheckpointLocation(str(p.root.resolve()), "c1")
    part = read_part(LocalFiles(), location, p.identity.place, checkpoint_id="c1")
    assert (part.manifest.extra, part.documents) == ({"shape": 3}, {"index": {"a": keys}})


async def test_an_owner_without_keys_replies_none_and_one_that_fails_fails_the_commit(tmp_path: Path) -> None:
    p, owner = served(tmp_path)
    async with p:
        await p.prepare()
        assert not (await p.commit()).HasField("staging_keys")
        await p.resume()
        await p.prepare("c2")
        owner.extra = CommitExtra({"bad": object()})
        with pytest.raises(InvalidArgument):
            await p.commit(id="c2")
        await p.resume("c2")
        assert owner.fates == [("c1", True), ("c2", False)]
