"""An operation of the disk that fails at any step of whatever changes a root, once or from there on."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from itertools import cycle

import pytest

from gym_ckpt_grpc.protocol.errors import PublishUnknown, StateUnwritable
from gym_ckpt_grpc.storage import CheckpointRoot
from tests.storage.builders import complete
from tests.storage.crash_histories import HISTORIES, History, check, check_clean, epoch_of, record, temporaries
from tests.storage.recording_files import ROOT, Fault, Loss, RecordingFiles

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS)
SOME_STEPS = 3
"""Of a disk that stays broken: one step out of so many, a different one in each run."""


def fail(history: History, fault: Fault) -> tuple[CheckpointRoot, RecordingFiles, str]:
    """Do it on a disk with a fault; gives what it said, or nothing if it was done all the same."""
    recorded = record(history)
    root = recorded.anew()
    files = root.files
    assert isinstance(files, RecordingFiles)
    files.fault = replace(fault, at=fault.at - recorded.start)
    text = ""
    try:
        history.act(root, epoch_of(root))
    except (StateUnwritable, PublishUnknown) as error:
        text = error.message
        assert errno.errorcode[fault.code] in text
        assert ROOT in text
    files.fault = None
    return root, files, text


def check_and_repeat(history: History, root: CheckpointRoot, files: RecordingFiles, said: str) -> None:
    """What was published is as it was; the same again converges, and what it did lasts."""
    check(history, root, finished=not said)
    history.act(root, epoch_of(root))
    check(history, root, finished=True)
    if history.clean:
        check_clean(root)
    check(history, CheckpointRoot(ROOT, files.image(len(files.steps), Loss.POWER)), finished=True)


@pytest.mark.behaviour("C173", "C226")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("after", [False, True], ids=["undone", "done"])
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_a_failing_operation_is_typed_leaves_nothing_and_can_be_repeated(history: History, after: bool) -> None:
    recorded, codes = record(history), cycle(CODES)
    for at in range(recorded.start, len(recorded.files.steps)):
        root, files, said = fail(history, Fault(at, next(codes), after=after))
        step = recorded.files.steps[at]
        # Moving LATEST comes after the commit point, and cleaning up is nobody's failure.
        assert said or step.kind == "remove" or _after_publication(recorded.files, at), step
        if step.kind != "remove":
            assert temporaries(files, ROOT) == []
        check_and_repeat(history, root, files, said)


def _after_publication(files: RecordingFiles, at: int) -> bool:
    named = [number for number, step in enumerate(files.steps) if step.kind == "link" and "/sequence/" in step.other]
    return at > named[-1]


@pytest.mark.behaviour("C173")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("after", [False, True], ids=["undone", "done"])
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_a_disk_that_stays_broken_never_harms_what_is_published(
    history: History, after: bool, rng: random.Random
) -> None:
    recorded, codes = record(history), cycle(CODES)
    for at in range(recorded.start + rng.randrange(SOME_STEPS), len(recorded.files.steps), SOME_STEPS):
        root, files, said = fail(history, Fault(at, next(codes), after=after, for_good=True))
        check_and_repeat(history, root, files, said)


@pytest.mark.behaviour("C226")
def test_a_sync_that_fails_after_naming_is_unknown_and_the_same_call_converges() -> None:
    history = next(history for history in HISTORIES if history.name == "publish")
    recorded = record(history)
    kinds = [step.kind for step in recorded.files.steps]
    at = kinds.index("link", recorded.start) + 2
    assert kinds[at] == "sync_dir"
    root = recorded.anew()
    files = root.files
    assert isinstance(files, RecordingFiles)
    _, digest = complete(root, "second", epoch=1, turn=1)
    files.fault = Fault(at - recorded.start + len(files.steps), errno.EIO)
    with pytest.raises(PublishUnknown, match="EIO"):
        root.sequence.publish("second", digest, epoch=1)
    files.fault = None
    first = root.sequence.publish("second", digest, epoch=1)
    assert root.sequence.publish("second", digest, epoch=1) == first
    check(history, CheckpointRoot(ROOT, files.image(len(files.steps), Loss.POWER)), finished=True)
