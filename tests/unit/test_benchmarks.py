"""The benchmarks measure what they say: their results are checked, their baselines work, their gates can be missed."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import disk, options, page, plain
from benchmarks import sessions as sessions_module
from benchmarks.figures import Gate, Group, Machine, Report, Row, from_json, to_json
from benchmarks.loads import Load, check, episode_of, seals
from benchmarks.office import Office, RevisedOffice, Traffic
from benchmarks.rounds import Case, WrongResult, take
from benchmarks.sessions import RECORD_SIZE, changed, make_sessions
from benchmarks.table import markdown
from gym_ckpt_grpc.testing import serve

REPOSITORY = Path(__file__).parents[2]


# ---- everything, once


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_smoke_run_takes_every_path_and_leaves_nothing(tmp_path: Path) -> None:
    """Store, gRPC, memory, pause and telemetry, each result checked by the run itself; the report names all of them."""
    work, report = tmp_path / "work", tmp_path / "report.json"
    work.mkdir()
    command = ["-m", "benchmarks", "--smoke", "--gate", "--seed", "7", "--json", str(report), "--directory", str(work)]
    done = subprocess.run([sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = from_json(report.read_bytes())
    telemetry = ["telemetry-sites", "telemetry-cost", "telemetry-cycles"]
    assert [group.name for group in found.groups] == [
        *("store-sessions", "remote", "store-records", "memory", "pause"),
        *telemetry,
    ]
    assert all(row.samples and min(row.samples) > 0 for group in found.groups for row in group.rows)
    assert [group.name for group in found.groups if not group.gates] == [telemetry[0], telemetry[2]]
    assert list(work.iterdir()) == []


# ---- the baselines


@pytest.mark.parametrize("budget", [sessions_module.BUDGET, 200_000], ids=["all made", "most copied"])
def test_sessions_have_their_size_and_come_again_from_their_seed(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two are equal, none share what can be changed, and all are what JSON keeps exactly."""
    monkeypatch.setattr(sessions_module, "BUDGET", budget)
    for count, size in ((120, 20_000), (120, RECORD_SIZE)):
        sessions = make_sessions(count, size=size, seed=3)
        assert sessions == make_sessions(count, size=size, seed=3) != make_sessions(count, size=size, seed=4)
        assert all(abs(len(orjson.dumps(each)) - size) < 0.25 * size for each in sessions)
        assert abs(sum(len(orjson.dumps(each)) for each in sessions) / count - size) < 0.05 * size
        assert len({orjson.dumps(each) for each in sessions}) == count
        assert len({id(each["mails"]) for each in sessions}) == count


@pytest.mark.parametrize("size", [20_000, RECORD_SIZE])
def test_a_changed_session_is_another_one(rng: random.Random, size: int) -> None:
    """What was exported before stays as it was."""
    [session] = make_sessions(1, size=size)
    before = copy.deepcopy(session)
    for _ in range(20):
        assert changed(session, rng) != session == before


