"""`gym-ckpt gc`: what it prints, removes, and ends with; on whole roots, damaged ones, and beside a coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_ckpt_grpc.cli.gc import policy_of, seconds
from gym_ckpt_grpc.cli.root_commands import app
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.storage import CheckpointRoot, Intent, Retention
from tests.coordinator.fleet_of_nodes import Gate, Nodes, episodes
from tests.storage.builders import commit, complete, faults

ALL = ("ck-1", "ck-2", "ck-3", "ck-4")


@pytest.fixture
def root(tmp_path: Path) -> CheckpointRoot:
    """Four published checkpoints of epoch 1."""
    root = CheckpointRoot(str(tmp_path / "root"))
    root.preflight()
    root.sequence.claim("ctl", "run")
    for turn, name in enumerate(ALL):
        commit(root, name, epoch=1, turn=turn)
    return root


def run(root: CheckpointRoot | str, *options: str) -> tuple[int, str]:
    """Exit code, and what was printed."""
    path = root if isinstance(root, str) else root.path
    result = CliRunner().invoke(app, ["gc", "--root", path, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def run_json(root: CheckpointRoot, *options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["gc", "--root", root.path, "--json", *options])
    return result.exit_code, json.loads(result.stdout)


def there(root: CheckpointRoot) -> list[str]:
    return root.files.names(f"{root.path}/checkpoints")


def orphan(root: CheckpointRoot, name: str, *, epoch: int) -> None:
    root.write_intent(Intent(checkpoint_id=name, run_id="run", controller_id="ctl", epoch=epoch, members=()))


def make_old(root: CheckpointRoot) -> None:
    for directory, _, names in os.walk(root.path):
        for name in names:
            os.utime(f"{directory}/{name}", (1.0, 1.0))


DURATIONS = {"90": 90, "90s": 90, "15m": 900, "6h": 21600, "2d": 172800, "1w": 604800, "1.5h": 5400}


@pytest.mark.parametrize(("text", "value"), DURATIONS.items())
def test_durations(text: str, value: float) -> None:
    assert seconds("--grace", text) == value


@pytest.mark.parametrize("text", ["", "h", "6x", "-1h", "1h30m", "nan", "1e3s", "6h\n"])
def test_what_is_no_duration_is_refused_naming_the_option(root: CheckpointRoot, text: str) -> None:
    with pytest.raises(UsageError, match="--grace"):
        seconds("--grace", text)
    code, printed = run(root, "--keep-within", text)
    assert code == 2
    assert "--keep-within" in printed
    assert there(root) == list(ALL)


def test_one_keep_option_is_enough_and_none_keeps_all() -> None:
    assert policy_of(None, None, None) is None
    assert policy_of(None, 5, None) == Retention(keep_last=2, keep_every=5)
    assert policy_of(1, None, "6h") == Retention(keep_last=1, keep_within=21600.0)


@pytest.mark.behaviour("C229")
def test_it_removes_what_no_option_keeps_and_says_what_and_why(root: CheckpointRoot) -> None:
    root.hold("ck-2", "save-7")
    code, printed = run(root, "--keep-last", "1")
    assert code == 0
    lines = printed.splitlines()
    for name, fate, why in (
        ("ck-4", "kept", "newest"),
        ("ck-3", "removed", "no rule keeps it"),
        ("ck-2", "kept", "held by 'save-7'"),
        ("ck-1", "removed", "no rule keeps it"),
    ):
        (line,) = [line for line in lines if name in line]
        assert fate in line
        assert why in line
    assert any(line.startswith("2 removed, ") for line in lines)
    assert there(root) == ["ck-2", "ck-4"]
    assert faults(root, "ck-2") == faults(root, "ck-4") == []


def test_a_dry_run_changes_nothing_and_names_the_same(root: CheckpointRoot) -> None:
    root.sequence.claim("ctl", "run")
    orphan(root, "orphan", epoch=1)
    make_old(root)
    before = sorted(str(path) for path in Path(root.path).rglob("*"))
    code, planned = run_json(root, "--keep-last", "2", "--dry-run")
    assert code == 0
    assert sorted(str(path) for path in Path(root.path).rglob("*")) == before
    assert planned["dry_run"]
    code, done = run_json(root, "--keep-last", "2")
    assert (code, done["dry_run"]) == (0, False)
    for kind in ("checkpoints", "orphans"):
        expected = [(each["checkpoint_id"], each["fate"].replace("would_go", "removed")) for each in planned[kind]]
        assert [(each["checkpoint_id"], each["fate"]) for each in done[kind]] == expected
    assert planned["bytes_freed"] == done["bytes_freed"] > 0
    assert there(root) == ["ck-3", "ck-4"]


def test_without_a_keep_option_only_what_crashed_runs_left_is_removed(root: CheckpointRoot) -> None:
    root.sequence.claim("ctl", "run")
    orphan(root, "orphan", epoch=1)
    os.rename(root.location("ck-1").directory, f"{root.path}/checkpoints/.deleted-{'0' * 32}-ck-1")
    make_old(root)
    young = Path(root.path, "sequence", f".tmp-{0:032x}")
    old = Path(root.path, "sequence", f".tmp-{1:032x}")
    for path in (young, old):
        path.write_bytes(b"12345")
    os.utime(old, (1.0, 1.0))
    code, printed = run(root)
    assert code == 0
    assert there(root) == ["ck-2", "ck-3", "ck-4"]
    assert (young.exists(), old.exists()) == (True, False)
    assert "sequence/.tmp-00" in printed
    assert "interrupted removals of ck-1" in printed
    assert "every published checkpoint is kept" in printed


@pytest.mark.behaviour("C231")
def test_the_grace_is_an_option(root: CheckpointRoot) -> None:
    root.sequence.claim("ctl", "run")
    orphan(root, "orphan", epoch=1)
    code, printed = run(root)
    assert code == 0
    assert "orphan" in there(root)
    assert "removed once that is 1 h" in printed
    assert run(root, "--grace", "0")[0] == 0
    assert "orphan" not in there(root)


def test_every_decision_is_in_the_object(root: CheckpointRoot) -> None:
    code, found = run_json(root, "--keep-last", "1", "--keep-every", "3")
    assert code == 0
    assert {key: type(value) for key, value in found.items()} == {
        "root": str,
        "dry_run": bool,
        "epoch": int,
        "checkpoints": list,
        "orphans": list,
        "files": list,
        "interrupted": list,
        "finished": list,
        "bytes_freed": int,
        "failures": list,
    }
    assert [(each["checkpoint_id"], each["sequence_number"], each["fate"]) for each in found["checkpoints"]] == [
        ("ck-4", 5, "kept"),
        ("ck-3", 4, "kept"),
        ("ck-2", 3, "removed"),
        ("ck-1", 2, "removed"),
    ]
    assert all(each["reason"] and each["bytes"] > 0 for each in found["checkpoints"])


def test_a_place_that_is_no_root_is_a_usage_error(tmp_path: Path) -> None:
    code, printed = run(str(tmp_path / "nowhere"))
    assert (code, "nowhere" in printed) == (2, True)
    assert run("s3://bucket/root")[0] == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(str(empty), "--keep-last", "1")[0] == 0
    assert os.listdir(empty) == []


def damage_sequence(root: CheckpointRoot) -> None:
    Path(root.sequence.path(3)).write_bytes(b"junk")


def lose_entry(root: CheckpointRoot) -> None:
    Path(root.sequence.path(2)).unlink()


def lose_sequence(root: CheckpointRoot) -> None:
    for path in Path(root.path, "sequence").iterdir():
        path.unlink()


@pytest.mark.behaviour("C229")
@pytest.mark.parametrize("damage", [damage_sequence, lose_entry, lose_sequence])
def test_on_a_root_whose_sequence_is_damaged_nothing_is_removed(root: CheckpointRoot, damage: Any) -> None:
    damage(root)
    make_old(root)
    code, printed = run(root, "--keep-last", "1", "--grace", "0")
    assert there(root) == list(ALL)
    if damage is lose_sequence:  # nothing contradicts itself: but nothing is known to be ours either
        assert "0 removed" in printed
        return
    assert code == 1
    assert "nothing is removed" in printed
    code, found = run_json(root, "--keep-last", "1", "--dry-run")
    assert code == 1
    assert found["failures"]
    assert {each["fate"] for each in found["checkpoints"]} == {"kept"}


@pytest.mark.behaviour("C222")
def test_a_checkpoint_that_is_damaged_stays_and_the_others_are_seen_to(root: CheckpointRoot) -> None:
    Path(root.location("ck-2").aggregate).write_bytes(b"junk")
    code, printed = run(root, "--keep-last", "1")
    assert code == 0
    assert there(root) == ["ck-2", "ck-4"]
    (line,) = [line for line in printed.splitlines() if "ck-2 " in line]
    assert "kept" in line
    assert "cannot be read" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_now_stays(root: CheckpointRoot) -> None:
    """Mode 000 on the manifest of one: still there, and with its mode back it is as ever."""
    path = Path(root.location("ck-2").aggregate)
    mode = stat.S_IMODE(path.stat().st_mode)
    path.chmod(0)
    assert run(root, "--keep-last", "1")[0] == 0
    assert there(root) == ["ck-2", "ck-4"]
    path.chmod(mode)
    assert faults(root, "ck-2") == []


def test_what_cannot_be_removed_is_told_and_ends_with_1(root: CheckpointRoot) -> None:
    blocked = Path(root.path, "checkpoints", f".aside-{'0' * 32}-ck-1")
    blocked.mkdir()  # where `ck-1` is too: a name with two directories is nobody's to mend
    root.hold("ck-1", "me")
    code, printed = run(root, "--keep-last", "1")
    assert code == 1
    assert "ck-1 is not gone yet" in printed
    assert faults(root, "ck-1") == []
    assert {"ck-1", "ck-4"} <= set(there(root))


async def test_beside_a_coordinator_at_work_it_disturbs_nothing(tmp_path: Path) -> None:
    """While a checkpoint is being written, and while one is being restored."""
    nodes = await Nodes(tmp_path / "root").start()
    try:
        await _beside(nodes)
    finally:
        await nodes.stop()


async def _beside(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    root = CheckpointRoot(str(nodes.root))

    async def collect() -> None:
        code, printed = await asyncio.to_thread(run, root, "--keep-last", "1", "--grace", "0")
        assert code == 0, printed

    async with nodes.coordinator() as coordinator:
        for name in ("ck-1", "ck-2", "ck-3"):
            async with coordinator.checkpoint(checkpoint_id=name) as checkpoint:
                await checkpoint.prepare(ready_within=5)
                await checkpoint.commit(in_flight)
                await collect()
                await checkpoint.publish()
    assert there(root) == ["ck-2", "ck-3"]
    for node in nodes:
        await node.restart()
    gate = Gate()
    nodes["agent"].script["Restore"] = [gate.hold()]
    async with nodes.coordinator() as coordinator:

        async def restore() -> None:
            async with coordinator.restoring("ck-2", deadline=30):
                await collect()

        task = asyncio.create_task(restore())
        await gate.entered.wait()
        await collect()
        gate.open.set()
        await task
        epoch = coordinator.epoch
        await collect()
        assert there(root) == ["ck-2", "ck-3"]
        assert root.sequence.epoch() == (epoch, False)  # it claims nothing: the coordinator was not replaced
        async with coordinator.checkpoint(checkpoint_id="ck-4") as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit([episode.next() for episode in in_flight])
            await checkpoint.publish()
        await collect()
    assert there(root) == ["ck-4"]


@pytest.mark.behaviour("C231")
def test_an_unpublished_one_of_an_epoch_that_was_released_is_an_orphan(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path / "root"))
    root.preflight()
    claim = root.sequence.claim("ctl", "run")
    complete(root, "left", epoch=1)
    assert run(root, "--grace", "0")[0] == 0
    assert there(root) == ["left"]
    root.sequence.release(claim)
    assert run(root, "--grace", "0")[0] == 0
    assert there(root) == []
