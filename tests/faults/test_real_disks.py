"""Real file systems that refuse: files in the way, other users, read-only and full ones; and writers that are killed.

Run as a program it is the child of these tests: it drops its rights where it has any, then does what it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gym_ckpt_grpc.coordinator import CommitFailed, Coordinator, Fleet
from gym_ckpt_grpc.protocol.errors import ControlError, StateUnwritable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, delete_checkpoint, read_part
from tests.faults import participant_process
from tests.faults.harness import Participants, Process
from tests.storage.builders import AGENT, commit, faults, make_records, write
from tests.storage.crash_histories import temporaries

MODULE = "tests.faults.test_real_disks"
REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534
FEW_KILLS = 6
SOAK_KILLS = 50
KEPT = 3
"""Published checkpoints that the writer of the kill tests leaves."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can get to, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="gymckpt-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


# ---- the child


def as_nobody() -> None:
    """Lose the rights of root, for whom mode bits are no obstacle. Whoever is not root stays who they are."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def save(root: Path, _: str) -> None:
    as_nobody()
    opened = CheckpointRoot(str(root))
    opened.preflight()
    commit(opened, "second", epoch=1, turn=1)


def write_beyond_limit(root: Path, limit: str) -> None:
    """A part with more bytes than this process may put into a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    opened = CheckpointRoot(str(root))
    write(opened.files, opened, "second", records=make_records(size=10_000), chunk_size=4096)


def serve_as_nobody(root: Path, address: str) -> None:
    as_nobody()
    asyncio.run(participant_process.serve(address, root, "agent"))


def save_for_ever(root: Path, number: str) -> None:
    """Publish and prune until killed, each checkpoint with the state of its number; says what it has done."""
    opened = CheckpointRoot(str(root))
    opened.preflight()
    epoch = opened.sequence.claim("ctl", "run").epoch
    for turn in itertools.count(int(number)):
        kept = [entry.publication.checkpoint_id for entry in opened.published()]
        pin = opened.pin(kept[0], epoch=epoch) if kept else None
        commit(opened, f"ck-{turn}", epoch=epoch, turn=turn, base=kept[0] if turn % 3 and kept else "")
        print(turn, flush=True)
        if pin is not None:
            opened.unpin(pin)
        for name in kept[KEPT - 1 :]:
            with contextlib.suppress(ControlError):  # kept for what refers to it
                delete_checkpoint(opened, name, epoch=epoch)


ACTIONS: dict[str, Callable[[Path, str], None]] = {
    action.__name__: action for action in (save, write_beyond_limit, serve_as_nobody, save_for_ever)
}


def main(action: str, root: str, argument: str = "") -> None:
    try:
        ACTIONS[action](Path(root), argument)
    except ControlError as error:
        print(json.dumps({"error": type(error).__name__, "message": error.message}))


