"""Imports: rows of a restore under the next attempts, whole or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.capture.imports import WrittenRows
from gym_ckpt_grpc.control import Ledger, Row
from gym_ckpt_grpc.protocol.errors import StaleAttempt, StateUnwritable, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.local_files import LocalSink
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
    restore,
    said,
    talk,
    user,
)
from tests.storage.recording_files import ROOT, Fault, Loss

S1 = S0.next()


@pytest.fixture
def files() -> SpyFiles:
    return SpyFiles()


@pytest.fixture
def ledger(tmp_path: Path, files: SpyFiles) -> CaptureLedger:
    return CaptureLedger(tmp_path, files=files, sync_rows=False)


def stored(rows: Any) -> Any:
    """Rows as a record gives them back: through JSON."""
    return orjson.loads(orjson.dumps(rows))


def fence_of(ledger: CaptureLedger, rollout: str) -> int:
    return ledger._fences.read().get(rollout, -1)


def test_it_is_the_port_of_the_policy_model(ledger: CaptureLedger) -> None:
    port: Ledger = ledger
    made(ledger, R0, "one")
    rows = port.export([R0])[R0]
    assert stored(rows) == rows
    port.check_rows(rows)
    staged = port.stage({R1: rows})
    assert calls(ledger, R1) == []
    port.drop(staged)
    port.drop(staged)
    with pytest.raises(TypeError):
        port.activate(object())


# ---- what carries over -------------------------------------------------------------------------------------


@pytest.mark.behaviour("P106")
def test_restored_rows_resolve_the_parent_with_the_staging_chain_of_the_source(tmp_path: Path) -> None:
    """In a process that never saw the source attempt, from rows that went through a record."""
    source = CaptureLedger(tmp_path / "source")
    conversation = talk(source, R0, 3)
    target = CaptureLedger(tmp_path / "target")
    restore(target, {R0: stored(source.export([R0])[R0])})
    admission = admitted(target, R1, "next", conversation)
    assert (admission.capture_key, admission.mode, admission.parent_id) == ("r-a1", "token_in", "c2")
    assert (admission.staging_chain, admission.previous_length) == (("r/c0", "r/c1", "r/c2"), 15)
    assert admission.number == 4
    assert target.append_staged(admission, coordinates(admission, "a3"), "resp", said("a3"))
    after = admitted(target, R1, "after", [*conversation, said("a3"), user("q4")])
    assert after.staging_chain == ("r/c0", "r/c1", "r/c2", "r-a1/next")


@pytest.mark.behaviour("P109")
def test_carried_over_calls_are_listed_under_the_key_they_were_staged_under(ledger: CaptureLedger) -> None:
    """Over a chain of restores each keeps its first stamp; failures have none."""
    episode = R0
    for attempt in range(3):
        talk(ledger, episode, attempt + 1, start=attempt)
        ledger.append_failure(admitted(ledger, episode, f"f{attempt}"), "lost")
        if attempt < 2:
            restore(ledger, {episode: stored(ledger.export([episode])[episode])})
            episode = episode.next()
    manifest = ledger.manifest(R2)
    assert [(call["call_id"], call["capture_key"]) for call in manifest["calls"]] == [
        ("c0", "r"),
        ("c1", "r-a1"),
        ("c2", "r-a2"),
    ]
    assert manifest["calls"][2]["staging_chain"] == ["r/c0", "r-a1/c1", "r-a2/c2"]
    assert [failure["call_id"] for failure in manifest["failures"]] == ["f0", "f1", "f2"]
    rows = ledger.export([R2])[R2]
    assert [row.get("capture_key") for row in rows] == ["r", None, "r-a1", None, None, None]
    assert [ledger.staging_keys(row) for row in rows] == [
        ("r", "r/c0"),
        None,
        ("r-a1", "r-a1/c1"),
        None,
        ("", "r-a2/c2"),
        None,
    ]
    assert [ledger.stamped(row, R2).get("capture_key") for row in rows] == ["r", None, "r-a1", None, "r-a2", None]


@pytest.mark.behaviour("P115", "P239", "P252")
def test_restoring_again_yields_exactly_the_checkpoints_rows(ledger: CaptureLedger, tmp_path: Path) -> None:
    """Also in a process that had followed the first replacement's ledger."""
    conversation = talk(ledger, R0, 2)
    rows = ledger.export([R0])
    other = CaptureLedger(tmp_path)
    replies = [*conversation, said("a2"), user("q3")]
    for run in range(4):
        restore(ledger, rows)
        assert exported(ledger, R1) == exported(other, R1) == ["c0", "c1"]
        writer, reader = (ledger, other) if run % 2 else (other, ledger)
        admission = made(writer, R1, f"run-{run}", conversation, "a2")
        assert (admission.parent_id, admission.number >= 3) == ("c1", True)
        for each in (writer, reader):
            assert admitted(each, R1, "next", replies).parent_id == f"run-{run}"


