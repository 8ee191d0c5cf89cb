"""Between release and durability, something dies or the disk is full: the previous checkpoint stands. Real processes.

Rollouts are held in a generation, so that each is in flight in every checkpoint; they end as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from gym_ckpt_grpc.coordinator import Checkpoint, CheckpointState, CommitFailed
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.e2e.plays import counting, play
from tests.e2e.rig import COUNTER, HELD_AFTER, LIMIT, Rig, rig, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]

REPO = Path(__file__).resolve().parents[2]
PARTICIPANTS = {"environment", "agent", "policy_model", "counter"}


def newest(gym: Rig) -> str:
    publication = gym.coordinator().root.sequence.latest()
    return publication.checkpoint_id if publication else ""


def written(gym: Rig, checkpoint_id: str) -> set[str]:
    """Services whose part of a checkpoint is durable."""
    return {path.parts[-3] for path in (gym.plan.root / "checkpoints" / checkpoint_id).rglob("manifest.json")}


async def open_everywhere(gym: Rig) -> None:
    statuses = await gym.statuses()
    assert {status.active_checkpoint_id for status in statuses.values()} == {""}, statuses


@asynccontextmanager
async def two_in_flight(tmp_path: Path) -> AsyncIterator[tuple[Rig, Checkpoint]]:
    """A deployment with two rollouts held in their second call, and a checkpoint of them."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        for name in ("a", "b"):
            await gym.held_at_call(counting(name), turn=1)
        yield gym, await gym.checkpoint()


@asynccontextmanager
async def released(gym: Rig) -> AsyncIterator[Checkpoint]:
    """A checkpoint whose records are frozen while every server works on."""
    async with gym.prepared() as checkpoint:
        await checkpoint.capture(checkpoint.report.continued(gym.in_flight))
        await checkpoint.reopen()
        await open_everywhere(gym)
        yield checkpoint


async def went_on_in_vain(gym: Rig, checkpoint: Checkpoint, first: Checkpoint) -> None:
    """It says so, and the one before it is the newest, whole on disk."""
    result = checkpoint.result
    assert result is not None
    assert result.state is CheckpointState.ABORTED
    assert first.id in result.failure
    assert newest(gym) == first.id
    assert gym.faults(first.id) == []


async def finishes_from(gym: Rig, checkpoint: Checkpoint) -> None:
    """A new life goes on from this checkpoint, checkpoints again on the way, and ends as if never killed."""
    restored = await gym.installed()
    assert restored.source_checkpoint_id == checkpoint.id
    assert sorted(restored.continued) == [EpisodeId("a", 1), EpisodeId("b", 1)]
    await gym.hold_tokens(HELD_AFTER + 1)
    gym.send_continued(restored)
    for name in ("a", "b"):
        await gym.held_tokens(name)
    after = await gym.checkpoint()
    assert newest(gym) == after.id
    await gym.release_tokens()
    assert await gym.finish() == {name: play(gym.tasks[name]).result for name in ("a", "b")}


@pytest.mark.behaviour("C217")
@pytest.mark.parametrize("when", ["before its commit", "in its write"])
async def test_a_participant_that_dies_before_it_is_durable(tmp_path: Path, when: str) -> None:
    async with two_in_flight(tmp_path) as (gym, first):
        async with released(gym) as checkpoint:
            pid = gym.servers.pids["counter"]
            os.killpg(pid, signal.SIGSTOP)
            writing = asyncio.create_task(checkpoint.commit(checkpoint.scope)) if when == "in its write" else None
            if writing:
                await until(lambda: written(gym, checkpoint.id) == PARTICIPANTS - {"counter"})
            await gym.servers.kill("counter")
            await gym.servers.start([spec for spec in gym.plan.specs(life=gym.life) if spec.name == "counter"])
            with pytest.raises(CommitFailed, match="expected process") as raised:
                await (writing or checkpoint.commit(checkpoint.scope))
            assert first.id in str(raised.value)
        await went_on_in_vain(gym, checkpoint, first)
        await open_everywhere(gym)
        await gym.crash()
        await finishes_from(gym, first)


