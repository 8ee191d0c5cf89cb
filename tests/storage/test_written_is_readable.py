"""What a reader refuses for its size or its names, a writer refuses before it is published."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gym_ckpt_grpc.protocol.errors import InvalidArgument
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    EpisodeLists,
    documents,
    read_aggregate,
    read_episodes,
    read_part,
    write_aggregate,
)
from tests.storage.builders import AGENT, complete, make_records, write
from tests.storage.recording_files import ROOT, RecordingFiles

ID = "ck"


@pytest.fixture
def files() -> RecordingFiles:
    return RecordingFiles()


@pytest.fixture
def root(files: RecordingFiles) -> CheckpointRoot:
    return CheckpointRoot(ROOT, files)


def kept_or_refused(files: RecordingFiles, root: CheckpointRoot, **more: Any) -> bool:
    """Whether a part is written, and then it reads back; if not, nothing of it is there."""
    try:
        write(files, root, ID, **more)
    except InvalidArgument:
        assert not [path for path in files.all_files() if "/participants/" in path]
        return False
    part = read_part(files, root.location(ID), AGENT.place, checkpoint_id=ID)
    assert list(part.records) == make_records()
    assert part.manifest.extra == more.get("extra", {})
    assert part.documents == more.get("documents", {})
    return True


@pytest.mark.parametrize(
    ("documents", "kept"),
    [
        ({"d" * 64: {"a": 1}}, True),
        ({"d" * 65: {"a": 1}}, False),
        ({"d" * 64 + "a": {"a": 1}, "d" * 64 + "b": {"a": 2}}, False),
        ({"": {"a": 1}}, False),
        ({"\ud800": {"a": 1}}, False),
        ({"é" * 64: {"a": 1}, "../x": {"a": 2}}, True),
    ],
)
def test_names_of_documents(files: RecordingFiles, root: CheckpointRoot, documents: Any, kept: bool) -> None:
    assert kept_or_refused(files, root, documents=documents) == kept


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        ({"text": "x" * 1_000_000}, True),
        ({"text": "x" * (2 << 20)}, False),
        ({"many": [0] * 400_000}, False),  # less than a MiB, until each stands on a line of its own
        ({"many": [0] * 100_000}, True),
    ],
    ids=["long", "longer", "many", "fewer"],
)
def test_facts_of_a_manifest(files: RecordingFiles, root: CheckpointRoot, extra: Any, kept: bool) -> None:
    assert kept_or_refused(files, root, extra=extra) == kept


def test_a_document(files: RecordingFiles, root: CheckpointRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 4096)
    assert not kept_or_refused(files, root, documents={"keys": {"many": "x" * 4096}})
    assert kept_or_refused(files, root, documents={"keys": {"many": "x" * 4000}})


@pytest.mark.parametrize("large", ["manifest", "lists"])
@pytest.mark.parametrize("length", [100, 1 << 15])
def test_the_aggregate_manifest_and_its_lists(
    files: RecordingFiles, root: CheckpointRoot, monkeypatch: pytest.MonkeyPatch, large: str, length: int
) -> None:
    """The trainer's own state stands in the one, the reason of every rollout that starts over in the other."""
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 1 << 15)
    manifest, _ = complete(root, ID, epoch=1)
    frontier = {"proof": "x" * length} if large == "manifest" else None
    reason = "x" * length if large == "lists" else ""
    wanted = msgspec.structs.replace(manifest, checkpoint_id="two", frontier=frontier)
    lists, location = EpisodeLists((), {EpisodeId("late"): reason}), root.location("two")
    if length == 1 << 15:
        with pytest.raises(InvalidArgument, match=str(1 << 15)):
            write_aggregate(files, location, wanted, episodes=lists)
        assert not files.exists(location.aggregate)
    else:
        written, digest = write_aggregate(files, location, wanted, episodes=lists)
        assert read_aggregate(files, location, expected_digest=digest)[0] == written
        assert read_episodes(files, location, written) == lists
