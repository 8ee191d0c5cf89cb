"""The sequence of a root: epochs exclude each other, publications converge, damage is named."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    InvalidArgument,
    PublishUnknown,
    StaleController,
    StateCorrupt,
    StateUnwritable,
)
from gym_ckpt_grpc.storage import CheckpointRoot, Claim, Publication, Sequence
from tests.storage.recording_files import ROOT, Fault, Loss, RecordingFiles, Step

DIGEST, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def files() -> RecordingFiles:
    return RecordingFiles()


@pytest.fixture
def sequence(files: RecordingFiles) -> Sequence:
    return Sequence(files, ROOT)


def test_every_claim_has_an_epoch_above_all_before_and_above_what_is_asked(sequence: Sequence) -> None:
    assert sequence.epoch() == (0, False)
    assert sequence.claim("a", "run") == Claim(1, 1)
    assert sequence.claim("a", "run") == Claim(2, 2)
    assert sequence.claim("a", "run", above=10) == Claim(11, 3)
    assert sequence.claim("a", "run", above=3) == Claim(12, 4)
    assert sequence.epoch() == (12, False)


def test_a_release_is_for_the_present_epoch_only_and_once(sequence: Sequence) -> None:
    first = sequence.claim("a", "run")
    second = sequence.claim("b", "run")
    sequence.release(first)
    assert sequence.epoch() == (2, False)
    sequence.release(second)
    sequence.release(second)
    assert sequence.epoch() == (2, True)
    assert len(list(sequence.entries())) == 3
    assert sequence.claim("a", "run").epoch == 3
    assert sequence.epoch() == (3, False)


@pytest.mark.behaviour("C223")
def test_publishing_twice_gives_the_same_result(sequence: Sequence) -> None:
    sequence.claim("a", "run")
    first = sequence.publish("ck", DIGEST, epoch=1)
    assert first == Publication(2, 1, "ck", DIGEST)
    assert sequence.publish("ck", DIGEST, epoch=1) == first
    sequence.claim("b", "run")
    assert sequence.publish("ck", DIGEST, epoch=1) == first  # it stands, whoever came later
    assert sequence.publications() == (first,)


@pytest.mark.behaviour("C223")
def test_publishing_under_a_passed_epoch_is_refused(sequence: Sequence) -> None:
    sequence.claim("a", "run")
    sequence.claim("b", "run")
    with pytest.raises(StaleController, match="'b'"):
        sequence.publish("ck", DIGEST, epoch=1)
    assert sequence.publications() == ()
    with pytest.raises(InvalidArgument, match="never claimed"):
        sequence.publish("ck", DIGEST, epoch=3)
    sequence.publish("ck", DIGEST, epoch=2)


def test_publishing_after_release_with_another_manifest_or_without_digest_is_refused(sequence: Sequence) -> None:
    claim = sequence.claim("a", "run")
    sequence.publish("ck", DIGEST, epoch=1)
    with pytest.raises(CheckpointConflict):
        sequence.publish("ck", OTHER, epoch=1)
    with pytest.raises(InvalidArgument):
        sequence.publish("ck2", "A" * 64, epoch=1)
    sequence.release(claim)
    with pytest.raises(StaleController, match="released"):
        sequence.publish("ck2", DIGEST, epoch=1)


@pytest.mark.behaviour("C223")
def test_a_claim_that_takes_the_number_of_a_publication_stops_it(files: RecordingFiles, sequence: Sequence) -> None:
    sequence.claim("a", "run")

    def take_over(step: Step) -> None:
        if step.kind == "link":
            files.before = None
            assert sequence.claim("b", "run") == Claim(2, 2)

    files.before = take_over
    with pytest.raises(StaleController):
        sequence.publish("ck", DIGEST, epoch=1)
    assert sequence.publications() == ()
    assert [step for step in files.all_files() if ".tmp-" in step] == []


def test_a_publication_that_takes_the_number_of_a_claim_stands_and_the_claim_follows(
    files: RecordingFiles, sequence: Sequence
) -> None:
    sequence.claim("a", "run")

    def publish(step: Step) -> None:
        if step.kind == "link":
            files.before = None
            sequence.publish("ck", DIGEST, epoch=1)

    files.before = publish
    assert sequence.claim("b", "run") == Claim(2, 3)
    assert [entry.number for entry in sequence.publications()] == [2]


def test_two_that_publish_the_same_at_once_get_one_entry(files: RecordingFiles, sequence: Sequence) -> None:
    sequence.claim("a", "run")
    inner: list[Publication] = []

    def publish(step: Step) -> None:
        if step.kind == "link":
            files.before = None
            inner.append(sequence.publish("ck", DIGEST, epoch=1))

    files.before = publish
    assert sequence.publish("ck", DIGEST, epoch=1) == inner[0]
    assert sequence.publications() == (inner[0],)


def test_claims_and_publications_of_many_threads_never_collide(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path))
    claims: list[Claim] = []
    published: list[str] = []
    barrier = threading.Barrier(6)

    def work(name: str) -> None:
        barrier.wait(10)
        for number in range(4):
            claim = root.sequence.claim(name, "run")
            claims.append(claim)
            try:
                root.sequence.publish(f"{name}-{number}", DIGEST, epoch=claim.epoch)
            except StaleController:
                continue
            published.append(f"{name}-{number}")

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(claim.epoch for claim in claims) == list(range(1, 25))
    assert root.sequence.problems() == []
    assert sorted(entry.checkpoint_id for entry in root.sequence.publications()) == sorted(published)
    highest = 0
    for entry in root.sequence.entries():
        assert not isinstance(entry, StateCorrupt)
        if entry.kind == "claim":
            assert entry.epoch > highest
            highest = entry.epoch
        else:
            assert entry.epoch == highest  # nobody published after he was replaced


@pytest.mark.behaviour("C226")
@pytest.mark.parametrize("after", [False, True])
def test_whatever_fails_while_publishing_the_same_call_ends_in_published_or_failed(after: bool) -> None:
    probe = RecordingFiles()
    Sequence(probe, ROOT).claim("a", "run")
    start = len(probe.steps)
    Sequence(probe, ROOT).publish("ck", DIGEST, epoch=1)
    outcomes = set()
    for at in range(start, len(probe.steps)):
        for replaced in (False, True):
            files = RecordingFiles()
            sequence = Sequence(files, ROOT)
            sequence.claim("a", "run")
            files.fault = Fault(at, errno.EIO, after=after)
            with pytest.raises((StateUnwritable, PublishUnknown)) as caught:
                sequence.publish("ck", DIGEST, epoch=1)
            files.fault = None
            named = bool(sequence.publications())
            assert isinstance(caught.value, PublishUnknown) or not named
            if replaced:
                sequence.claim("b", "run")
            if replaced and not named:
                with pytest.raises(StaleController):
                    sequence.publish("ck", DIGEST, epoch=1)
                assert sequence.publications() == ()
            else:
                sequence.publish("ck", DIGEST, epoch=1)
                lost = Sequence(files.image(len(files.steps), Loss.POWER), ROOT)
                assert [entry.checkpoint_id for entry in lost.publications()] == ["ck"]
            outcomes.add((type(caught.value), named))
    assert (PublishUnknown, True) in outcomes
    assert (StateUnwritable, False) in outcomes


# ---- LATEST


@pytest.mark.behaviour("C224")
def test_latest_is_a_hint_that_is_never_trusted(files: RecordingFiles, sequence: Sequence) -> None:
    sequence.claim("a", "run")
    first = sequence.publish("one", DIGEST, epoch=1)
    assert sequence.move_latest(first)
    second = sequence.publish("two", OTHER, epoch=1)
    assert sequence.latest() == second  # LATEST was not moved yet: readers go on by number
    for junk in (b"", b"{}", b"[]", b"\xff", files.all_files()[sequence.latest_path].replace(b"one", b"six")):
        files.damage(sequence.latest_path, junk)
        assert sequence.latest() == second
        assert sequence.move_latest(second)
        assert sequence.latest() == second
    assert not sequence.move_latest(first)  # never by a lower number
    assert b'"two"' in files.all_files()[sequence.latest_path]
    files.damage(sequence.latest_path, files.all_files()[sequence.latest_path].replace(b"3", b"99"))
    assert sequence.latest() == second
    assert sequence.move_latest(second)  # a number beyond the sequence is damage
    files.remove(sequence.latest_path)
    assert sequence.latest() == second


def test_with_latest_a_reader_opens_only_what_came_after(files: RecordingFiles, sequence: Sequence) -> None:
    sequence.claim("a", "run")
    newest = [sequence.publish(f"ck{number}", DIGEST, epoch=1) for number in range(50)][-1]
    sequence.move_latest(newest)
    files.reads.clear()
    assert sequence.latest() == newest
    assert len({path for path, _, _ in files.reads}) == 2


# ---- damage


def _two_published(sequence: Sequence) -> None:
    sequence.claim("a", "run")
    sequence.publish("one", DIGEST, epoch=1)
    sequence.publish("two", OTHER, epoch=1)


@pytest.mark.parametrize("junk", [b"", b"{}", b"[1]", b"{", b"\x00" * 100])
@pytest.mark.parametrize("hint", [False, True])
def test_a_damaged_entry_is_passed_over_by_readers_named_and_never_built_upon(
    files: RecordingFiles, sequence: Sequence, junk: bytes, hint: bool
) -> None:
    _two_published(sequence)
    if hint:
        sequence.move_latest(sequence.publications()[1])
    files.damage(sequence.path(3), junk)
    latest = sequence.latest()
    assert latest is not None
    assert latest.checkpoint_id == "one"
    assert [problem.message.split(" ")[0] for problem in sequence.problems()] == [repr(sequence.path(3))]
    for act in (
        lambda: sequence.claim("b", "run"),
        lambda: sequence.publish("three", DIGEST, epoch=1),
        lambda: sequence.release(Claim(1, 1)),
    ):
        with pytest.raises(StateCorrupt, match="000000000003"):
            act()
    assert len(files.names(sequence.directory)) == 3


def test_damage_before_a_later_claim_harms_only_what_it_said(files: RecordingFiles, sequence: Sequence) -> None:
    _two_published(sequence)
    sequence.claim("b", "run")
    files.damage(sequence.path(2), b"")
    assert [entry.checkpoint_id for entry in sequence.publications()] == ["two"]
    assert sequence.publish("three", DIGEST, epoch=2).number == 5
    assert sequence.claim("c", "run").epoch == 3
    assert len(sequence.problems()) == 1


def test_a_missing_entry_in_the_middle_is_damage(files: RecordingFiles, sequence: Sequence) -> None:
    _two_published(sequence)
    files.remove(sequence.path(2))
    assert [entry.checkpoint_id for entry in sequence.publications()] == ["two"]
    assert len(sequence.problems()) == 1
    with pytest.raises(StateCorrupt, match="later entries"):
        sequence.claim("b", "run")


@pytest.mark.parametrize("hint", [False, True])
def test_a_gap_does_not_hide_what_follows_it(files: RecordingFiles, sequence: Sequence, hint: bool) -> None:
    sequence.claim("a", "run")
    first = sequence.publish("one", DIGEST, epoch=1)
    sequence.publish("two", DIGEST, epoch=1)
    third = sequence.publish("three", DIGEST, epoch=1)
    if hint:
        sequence.move_latest(first)
    files.remove(sequence.path(3))
    assert sequence.latest() == third


def test_foreign_files_beside_the_entries_are_passed_over(files: RecordingFiles, sequence: Sequence) -> None:
    _two_published(sequence)
    for name in (".tmp-1", "README", "4", "00000000000x", "000000000000", "0000000000004"):
        files.put(f"{sequence.directory}/{name}", b"junk")
    assert sequence.problems() == []
    assert sequence.publish("three", DIGEST, epoch=1).number == 4


def test_a_number_far_beyond_is_refused_and_not_counted_up_to(tmp_path: Path) -> None:
    """A stray file would keep every reader busy for ever."""
    root = CheckpointRoot(str(tmp_path))
    root.sequence.claim("a", "run")
    stray = tmp_path / "sequence" / "999999999999"
    stray.touch()
    for ask in (root.sequence.history, root.sequence.latest, lambda: root.sequence.claim("b", "run")):
        with pytest.raises(StateCorrupt, match="999999999999"):
            ask()
    stray.unlink()
    assert root.sequence.claim("b", "run").epoch == 2


def test_an_entry_under_another_number_is_damage(files: RecordingFiles, sequence: Sequence) -> None:
    _two_published(sequence)
    files.damage(sequence.path(3), files.all_files()[sequence.path(2)])
    assert [entry.checkpoint_id for entry in sequence.publications()] == ["one"]
    assert len(sequence.problems()) == 1


def test_an_entry_of_a_later_format_is_named_with_the_versions_readable_here(
    files: RecordingFiles, sequence: Sequence
) -> None:
    _two_published(sequence)
    data = files.all_files()[sequence.path(3)]
    files.damage(sequence.path(3), data.replace(b'"schema_version": 1', b'"schema_version": 2'))
    (problem,) = sequence.problems()
    assert "readable here: 1" in problem.message
