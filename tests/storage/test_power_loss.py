"""Crash and power loss after every step of whatever changes a root: what is published is whole, and one can go on."""

from __future__ import annotations

import os
import random

import pytest

from gym_ckpt_grpc.storage import CheckpointRoot
from tests.conftest import SEED_VARIABLE
from tests.storage.crash_histories import HISTORIES, History, check, check_clean, epoch_of, record, retain, temporaries
from tests.storage.recording_files import ROOT, Loss, RecordingFiles

EVERY_STEP = (Loss.CRASH, Loss.POWER, Loss.TORN)
SOME_STEPS = 4
"""Of the other losses: one step out of so many, a different one in each run. In soak every step of each."""
SOAK_MIXES = 100


def seeds(count: int) -> list[str]:
    return [f"{os.environ[SEED_VARIABLE]} {number}" for number in range(count)]


def go_on(history: History, image: RecordingFiles) -> None:
    """The next controller does the same again; with the next retention nothing of the interruption is left."""
    root = CheckpointRoot(ROOT, image)
    epoch = root.sequence.claim("next", "run").epoch
    history.act(root, epoch)
    check(history, root, finished=True)
    assert temporaries(image, f"{ROOT}/checkpoints/second/participants") == []
    retain(None)(root, epoch_of(root))
    check(history, root, finished=True)
    check_clean(root)


def play(history: History, counts: range, loss: Loss, mixes: int = 1) -> None:
    """What is left after so many steps and a loss is whole, and one can go on from it."""
    recorded = record(history)
    for count, _, image in recorded.files.images(counts, [loss], seeds=seeds(mixes)):
        check(history, CheckpointRoot(ROOT, image), finished=count == len(recorded.files.steps))
        go_on(history, image)
        if loss in (Loss.CRASH, Loss.POWER):
            lost = image.image(len(image.steps), Loss.POWER)
            check(history, CheckpointRoot(ROOT, lost), finished=True)


@pytest.mark.behaviour("C174", "C175", "C224")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("loss", list(Loss), ids=lambda loss: loss.name)
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_after_every_step_and_loss_the_newest_published_is_whole_and_one_can_go_on(
    history: History, loss: Loss, rng: random.Random
) -> None:
    counts = record(history).counts
    play(history, counts if loss in EVERY_STEP else counts[rng.randrange(SOME_STEPS) :: SOME_STEPS], loss)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_whatever_reached_the_disk(history: History) -> None:
    for loss in Loss:
        play(history, record(history).counts, loss, mixes=SOAK_MIXES)


@pytest.mark.behaviour("C174")
@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_one_can_go_on_after_several_interruptions(history: History, rng: random.Random) -> None:
    """Each of them cuts short what was done to recover from the one before."""
    recorded = record(history)
    for _ in range(5):
        image = recorded.files.image(rng.choice(recorded.counts), rng.choice(list(Loss)), seed=rng.random())
        for _ in range(3):
            before = len(image.steps)
            go_on(history, image)
            image = image.image(rng.randint(before, len(image.steps)), rng.choice(list(Loss)), seed=rng.random())
            check(history, CheckpointRoot(ROOT, image), finished=False)
        go_on(history, image)


def test_the_early_write_back_is_played_too() -> None:
    history = next(history for history in HISTORIES if history.name == "commit-write-back")
    recorded = record(history)
    kinds = [step.kind for step in recorded.files.steps[recorded.start :]]
    assert kinds.count("begin_sync") > 2
    assert kinds.index("begin_sync") < kinds.index("fsync", kinds.index("begin_sync"))
