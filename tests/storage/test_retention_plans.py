"""What a policy keeps and removes, and what nothing may remove."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import StaleController, StateCorrupt, UsageError
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    Retention,
    apply_retention,
    plan_retention,
)
from tests.storage.builders import faults
from tests.storage.kept_roots import HOUR, decided, prune, pruned, put, unfinished
from tests.storage.recording_files import ROOT, RecordingFiles


@pytest.fixture
def files() -> RecordingFiles:
    return RecordingFiles()


@pytest.fixture
def root(files: RecordingFiles) -> CheckpointRoot:
    """Empty, claimed as epoch 1."""
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    return root


@pytest.mark.parametrize(
    ("field", "value"),
    [("keep_last", bad) for bad in (0, -1, 1.5, "2", None, True)]
    + [("keep_every", bad) for bad in (-1, 2.0, None, False)]
    + [("keep_within", bad) for bad in (0, -1, math.inf, math.nan, "6h", True)],
)
def test_a_policy_that_says_nothing_sensible_is_refused_naming_the_field(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{field} is "):
        Retention(**{field: value})


@pytest.mark.behaviour("C229")
def test_the_last_ones_are_kept_by_number_and_not_by_name_or_date(root: CheckpointRoot) -> None:
    put(root, "z", created="2030-01-01T00:00:00+00:00")
    put(root, "m", "a", created="2020-01-01T00:00:00+00:00")
    put(root, "b", created="")
    assert prune(root, Retention(keep_last=2)) == ["a", "b"]
    assert prune(root, Retention(keep_last=1)) == ["b"]
    assert prune(root, Retention(keep_last=1)) == ["b"]


@pytest.mark.behaviour("C229")
def test_every_nth_publication_stays_the_same_one_while_others_come_and_go(root: CheckpointRoot) -> None:
    """Counted over all publications ever made; a count of what is left would shift with each removal."""
    kept = []
    for number in range(1, 14):
        put(root, f"ck-{number:02}")
        kept.append(prune(root, Retention(keep_last=1, keep_every=3)))
    assert kept[-1] == ["ck-03", "ck-06", "ck-09", "ck-12", "ck-13"]
    for earlier, later in itertools.pairwise(kept):
        assert set(later) >= set(earlier[:-1])  # whatever stayed as an n-th one stays


@pytest.mark.behaviour("C229")
def test_what_was_made_shortly_before_the_newest_is_kept(root: CheckpointRoot) -> None:
    """Relative to the newest one, never to the clock of this machine; an unreadable date keeps."""
    for name, created in (
        ("early", "2001-01-01T00:00:00+00:00"),
        ("unknown", "yesterday"),
        ("naive", "2001-01-01T06:00:00"),
        ("late", "2001-01-01T05:00:00+02:00"),
        ("older", "2001-01-01T04:00:00+00:00"),
        ("newest", "2001-01-01T06:00:00+00:00"),
    ):
        put(root, name, created=created)
    policy = Retention(keep_last=1, keep_within=2.5 * HOUR)
    reasons = decided(plan_retention(root, policy, epoch=1))
    assert {name for name, reason in reasons.items() if not reason} == {"early", "late"}
    assert "cannot be told" in reasons["unknown"]
    assert "cannot be told" in reasons["naive"]
    assert "within 2.5 h" in reasons["older"]
    put(root, "undated", created="")
    reasons = decided(plan_retention(root, policy, epoch=1))
    assert all(reasons.values())


def test_rules_add_up(root: CheckpointRoot) -> None:
    """Against the same rules written down plainly, over random histories."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    times = [f"2001-01-01T{hour:02}:00:00+00:00" for hour in range(20)]
    names = [f"ck-{number:02}" for number in range(1, 21)]
    for name, created in zip(names, times, strict=True):
        put(root, name, created=created)
    for _ in range(20):
        last, every, hours = rng.randint(1, 6), rng.randint(0, 6), rng.choice([None, rng.randint(1, 12)])
        policy = Retention(keep_last=last, keep_every=every, keep_within=hours and hours * HOUR)
        expected = {
            name
            for at, name in enumerate(names, 1)
            if at > len(names) - last or (every and at % every == 0) or (hours and len(names) - at <= hours)
        }
        assert {name for name, reason in decided(plan_retention(root, policy, epoch=1)).items() if reason} == expected


def test_no_policy_keeps_every_published_checkpoint(root: CheckpointRoot) -> None:
    put(root, "one", "two", "three")
    unfinished(root, "orphan", epoch=1)
    root.sequence.claim("ctl", "run")
    assert prune(root, None, epoch=2) == ["one", "three", "two"]


# ---- never removed