@pytest.mark.behaviour("P115")
def test_a_process_that_followed_the_dead_rows_sees_that_the_file_is_another_one(
    ledger: CaptureLedger, tmp_path: Path
) -> None:
    """It begins with the same call and has grown past where that process had read."""
    conversation = talk(ledger, R0, 2)
    rows = ledger.export([R0])
    other = CaptureLedger(tmp_path)
    restore(ledger, rows)
    made(ledger, R1, "dead", conversation, "dead")
    assert admitted(other, R1, "x", [*conversation, said("dead")]).parent_id == "dead"
    restore(ledger, rows)
    for number in range(3):
        made(ledger, R1, f"live-{number}", conversation, f"live {number}")
    assert admitted(other, R1, "y", [*conversation, said("dead")]).parent_id == ""
    assert admitted(other, R1, "z", [*conversation, said("live 1")]).parent_id == "live-1"


@pytest.mark.behaviour("P116")
def test_a_target_without_rows_has_its_dead_rows_cleared(ledger: CaptureLedger, tmp_path: Path) -> None:
    made(ledger, R1, "dead")
    restore(ledger, {R0: [], S0: []})
    assert calls(ledger, R1) == calls(CaptureLedger(tmp_path), R1) == []
    assert fence_of(ledger, "r") == 0


@pytest.mark.behaviour("P117")
def test_a_restore_fences_the_attempts_it_continues(ledger: CaptureLedger, tmp_path: Path) -> None:
    """All below the target, which may be higher than the next. A late row of one finds no file to get into."""
    made(ledger, R0, "one")
    late = admitted(ledger, R0, "late")
    ledger.activate(ledger.stage({EpisodeId("r", 3): ledger.export([R0])[R0]}))
    assert not ledger.append_staged(late, coordinates(late), "resp", said("ok"))
    for each in (ledger, CaptureLedger(tmp_path)):
        for attempt in range(3):
            with pytest.raises(StaleAttempt):
                each.manifest(EpisodeId("r", attempt))
        assert calls(each, EpisodeId("r", 3)) == ["one"]


@pytest.mark.behaviour("P251")
def test_an_import_removes_target_and_later_attempts_of_exactly_that_rollout(
    ledger: CaptureLedger, tmp_path: Path
) -> None:
    """Ledger, tokens and fence of them; look-alikes of other rollouts survive."""
    mine = [R1, R2, EpisodeId("r", 10), EpisodeId("r", 11)]
    others = [EpisodeId("r1", 2), EpisodeId("r-a1x", 3), EpisodeId("r1"), EpisodeId("r-a1x"), EpisodeId("rr", 1)]
    (tmp_path / "tokens").mkdir()
    for episode in (R0, *mine, *others):
        made(ledger, episode, f"c-{episode}")
        (tmp_path / "tokens" / f"{episode.capture_key}.tokens").touch()
    rows = ledger.export([R0])
    ledger.retire([EpisodeId("r", 10)])
    restore(ledger, rows)
    assert calls(ledger, R1) == ["c-r"]
    assert [calls(ledger, episode) for episode in mine[1:]] == [[], [], []]
    assert [calls(ledger, episode) for episode in others] == [[f"c-{episode}"] for episode in others]
    assert fence_of(ledger, "r") == 0
    left = {path.name for path in (tmp_path / "tokens").iterdir()}
    assert left == {f"{episode.capture_key}.tokens" for episode in others}
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {
        f"{episode.capture_key}.rows" for episode in (R1, *others)
    }