def test_the_plain_writer_keeps_its_promises(tmp_path: Path) -> None:
    """Read back equal; what is damaged is found; nothing but the lines and the manifest is left."""
    load = Load("sessions", 5, 20_000, seed=1)
    directory = tmp_path / "plain"
    plain.write(directory, load.plain_records())
    assert plain.read(directory) == list(load.plain_records())
    assert sorted(each.name for each in directory.iterdir()) == [plain.MANIFEST, plain.LINES]
    lines = directory / plain.LINES
    text = bytearray(lines.read_bytes())
    text[len(text) // 2] ^= 1
    lines.write_bytes(text)
    with pytest.raises(plain.Damaged):
        plain.read(directory)


@pytest.mark.parametrize("odd", [uuid.UUID(int=1), b"bytes", {1: 2}, 2**70, object()], ids=repr)
def test_the_plain_writer_refuses_what_json_would_not_keep(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(TypeError):
        plain.write(tmp_path / "plain", [plain.PlainRecord(episode_of("a"), "a", {"odd": odd})])


async def test_requests_of_the_traffic_are_held_while_admission_is_closed(rng: random.Random) -> None:
    """A pause that no request had to wait for would be measured on a server without load."""
    office = Office({each["session_id"]: each for each in make_sessions(4, size=20_000)})
    async with serve(office.owner) as served:
        await served.client.prepare("c1")
        before = dict(office.sessions)
        traffic = Traffic(office, 100.0, rng)
        traffic.start()
        while office.owner.admission.waiting <= 10:
            await served.client.status()
        assert traffic.changes == 0
        assert office.sessions == before
        await served.client.resume("c1")
        await traffic.stop()
        assert traffic.changes > 0
        assert office.sessions != before
        assert traffic.take_longest() > 0.0 == traffic.take_longest()


def test_an_office_with_revisions_moves_them_with_every_change(rng: random.Random) -> None:
    office = RevisedOffice({each["session_id"]: each for each in make_sessions(2, size=20_000)})
    key, other = office.sessions
    seen = {office.session_revisions()[key]}
    for turn in range(10):
        office.change(key, rng)
        seen.add(office.session_revisions()[key])
        assert len(seen) == turn + 2
    assert office.session_revisions()[other] == 0


# ---- results are checked


def _drop(found: list[Any]) -> None:
    found.pop()


def _repeat(found: list[Any]) -> None:
    found.append(found[0])


def _exchange(found: list[Any]) -> None:
    found[0], found[1] = found[1], found[0]


def _another_episode(found: list[Any]) -> None:
    found[0] = (episode_of("other"), *found[0][1:])


def _another_type(found: list[Any]) -> None:
    found[0] = (*found[0][:2], {**found[0][2], "version": 3.0})


def _another_order(found: list[Any]) -> None:
    found[0] = (*found[0][:2], dict(reversed(found[0][2].items())))


@pytest.mark.parametrize("spoil", [_drop, _repeat, _exchange, _another_episode, _another_type, _another_order])
def test_a_wrong_result_is_noticed(spoil: Callable[[list[Any]], None]) -> None:
    """A value that Python calls equal is wrong too, if its type or its key order is another."""
    load = Load("sessions", 3, 20_000, seed=1)
    found: list[Any] = [(episode_of(key), key, state) for key, state in load.sessions.items()]
    check(found, load.seals)
    spoil(found)
    with pytest.raises(WrongResult):
        check(found, load.seals)


def test_what_changed_later_is_compared_with_what_it_became() -> None:
    load = Load("sessions", 20, 20_000, seed=1)
    assert len(load.changes) == 1
    assert load.later_seals == seals(load.later)
    assert sum(load.seals[key] != load.later_seals[key] for key in load.seals) == 1


def test_rounds_run_every_case_once_in_changing_order_and_clean_up(rng: random.Random) -> None:
    """One round more than asked for comes first and does not count; only `run` is between the two clocks."""
    log: list[str] = []

    def case(name: str) -> Case:
        return Case(
            name,
            lambda: log.append(f"run {name}"),
            before=lambda: log.append(f"before {name}"),
            check=lambda _: log.append(f"check {name}"),
            after=lambda: log.append(f"after {name}"),
        )

    taken = take([case(name) for name in "abc"], 20, rng)
    assert {name: len(took.seconds) for name, took in taken.items()} == dict.fromkeys("abc", 20)
    assert {name: len(took.processor) for name, took in taken.items()} == dict.fromkeys("abc", 20)
    steps = [log[at : at + 4] for at in range(0, len(log), 4)]
    assert all([line.split()[0] for line in four] == ["before", "run", "check", "after"] for four in steps)
    orders = ["".join(four[0][-1] for four in steps[at : at + 3]) for at in range(0, len(steps), 3)]
    assert len(orders) == 21
    assert all(sorted(order) == list("abc") for order in orders)
    assert len(set(orders)) > 1


def test_a_failed_check_ends_the_run_and_still_cleans_up(rng: random.Random) -> None:
    cleaned = []

    def wrong(_: Any) -> None:
        raise WrongResult("not equal")

    with pytest.raises(WrongResult):
        take([Case("a", lambda: None, check=wrong, after=lambda: cleaned.append(1))], 3, rng)
    assert cleaned == [1]


# ---- figures, gates, pages


def _report(*gates: Gate, smoke: bool = False) -> Report:
    row = Row(name="commit", samples=(0.3, 0.1, 0.2), facts={"x plain": 4.25, "disk MB/s": 1234.5})
    machine = Machine(python="3.11", system="Linux", processor="a", cores=2, memory=8.0, filesystem="ext4")
    group = Group(name="store", title="Store", rows=(row,), gates=gates, notes=("a note",))
    return Report(machine=machine, seed=1, smoke=smoke, groups=(group,))


HELD = Gate(name="fast", value=4.0, limit=4.0)
MISSED = Gate(name="pause", value=250.1, limit=250.0, unit="ms", at_most=True)


def test_gates_hold_at_their_limit_and_not_beyond() -> None:
    assert HELD.held
    assert not Gate(name="fast", value=3.99, limit=4.0).held
    assert not MISSED.held
    assert Gate(name="pause", value=250.0, limit=250.0, unit="ms", at_most=True).held
    assert _report(HELD, MISSED).missed() == [MISSED]


def test_a_report_survives_its_json_form() -> None:
    """For other tools it also has the medians and what is held."""
    report = _report(HELD, MISSED)
    assert from_json(to_json(report)) == report
    group = json.loads(to_json(report))["groups"][0]
    assert [group["rows"][0][name] for name in ("median", "min", "max")] == [0.2, 0.1, 0.3]
    assert [gate["held"] for gate in group["gates"]] == [True, False]


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--gate"], 1), (["--gate", "--smoke"], 0)])
def test_a_missed_gate_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int
) -> None:
    """It fails the run only where it is asked to, and never a smoke run, whose figures mean nothing."""
    given = options.parser("a test").parse_args([*arguments, "--directory", str(tmp_path), "--json"])
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(disk, "IN_MEMORY", frozenset())
        assert options.run(given, lambda directory, rng, tell: _report(HELD, MISSED).groups) == code
    out, err = capsys.readouterr()
    assert from_json(out.encode()).groups == _report(HELD, MISSED).groups
    assert ("missed: pause: 250 ms" in err) is (code == 1)
    assert "missed: fast" not in err


def test_a_work_directory_in_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures would say nothing of a disk; nothing is measured, nothing is left."""
    monkeypatch.setattr(disk, "filesystem", lambda path: "tmpfs")
    given = options.parser("a test").parse_args(["--directory", str(tmp_path)])
    assert options.run(given, lambda directory, rng, tell: pytest.fail("measured")) == 2
    assert "tmpfs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_type_of_a_file_system_is_found() -> None:
    assert disk.filesystem(Path("/proc")) == "proc"
    assert disk.filesystem(Path("/dev/shm")) == "tmpfs"


def test_the_disk_writes_the_same_bytes(tmp_path: Path, rng: random.Random) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(rng.randbytes(9_000_001))
    disk.write_plainly(source, target)
    assert target.read_bytes() == source.read_bytes()
    disk.remove(target)
    assert os.listdir(tmp_path) == ["source"]


def test_the_page_takes_its_tables_between_its_markers() -> None:
    """Twice gives the same page; everything else stays."""
    before = page.PAGE.read_text(encoding="utf-8")
    after = page.rewritten(before, markdown(_report(HELD, MISSED)))
    assert page.rewritten(after, markdown(_report(HELD, MISSED))) == after
    assert after.partition(page.BEGIN)[0] == before.partition(page.BEGIN)[0]
    assert after.partition(page.END)[2] == before.partition(page.END)[2]
    assert "| commit | 3 | 0.2 s | 0.1 s | 0.3 s | 4.25 | 1,234 |" in after
    assert "- MISSED: pause: 250 ms, at most 250 ms" in after
    with pytest.raises(page.NoMarkers):
        page.rewritten("no markers", "tables")


def test_figures_of_a_smoke_run_never_reach_the_page(tmp_path: Path) -> None:
    before = page.PAGE.read_bytes()
    report = tmp_path / "report.json"
    report.write_bytes(to_json(_report(HELD, smoke=True)))
    assert page.main([str(report)]) == 2
    assert page.PAGE.read_bytes() == before
