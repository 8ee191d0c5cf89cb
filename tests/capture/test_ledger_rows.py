"""Rows: appended, read, torn, poisoned, durable; and the names of their files."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.capture import CaptureAdmission, CaptureLedger
from gym_ckpt_grpc.capture.ledger_names import MAX_NAME, LedgerPaths
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateUnwritable, UsageError
from gym_ckpt_grpc.protocol.ids import MAX_ATTEMPT, MAX_ROLLOUT_ID, EpisodeId
from tests.capture.ledger_rig import (
    ASK,
    R0,
    R1,
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
def ledger(tmp_path: Path) -> CaptureLedger:
    return CaptureLedger(tmp_path)


def rows_file(tmp_path: Path, episode: EpisodeId = R0) -> Path:
    return tmp_path / "rows" / f"{episode.capture_key}.rows"


def test_a_manifest_has_the_coordinates_of_each_call(ledger: CaptureLedger) -> None:
    root = made(ledger, R0, "one", ASK, "first")
    follower = made(ledger, R0, "two", [*ASK, said("first"), user("more")], "second")
    failed = admitted(ledger, R0, "three")
    ledger.append_failure(failed, "the worker went away")
    manifest = ledger.manifest(R0)
    assert manifest["capture_key"] == "r"
    assert manifest["failures"] == [{"call_id": "three", "number": 3, "reason": "the worker went away"}]
    first, second = manifest["calls"]
    want = coordinates(follower, "second")
    assert second == {
        "call_id": "two",
        "capture_key": "r",
        "number": 2,
        "mode": "token_in",
        "parent_id": "one",
        "staging_key": "r/two",
        "staging_chain": ["r/one", "r/two"],
        "weight_version": 7,
        "previous_length": 5,
        "added_length": 5,
        "total_length": 10,
        "staging_digest": want.staging_digest,
        "extras_digest": want.extras_digest,
        "chain_hash": want.chain_hash,
        "cumulative_hash": want.cumulative_hash,
        "response_id": "resp-two",
    }
    assert (first["mode"], first["parent_id"], first["number"]) == ("text", "", 1)
    assert (root.mode, root.staging_chain) == ("text", ())


def test_calls_are_in_the_order_they_were_admitted(ledger: CaptureLedger) -> None:
    first, second = admitted(ledger, R0, "first"), admitted(ledger, R0, "second")
    for admission in (second, first):
        ledger.append_staged(admission, coordinates(admission), "resp", said("ok"))
    assert (exported(ledger, R0), calls(ledger, R0)) == (["second", "first"], ["first", "second"])


def test_an_attempt_without_a_ledger_is_empty(ledger: CaptureLedger) -> None:
    assert ledger.manifest(R0) == {"capture_key": "r", "calls": [], "failures": []}
    assert ledger.export([R0, S0]) == {R0: [], S0: []}


# ---- torn and bad lines ------------------------------------------------------------------------------------


@pytest.mark.behaviour("P253")
def test_a_torn_last_line_is_ignored_and_the_next_append_is_readable(tmp_path: Path) -> None:
    """Torn anywhere in the second row, by a process that died there."""
    whole = CaptureLedger(tmp_path / "whole")
    made(whole, R0, "one", ASK, "a")
    size = rows_file(tmp_path / "whole").stat().st_size
    made(whole, R0, "two", ASK, "b")
    data = rows_file(tmp_path / "whole").read_bytes()
    ledger = CaptureLedger(tmp_path / "torn", sync_rows=False)
    path = rows_file(tmp_path / "torn")
    for cut in (*range(size, len(data), 7), len(data) - 1):
        path.write_bytes(data[:cut])
        assert exported(ledger, R0) == ["one"]
        made(ledger, R0, f"three-{cut}", ASK, "c")
        assert exported(ledger, R0) == ["one", f"three-{cut}"]


@pytest.mark.behaviour("P253")
@pytest.mark.parametrize(
    "bad",
    [
        b'{"kind":"staged","call',
        b"[]",
        b"",
        b'{"kind":"failure","call_id":"x","number":1,"reason":"","other":1}',
        b'{"kind":"failure","call_id":"x","number":0,"reason":""}',
        b'{"kind":"unheard","call_id":"x","number":1,"reason":""}',
        b"\x00\x00\x00",
    ],
    ids=["torn", "list", "empty", "unknown field", "number", "kind", "zeros"],
)
def test_a_bad_line_elsewhere_is_state_corrupt(ledger: CaptureLedger, tmp_path: Path, bad: bytes) -> None:
    for call_id in ("one", "two"):
        made(ledger, R0, call_id)
    path = rows_file(tmp_path)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bad + b"\n" + second)
    for read in (ledger.manifest, lambda episode: ledger.export([episode]), lambda e: ledger.admit(e, "n", ASK)):
        with pytest.raises(StateCorrupt, match="ledger of r has a bad line at byte") as caught:
            read(R0)
        assert caught.value.episodes == (R0,)
    assert exported(ledger, S0) == []


def test_a_line_that_another_process_has_half_written_is_not_lost(tmp_path: Path) -> None:
    """Seen as torn, it is completed before the next line: the mark lands behind it and cancels nothing."""
    files = SpyFiles()
    ledger = CaptureLedger(tmp_path, files=files)
    for call_id in ("one", "two"):
        made(ledger, R0, call_id)
    path = rows_file(tmp_path)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:40])

    def complete(action: str, _: str) -> None:
        if action == "append":
            files.before = None
            with path.open("ab") as file:
                file.write(second[40:])

    files.before = complete
    made(ledger, R0, "three")
    assert exported(ledger, R0) == exported(CaptureLedger(tmp_path), R0) == ["one", "two", "three"]


# ---- poison and lineage ------------------------------------------------------------------------------------


@pytest.mark.behaviour("P254")
def test_lineage_only_rows_resolve_parents_and_stay_out_of_the_manifest(ledger: CaptureLedger) -> None:
    admission = admitted(ledger, R0, "draft")
    ledger.append_staged(admission, coordinates(admission), "", said("ok"), lineage_only=True)
    follower = made(ledger, R0, "final", [*ASK, said("ok"), user("more")], "done")
    assert (follower.parent_id, follower.staging_chain) == ("draft", ("r/draft",))
    assert (calls(ledger, R0), exported(ledger, R0)) == (["final"], ["draft", "final"])
    draft, final = ledger.export([R0])[R0]
    assert [ledger.staging_keys(row) for row in (draft, final)] == [("", "r/draft"), ("", "r/final")]


@pytest.mark.behaviour("P254")
@pytest.mark.parametrize("missing", ["response_id", "staging_digest", "extras_digest", "chain_hash", "cumulative_hash"])
def test_a_row_without_response_id_or_a_hash_poisons_the_manifest(ledger: CaptureLedger, missing: str) -> None:
    made(ledger, R0, "good")
    admission = admitted(ledger, R0, "bad")
    changes: dict[str, Any] = {} if missing == "response_id" else {missing: ""}
    response_id = "" if missing == "response_id" else "resp"
    ledger.append_staged(admission, coordinates(admission, "other", **changes), response_id, said("other"))
    with pytest.raises(StateCorrupt, match=f"bad has no {missing}") as caught:
        ledger.manifest(R0)
    assert caught.value.episodes == (R0,)
    assert exported(ledger, R0) == ["good", "bad"]


def test_what_a_worker_could_not_stage_is_a_failure(ledger: CaptureLedger) -> None:
    failed = admitted(ledger, R0, "failed")
    ledger.append_staged(failed, coordinates(failed, capture_failed="disk full \udc80"), "resp", said("ok"))
    assert ledger.manifest(R0)["failures"] == [{"call_id": "failed", "number": 1, "reason": "disk full ?"}]
    (row,) = ledger.export([R0])[R0]
    assert (ledger.call_id(row), ledger.staging_keys(row), ledger.stamped(row, R0)) == ("failed", None, row)


@pytest.mark.parametrize(
    "changes",
    [
        {"call_id": "other"},
        {"capture_key": "r-a1"},
        {"mode": "token_in"},
        {"previous_length": 1, "total_length": 6},
        {"staging_chain": ("r/else", "r/call")},
        {"staging_chain": ()},
        {"staging_chain": ("r/else",)},
        {"staging_key": "", "staging_chain": ("",)},
        {"total_length": 6},
        {"weight_version": -1},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_coordinates_of_another_call_never_spoil_the_ledger(ledger: CaptureLedger, changes: dict[str, Any]) -> None:
    admission = admitted(ledger, R0, "call")
    assert ledger.append_staged(admission, coordinates(admission, **changes), "resp", said("ok"))
    manifest = ledger.manifest(R0)
    assert (manifest["calls"], [failure["call_id"] for failure in manifest["failures"]]) == ([], ["call"])


def test_a_call_has_one_row(ledger: CaptureLedger, tmp_path: Path) -> None:
    admission = made(ledger, R0, "one")
    with pytest.raises(UsageError, match="one was not admitted"):
        ledger.append_failure(admission, "late")
    foreign = CaptureAdmission(capture_key="r", call_id="two", mode="text", number=1)
    with pytest.raises(UsageError, match="two was not admitted"):
        ledger.append_staged(foreign, coordinates(foreign), "resp", said("ok"))
    assert exported(ledger, R0) == ["one"]


@pytest.mark.parametrize("call_id", ["", "a/b", "../x", "x" * 129, "x\n"])
def test_a_bad_call_id_is_refused(ledger: CaptureLedger, call_id: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ledger.admit(R0, call_id, ASK)
    assert [violation.field for violation in caught.value.violations] == ["call_id"]


# ---- durability --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync_rows", [True, False])
def test_a_row_is_durable_when_its_append_returns_if_rows_are_synced(sync_rows: bool) -> None:
    """Else a loss of power may take it; the death of the process never does."""
    files = RecordingLedgerFiles()
    ledger = CaptureLedger(f"{ROOT}/ledger", files=files, sync_rows=sync_rows)
    for call_id in ("one", "two"):
        made(ledger, R0, call_id)
        for loss in (Loss.CRASH, Loss.POWER):
            image = RecordingLedgerFiles().after(files.image(len(files.steps), loss))
            found = exported(CaptureLedger(f"{ROOT}/ledger", files=image), R0)
            assert (call_id in found) is (sync_rows or loss is Loss.CRASH)


@pytest.mark.parametrize("sync_rows", [True, False])
def test_a_failed_append_can_be_made_again(sync_rows: bool) -> None:
    """A disk that fails at any step: the append raises, and the same one succeeds later."""
    for at in range(8):
        files = RecordingLedgerFiles()
        ledger = CaptureLedger(f"{ROOT}/ledger", files=files, sync_rows=sync_rows)
        admission = admitted(ledger, R0, "one")
        files.fault = Fault(len(files.steps) + at, 28)
        try:
            ledger.append_staged(admission, coordinates(admission), "resp", said("ok"))
        except StateUnwritable:
            files.fault = None
            ledger.append_staged(admission, coordinates(admission), "resp", said("ok"))
        assert (exported(ledger, R0), calls(ledger, R0)) == (["one"], ["one"])
        image = RecordingLedgerFiles().after(files.image(len(files.steps), Loss.POWER))
        assert exported(CaptureLedger(f"{ROOT}/ledger", files=image), R0) == (["one"] if sync_rows else [])


def test_a_write_that_comes_short_is_an_error_and_a_torn_line(
    ledger: CaptureLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(ledger, R0, "one")
    admission = admitted(ledger, R0, "two")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: write(handle, bytes(data)[:30]))
        with pytest.raises(StateUnwritable, match="30 of"):
            ledger.append_staged(admission, coordinates(admission), "resp", said("ok"))
    assert exported(ledger, R0) == ["one"]
    ledger.append_staged(admission, coordinates(admission), "resp", said("ok"))
    assert calls(ledger, R0) == ["one", "two"]


# ---- names -------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P256")
def test_the_longest_rollout_id_with_a_ten_digit_attempt_has_a_working_ledger(ledger: CaptureLedger) -> None:
    longest = "x" * MAX_ROLLOUT_ID
    episodes = [EpisodeId(longest, attempt) for attempt in (0, 1, MAX_ATTEMPT - 1, MAX_ATTEMPT)]
    episodes.append(EpisodeId("x" * (MAX_ROLLOUT_ID - 1) + "y", MAX_ATTEMPT))
    for number, episode in enumerate(episodes):
        talk(ledger, episode, 2, prefix=f"c{number}-")
    for number, episode in enumerate(episodes):
        assert calls(ledger, episode) == [f"c{number}-0", f"c{number}-1"]
    rows = ledger.export([episodes[2]])
    ledger.activate(ledger.stage({episodes[3]: rows[episodes[2]]}))
    assert calls(ledger, episodes[3]) == ["c2-0", "c2-1"]
    found = ledger.retire(episodes[:4])
    assert (found.removed, found.absent) == ((episodes[3],), tuple(episodes[:3]))
    made(ledger, EpisodeId("x"), "short")
    ledger.delete([longest])
    assert calls(ledger, EpisodeId("x")) == ["short"]
    assert [calls(ledger, episode) for episode in episodes] == [[], [], [], [], ["c4-0", "c4-1"]]


@pytest.mark.behaviour("P256")
def test_no_two_attempts_share_a_name_and_none_is_too_long(rng: random.Random) -> None:
    """Also ids that differ in their last characters only, or look like attempts of each other."""
    paths = LedgerPaths("/ledger")
    rollouts = {"r", "r1", "r-a1x", "r-a", "r-a0", "r-a01", "x.rows", "a" * 181, "a" * 182, "a" * 256}
    while len(rollouts) < 300:
        size = rng.choice((1, 2, 3, 180, 181, 182, 190, 255, 256))
        text = "x" * (size - min(size, 4)) + "".join(rng.choice("ax1.-_") for _ in range(min(size, 4)))
        try:
            rollouts.add(EpisodeId(text).rollout_id)
        except ValueError:
            continue
    episodes = [EpisodeId(each, attempt) for each in rollouts for attempt in (0, 1, 12, MAX_ATTEMPT)]
    for name, directory in ((paths.rows_of, paths.rows), (paths.tokens_of, paths.tokens)):
        names = [Path(name(episode)).name for episode in episodes]
        assert len(set(names)) == len(names)
        assert max(map(len, names)) <= MAX_NAME
        assert [each.attempt for each in paths.attempts(directory, names)] == [each.attempt for each in episodes]


def test_rows_of_one_attempt_survive_a_new_process(tmp_path: Path) -> None:
    conversation = talk(CaptureLedger(tmp_path), R1, 3)
    again = CaptureLedger(tmp_path)
    admission = admitted(again, R1, "next", conversation)
    assert (admission.number, admission.parent_id, admission.previous_length) == (4, "c2", 15)