# ---- cost --------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P113")
def test_directory_syncs_of_an_import_are_the_same_for_1_and_for_100(tmp_path: Path) -> None:
    seen = []
    for count in (1, 100):
        files = SpyFiles()
        ledger = CaptureLedger(tmp_path / str(count) / "ledger", files=files, sync_rows=False)
        episodes = [EpisodeId(f"x{number}") for number in range(count)]
        for episode in episodes:
            made(ledger, episode, "one")
        rows = ledger.export(episodes)
        files.log.clear()
        restore(ledger, rows)
        syncs = [entry for entry in files.log if entry[0] in ("sync", "sync_dir", "append", "names")]
        seen.append([(action, "" if len(name) == 32 else name) for action, name in syncs])
        assert files.count("replace") == count
        assert [calls(ledger, episode.next()) for episode in episodes] == [["one"]] * count
    assert seen[0] == seen[1]
    assert [action for action, _ in seen[0]].count("sync_dir") <= 4


@pytest.mark.behaviour("P114")
async def test_the_loop_turns_between_any_two_files_of_an_export_and_an_import(
    ledger: CaptureLedger, files: SpyFiles
) -> None:
    """Off the loop a ledger never waits for it, and holds nothing up: it turns before each file is touched."""
    loop = asyncio.get_running_loop()
    episodes = [EpisodeId(f"x{number}") for number in range(100)]
    for episode in episodes:
        talk(ledger, episode, 2)
    turns = 0

    def turn(action: str, _: str) -> None:
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(10), f"the loop does not turn in {action}"
        nonlocal turns
        turns += 1

    files.before = turn
    rows = await asyncio.to_thread(ledger.export, episodes)
    assert turns > 100
    await asyncio.to_thread(restore, ledger, rows)
    assert turns > 300
    files.before = None
    assert [calls(ledger, episode.next()) for episode in episodes] == [["c0", "c1"]] * 100


# ---- failures ----------------------------------------------------------------------------------------------


def _bad(change: Mapping[str, Any]) -> list[dict[str, Any]]:
    good = {"kind": "failure", "call_id": "one", "number": 1, "reason": "x"}
    return [good, {**good, "call_id": "two", **change}]


@pytest.mark.behaviour("P252")
@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (_bad({"call_id": "one"}), "stands twice"),
        (_bad({"extra": 1}), "unknown field `extra`"),
        (_bad({"kind": "other"}), "Invalid value 'other'"),
        (_bad({"number": "2"}), "Expected `int`"),
        (_bad({"number": 0}), "Expected `int` >= 1"),
        (_bad({"kind": "staged"}), "missing required field|unknown field"),
        ([_bad({})[0], "text"], "rows"),
        ([_bad({})[0], None], "rows"),
    ],
)
def test_rows_that_cannot_be_are_refused_before_anything_changes(
    ledger: CaptureLedger, tmp_path: Path, rows: Sequence[Row], problem: str
) -> None:
    made(ledger, R1, "live")
    with pytest.raises(ValueError, match=problem) as caught:
        ledger.check_rows(rows)
    assert "rows[1]" in str(caught.value)
    with pytest.raises(ValueError, match=r"s-a1: rows\[1\]"):
        ledger.stage({R1: _bad({}), S1: rows})
    assert calls(ledger, R1) == ["live"]
    assert {path.name for path in tmp_path.iterdir()} == {"fences.log", "lock", "rows"}


@pytest.mark.parametrize(
    "change",
    [
        {"total_length": 6},
        {"staging_chain": []},
        {"staging_chain": ["r/other"]},
        {"capture_key": "../r"},
        {"mode": "other"},
        {"weight_version": True},
    ],
)
def test_staged_rows_that_contradict_themselves_are_refused(ledger: CaptureLedger, change: dict[str, Any]) -> None:
    made(ledger, R0, "one")
    (row,) = ledger.export([R0])[R0]
    with pytest.raises(ValueError, match=r"rows\[0\]"):
        ledger.check_rows([{**row, **change}])


def _before_import() -> tuple[RecordingLedgerFiles, CaptureLedger, dict[EpisodeId, list[Row]]]:
    """r has a dead replacement and a later one, s was retired; the rows are those of the checkpoint."""
    files = RecordingLedgerFiles()
    ledger = CaptureLedger(f"{ROOT}/ledger", files=files)
    made(ledger, R0, "kept")
    made(ledger, S0, "s")
    rows = {R1: ledger.export([R0])[R0], S1: []}
    made(ledger, R1, "dead")
    made(ledger, R2, "later")
    made(ledger, S1, "dead")
    ledger.drop(ledger.stage(rows))
    return files, ledger, rows


def _live(files: RecordingLedgerFiles) -> dict[str, bytes]:
    return {path: data for path, data in files.all_files().items() if "/imports/" not in path}


