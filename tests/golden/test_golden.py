"""The promise of docs/format.md: what a release wrote, every later one restores."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import orjson
import pytest

from gym_ckpt_grpc.minigym.tasks import Task
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.minigym.trainer import Result
from gym_ckpt_grpc.participants import records
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles, read_part, verify_checkpoint
from gym_ckpt_grpc.storage.record_format import FORMAT_VERSION
from tests.e2e.rig import rig
from tests.golden.make import digests, read_expected
from tests.golden.scenes import (
    CHECKPOINT,
    DIGESTS,
    FORMATS,
    HELD_AFTER,
    HELD_TURN,
    LATER,
    LONG,
    PLACE,
    RAW,
    VALUES,
    scenes,
)


def test_no_fixture_was_changed() -> None:
    assert digests() == orjson.loads(DIGESTS.read_bytes())


def test_todays_format_has_a_fixture() -> None:
    """A new version of the file format, or of the records, needs one before it is released."""
    assert max(FORMAT_VERSION, records.VERSION) == max(int(each.name.removeprefix("format-")) for each in FORMATS)


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("scene", ["native", "legacy"])
def test_each_verifies(format: Path, scene: str) -> None:
    root = CheckpointRoot((format / scene / "root").as_uri(), files=LocalFiles())
    listed = list(root.published())
    assert len(listed) == (1 if format.name == "format-1" else 2)
    for each in listed:
        assert [str(found) for found in verify_checkpoint(root, each.publication.checkpoint_id) if found.is_fault] == []
    assert listed[0].manifest is not None
    assert (max(member.chain for member in listed[0].manifest.members) > 0) == (len(listed) > 1)


@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("scene", ["native", "legacy"])
async def test_rollouts_of_every_format_continue_in_todays_servers(format: Path, scene: str, tmp_path: Path) -> None:
    """At other addresses, to the very results that they gave uninterrupted; nothing that was made is made again."""
    topology: Topology = scenes()[scene].topology
    expected = read_expected(format / scene)
    async with rig(tmp_path, topology) as gym:
        for part, place in (("root", gym.plan.root), ("staged", gym.plan.staged)):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(format / scene / part, place)
        gym.tasks = {rollout: Task(**each["task"]) for rollout, each in expected.items()}
        restored = await gym.restore()
        assert {episode.rollout_id for episode in restored.continued} == set(expected)
        results = await gym.finish()
        for rollout in expected:
            first, *_ = gym.calls(rollout)
            assert (first.attempt, first.turn, first.reused) == (1, HELD_TURN, HELD_AFTER)
    assert results == {rollout: Result.from_reply(each["result"]) for rollout, each in expected.items()}


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_hard_values_come_back_as_they_were(format: Path) -> None:
    root = CheckpointRoot((format / "values" / "root").as_uri(), files=LocalFiles())
    newest = CHECKPOINT if format.name == "format-1" else LATER
    part = read_part(root.files, root.location(newest), PLACE, checkpoint_id=newest)
    assert [record.episode for record in part.records] == [EpisodeId("v", n) for n in range(part.total_count)]
    found = {str(record.fields["name"]): record.decode(str(record.fields["name"])) for record in part.records}
    assert found.pop("raw") == RAW
    assert found.pop("long", LONG) == LONG
    assert [same(found[name], value) for name, value in VALUES.items()] == [True] * len(VALUES)


def same(left: Any, right: Any) -> bool:
    """Equal in type, value, bits and key order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return struct.pack("<d", left) == struct.pack("<d", right) if isinstance(left, float) else bool(left == right)
