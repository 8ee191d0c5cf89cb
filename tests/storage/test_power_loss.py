"""Crash, power loss and failing operations at every step of a commit and its publication."""

from __future__ import annotations

import errno
import json
from contextlib import suppress

import pytest

from gym_ckpt_grpc.protocol.errors import PublishUnknown, StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage import CheckpointRoot, read_part
from gym_ckpt_grpc.storage.names import is_temporary
from tests.storage.builders import AGENT, COUNTER, commit, complete, faults, make_records
from tests.storage.recording_files import ROOT, Fault, Loss, RecordingFiles


def _root_with_one() -> tuple[CheckpointRoot, RecordingFiles]:
    files = RecordingFiles()
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    commit(root, "first", epoch=1)
    return root, files


def _steps_of_a_commit() -> tuple[RecordingFiles, int]:
    root, files = _root_with_one()
    before = len(files.steps)
    commit(root, "second", epoch=1, turn=1)
    return files, before


def _check_image(image: RecordingFiles, *, whole: bool) -> None:
    root = CheckpointRoot(ROOT, image)
    newest = root.find()
    assert newest.location.checkpoint_id in ("first", "second")
    if whole:
        assert newest.location.checkpoint_id == "second"
    assert faults(root, newest.location.checkpoint_id) == []
    assert faults(root, "first") == []
    named = json.loads(image.all_files()[root.sequence.latest_path])
    assert named["checkpoint_id"] in [entry.checkpoint_id for entry in root.sequence.publications()]
    # A part exists if and only if its manifest exists.
    for identity, count in ((AGENT, 4), (COUNTER, 2)):
        try:
            part = read_part(image, root.location("second"), identity.place, checkpoint_id="second")
        except StateNotFound:
            assert not whole
        else:
            assert list(part.records) == make_records(turn=1)[:count]


@pytest.mark.behaviour("C224")
@pytest.mark.parametrize("loss", list(Loss))
def test_after_every_step_and_loss_the_newest_published_checkpoint_is_whole(loss: Loss) -> None:
    files, before = _steps_of_a_commit()
    assert len(files.steps) - before > 60
    for count in range(before, len(files.steps) + 1):
        _check_image(files.image(count, loss), whole=count == len(files.steps))


@pytest.mark.parametrize("loss", list(Loss))
def test_a_commit_goes_on_from_every_image(loss: Loss) -> None:
    files, before = _steps_of_a_commit()
    for count in range(before, len(files.steps) + 1):
        image = files.image(count, loss)
        root = CheckpointRoot(ROOT, image)
        claim = root.sequence.claim("ctl", "run")
        assert claim.epoch == 2
        commit(root, "second", epoch=claim.epoch, turn=1)
        _check_image(image, whole=True)
        strays = [
            path for path in image.all_files() if "/participants/" in path and is_temporary(path.rpartition("/")[2])
        ]
        assert strays == []


def _temporaries(files: RecordingFiles) -> list[str]:
    return [path for path in files.all_files() if is_temporary(path.rpartition("/")[2])]


@pytest.mark.behaviour("C173", "C226")
@pytest.mark.parametrize("after", [False, True], ids=["undone", "done"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_failing_operation_is_typed_leaves_nothing_and_can_be_repeated(code: int, after: bool) -> None:
    recorded, before = _steps_of_a_commit()
    latest_step = next(at for at, step in enumerate(recorded.steps) if at >= before and "LATEST" in step.other)
    for at in range(before, len(recorded.steps)):
        root, files = _root_with_one()
        assert len(files.steps) == before
        files.fault = Fault(at, code, after=after)
        failure, done = None, None
        try:
            done = commit(root, "second", epoch=1, turn=1)
        except (StateUnwritable, PublishUnknown) as error:
            failure = error.message
        if failure is not None:
            assert errno.errorcode[code] in failure
            assert ROOT in failure
            assert root.find().location.checkpoint_id in ("first", "second")
        else:
            # Moving LATEST comes after the commit point, and cleaning up is nobody's failure.
            assert done is not None
            assert done.published.latest_error or recorded.steps[at].kind == "remove" or at < latest_step
            assert root.find().location.checkpoint_id == "second"
        if recorded.steps[at].kind != "remove":
            assert _temporaries(files) == []
        files.fault = None
        assert faults(root, "first") == []
        commit(root, "second", epoch=1, turn=1)
        assert root.find().publication == root.sequence.publications()[0]
        assert [entry.checkpoint_id for entry in root.sequence.publications()] == ["second", "first"]
        _check_image(files, whole=True)


@pytest.mark.behaviour("C173")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_stays_full_never_harms_what_is_published(code: int) -> None:
    recorded, before = _steps_of_a_commit()
    for at in range(before, len(recorded.steps), 3):
        root, files = _root_with_one()
        files.fault = Fault(at, code, for_good=True)
        with suppress(StateUnwritable, PublishUnknown):
            commit(root, "second", epoch=1, turn=1)
        assert faults(root, root.find().location.checkpoint_id) == []
        files.fault = None
        commit(root, "second", epoch=1, turn=1)
        _check_image(files, whole=True)


@pytest.mark.behaviour("C226")
def test_a_sync_that_fails_after_naming_is_unknown_and_the_same_call_converges() -> None:
    root, files = _root_with_one()
    _, digest = complete(root, "second", epoch=1, turn=1)
    start = len(files.steps)
    probe = CheckpointRoot(ROOT, files.image(start, Loss.CRASH))
    probe.sequence.publish("second", digest, epoch=1)
    kinds = [step.kind for step in probe.files.steps]  # type: ignore[attr-defined]
    files.fault = Fault(start + kinds.index("link") + 2, errno.EIO)
    with pytest.raises(PublishUnknown) as caught:
        root.sequence.publish("second", digest, epoch=1)
    assert "EIO" in caught.value.message
    files.fault = None
    first = root.sequence.publish("second", digest, epoch=1)
    assert root.sequence.publish("second", digest, epoch=1) == first
    lost = CheckpointRoot(ROOT, files.image(len(files.steps), Loss.POWER))
    assert lost.find().location.checkpoint_id == "second"