@pytest.mark.behaviour("C235")
@pytest.mark.parametrize("when", ["before its commit", "in its write"])
async def test_a_trainer_that_dies_before_it_is_durable(tmp_path: Path, when: str) -> None:
    """SIGKILL: nothing is published, servers serve on without waiting for any lease, and the next trainer begins."""
    async with two_in_flight(tmp_path) as (gym, first):
        keys = [episode.capture_key for episode in gym.in_flight]
        trainer = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.e2e.killed_trainer", str(gym.plan.file), *keys),
            cwd=REPO,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert trainer.stdout is not None
        assert trainer.stdin is not None
        word, checkpoint_id = (await asyncio.wait_for(trainer.stdout.readline(), LIMIT)).decode().split()
        assert word == "released"
        counter = gym.servers.pids["counter"]
        if when == "in its write":
            os.killpg(counter, signal.SIGSTOP)
            trainer.stdin.write(b"go\n")
            await until(lambda: written(gym, checkpoint_id) == PARTICIPANTS - {"counter"})
        trainer.kill()
        await trainer.wait()
        os.killpg(counter, signal.SIGCONT)
        await open_everywhere(gym)
        assert newest(gym) == first.id
        after = await gym.checkpoint()  # by the next trainer, at once
        assert newest(gym) == after.id
        assert gym.faults(after.id) == []
        await gym.release_tokens()
        assert await gym.finish() == {name: play(gym.tasks[name]).result for name in ("a", "b")}
        assert newest(gym) == after.id
        await gym.crash()
        await finishes_from(gym, after)


@contextmanager
def full(gym: Rig) -> Iterator[None]:
    """No file of the tools' server can grow: a full disk that needs no mount."""
    pid = gym.servers.pids["counter"]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of its own for a root; leaves the test out where this process may not mount."""
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if mount and not os.getuid() else None
    if done is None or done.returncode:
        pytest.skip("not root, or no right to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


async def fails_for_want_of_room(gym: Rig, checkpoint: Checkpoint, first: Checkpoint, text: str) -> None:
    checkpoint.allow(4.0)
    with pytest.raises(CommitFailed, match=text) as raised:
        await checkpoint.commit(checkpoint.scope)
    assert first.id in str(raised.value)
    assert "STATE_UNWRITABLE" in str(raised.value)


@pytest.mark.behaviour("C173")
async def test_a_disk_that_is_full_for_one_server(tmp_path: Path) -> None:
    """Repeated while its records are kept, the same checkpoint succeeds; given up, the previous one stands."""
    async with two_in_flight(tmp_path) as (gym, first):
        async with released(gym) as checkpoint:
            with full(gym):
                await fails_for_want_of_room(gym, checkpoint, first, "counter")
            assert newest(gym) == first.id
            checkpoint.allow(LIMIT)
            await checkpoint.commit(checkpoint.scope)
            await checkpoint.publish()
        assert newest(gym) == checkpoint.id
        assert gym.faults(checkpoint.id) == []
        async with released(gym) as given_up:
            with full(gym):
                await fails_for_want_of_room(gym, given_up, checkpoint, "counter")
        await went_on_in_vain(gym, given_up, checkpoint)
        await open_everywhere(gym)
        await gym.crash()
        await finishes_from(gym, checkpoint)


@pytest.mark.behaviour("C173")
async def test_a_small_file_system_that_is_full(tmp_path: Path) -> None:
    (tmp_path / "gym" / "root").mkdir(parents=True)
    with small_disk(tmp_path / "gym" / "root") as root:
        async with two_in_flight(tmp_path) as (gym, first):
            filler = root / "filler"
            async with released(gym) as checkpoint:
                with filler.open("wb") as file:
                    while (room := os.statvfs(root).f_bavail * os.statvfs(root).f_frsize) > 8192:
                        file.write(bytes(room // 2))
                        file.flush()
                await fails_for_want_of_room(gym, checkpoint, first, str(root))
            await went_on_in_vain(gym, checkpoint, first)
            await open_everywhere(gym)
            filler.unlink()
            after = await gym.checkpoint()
            assert newest(gym) == after.id
            await gym.crash()
            await finishes_from(gym, after)
