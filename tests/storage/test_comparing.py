"""Comparing two checkpoints by manifests and indexes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gym_ckpt_grpc.participants.records import ResourcesRecord
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, EpisodeLists, Record
from gym_ckpt_grpc.storage.comparing import Difference, PartDifference, compare
from gym_ckpt_grpc.storage.viewing import view_checkpoint
from tests.storage.damaged import (
    COUNTER,
    LATE,
    MAIL,
    ROLLOUTS,
    CountingFiles,
    copy_of_part,
    flip,
    make_checkpoint,
    make_root,
    only,
    records_of,
    unsynced,
)

__all__ = ["unsynced"]
pytestmark = pytest.mark.usefixtures("unsynced")


def difference(root: CheckpointRoot, first: str = "one", second: str = "two") -> Difference:
    return compare(view_checkpoint(root, first), view_checkpoint(root, second))


def part(found: Difference, who: ParticipantIdentity) -> PartDifference:
    [chosen] = [each for each in found.parts if each.name == str(who)]
    return chosen


def test_a_checkpoint_does_not_differ_from_itself(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    found = difference(root, "two", "two")
    assert found.is_empty
    assert {each.changed_bytes for each in found.parts} == {0}
    assert set(found.both) == {episode.rollout_id for episode in ROLLOUTS}


def test_what_changed_is_told_by_digest_wherever_the_bytes_are(tmp_path: Path) -> None:
    """The second is incremental: what stands still is in the first's files, and is no change."""
    root = make_root(tmp_path / "root")
    found = difference(root)
    moved = tuple(sorted(episode.rollout_id for at, episode in enumerate(ROLLOUTS) if at % 2))
    assert part(found, COUNTER).changed_rollouts == moved
    assert (part(found, COUNTER).changed, part(found, COUNTER).unchanged) == (3, 0)
    assert (part(found, MAIL).changed, part(found, MAIL).unchanged) == (0, 3)
    states = [record.payloads["state"] for record in records_of(COUNTER, turn=1)]
    assert part(found, COUNTER).changed_bytes == sum(len(state.data) for state in states)
    assert part(found, MAIL).state_bytes[1] > part(found, MAIL).written_bytes[1], "it wrote none of its state"
    assert not found.is_empty


def test_no_payload_is_read(tmp_path: Path) -> None:
    """Less is read than the payloads take: of every file the header, the footer and the index."""
    records = {
        who: [ResourcesRecord(episode, "s", {"text": "x" * 200_000}).to_record() for episode in ROLLOUTS]
        for who in (COUNTER, MAIL)
    }

    def chosen(who: ParticipantIdentity) -> list[Record]:
        return records.get(who, [])

    root = make_root(tmp_path / "root")
    make_checkpoint(root, "three", records=chosen)
    make_checkpoint(root, "four", records=chosen, base="three")
    counting = CountingFiles()
    assert compare(*(view_checkpoint(CheckpointRoot(root.path, counting), each) for each in ("three", "four"))).both
    assert 0 < counting.read < 100_000


def test_rollouts_and_restarts(tmp_path: Path) -> None:
    """Which continue in one only, which start over now, and that an attempt rose."""
    root = make_root(tmp_path / "root")
    first, *others = ROLLOUTS
    again = EpisodeId(others[0].rollout_id, others[0].attempt + 1)
    fresh = EpisodeId("fresh")
    lists = EpisodeLists((again, *others[1:], fresh), {first: "no_record", LATE: "straggler"})
    make_checkpoint(root, "three", turn=1, lists=lists)
    found = difference(root, "two", "three")
    assert found.only_first == (first,)
    assert found.only_second == (fresh,)
    assert found.both[again.rollout_id] == (again.attempt - 1, again.attempt)
    assert found.restarted == {first: "no_record"}
    assert found.restarts_second == {first: "no_record", LATE: "straggler"}


def test_another_rollout_that_starts_over_is_a_difference(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    make_checkpoint(root, "three", turn=1, lists=EpisodeLists(ROLLOUTS, {LATE: "straggler", EpisodeId("more"): "new"}))
    assert not difference(root, "two", "three").is_empty
    make_checkpoint(root, "four", turn=1, lists=EpisodeLists(ROLLOUTS, {LATE: "said in other words"}))
    assert difference(root, "two", "four").is_empty


def test_what_cannot_be_read_is_told_and_the_rest_compared(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    file = only(tmp_path / "root", f"{copy_of_part(COUNTER, 'two')}/records-*.gck")
    flip(file, file.stat().st_size - 70)
    os.remove(only(tmp_path / "root", "checkpoints/two/episodes-*.json"))
    found = difference(root)
    assert not part(found, COUNTER).records_known
    assert part(found, MAIL).records_known
    assert part(found, MAIL).unchanged == 3
    assert not found.rollouts_known
    assert found.both == {}
    assert {file.name} <= {name for trouble in found.troubles for name in str(trouble).replace("'", "/").split("/")}
    assert not found.is_empty
