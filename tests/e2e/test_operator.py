"""The commands of an operator on a deployment of real servers that `gym-ckpt up` keeps running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_ckpt_grpc.auth import TokenFile
from gym_ckpt_grpc.coordinator import Coordinator
from gym_ckpt_grpc.minigym.deployment import Deployment
from gym_ckpt_grpc.minigym.evidence import turns_begun
from gym_ckpt_grpc.minigym.inference_log import read_log
from gym_ckpt_grpc.minigym.tasks import Task, make_tasks
from gym_ckpt_grpc.minigym.trainer import Trainer
from gym_ckpt_grpc.protocol import EpisodeId
from tests.e2e.processes import Running, listening, run, started, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SERVICES = ("environment", "agent", "policy_model", "counter", "blackjack")


@dataclass
class Up:
    """A deployment, what `up` printed about it, and an operator with one session."""

    printed: dict[str, Any]
    running: Running
    session: Path

    @property
    def plan(self) -> Deployment:
        return Deployment.load(Path(self.printed["directory"]) / "minigym.json")

    @property
    def in_flight(self) -> Path:
        return Path(self.printed["in_flight"])

    def __call__(self, command: str, *arguments: str, token: str = "token_file") -> subprocess.CompletedProcess[str]:
        """A command with the deployment's token, and its fleet if it names no session of its own."""
        return run(command, *arguments, GYM_CKPT_TOKEN_FILE=self.printed[token], GYM_CKPT_FLEET=self.printed["fleet"])

    def step(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self(command, "--session", str(self.session), *arguments)

    def begin(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.step(command, "--root", self.printed["root"], *arguments)

    def phases(self) -> set[str]:
        servers = told(self("status", "--json"))["servers"]
        return {server["status"]["phase"].removeprefix("PHASE_") for server in servers}

    def kill_all(self) -> None:
        """SIGKILL to every server at once."""
        for server in self.printed["servers"]:
            os.kill(server["pid"], signal.SIGKILL)
        assert self.running.popen.wait(30) == 1  # `up` ends when a server does


def told(ended: subprocess.CompletedProcess[str], code: int = 0) -> Any:
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return json.loads(ended.stdout)


@contextmanager
def deployment(directory: Path, *, rollouts: int = 8, session: Path | None = None) -> Iterator[Up]:
    with started("up", "--json", "--rollouts", str(rollouts), "--directory", str(directory)) as running:
        assert running.popen.stdout is not None
        lines = [running.popen.stdout.readline()]
        while lines[-1] != "}\n":
            lines.append(running.popen.stdout.readline())
            assert lines[-1], running.lines
        yield Up(json.loads("".join(lines)), running, session or directory.parent / "session")
        if running.popen.poll() is None:
            assert running.interrupt() == 130


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One deployment for every test that leaves it as it was."""
    with deployment(tmp_path_factory.mktemp("living") / "gym") as up:
        yield up


@pytest.fixture
def up(living: Up, tmp_path: Path) -> Iterator[Up]:
    yield Up(living.printed, living.running, tmp_path / "session")
    assert living.phases() == {"IDLE"}, "the test left something closed"


# ---- a checkpoint, a process per step


def test_a_checkpoint_step_by_step(up: Up) -> None:
    """Closed from prepare to resume under one epoch; what was in flight is in it; afterwards rollouts go on."""
    prepared = told(up.begin("prepare", "--json"))
    assert (prepared["ready"], prepared["step"], prepared["blocker_count"]) == (True, "prepared", 0)
    assert 290 < prepared["lease_left"] <= 300
    assert stat.S_IMODE(up.session.stat().st_mode) == 0o600
    assert Path(up.printed["token_file"]).read_text().strip() not in up.session.read_text()
    assert up.phases() == {"PREPARED"}

    before = up.in_flight.read_text()
    assert before
    committed = told(up.step("commit", "--episodes", str(up.in_flight), "--json"))
    assert up.phases() == {"COMMITTED"}
    assert {*committed["continued"], *committed["restarts"]} == set(before.split())
    assert committed["continued"]
    assert set(committed["restarts"].values()) <= {"no_record"}  # its reply was on the wire
    assert run("show", "--root", up.printed["root"], committed["checkpoint_id"]).returncode == 1  # not complete yet

    published = told(up.step("publish", "--json"))
    assert up.phases() == {"COMMITTED"}
    resumed = told(up.step("resume", "--json"))
    assert (resumed["state"], resumed["sequence_number"]) == ("published", published["sequence_number"])
    assert not up.session.exists()
    assert up.phases() == {"IDLE"}

    shown = told(run("show", "--json", "--root", up.printed["root"]))
    assert shown["checkpoint_id"] == prepared["checkpoint_id"]
    assert shown["continued"] == committed["continued"]
    assert (shown["epoch"], shown["controller_id"]) == (prepared["epoch"], "operator")
    assert told(run("verify", "--json", "--root", up.printed["root"]))["intact"]
    assert until(lambda: up.in_flight.read_text() not in ("", before), 30), "no rollout went on"


def test_people_are_told_what_comes_next(up: Up) -> None:
    """Every step names the next one; nothing of it is on standard output with --json."""
    prepared = up.begin("prepare")
    assert "prepared" in prepared.stdout
    assert f"next gym-ckpt commit --session {up.session}" in prepared.stderr
    committed = up.step("commit", "--episodes", str(up.in_flight))
    assert "committed, not published" in committed.stdout
    assert f"next gym-ckpt publish --session {up.session}" in committed.stderr
    published = up.step("publish")
    assert "published as number" in published.stdout
    assert f"gym-ckpt resume --session {up.session}" in published.stderr
    assert "every participant is open" in up.step("resume").stdout


def test_a_session_whose_lease_ended_says_so(up: Up) -> None:
    """The participants opened by themselves; the session is over, and the message says what to do."""
    told(up.begin("prepare", "--lease", "1", "--json"))
    assert until(lambda: up.phases() == {"IDLE"}, 30)
    expired = up.step("commit", "--episodes", str(up.in_flight))
    assert expired.returncode == 1
    assert "has expired and was removed" in expired.stderr
    assert "Begin anew: gym-ckpt prepare" in expired.stderr
    assert "LEASE_LOST" in expired.stderr
    assert "Traceback" not in expired.stderr
    assert not up.session.exists()


async def test_a_newer_controller_ends_a_session(up: Up) -> None:
    """It took over with a higher epoch: the old session makes no call, says so and is removed."""
    told(up.begin("prepare", "--json"))
    token = TokenFile(up.printed["token_file"])
    async with Coordinator(up.plan.fleet(), root=up.printed["root"], controller_id="trainer", token=token) as trainer:
        assert trainer.epoch > 1
    for command in (("commit", "--episodes", str(up.in_flight)), ("resume",)):
        saved = up.session.read_bytes()
        over = up.step(*command)
        assert over.returncode == 1
        assert "a newer controller has taken over" in over.stderr
        assert not up.session.exists()
        up.session.write_bytes(saved)
        up.session.chmod(0o600)


def test_an_observer_cannot_prepare(up: Up) -> None:
    """Refused credentials are exit 3, whichever call they were refused in; nothing is closed."""
    refused = up("prepare", "--session", str(up.session), "--root", up.printed["root"], token="observer_token_file")
    assert refused.returncode == 3
    assert "PERMISSION_DENIED" in refused.stderr
    assert up.phases() == {"IDLE"}


def test_a_crash_of_everything_is_restored_by_hand(tmp_path: Path) -> None:
    """SIGKILL of all servers; restore, resume, and the attempts that restore printed go on behind their first turn."""
    with deployment(tmp_path / "gym") as up:
        assert until(lambda: len(behind_first_turn(up)) >= 4, 60)
        told(up.begin("prepare", "--json"))
        behind = behind_first_turn(up)  # of the cut: those of a moment ago may have ended
        committed = told(up.step("commit", "--episodes", str(up.in_flight), "--json"))
        told(up.step("publish", "--json"))
        told(up.step("resume", "--json"))
        up.kill_all()
    with deployment(tmp_path / "gym", rollouts=0, session=tmp_path / "session") as up:
        restored = told(up.begin("restore", "--json"))
        assert restored["source"] == committed["checkpoint_id"]
        assert up.phases() == {"RESTORED"}
        expected = [EpisodeId.from_capture_key(key).next().capture_key for key in committed["continued"]]
        assert restored["episodes"] == expected
        resumed = told(up.step("resume", "--json"))
        assert (resumed["state"], resumed["episodes"]) == ("open", expected)
        assert up.phases() == {"IDLE"}
        assert send(up.plan, restored["episodes"]) == set()
        log = read_log(up.plan.inference_log)
        went_on = behind & {EpisodeId.from_capture_key(key).rollout_id for key in committed["continued"]}
        assert went_on
        assert all(log[rollout].first_turn.get(1, 1) > 0 for rollout in went_on)


def behind_first_turn(up: Up) -> set[str]:
    """Rollouts in flight whose first turn is done, by the worker's own log."""
    begun = turns_begun(up.plan.inference_log, life=1)
    return {rollout for rollout in up.in_flight.read_text().split() if begun.get(rollout, 0) > 0}


def send(plan: Deployment, keys: list[str]) -> set[str]:
    """Send attempts to their end, as the trainer of `up` names its tasks; gives those without a result."""
    episodes = [EpisodeId.from_capture_key(key) for key in keys]

    async def sending() -> set[str]:
        tasks = [task_of(episode.rollout_id) for episode in episodes]
        async with Trainer(plan.server("environment").url) as trainer:
            trainer.send(tasks, {episode.rollout_id: episode.attempt for episode in episodes})
            await trainer.finish()
            return {task.rollout_id for task in tasks} - set(trainer.results)

    return asyncio.run(sending())


def task_of(rollout_id: str) -> Task:
    """The task that `up` sent under this id: `<round>-<task>-<rollout>`, the round being the seed."""
    round_number, _, name = rollout_id.partition("-")
    task = next(task for task in make_tasks(8, int(round_number)) if task.rollout_id == name)
    return Task(rollout_id, task.kind, task.seed, task.prompt, task.turns, task.setup)


# ---- doctor


def findings(ended: subprocess.CompletedProcess[str], code: int) -> list[dict[str, str]]:
    """What is not OK; each such finding says what to do."""
    checks = told(ended, code)["checks"]
    bad = [check for check in checks if check["level"] != "OK"]
    assert all(check["advice"] for check in bad)
    return bad


def test_doctor_finds_nothing_wrong_with_a_healthy_deployment(up: Up) -> None:
    """It names process and port of each server, and leaves no trace."""
    ended = up("doctor", "--root", up.printed["root"], "--json")
    checks = told(ended)["checks"]
    assert {check["level"] for check in checks} <= {"OK", "WARN"}
    pids = {server["role"]: server["pid"] for server in up.printed["servers"]}
    texts = [f"{check['subject']}: {check['message']}" for check in checks]
    for service in SERVICES:
        mine = [text for text in texts if f"/{service}/0: " in text]
        assert any(f"is served by process {pids[service]} (" in text for text in mine)
        for part in ("answers at", "refuses a call without a token", "is a controller's", "speaks protocol", "marks"):
            assert any(part in text for text in mine), (service, part)
    assert any("root: " in text and "can be written" in text for text in texts)
    assert "none is open" in ended.stdout
    assert " 0 FAIL" in up("doctor", "--root", up.printed["root"]).stdout


def test_doctor_tells_open_checkpoints_marks_and_roles(up: Up) -> None:
    """A warning each; the lease in seconds; an observer's token is named as one."""
    told(up("retire", "gone-0", "--root", up.printed["root"], "--json"))
    prepared = told(up.begin("prepare", "--json"))
    ended = up("doctor", "--root", up.printed["root"], "--json", token="observer_token_file")
    bad = findings(ended, 0)
    texts = [check["message"] for check in told(ended)["checks"]]
    opened = next(check for check in bad if check["subject"] == "checkpoints")
    assert prepared["checkpoint_id"] in opened["message"]
    assert "of controller operator is open at 5 of 5 (PREPARED)" in opened["message"]
    assert sum("the token is an observer's" in check["message"] for check in bad) == 5
    assert sum("holds 1 marks of retired rollouts" in text for text in texts) == 5
    told(up.step("resume", "--json"))
    told(up("forget", "gone-0:0", "--root", up.printed["root"], "--json"))
    ended = up("doctor", "--json")
    assert sum("holds no marks" in check["message"] for check in told(ended)["checks"]) == 5


def test_doctor_without_the_right_token(up: Up, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    bad = findings(up("doctor", "--json", "--token-file", str(wrong)), 3)
    assert len(bad) == 5
    assert all("REFUSED" in check["message"] and "--token-file" in check["advice"] for check in bad)


@pytest.mark.parametrize("kind", ["http", "nothing", "foreign"])
def test_doctor_and_an_address_that_is_no_participant(up: Up, tmp_path: Path, kind: str) -> None:
    """The data plane's port, a port where nobody listens, and another participant's address."""
    addresses = {
        "http": f"127.0.0.1:{up.plan.server('agent').port}",
        "nothing": "127.0.0.1:1",
        "foreign": up.plan.server("blackjack").control_address,
    }
    fleet = yaml.safe_load(Path(up.printed["fleet"]).read_text())
    next(s for s in fleet["servers"] if s["service"] == "agent")["address"] = addresses[kind]
    mended = tmp_path / "fleet.yaml"
    mended.write_text(yaml.safe_dump(fleet))
    bad = findings(up("doctor", "--json", "--fleet", str(mended)), 1 if kind == "foreign" else 3)
    failed = [check for check in bad if check["level"] == "FAIL"]
    assert len(failed) == 1
    if kind == "http":
        pid = next(s["pid"] for s in up.printed["servers"] if s["role"] == "agent")
        assert f"process {pid} (" in failed[0]["message"]
        assert "no participant" in failed[0]["advice"]
    elif kind == "nothing":
        assert "nobody listens there" in failed[0]["message"]
        assert "start it" in failed[0]["advice"]
    else:
        assert "WRONG_IDENTITY" in failed[0]["message"]
        assert "mixed up" in failed[0]["advice"]


def test_doctor_and_roots_that_cannot_be_used(up: Up, tmp_path: Path) -> None:
    """Missing, no directory, and read-only (/sys, where not even root writes)."""
    file = tmp_path / "file"
    file.touch()
    missing = tmp_path / "missing"
    for root, text in ((missing, "no directory"), (file, "no directory"), (Path("/sys"), "cannot")):
        bad = [check for check in findings(up("doctor", "--json", "--root", str(root)), 1) if check["level"] == "FAIL"]
        assert [check["subject"] for check in bad] == ["root"]
        assert text in bad[0]["message"]
    assert not missing.exists()
    relative = findings(up("doctor", "--json", "--root", "relative/path"), 1)
    assert any(check["subject"] == "root" for check in relative)


def test_doctor_and_a_damaged_checkpoint(up: Up, tmp_path: Path) -> None:
    """The newest one's manifests are compared; other epochs than the root's are told."""
    told(up.begin("prepare", "--json"))
    told(up.step("commit", "--episodes", str(up.in_flight), "--json"))
    told(up.step("publish", "--json"))
    told(up.step("resume", "--json"))
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(up.plan.root), str(copy)], check=True)
    assert told(up("doctor", "--json", "--root", str(copy)))["ok"]
    newest = told(run("show", "--json", "--root", str(copy)))["checkpoint_id"]
    manifest = next((copy / "checkpoints" / newest).rglob("manifest.json"))
    manifest.chmod(0o600)
    manifest.write_text(manifest.read_text().replace('"records"', '"recordz"'))
    bad = [check for check in findings(up("doctor", "--json", "--root", str(copy)), 1) if check["level"] == "FAIL"]
    assert len(bad) == 1
    assert "the newest checkpoint is damaged" in bad[0]["message"]
    empty = tmp_path / "empty"
    empty.mkdir()
    bad = findings(up("doctor", "--json", "--root", str(empty)), 0)
    assert any("driven from another root" in check["advice"] for check in bad)


# ---- servers that go away


class Watching:
    """`watch --json` as it runs; lines are read as they come."""

    def __init__(self, running: Running) -> None:
        self._stdout = running.popen.stdout
        self.newest: dict[str, dict[str, Any]] = {}

    def until(self, service: str, **expected: str) -> None:
        """Read changes until one of a service is as expected."""
        assert self._stdout is not None
        while True:
            line = self._stdout.readline()
            assert line, "watch ended"
            change = json.loads(line)
            mine = service in change["participant"]
            if mine and all(change.get(name) == value for name, value in expected.items()):
                return


def test_watch_and_doctor_when_servers_die_and_come_back(tmp_path: Path) -> None:
    """watch goes on through it; doctor names the dead; `status` and `watch` need no more than an observer's token."""
    with deployment(tmp_path / "gym", rollouts=0) as up:
        fleet, token = up.printed["fleet"], up.printed["observer_token_file"]
        with started("watch", "--json", "--fleet", fleet, "--token-file", token) as running:
            watching = Watching(running)
            watching.until("counter", finding="OK", phase="IDLE")
            told(up.begin("prepare", "--json"))
            watching.until("counter", phase="PREPARED")
            told(up.step("resume", "--json"))
            watching.until("counter", phase="IDLE")
            up.kill_all()
            watching.until("counter", finding="DOWN")
            ports = [server.control_port for server in up.plan.servers if server.control_port]
            assert listening(ports) == []
            bad = findings(up("doctor", "--json", "--timeout", "2"), 3)
            assert len(bad) == 5
            assert all("nobody listens there on this host" in check["message"] for check in bad)
            unreached = up.begin("prepare")
            assert unreached.returncode == 3
            assert not up.session.exists()
            with deployment(tmp_path / "gym", rollouts=0):
                watching.until("counter", finding="OK", phase="IDLE")
            assert running.interrupt() == 130
        with started("watch", "--fleet", fleet, "--token-file", token) as running:
            assert running.popen.stdout is not None
            assert "DOWN" in running.popen.stdout.readline()
            assert running.interrupt() == 130
