"""Fences and removal: durable first, seen by every process, and what races them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from gym_ckpt_grpc.capture import CaptureLedger, fences
from gym_ckpt_grpc.capture.fences import Fences
from gym_ckpt_grpc.control import Continuation
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StaleAttempt, StateCorrupt, StateUnwritable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.capture.ledger_rig import (
    ASK,
    R0,
    R1,
    R2,
    S0,
    RecordingLedgerFiles,
    SpyFiles,
    admitted,
    calls,
    coordinates,
    exported,
    made,
    said,
    talk,
    user,
)
from tests.storage.recording_files import ROOT, Fault, Loss


@pytest.fixture
def files() -> SpyFiles:
    return SpyFiles()


@pytest.fixture
def ledger(tmp_path: Path, files: SpyFiles) -> CaptureLedger:
    return CaptureLedger(tmp_path, files=files, sync_rows=False)


def assert_refused(ledger: CaptureLedger, episode: EpisodeId) -> None:
    for read in (ledger.manifest, lambda each: ledger.export([EpisodeId("live"), each])):
        with pytest.raises(StaleAttempt) as caught:
            read(episode)
        assert caught.value.episodes == (episode,)
    assert ledger.admit(episode, "new", ASK) is None


# ---- retire ------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P240")
def test_retire_reports_each_id_once_and_reads_are_stale(ledger: CaptureLedger) -> None:
    conversation = talk(ledger, R0, 2)
    made(ledger, S0, "s")
    found = ledger.retire([R0, EpisodeId("never", 3), R0, EpisodeId("never", 3), S0])
    assert (found.removed, found.absent) == ((R0, S0), (EpisodeId("never", 3),))
    assert_refused(ledger, R0)
    assert ledger.admit(R0, "next", conversation) is None
    made(ledger, R1, "fresh", conversation, "a")
    assert ledger.manifest(R1)["calls"][0]["parent_id"] == ""
    assert ledger.retire([]) == type(found)((), ())


@pytest.mark.behaviour("P121")
def test_retiring_attempt_1_fences_0_and_1_and_not_2(ledger: CaptureLedger, tmp_path: Path) -> None:
    for episode in (R0, R1, R2):
        made(ledger, episode, f"c{episode.attempt}")
    found = ledger.retire([R1])
    assert (found.removed, found.absent) == ((R1,), ())
    for each in (ledger, CaptureLedger(tmp_path)):
        assert_refused(each, R0)
        assert_refused(each, R1)
        assert calls(each, R2) == ["c2"]
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["r-a2.rows"]
    ledger.retire([R0])
    assert_refused(ledger, R1)


@pytest.mark.behaviour("P241")
def test_retiring_again_writes_nothing_and_syncs_once(ledger: CaptureLedger, files: SpyFiles, tmp_path: Path) -> None:
    made(ledger, R0, "one")
    made(ledger, S0, "s")
    never = EpisodeId("never", 7)
    ledger.retire([R1, never])
    log = (tmp_path / "fences.log").read_bytes()
    files.log.clear()
    again = ledger.retire([R1, R0, never])
    assert (again.removed, again.absent) == ((), (R1, R0, never))
    assert (files.count("sync"), files.count("append"), files.count("remove")) == (1, 0, 0)
    assert (tmp_path / "fences.log").read_bytes() == log
    assert_refused(ledger, never)
    assert_refused(ledger, EpisodeId("never", 0))
    assert ledger.admit(EpisodeId("never", 8), "new", ASK)
    assert calls(ledger, S0) == ["s"]


@pytest.mark.behaviour("P241")
@pytest.mark.parametrize("count", [1, 100])
def test_a_retire_syncs_once_however_many_it_fences(ledger: CaptureLedger, files: SpyFiles, count: int) -> None:
    for number in range(count):
        made(ledger, EpisodeId(f"x{number}"), "one")
    files.log.clear()
    ledger.retire([EpisodeId(f"x{number}") for number in range(count)])
    counts = {action: files.count(action) for action in ("sync", "sync_dir", "append", "names", "remove")}
    assert counts == {"sync": 1, "sync_dir": 0, "append": 1, "names": 2, "remove": count}


@pytest.mark.behaviour("P242")
@pytest.mark.parametrize("staged", [True, False])
def test_a_late_row_of_a_fenced_attempt_is_dropped_with_a_warning(
    ledger: CaptureLedger, tmp_path: Path, caplog: pytest.LogCaptureFixture, staged: bool
) -> None:
    admission = admitted(ledger, R1, "late")
    CaptureLedger(tmp_path).retire([R1])
    with caplog.at_level(logging.WARNING):
        if staged:
            kept = ledger.append_staged(admission, coordinates(admission), "resp", said("ok"))
        else:
            kept = ledger.append_failure(admission, "gone")
    assert kept is False
    (record,) = caplog.records
    assert "r-a1/late" in record.getMessage()
    assert list((tmp_path / "rows").iterdir()) == []


@pytest.mark.behaviour("P243")
def test_a_call_on_a_fenced_attempt_gets_no_admission(ledger: CaptureLedger, tmp_path: Path) -> None:
    """A root, a follower or a continuation; in the other process as in this one."""
    conversation = talk(ledger, R0, 1)
    other = CaptureLedger(tmp_path)
    cut = Continuation("r", "c9", ("cuts/r/c9/x",), 1, "d" * 64, 8, 7)
    admission = other.admit(R0, "before", conversation, cut)
    assert admission is not None
    assert (admission.parent_id, admission.continuation) == ("c0", cut)
    ledger.retire([R0])
    for each in (ledger, other):
        assert each.admit(R0, "root", ASK) is None
        assert each.admit(R0, "follower", conversation) is None
        assert each.admit(R0, "continuation", conversation, cut) is None


@pytest.mark.behaviour("P244")
def test_the_fence_is_looked_up_only_when_a_file_would_be_created(ledger: CaptureLedger, files: SpyFiles) -> None:
    pending = [admitted(ledger, R0, f"c{at}") for at in range(5)]
    files.log.clear()
    for at, admission in enumerate(pending):
        ledger.append_staged(admission, coordinates(admission), "resp", said("ok"))
        assert (files.count("open", "fences"), files.count("create")) == (2, 1), f"append {at}"


@pytest.mark.behaviour("P244")
@pytest.mark.parametrize("moment", ["create", "append"])
def test_a_file_created_while_the_fence_arrived_is_removed(
    ledger: CaptureLedger, files: SpyFiles, tmp_path: Path, moment: str
) -> None:
    """The retire comes after the look, and runs whole: before the file is there, or when it is and is empty."""
    other = CaptureLedger(tmp_path)
    admission = admitted(ledger, R0, "late")
    looks = 0

    def retire(action: str, name: str) -> None:
        nonlocal looks
        looks += (action, name) == ("open", "fences.log")
        if (moment == "create" and action == "create") or (moment == "append" and looks == 2):
            files.before = None
            assert other.retire([R0]).removed == ((R0,) if moment == "append" else ())

    files.before = retire
    assert not ledger.append_staged(admission, coordinates(admission), "resp", said("ok"))
    assert list((tmp_path / "rows").iterdir()) == []
    assert_refused(ledger, R0)


@pytest.mark.behaviour("P244")
def test_a_file_is_not_removed_if_the_fence_is_gone_again(
    ledger: CaptureLedger, files: SpyFiles, tmp_path: Path
) -> None:
    """Retired while it was created; deleted and used again before it would be removed."""
    other = CaptureLedger(tmp_path)
    admission = admitted(ledger, R0, "late")

    def interfere(action: str, _: str) -> None:
        if action == "create":
            other.retire([R0])
        if action == "lock":
            files.before = None
            other.delete(["r"])
            made(other, R0, "reused")

    files.before = interfere
    assert not ledger.append_staged(admission, coordinates(admission), "resp", said("ok"))
    assert calls(ledger, R0) == ["reused"]


@pytest.mark.behaviour("P245")
def test_retiring_attempt_1000_costs_what_attempt_1_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # counted, and too slow to wait 1,000 times for
    costs = []
    for name, before in (("young", 0), ("old", 999)):
        files = SpyFiles()
        ledger = CaptureLedger(tmp_path / name, files=files)
        for attempt in range(before):
            made(ledger, EpisodeId("r", attempt), "one")
            ledger.retire([EpisodeId("r", attempt)])
        made(ledger, EpisodeId("r", before), "one")
        files.log.clear()
        ledger.retire([EpisodeId("r", before)])
        costs.append([action for action, _ in files.log])
    assert costs[0] == costs[1]


@pytest.mark.behaviour("P246")
def test_after_a_retire_only_the_fence_is_left_on_disk(ledger: CaptureLedger, tmp_path: Path) -> None:
    for episode in (R0, R1):
        talk(ledger, episode, 2, prefix="secret")
        tokens = tmp_path / "tokens" / f"{episode.capture_key}.tokens"
        tokens.parent.mkdir(exist_ok=True)
        tokens.write_bytes(b"secret")
    ledger.retire([R1])
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"fences.log", "lock"}
    assert orjson.loads((tmp_path / "fences.log").read_bytes().splitlines()[-1]) == [["r", 1]]
    assert b"secret" not in (tmp_path / "fences.log").read_bytes()


# ---- what a caller gives -----------------------------------------------------------------------------------


@pytest.mark.behaviour("P248")
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda ledger: ledger.retire("r"), TypeError),
        (lambda ledger: ledger.retire(R0), TypeError),
        (lambda ledger: ledger.retire([R0, "s"]), TypeError),
        (lambda ledger: ledger.discard("r"), TypeError),
        (lambda ledger: ledger.discard([R0, None]), TypeError),
        (lambda ledger: ledger.delete("r"), TypeError),
        (lambda ledger: ledger.delete(b"r"), TypeError),
        (lambda ledger: ledger.delete(["r", R0]), TypeError),
        (lambda ledger: ledger.delete(["r", ""]), InvalidArgument),
        (lambda ledger: ledger.delete(["r", "s-a1"]), InvalidArgument),
        (lambda ledger: ledger.delete(["r", "../s"]), InvalidArgument),
    ],
)
def test_a_bare_string_or_one_bad_id_changes_nothing(
    ledger: CaptureLedger, tmp_path: Path, call: Callable[[Any], object], error: type[Exception]
) -> None:
    made(ledger, R0, "one")
    made(ledger, S0, "s")
    ledger.retire([EpisodeId("t")])
    log = (tmp_path / "fences.log").read_bytes()
    with pytest.raises(error):
        call(ledger)
    assert (tmp_path / "fences.log").read_bytes() == log
    assert (calls(ledger, R0), calls(ledger, S0)) == (["one"], ["s"])


# ---- delete and discard ------------------------------------------------------------------------------------


@pytest.mark.behaviour("P249")
def test_delete_frees_ids_for_reuse_also_of_a_live_ledger(
    ledger: CaptureLedger, files: SpyFiles, tmp_path: Path
) -> None:
    conversation = talk(ledger, R0, 1)
    talk(ledger, R2, 1)
    talk(ledger, S0, 1)
    live = talk(ledger, EpisodeId("live"), 1)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "r-a2.tokens").write_bytes(b"x")
    ledger.retire([R1])
    files.log.clear()
    ledger.delete(["r", "live", "r"])
    assert (files.count("sync"), files.count("sync_dir", "rows"), files.count("sync_dir", "tokens")) == (1, 1, 1)
    assert list((tmp_path / "tokens").iterdir()) == []
    for episode, asked in ((R0, conversation), (R2, conversation), (EpisodeId("live"), live)):
        assert calls(ledger, episode) == []
        admission = admitted(ledger, episode, "again", asked)
        assert (admission.mode, admission.number) == ("text", 1)
    assert calls(ledger, S0) == ["c0"]
    assert calls(CaptureLedger(tmp_path), R1) == []


@pytest.mark.behaviour("P118", "P249")
def test_discard_removes_one_attempt_and_no_fence(ledger: CaptureLedger, files: SpyFiles, tmp_path: Path) -> None:
    conversation = talk(ledger, R0, 1)
    for episode in (R1, R2):
        talk(ledger, episode, 1)
    ledger.retire([R0])
    files.log.clear()
    ledger.discard([R1])
    assert (files.count("sync_dir", "rows"), files.count("append"), files.count("names")) == (1, 0, 0)
    assert_refused(ledger, R0)
    assert (calls(ledger, R1), calls(ledger, R2)) == ([], ["c0"])
    admission = admitted(ledger, R1, "again", conversation)
    assert (admission.mode, admission.number) == ("text", 1)


@pytest.mark.behaviour("P249")
def test_every_non_empty_batch_syncs_even_if_nothing_was_there(ledger: CaptureLedger, files: SpyFiles) -> None:
    files.log.clear()
    ledger.discard([EpisodeId("never")])
    assert files.count("sync_dir", "rows") == 1
    ledger.delete(["never"])
    assert (files.count("sync_dir", "rows"), files.count("sync", "fences"), files.count("append")) == (2, 1, 0)
    files.log.clear()
    ledger.discard([])
    ledger.delete([])
    assert files.log == []


@pytest.mark.behaviour("P250")
def test_a_ledger_recreated_behind_a_delete_survives_a_retire_under_way(
    ledger: CaptureLedger, files: SpyFiles, tmp_path: Path
) -> None:
    """The delete comes between the fences and the removal: what is no longer fenced stays, the rest goes."""
    other = CaptureLedger(tmp_path)
    made(ledger, R0, "dead")
    made(ledger, S0, "dead")
    locks = 0

    def delete(action: str, _: str) -> None:
        nonlocal locks
        locks += action == "lock"
        if locks == 2:
            files.before = None
            assert other.admit(R0, "fenced", ASK) is None
            other.delete(["r"])
            made(other, R0, "reused")

    files.before = delete
    found = ledger.retire([R0, S0])
    assert (found.removed, found.absent) == ((S0,), (R0,))
    assert_refused(ledger, S0)
    assert calls(ledger, R0) == calls(other, R0) == ["reused"]


# ---- loss of power, failing disks --------------------------------------------------------------------------


@pytest.mark.behaviour("P247")
@pytest.mark.parametrize("loss", list(Loss))
def test_a_fence_is_durable_before_any_ledger_is_unlinked(loss: Loss) -> None:
    """After every step of a retire and every loss: what is gone is refused, and a finished retire stands."""
    files = RecordingLedgerFiles()
    ledger = CaptureLedger(f"{ROOT}/ledger", files=files)
    for episode in (R0, R1, S0):
        made(ledger, episode, f"c-{episode}")
    before = len(files.steps)
    ledger.retire([R1, S0])
    fenced_at = []
    for count in range(before, len(files.steps) + 1):
        image = RecordingLedgerFiles().after(files.image(count, loss))
        after = CaptureLedger(f"{ROOT}/ledger", files=image)
        for episode in (R0, R1, S0):
            try:
                assert calls(after, episode) == [f"c-{episode}"]
            except StaleAttempt:
                assert after.admit(episode, "new", ASK) is None
                fenced_at.append(count)
    assert fenced_at.count(len(files.steps)) == 3
    removals = [at for at, step in enumerate(files.steps) if step.kind == "remove" and at >= before]
    syncs = [at for at, step in enumerate(files.steps) if step.kind == "fsync" and at >= before]
    assert len(removals) == 3
    assert len(syncs) == 1
    assert syncs[0] < removals[0]
    assert fenced_at.count(removals[0]) == 3


@pytest.mark.behaviour("P249")
@pytest.mark.parametrize("loss", list(Loss))
def test_after_a_delete_no_loss_brings_old_rows_back_to_a_reused_id(loss: Loss) -> None:
    files = RecordingLedgerFiles()
    ledger = CaptureLedger(f"{ROOT}/ledger", files=files)
    made(ledger, R0, "old")
    ledger.retire([R0])
    made(ledger, R1, "older")
    before = len(files.steps)
    ledger.delete(["r"])
    for count in range(before, len(files.steps) + 1):
        image = RecordingLedgerFiles().after(files.image(count, loss))
        after = CaptureLedger(f"{ROOT}/ledger", files=image)
        if after.admit(R0, "new", ASK) is not None:
            assert (calls(after, R0), calls(after, R1)) == ([], [])
    assert admitted(CaptureLedger(f"{ROOT}/ledger", files=files), R0, "new").number == 1


def test_a_retire_that_fails_at_any_step_is_made_good_by_the_next() -> None:
    for at in range(4):
        for lasting in (False, True):
            files = RecordingLedgerFiles()
            ledger = CaptureLedger(f"{ROOT}/ledger", files=files)
            for episode in (R0, R1):
                made(ledger, episode, "one")
            files.fault = Fault(len(files.steps) + at, 5, after=lasting)
            with pytest.raises(StateUnwritable):
                ledger.retire([R1])
            files.fault = None
            ledger.retire([R1])
            for loss in Loss:
                image = RecordingLedgerFiles().after(files.image(len(files.steps), loss))
                assert_refused(CaptureLedger(f"{ROOT}/ledger", files=image), R0)


def test_after_a_failed_sync_the_fences_are_written_anew() -> None:
    """The system may take what it failed to write for written: a second sync of it would prove nothing."""
    files = RecordingLedgerFiles()
    ledger = CaptureLedger(f"{ROOT}/ledger", files=files)
    ledger.retire([S0])
    files.fault = Fault(len(files.steps) + 1, 5)
    with pytest.raises(StateUnwritable):
        ledger.retire([R1])
    steps = len(files.steps)
    ledger.retire([R1])
    kinds = [step.kind for step in files.steps[steps:]]
    assert kinds == ["create", "write", "write", "fsync", "rename", "sync_dir"]
    assert_refused(ledger, R1)
    assert_refused(ledger, S0)


# ---- the log -----------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P253")
def test_a_torn_last_fence_never_counted_and_a_bad_one_elsewhere_is_state_corrupt(
    ledger: CaptureLedger, tmp_path: Path
) -> None:
    path = tmp_path / "fences.log"
    ledger.retire([R0])
    path.write_bytes(path.read_bytes() + b'[["s",3],["t"')
    for each in (ledger, CaptureLedger(tmp_path)):
        assert_refused(each, R0)
        assert calls(each, S0) == []
    ledger.retire([EpisodeId("u")])
    for each in (ledger, CaptureLedger(tmp_path)):
        assert_refused(each, EpisodeId("u"))
        assert calls(each, S0) == []
    for bad in (b'[["s"]]', b"{}x", b'[["s",-2]]', b"7"):
        path.write_bytes(path.read_bytes() + bad + b"\n")
        for _ in range(2):
            with pytest.raises(StateCorrupt, match="bad line at byte"):
                ledger.manifest(S0)
        with pytest.raises(StateCorrupt, match="bad line at byte"):
            CaptureLedger(tmp_path).retire([S0])
        path.write_bytes(path.read_bytes()[: -len(bad) - 1])
    assert calls(ledger, S0) == []


def test_a_missing_fence_log_is_never_taken_for_no_fences(ledger: CaptureLedger, tmp_path: Path) -> None:
    ledger.retire([R0])
    (tmp_path / "fences.log").unlink()
    for call in (lambda: ledger.manifest(R0), lambda: ledger.admit(R0, "x", ASK), lambda: ledger.retire([R0])):
        with pytest.raises(StateCorrupt, match="is gone"):
            call()


def test_the_log_is_written_anew_when_most_of_it_no_longer_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers in the middle of the old file notice that it was replaced; no fence is lost or comes back."""
    monkeypatch.setattr(fences, "SLACK", 20)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    ledger, reader = CaptureLedger(tmp_path), CaptureLedger(tmp_path)
    ledger.retire([EpisodeId("kept", 3)])
    sizes = []
    for number in range(100):
        rollout = f"x{number}"
        ledger.retire([EpisodeId(rollout)])
        assert reader.admit(EpisodeId(rollout), "fenced", ASK) is None
        ledger.delete([rollout])
        assert reader.admit(EpisodeId(rollout), "freed", ASK)
        assert reader.admit(EpisodeId("kept", 3), "kept", ASK) is None
        sizes.append((tmp_path / "fences.log").stat().st_size)
    assert max(sizes) < 1000
    assert {path.name for path in tmp_path.iterdir()} == {"fences.log", "lock", "rows"}
    assert dict(Fences(SpyFiles(), str(tmp_path / "fences.log")).read()) == {"kept": 3}


def test_a_fence_log_begun_and_not_finished_is_made_again(tmp_path: Path) -> None:
    """Killed while the first ledger was built: the next one is built all the same."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "fences.log.new").write_bytes(b"half")
    ledger = CaptureLedger(tmp_path)
    ledger.retire([R0])
    assert_refused(CaptureLedger(tmp_path), R0)
    assert exported(ledger, S0) == []
    assert talk(ledger, S0, 1) == [user("q0"), said("a0"), user("q1")]