@pytest.mark.behaviour("C229")
def test_what_is_pinned_held_or_open_stays_whatever_the_policy_says(root: CheckpointRoot) -> None:
    put(root, *"abcdef")
    root.pin("a", epoch=1)
    root.hold("b", "save-7")
    root.hold("b", "save-8")
    reasons = decided(plan_retention(root, Retention(keep_last=1), epoch=1, open_ids=["c"]))
    assert "pinned by the restore of epoch 1" in reasons["a"]
    assert "held by 'save-7', 'save-8'" in reasons["b"]
    assert "open" in reasons["c"]
    assert (reasons["d"], reasons["e"]) == ("", "")
    assert "newest" in reasons["f"]
    assert prune(root, Retention(keep_last=1), open_ids=["c"]) == ["a", "b", "c", "f"]
    root.release("b", "save-7")
    assert prune(root, Retention(keep_last=1)) == ["a", "b", "f"]
    root.release("b", "save-8")
    assert prune(root, Retention(keep_last=1)) == ["a", "f"]


@pytest.mark.behaviour("C229", "C230")
def test_a_pin_ends_with_the_first_publication_of_a_later_run_and_a_hold_does_not(root: CheckpointRoot) -> None:
    put(root, "a", "b", "c")
    root.pin("a", epoch=1)
    root.hold("b", "save")
    root.sequence.claim("ctl", "run")
    assert prune(root, Retention(keep_last=1), epoch=2) == ["a", "b", "c"]
    assert len(root.pins()) == 1
    put(root, "d", epoch=2)
    assert prune(root, Retention(keep_last=1), epoch=2) == ["b", "d"]
    assert root.pins() == ()  # what is void is tidied away
    assert len(root.holds()) == 1


@pytest.mark.behaviour("C229")
def test_what_a_kept_checkpoint_names_is_kept_and_so_is_what_that_names(root: CheckpointRoot) -> None:
    """What is listed must be whole: a checkpoint that stays for its files is still one that can be restored."""
    put(root, "full", "other", "alone")
    put(root, "middle", needs=["full"])
    put(root, "loose", needs=["other"])
    put(root, "newest", needs=["middle"])
    reasons = decided(plan_retention(root, Retention(keep_last=1), epoch=1))
    assert reasons["middle"] == "newest needs its files"
    assert reasons["full"] == "middle needs its files"
    assert {name for name, reason in reasons.items() if not reason} == {"loose", "other", "alone"}
    assert prune(root, Retention(keep_last=1)) == ["full", "middle", "newest"]


@pytest.mark.behaviour("C229")
def test_a_checkpoint_that_names_others_goes_before_them(root: CheckpointRoot, files: RecordingFiles) -> None:
    """Interrupted in between, nothing that is left needs what is gone."""
    put(root, "full")
    put(root, "second", needs=["full"])
    put(root, "third", needs=["second", "full"])
    put(root, "newest")
    before = len(files.steps)
    assert prune(root, Retention(keep_last=1)) == ["newest"]
    moved = [step.path.rpartition("/")[2] for step in files.steps[before:] if step.kind == "rename"]
    assert [name for name in moved if not name.startswith(".")] == ["third", "second", "full"]


@pytest.mark.behaviour("C222", "C229")
def test_what_cannot_be_read_stays_and_so_does_what_it_may_need(root: CheckpointRoot, files: RecordingFiles) -> None:
    put(root, "a", "b", "c", "d", "e")
    location = root.location("c")
    aggregate, intent = (files.all_files()[path] for path in (location.aggregate, location.intent))
    files.damage(location.aggregate, b"junk")
    # Its parts still say what they name, which is nothing.
    reasons = decided(plan_retention(root, Retention(keep_last=1), epoch=1))
    assert reasons["c"].startswith("it cannot be read")
    assert {name for name, reason in reasons.items() if not reason} == {"a", "b", "d"}
    # Without them nobody knows.
    files.damage(location.intent, b"junk")
    reasons = decided(plan_retention(root, Retention(keep_last=1), epoch=1))
    assert reasons["a"] == reasons["b"] == "c may need its files, which cannot be read"
    assert reasons["d"] == ""
    outcome = pruned(root, Retention(keep_last=1))
    assert [each.name for each in outcome.removed] == ["d"]
    assert any("cannot be read" in each.reason for each in outcome.kept if each.name == "c")
    # It was a passing fault: nothing is lost, and the next time is as ever.
    files.damage(location.aggregate, aggregate)
    files.damage(location.intent, intent)
    assert faults(root, "c") == []
    assert prune(root, Retention(keep_last=1)) == ["e"]


@pytest.mark.behaviour("C229")
def test_what_cannot_be_read_does_not_take_the_place_of_one_that_can(
    root: CheckpointRoot, files: RecordingFiles
) -> None:
    put(root, "a", "b", "c", "d")
    files.damage(root.location("c").aggregate, b"junk")
    assert prune(root, Retention(keep_last=2)) == ["b", "c", "d"]


