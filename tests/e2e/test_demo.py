"""The main job as a user runs it: real server processes, SIGKILL, restore, comparison; and its negative controls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.deployment import Deployment
from tests.e2e.processes import listening, processes_naming, run, started, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

FIELDS = {
    "rollouts",
    "finished_before",
    "in_flight",
    "continued",
    "restarted",
    "lost",
    "different",
    "tokens_saved",
    "tokens_kept",
    "tokens_redone",
    "turns_saved",
    "generations_continued",
    "pause_ms",
    "cut_ms",
    "durable_ms",
    "published_ms",
    "bytes",
}


@pytest.mark.behaviour("E5")
def test_every_rollout_in_flight_continues_and_nothing_differs() -> None:
    """64 rollouts, a checkpoint in mid-flight, SIGKILL of every server: each goes on from where it was."""
    ended = run("demo", "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert set(report) == FIELDS
    assert report["rollouts"] == 64
    assert report["in_flight"] >= 48
    assert report["in_flight"] + report["finished_before"] == 64
    assert report["lost"] == report["different"] == report["restarted"] == 0
    assert report["continued"] == report["in_flight"]
    assert report["tokens_saved"] > 0
    assert report["turns_saved"] >= report["in_flight"]  # each had at least one turn behind it
    assert report["generations_continued"] > report["in_flight"] / 2  # most were in the middle of one
    assert report["tokens_kept"] > report["generations_continued"]
    assert report["tokens_redone"] > 0  # the crash came after further work, which is really lost
    assert 0 < report["cut_ms"] < report["pause_ms"]
    assert 0 < report["durable_ms"] < report["published_ms"]
    assert report["bytes"] > 0


def test_without_cuts_running_generations_are_made_again() -> None:
    """What cuts are worth: everything else is kept as well without them."""
    ended = run("demo", "--json", "--no-cuts", "--rollouts", "16")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["lost"] == report["different"] == report["restarted"] == 0
    assert report["continued"] == report["in_flight"] > 0
    assert (report["tokens_kept"], report["generations_continued"]) == (0, 0)


@pytest.mark.behaviour("E5")
def test_without_the_resources_restore_results_differ(tmp_path: Path) -> None:
    """The negative control: the same demo with the tools' state forgotten does not pass."""
    ended = run("demo", "--json", "--rollouts", "16", "--leave-out", "resources", "--keep", str(tmp_path / "kept"))
    report = json.loads(ended.stdout)
    assert ended.returncode == 1
    assert report["different"] > 0
    assert "kept:" in ended.stderr


def test_without_the_agent_restore_nothing_continues(tmp_path: Path) -> None:
    """The other negative control: conversations forgotten. No rollout goes on, and the logs are kept."""
    ended = run("demo", "--json", "--rollouts", "16", "--leave-out", "agent", "--keep", str(tmp_path / "kept"))
    report = json.loads(ended.stdout)
    assert ended.returncode == 1
    assert report["continued"] == 0
    assert report["lost"] == report["in_flight"]
    assert (tmp_path / "kept" / "crashed" / "logs" / "agent.log").exists()


@pytest.mark.parametrize(
    "moment", ["starting 6 servers", "published", "killed every server", "restoring", "running the same"]
)
def test_ctrl_c_leaves_no_process_and_no_port(moment: str, tmp_path: Path) -> None:
    """Whenever the interrupt comes, nothing of the demo goes on."""
    kept = tmp_path / "kept"
    with started("demo", "--rollouts", "8", "--keep", str(kept)) as demo:
        demo.wait_for_line(moment)
        assert demo.interrupt() == 130
    assert until(lambda: not processes_naming(kept)), processes_naming(kept)
    for plan_file in kept.glob("*/minigym.json"):
        plan = Deployment.load(plan_file)
        ports = [port for server in plan.servers for port in (server.port, server.control_port) if port]
        assert listening(ports) == []


def test_a_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    """SIGKILL of the demo itself: the kernel ends its servers."""
    kept = tmp_path / "kept"
    with started("demo", "--rollouts", "8", "--keep", str(kept)) as demo:
        demo.wait_for_line("published")
        demo.popen.kill()
        demo.popen.wait()
    assert until(lambda: not processes_naming(kept)), processes_naming(kept)