@pytest.mark.behaviour("P252")
@pytest.mark.parametrize("after", [False, True], ids=["undone", "done"])
def test_a_failed_stage_changes_nothing_live_and_leaves_nothing(after: bool) -> None:
    failed = 0
    for at in range(20):
        files, ledger, rows = _before_import()
        live = _live(files)
        files.fault = Fault(len(files.steps) + at, 28, after=after)
        try:
            ledger.stage(rows)
        except StateUnwritable:
            failed += 1
        assert _live(files) == live
        files.fault = None
        ledger.activate(ledger.stage(rows))
        assert (calls(ledger, R1), calls(ledger, R2), calls(ledger, S1)) == (["kept"], [], [])
    assert 5 <= failed < 20


@pytest.mark.behaviour("P252")
def test_an_import_whose_first_write_fails_changes_nothing() -> None:
    """The fences: the one write of the activation that may want for space."""
    files, ledger, rows = _before_import()
    staged = ledger.stage(rows)
    live = _live(files)
    files.fault = Fault(len(files.steps), 28)
    with pytest.raises(StateUnwritable):
        ledger.activate(staged)
    assert _live(files) == live


@pytest.mark.behaviour("P252")
@pytest.mark.parametrize("loss", list(Loss))
def test_an_import_cut_short_at_any_step_is_made_good_by_the_next(loss: Loss) -> None:
    """By a failing disk, a death or a loss of power; a finished one survives all of them."""
    files, ledger, rows = _before_import()
    start = len(files.steps)
    ledger.activate(ledger.stage(rows))
    for count in range(start, len(files.steps) + 1):
        image = RecordingLedgerFiles().after(files.image(count, loss))
        after = CaptureLedger(f"{ROOT}/ledger", files=image)
        if count < len(files.steps):
            after.activate(after.stage(rows))
        assert (exported(after, R1), exported(after, R2), exported(after, S1)) == (["kept"], [], [])
        assert after.admit(R0, "fenced", ASK) is None
        assert after.admit(S0, "fenced", ASK) is None
        after.drop(after.stage({}))
        assert not any("/imports/" in path for path in image.all_files())


def test_a_failing_disk_in_an_activation_is_made_good_by_the_next() -> None:
    failed = 0
    for at in range(20):
        files, ledger, rows = _before_import()
        staged = ledger.stage(rows)
        files.fault = Fault(len(files.steps) + at, 5)
        try:
            ledger.activate(staged)
        except StateUnwritable:
            failed += 1
            files.fault = None
            ledger.activate(ledger.stage(rows))
        assert (exported(ledger, R1), exported(ledger, R2), exported(ledger, S1)) == (["kept"], [], [])
    assert 6 <= failed < 20


def test_an_import_that_a_death_left_behind_is_removed_and_one_at_work_is_not(tmp_path: Path) -> None:
    first, second = CaptureLedger(tmp_path), CaptureLedger(tmp_path)
    made(first, R0, "one")
    rows = {R1: first.export([R0])[R0]}
    abandoned = first.stage(rows)
    assert isinstance(abandoned, WrittenRows)
    abandoned.lock.release()  # as the system does when a process dies
    at_work = first.stage(rows)
    assert isinstance(at_work, WrittenRows)
    second.drop(second.stage(rows))
    assert [path.name for path in (tmp_path / "imports").iterdir()] == [Path(at_work.directory).name]
    first.activate(at_work)
    assert calls(second, R1) == ["one"]
    assert list((tmp_path / "imports").iterdir()) == []


def test_rows_of_several_targets_are_synced_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sync waits here for another one under way. One after the other, those of 16,000 rollouts take minutes."""
    ledger, meet, real = CaptureLedger(tmp_path), threading.Barrier(2), LocalSink.sync
    targets = [EpisodeId(f"e{number}", 1) for number in range(4)]
    made(ledger, R0, "one")
    rows = ledger.export([R0])[R0]

    def sync(sink: LocalSink) -> None:
        if sink._path.endswith(".rows"):
            meet.wait(10)
        real(sink)

    monkeypatch.setattr(LocalSink, "sync", sync)
    ledger.activate(ledger.stage(dict.fromkeys(targets, rows)))
    assert [calls(ledger, target) for target in targets] == [["one"]] * 4


def test_an_import_has_one_attempt_of_a_rollout(ledger: CaptureLedger) -> None:
    with pytest.raises(UsageError, match="two attempts"):
        ledger.stage({R1: [], R2: []})
