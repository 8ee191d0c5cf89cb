"""The event log beside a manifest: read as far as it can be, and in nobody's way."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from gym_ckpt_grpc.protocol.errors import CheckpointConflict, StateCorrupt
from gym_ckpt_grpc.storage import (
    AggregateManifest,
    CheckpointRoot,
    EpisodeLists,
    Level,
    LocalFiles,
    read_aggregate,
    verify_checkpoint,
    write_aggregate,
)
from gym_ckpt_grpc.storage.comparing import compare
from gym_ckpt_grpc.storage.event_log import MAX_STEPS, EventLog, LoggedStep, read_event_log, write_event_log
from gym_ckpt_grpc.storage.salvaging import salvage
from gym_ckpt_grpc.storage.viewing import view_checkpoint, view_root
from tests.storage.damaged import make_root, unsynced

__all__ = ["unsynced"]
pytestmark = pytest.mark.usefixtures("unsynced")

STEPS = [
    LoggedStep(participant="agent/a/0", step="Prepare", start=0.0, end=0.25, outcome="not_ready"),
    LoggedStep(participant="agent/a/0", step="Commit", start=0.3, end=0.5, tries=3, records=7, bytes=4096),
]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_root(tmp_path_factory.mktemp("pristine") / "root").path)


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> CheckpointRoot:
    shutil.copytree(pristine, tmp_path / "root")
    return CheckpointRoot(str(tmp_path / "root"))


def log_of(checkpoint_id: str, steps: list[LoggedStep] = STEPS) -> EventLog:
    moments = {"prepared": 0.25, "released": 0.6}
    return EventLog(checkpoint_id=checkpoint_id, began=1_700_000_000.5, steps=steps, moments=moments)


def test_what_is_written_is_read(root: CheckpointRoot) -> None:
    """Again in place of it, too; a checkpoint without one has none."""
    location = root.location("two")
    assert read_event_log(root.files, location) is None
    write_event_log(root.files, location, log_of("two", []))
    write_event_log(root.files, location, log_of("two"))
    assert read_event_log(root.files, location) == log_of("two")


def test_no_more_is_kept_than_is_read(root: CheckpointRoot) -> None:
    """A thousand participants with each step repeated: bounded, and it says what it left out."""
    name = "resources/" + "x" * 100 + "/"
    many = [
        LoggedStep(participant=f"{name}{at}", step="Commit", start=at / 7, end=at / 3, records=at, bytes=at)
        for at in range(MAX_STEPS + 5)
    ]
    write_event_log(root.files, root.location("two"), log_of("two", many))
    found = read_event_log(root.files, root.location("two"))
    assert found is not None
    assert (len(found.steps), found.left_out, found.unreadable) == (MAX_STEPS, 5, 0)


def test_nobody_minds_it(root: CheckpointRoot, tmp_path: Path) -> None:
    """Verifying, listing, comparing and salvaging, also where it is damaged."""
    for checkpoint_id in ("one", "two"):
        write_event_log(root.files, root.location(checkpoint_id), log_of(checkpoint_id))
    Path(root.location("one").events).write_bytes(b"\xff junk")
    for checkpoint_id in ("one", "two"):
        levels = {finding.level for finding in verify_checkpoint(root, checkpoint_id)}
        assert levels == {Level.CHECKED, Level.PASSED}
    assert [view.troubles for view in view_root(root).newest] == [(), ()]
    assert view_root(root).troubles == ()
    one, two = view_checkpoint(root, "one"), view_checkpoint(root, "two")
    assert list(compare(one, two).troubles) == []
    saved = salvage(root, "one", CheckpointRoot(str(tmp_path / "saved")))
    assert saved.is_complete


@pytest.mark.parametrize("spoilt", ["", "{", "[]", '{"format": "x", "schema_version": 1}'])
def test_a_head_that_cannot_be_read_is_refused(root: CheckpointRoot, spoilt: str) -> None:
    Path(root.location("two").events).write_text(spoilt)
    with pytest.raises(StateCorrupt, match=r"events\.jsonl"):
        read_event_log(root.files, root.location("two"))


def test_the_log_of_another_checkpoint_is_refused(root: CheckpointRoot) -> None:
    write_event_log(root.files, root.location("two"), log_of("one"))
    with pytest.raises(StateCorrupt, match="belongs to checkpoint 'one'"):
        read_event_log(root.files, root.location("two"))


def test_a_torn_log_is_read_as_far_as_it_goes(root: CheckpointRoot) -> None:
    """Each line stands for itself; what is missing is counted."""
    path = Path(root.location("two").events)
    write_event_log(root.files, root.location("two"), log_of("two"))
    head, first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([head, first[:-5], second]))
    found = read_event_log(root.files, root.location("two"))
    assert found is not None
    assert (list(found.steps), found.unreadable) == (STEPS[1:], 1)
    path.write_bytes(head)
    found = read_event_log(root.files, root.location("two"))
    assert found is not None
    assert (list(found.steps), found.unreadable) == ([], 2)


# ---- the trace in the manifest


def manifest_of(**fields: str) -> AggregateManifest:
    return AggregateManifest(checkpoint_id="x", run_id="r", controller_id="c", epoch=1, members=(), **fields)  # type: ignore[arg-type]


def test_a_trace_is_no_part_of_what_a_manifest_says(tmp_path: Path) -> None:
    """Another process may publish the same commit again, in another trace or in none: the first manifest stands."""
    root = CheckpointRoot(str(tmp_path))
    location, lists = root.location("x"), EpisodeLists()
    first, digest = write_aggregate(LocalFiles(), location, manifest_of(traceparent="00-ab-cd-01"), episodes=lists)
    for again in (manifest_of(), manifest_of(traceparent="00-ef-cd-01")):
        found, same = write_aggregate(LocalFiles(), location, again, episodes=lists)
        assert (found, same) == (first, digest)
    with pytest.raises(CheckpointConflict):
        write_aggregate(LocalFiles(), location, msgspec.structs.replace(manifest_of(), run_id="other"), episodes=lists)
    assert read_aggregate(LocalFiles(), location)[0].traceparent == "00-ab-cd-01"


def test_a_manifest_without_a_trace_is_the_same_bytes_as_ever(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path))
    write_aggregate(LocalFiles(), root.location("x"), manifest_of(), episodes=EpisodeLists())
    written = msgspec.json.decode(Path(root.location("x").aggregate).read_bytes())
    assert "traceparent" not in written
    assert not read_aggregate(LocalFiles(), root.location("x"))[0].traceparent