def child(action: Callable[[Path, str], None], root: Path, argument: str = "") -> dict[str, str]:
    """Let a child do it; gives the error it met, or nothing."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE, action.__name__, str(root), argument],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    error: dict[str, str] = json.loads(done.stdout or "{}")
    return error


# ---- files in the way, other users, read-only directories


def whole(root: CheckpointRoot, *names: str) -> None:
    """These are published, and each is as it was written."""
    listed = list(root.published())
    assert [(entry.publication.checkpoint_id, entry.problem) for entry in listed] == [(name, "") for name in names]
    assert [faults(root, name) for name in names] == [[]] * len(names)


def rooted(path: Path) -> CheckpointRoot:
    root = CheckpointRoot(str(path))
    root.preflight()
    root.sequence.claim("ctl", "run")
    commit(root, "first", epoch=1)
    return root


@pytest.mark.behaviour("C172")
def test_a_root_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    root = CheckpointRoot(str(tmp_path / "file" / "root"))
    for step in (root.preflight, lambda: root.sequence.claim("ctl", "run"), lambda: write(root.files, root, "ck")):
        with pytest.raises(StateUnwritable, match=r"ENOTDIR|EEXIST") as caught:
            step()
        assert str(tmp_path / "file") in caught.value.message
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.behaviour("C172")
def test_a_file_in_the_place_of_each_directory(tmp_path: Path) -> None:
    """Of a checkpoint, its parts, a kind, a service, an instance."""
    for number, names in enumerate(itertools.accumulate(("participants", "agent", "office", "0"), "{}/{}".format)):
        root = CheckpointRoot(str(tmp_path / str(number)))
        root.preflight()
        blocked = Path(root.location("ck").directory, names)
        blocked.parent.mkdir(parents=True)
        blocked.write_text("in the way")
        with pytest.raises(StateUnwritable) as caught:
            write(root.files, root, "ck")
        assert str(blocked) in caught.value.message
        blocked.unlink()
        write(root.files, root, "ck")


@pytest.mark.behaviour("C173")
@pytest.mark.parametrize("blocked", ["", "sequence", "checkpoints", "checkpoints/second/participants"])
def test_a_writer_without_the_right_to_write(place: Path, blocked: str) -> None:
    root = rooted(place / "root")
    Path(root.path, blocked).mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        subprocess.run(["chown", "-R", str(NOBODY), root.path], check=True)
        os.chown(Path(root.path, blocked), 0, 0)
    os.chmod(Path(root.path, blocked), 0o555)
    error = child(save, Path(root.path))
    assert error["error"] == "StateUnwritable"
    assert str(Path(root.path, blocked)) in error["message"]
    assert "EACCES" in error["message"]
    assert [path for path in temporaries(root.files, root.path) if "second" not in path or blocked != "sequence"] == []
    whole(root, "first")
    os.chmod(Path(root.path, blocked), 0o777)
    assert child(save, Path(root.path)) == {}
    whole(root, "second", "first")
    assert temporaries(root.files, root.path) == []


@pytest.mark.behaviour("C173")
def test_a_file_that_grows_beyond_its_limit(tmp_path: Path) -> None:
    """EFBIG in the middle of a write, of which a part was taken: a full disk that needs no mount."""
    root = rooted(tmp_path / "root")
    for limit in (0, 100, 4096, 20_000):
        error = child(write_beyond_limit, tmp_path / "root", str(limit))
        assert (error["error"], "EFBIG" in error["message"]) == ("StateUnwritable", True)
        assert root.path in error["message"]
        assert temporaries(root.files, root.path) == []
        whole(root, "first")
    assert child(write_beyond_limit, tmp_path / "root", "10000000") == {}


async def test_a_participant_of_another_user_is_named_before_anything_is_written(place: Path) -> None:
    """A root that the coordinator may write and a participant may not: squashed rights, a mount of its own."""
    (place / "root").mkdir(mode=0o755)
    served = place / "root"
    if os.getuid() != 0:  # the same user: its root is another, where nobody may write
        served = place / "elsewhere"
        (served / "checkpoints").mkdir(parents=True)
        pytest.skip("the coordinator and its participants are one user here: needs root to have two")
    running = Participants(place)
    process = Process(MODULE, "serve_as_nobody", str(served), "127.0.0.1:0")
    try:
        address = process.line()
        model = running.start("policy_model")
        process.tell("live r0")
        model.tell("live r0")
        servers = [
            {"kind": "agent", "service": "scripted", "address": address},
            {"kind": "policy_model", "service": "scripted", "address": running.addresses["policy_model"]},
        ]
        fleet = Fleet.from_mapping({"servers": servers}, source="test")
        async with Coordinator(fleet, root=str(served), controller_id="trainer") as coordinator:
            async with coordinator.checkpoint(checkpoint_id="ck", deadline=8.0) as checkpoint:
                await checkpoint.prepare(ready_within=10)
                with pytest.raises(CommitFailed) as caught:
                    await checkpoint.commit([EpisodeId("r0")])
                [outcome] = [outcome for outcome in caught.value.outcomes if outcome.error is not None]
                assert isinstance(outcome.error, StateUnwritable)
                assert "agent/scripted" in str(caught.value)
                assert str(served) in str(caught.value)
            assert list(coordinator.root.published()) == []
        assert temporaries(CheckpointRoot(str(served)).files, str(served)) == []
    finally:
        process.kill()
        for other in running.processes.values():
            other.kill()


# ---- mounts of our own


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small file system, if this process may; else the test is left out."""
    mounted: list[Path] = []

    def at(path: Path, *options: str) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        found = shutil.which("mount")
        command = [found or "mount", "-t", "tmpfs", "-o", ",".join(("size=1m", *options)), "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True) if found and os.getuid() == 0 else None
        if done is None or done.returncode != 0:
            pytest.skip(f"cannot mount here: {done.stderr.strip() if done else 'not root, or no mount'}")
        mounted.append(path)
        return path

    yield at
    for path in reversed(mounted):
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.behaviour("C173")
@pytest.mark.parametrize("room", range(0, 120_000, 8_192))
def test_a_disk_that_is_full(mount: Callable[..., Path], tmp_path: Path, room: int) -> None:
    """Wherever in a commit the last byte is used up."""
    root = CheckpointRoot(str(mount(tmp_path / "root")))
    root.sequence.claim("ctl", "run")
    commit(root, "first", epoch=1)
    filler = Path(root.path, "filler")
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(filler, max(0, filler.stat().st_size - room))
    error = ""
    try:
        commit(root, "second", epoch=1, turn=1)
    except StateUnwritable as failure:
        error = failure.message
        assert "ENOSPC" in error
        assert root.path in error
    assert temporaries(root.files, root.path) == []
    whole(root, *(("first",) if error else ("second", "first")))
    filler.unlink()
    commit(root, "second", epoch=1, turn=1)
    whole(root, "second", "first")


@pytest.mark.behaviour("C173")
def test_a_file_system_that_became_read_only(mount: Callable[..., Path], tmp_path: Path) -> None:
    root = CheckpointRoot(str(mount(tmp_path / "root")))
    root.sequence.claim("ctl", "run")
    commit(root, "first", epoch=1)
    subprocess.run(["mount", "-o", "remount,ro", root.path], check=True)
    with pytest.raises(StateUnwritable, match="EROFS") as caught:
        commit(root, "second", epoch=1, turn=1)
    assert root.path in caught.value.message
    whole(root, "first")
    subprocess.run(["mount", "-o", "remount,rw", root.path], check=True)
    commit(root, "second", epoch=1, turn=1)
    whole(root, "second", "first")


def test_another_file_system_inside_the_root(mount: Callable[..., Path], tmp_path: Path) -> None:
    """Files under construction lie beside their target, so nothing is ever moved between two of them."""
    root = rooted(tmp_path / "root")
    mount(Path(root.location("second").directory, "participants"))
    commit(root, "second", epoch=1, turn=1)
    whole(root, "second", "first")


# ---- killed writers


def check_after_kill(root: CheckpointRoot, said: int) -> None:
    """All that was said to be published is, whole and with its own state; what else is there is no part of it."""
    listed = list(root.published())
    assert [entry.problem for entry in listed if entry.problem] == []
    turns = [int(entry.publication.checkpoint_id.removeprefix("ck-")) for entry in listed]
    assert turns == sorted(turns, reverse=True)
    assert root.find().location.checkpoint_id == f"ck-{turns[0]}"
    assert turns[0] in (said, said + 1)
    for turn in turns:
        assert faults(root, f"ck-{turn}") == []
        part = read_part(root.files, root.location(f"ck-{turn}"), AGENT.place, checkpoint_id=f"ck-{turn}")
        assert list(part.records) == make_records(turn=turn)


def kill_and_look(path: Path, rng: random.Random, rounds: int) -> None:
    root, turn = CheckpointRoot(str(path)), 0
    for _ in range(rounds):
        process = Process(MODULE, "save_for_ever", str(path), str(turn))
        try:
            for _ in range(rng.randint(1, 6)):
                turn = int(process.line())
            time.sleep(rng.uniform(0, 0.1))  # somewhere in the middle of what follows
        finally:
            process.popen.send_signal(signal.SIGKILL)
            said = [int(line) for line in process.popen.stdout or () if line.endswith("\n")]
            process.kill()
        check_after_kill(root, max([turn, *said]))
        turn = max([turn, *said]) + 1


@pytest.mark.behaviour("C174")
def test_a_killed_writer_leaves_the_newest_published_whole(tmp_path: Path, rng: random.Random) -> None:
    kill_and_look(tmp_path / "root", rng, FEW_KILLS)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.behaviour("C174")
def test_a_writer_that_is_killed_many_times(tmp_path: Path, rng: random.Random) -> None:
    kill_and_look(tmp_path / "root", rng, SOAK_KILLS)


if __name__ == "__main__":
    main(*sys.argv[1:])