class Hidden(RecordingFiles):
    """Some paths say that they cannot be read, or that they are not there."""

    refused: tuple[str, ...] = ()

    def open(self, path: str) -> Any:
        if any(part in path for part in self.refused):
            raise StateCorrupt(f"cannot read {path!r}: Permission denied (EACCES)")
        return super().open(path)

    def exists(self, path: str) -> bool:
        return not any(part in path for part in self.refused) and super().exists(path)


@pytest.mark.behaviour("C229")
def test_a_passing_fault_of_reading_makes_nothing_look_deleted(files: RecordingFiles) -> None:
    """A stat that fails says "not there" on file systems: what needs other files would be overlooked."""
    hidden = Hidden()
    root = CheckpointRoot(ROOT, hidden)
    root.sequence.claim("ctl", "run")
    put(root, "full")
    put(root, "kept", needs=["full"])
    put(root, "newest")
    hidden.refused = ("/kept/",)
    assert prune(root, Retention(keep_last=2)) == ["full", "kept", "newest"]


def test_one_that_cannot_be_read_any_more_is_left(root: CheckpointRoot, files: RecordingFiles) -> None:
    """It was readable when the plan was made."""
    put(root, "a", "b", "c")
    plan = plan_retention(root, Retention(keep_last=1), epoch=1, grace=0.0)
    files.damage(root.location("a").aggregate, b"junk")
    outcome = apply_retention(root, plan)
    assert [each.name for each in outcome.removed] == ["b"]
    assert next(each.reason for each in outcome.kept if each.name == "a").startswith("it cannot be read")


@pytest.mark.behaviour("C229")
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_where_the_sequence_is_damaged_nothing_at_all_is_removed(
    root: CheckpointRoot, files: RecordingFiles, number: int
) -> None:
    put(root, "a", "b", "c")
    unfinished(root, "orphan", epoch=1)
    files.put(f"{ROOT}/.tmp-{'0' * 32}", b"")
    files.damage(root.sequence.path(number), b"junk")
    for epoch in (1, None):
        plan = plan_retention(root, Retention(keep_last=1), epoch=epoch, grace=0.0, aborted=["orphan"])
        assert plan.problems
        assert not plan.checkpoints
        before = files.all_files()
        outcome = apply_retention(root, plan)
        assert str(number) in outcome.failures[0]
        assert files.all_files() == before


class Lagging(RecordingFiles):
    """Lists of the sequence only its first entries, as a network file system may for a while."""

    seen: int | None = None

    def names(self, path: str) -> list[str]:
        names = super().names(path)
        return names[: self.seen] if path.endswith("/sequence") else names


@pytest.mark.parametrize("epoch", [2, None])
@pytest.mark.parametrize("seen", range(6))
def test_entries_that_are_not_seen_yet_make_nothing_an_orphan(epoch: int | None, seen: int) -> None:
    files = Lagging()
    root = CheckpointRoot(ROOT, files)
    root.sequence.claim("ctl", "run")
    put(root, "a", "b")
    root.sequence.claim("ctl", "run")
    put(root, "c", epoch=2)
    files.seen = seen
    plan = plan_retention(root, None, epoch=epoch, grace=0.0)
    assert bool(plan.problems) == (epoch == 2 and seen < 4)
    assert not plan.checkpoints
    assert apply_retention(root, plan).removed == ()


@pytest.mark.behaviour("C229")
def test_a_replaced_controller_removes_nothing(root: CheckpointRoot, files: RecordingFiles) -> None:
    put(root, "a", "b", "c")
    plan = plan_retention(root, Retention(keep_last=1), epoch=1)
    root.sequence.claim("other", "run")
    with pytest.raises(StaleController):
        plan_retention(root, Retention(keep_last=1), epoch=1)
    before = files.all_files()
    outcome = apply_retention(root, plan)
    assert "replaced by 2" in outcome.failures[0]
    assert files.all_files() == before


def test_one_that_is_replaced_in_the_middle_stops_there(root: CheckpointRoot, files: RecordingFiles) -> None:
    put(root, "a", "b", "c", "d")
    plan = plan_retention(root, Retention(keep_last=1), epoch=1)

    def replaced(step: Any) -> None:
        if step.kind == "rename" and step.path.endswith("/b"):
            files.before = None
            root.sequence.claim("other", "run")

    files.before = replaced
    outcome = apply_retention(root, plan)
    assert [each.name for each in outcome.removed] == ["c"]
    assert "replaced" in outcome.failures[0]
    assert files.names(f"{ROOT}/checkpoints") == ["a", "b", "d"]  # `b` was out of sight already: it is back
