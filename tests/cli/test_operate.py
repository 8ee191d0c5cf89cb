"""The commands as real processes against participants whose blockers, failures and clocks the test decides."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_ckpt_grpc.cli import operate
from gym_ckpt_grpc.coordinator import FleetReport
from gym_ckpt_grpc.protocol.errors import StaleCheckpoint, StateUnwritable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import Blocker, BlockerReason, PrepareReport
from gym_ckpt_grpc.storage import CheckpointRoot, read_episodes
from tests.coordinator.fleet_of_nodes import Gate, Nodes, refuse
from tests.e2e.processes import run, started

pytestmark = [pytest.mark.timeout(120)]

EPISODES = (EpisodeId("7-0"), EpisodeId("7-1", 2))
KEYS = "7-0\n7-1-a2\n"


class Operator:
    """Types commands against one fleet and root, with one session."""

    def __init__(self, nodes: Nodes, directory: Path) -> None:
        self.nodes = nodes
        self.root = str(nodes.root)
        self.session = directory / "session"
        self.fleet = directory / "fleet.yaml"
        self.episodes = directory / "episodes"
        self.fleet.write_text(yaml.safe_dump(nodes.fleet().to_mapping()))
        self.episodes.write_text(KEYS)

    async def __call__(self, command: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """One command to its end; the fleet answers meanwhile."""
        return await asyncio.to_thread(run, command, *arguments, **env)

    async def step(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the session."""
        return await self(command, "--session", str(self.session), *arguments)

    async def prepare(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return await self.step("prepare", "--fleet", str(self.fleet), "--root", self.root, *arguments)

    async def aside(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command without a session."""
        return await self(command, "--fleet", str(self.fleet), "--root", self.root, *arguments)


@pytest.fixture
def operator(nodes: Nodes, tmp_path: Path) -> Operator:
    nodes.add(*EPISODES)
    return Operator(nodes, tmp_path)


def told(ended: subprocess.CompletedProcess[str], code: int = 0) -> Any:
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return json.loads(ended.stdout)


async def test_not_ready_names_every_blocker_and_keeps_the_session(operator: Operator, nodes: Nodes) -> None:
    """Exact counts, the oldest first; prepare again goes on with the same checkpoint."""
    stuck = [EpisodeId(f"{number:03}-0") for number in range(120)]
    nodes["model"].owner.running.update(stuck)
    first = told(await operator.prepare("--ready-within", "0.5", "--json"), 1)
    assert (first["ready"], first["step"], first["blocker_count"]) == (False, "preparing", 120)
    assert len(first["blockers"]) == 100  # as many as a reply lists
    assert first["blockers"][0] == {
        "participant": "policy_model/model/0",
        "episode": "000-0",
        "worker": "",
        "reason": "RUNNING",
        "age": 1.0,
        "place": "step",
    }
    assert nodes.phases() == {"PREPARED", "PREPARING", "IDLE"}
    people = await operator.step("prepare", "--ready-within", "0.5")
    assert people.returncode == 1
    assert "and 110 more" in people.stdout
    assert "000-0 RUNNING in step for 1.0 s" in people.stdout
    assert "resume --session" in people.stderr
    nodes["model"].owner.park(*stuck)
    again = told(await operator.step("prepare", "--json"))
    assert (again["ready"], again["checkpoint_id"]) == (True, first["checkpoint_id"])
    assert told(await operator.step("resume", "--json"))["state"] == "aborted"
    assert nodes.all_open()
    assert not operator.session.exists()


async def test_ctrl_c_in_prepare_resumes(operator: Operator, nodes: Nodes) -> None:
    """Nothing stays closed, and no session stays."""
    nodes["model"].owner.run(EPISODES[0])
    gate = Gate()
    gate.open.set()
    nodes["model"].script["Prepare"].append(gate.hold())
    command = ("prepare", "--session", str(operator.session), "--fleet", str(operator.fleet), "--root", operator.root)
    with started(*command, "--ready-within", "60") as preparing:
        await gate.entered.wait()
        assert nodes["env"].phase == "PREPARED"
        assert await asyncio.to_thread(preparing.interrupt) == 130
    assert nodes.all_open()
    assert not operator.session.exists()
    assert "nothing is left closed" in "".join(preparing.lines)
    assert CheckpointRoot(operator.root).sequence.epoch() == (1, True)


async def test_a_killed_prepare_is_ended_with_what_it_left(operator: Operator, nodes: Nodes) -> None:
    """Its session is written before anything is closed, so that nobody has to wait for the lease."""
    nodes["model"].owner.run(EPISODES[0])
    gate = Gate()
    gate.open.set()
    nodes["model"].script["Prepare"].append(gate.hold())
    command = ("prepare", "--session", str(operator.session), "--fleet", str(operator.fleet), "--root", operator.root)
    with started(*command, "--ready-within", "60") as preparing:
        await gate.entered.wait()
        preparing.popen.kill()
        await asyncio.to_thread(preparing.popen.wait)
    for command_of_it in (("commit", "--episodes", str(operator.episodes)), ("publish",), ("prepare",)):
        refused = await operator.step(*command_of_it)
        assert refused.returncode == 2
        assert f"gym-ckpt resume --session {operator.session}" in refused.stderr
    assert nodes["env"].phase == "PREPARED"
    assert told(await operator.step("resume", "--json"))["state"] == "aborted"
    assert nodes.all_open()


async def test_ctrl_c_in_commit_aborts(operator: Operator, nodes: Nodes) -> None:
    told(await operator.prepare("--json"))
    gate = Gate()
    nodes["agent"].script["Commit"].append(gate.hold())
    with started("commit", "--session", str(operator.session), "--episodes", str(operator.episodes)) as committing:
        await gate.entered.wait()
        assert await asyncio.to_thread(committing.interrupt) == 130
    assert nodes.all_open()
    assert not operator.session.exists()


async def test_a_commit_that_failed_is_tried_again(operator: Operator, nodes: Nodes) -> None:
    """It stays closed and says so; then it is written with the same scope and published."""
    told(await operator.prepare("--json"))
    nodes["agent"].always["Commit"] = refuse(StateUnwritable("disk full"))
    failed = await operator.step("commit", "--episodes", str(operator.episodes), "--deadline", "3")
    assert failed.returncode == 1
    assert "disk full [agent/agent/0]" in failed.stderr  # the brackets are no style
    assert "is kept at step captured: the fleet stays closed for at most" in failed.stderr
    assert nodes.phases() == {"COMMITTED", "CAPTURED"}
    nodes["agent"].always.clear()
    other = await operator.step("commit", "--episodes", "-")
    assert (other.returncode, "another one" in other.stderr) == (2, True)
    committed = told(await operator.step("commit", "--episodes", str(operator.episodes), "--json"))
    assert committed["continued"] == ["7-0", "7-1-a2"]
    assert told(await operator.step("publish", "--json"))["sequence_number"] == 2
    assert told(await operator.step("publish", "--json"))["sequence_number"] == 2
    resumed = told(await operator.step("resume", "--json"))
    assert (resumed["state"], resumed["sequence_number"]) == ("published", 2)
    root = CheckpointRoot(operator.root)
    found = root.find()
    assert read_episodes(root.files, found.location, found.manifest).continued == EPISODES
    for method in ("Prepare", "Capture"):
        assert len(nodes["agent"].calls[method]) <= 3
    assert len(nodes["env"].calls["Prepare"]) == 1


async def test_an_empty_scope_is_a_checkpoint_too(operator: Operator, nodes: Nodes) -> None:
    told(await operator.prepare("--json"))
    operator.episodes.write_text("\n")
    committed = told(await operator.step("commit", "--episodes", str(operator.episodes), "--json"))
    assert (committed["continued"], committed["restarts"], committed["records"]) == ([], {}, 0)
    told(await operator.step("resume", "--json"))


async def test_a_bad_list_of_episodes_changes_nothing(operator: Operator, nodes: Nodes) -> None:
    told(await operator.prepare("--json"))
    operator.episodes.write_text("7-0\n7 1\n")
    refused = await operator.step("commit", "--episodes", str(operator.episodes))
    assert refused.returncode == 2
    assert "line 2" in refused.stderr
    assert (await operator.step("commit")).returncode == 2
    assert nodes.journal.begun("Capture") == []
    told(await operator.step("resume", "--json"))


async def test_steps_out_of_order_send_nothing(operator: Operator, nodes: Nodes) -> None:
    told(await operator.prepare("--json"))
    refused = await operator.step("publish")
    assert refused.returncode == 2
    assert "is prepared" in refused.stderr
    assert nodes.phases() == {"PREPARED"}
    assert told(await operator.step("resume", "--json"))["state"] == "aborted"
    gone = await operator.step("resume")
    assert (gone.returncode, "there is no session" in gone.stderr) == (2, True)


async def test_what_another_controller_has_open_is_not_ended_by_accident(operator: Operator, nodes: Nodes) -> None:
    """prepare, restore, retire and forget refuse, naming it; --take-over ends it, and its session says so."""
    mine = told(await operator.prepare("--json", "--controller", "first"))
    second = ("--session", str(operator.session.with_name("second")))
    for command in (("prepare", *second), ("restore", *second), ("retire", "7-0"), ("forget", "7-0")):
        refused = await operator.aside(*command)
        assert refused.returncode == 1, command
        assert mine["checkpoint_id"] in refused.stderr
        assert "controller first" in refused.stderr
    assert nodes.phases() == {"PREPARED"}
    taken = told(await operator.aside("prepare", *second, "--take-over", "--json"))
    assert taken["epoch"] > mine["epoch"]
    over = await operator.step("commit", "--episodes", str(operator.episodes))
    assert over.returncode == 1
    assert "a newer controller has taken over" in over.stderr
    assert not operator.session.exists()
    assert nodes.phases() == {"PREPARED"}  # that of the second
    told(await operator("resume", *second, "--json"))
    assert nodes.all_open()


async def test_retire_and_forget_with_and_without_a_session(operator: Operator, nodes: Nodes) -> None:
    told(await operator.prepare("--json"))
    assert told(await operator.step("retire", "7-1-a2", "--json"))["retired"] == ["7-1-a2"]
    assert nodes.phases() == {"PREPARED"}
    refused = await operator.step("forget", "7-1")
    assert (refused.returncode, "INVALID_PHASE" in refused.stderr) == (1, True)
    assert nodes.phases() == {"PREPARED"}
    told(await operator.step("resume", "--json"))
    assert told(await operator.aside("forget", "7-1:1", "--json")) == {"forgotten": {"7-1": 1}}
    assert {node.plane.status().marks_held for node in nodes} == {1}  # the mark is of attempt 2
    told(await operator.aside("forget", "7-1", "--json"))
    assert {node.plane.status().marks_held for node in nodes} == {0}
    nodes["agent"].owner.stuck.add(EPISODES[0])
    incomplete = told(await operator.aside("retire", "--episodes", str(operator.episodes), "--json"), 1)
    assert set(incomplete["incomplete"]) == {"7-0"}
    assert set(incomplete["incomplete"]["7-0"]) == {"agent/agent/0"}


@pytest.mark.parametrize("abort", [False, True])
async def test_restore_then_resume(operator: Operator, nodes: Nodes, abort: bool) -> None:
    told(await operator.prepare("--json"))
    told(await operator.step("commit", "--episodes", str(operator.episodes), "--json"))
    told(await operator.step("publish", "--json"))
    told(await operator.step("resume", "--json"))
    for node in nodes:
        await node.restart()
    session = ("--session", str(operator.session))
    restored = told(await operator.aside("restore", *session, "--json"))
    assert restored["episodes"] == ["7-0-a1", "7-1-a3"]
    assert set(restored["placements"]["7-0-a1"]) == {node.place for node in nodes}
    assert nodes.phases() == {"RESTORED"}
    refused = await operator.step("commit", "--episodes", str(operator.episodes))
    assert (refused.returncode, "restore" in refused.stderr) == (2, True)
    resumed = told(await operator.step("resume", "--json", *(["--abort"] if abort else [])))
    assert resumed["state"] == ("aborted" if abort else "open")
    assert nodes.all_open()
    assert {bool(node.owner.live) for node in nodes} == {not abort}
    assert not operator.session.exists()


async def test_a_resume_that_not_all_heard_can_be_given_again(operator: Operator, nodes: Nodes) -> None:
    told(await operator.prepare("--json"))
    await nodes["res"].stop()
    pending = told(await operator.step("resume", "--deadline", "5", "--json"), 3)
    assert pending["resume_pending"] == ["resources/res/0"]
    assert operator.session.exists()
    await nodes["res"].start()
    again = told(await operator.step("resume", "--json"))
    assert again["resume_pending"] == []
    assert nodes.all_open()
    assert not operator.session.exists()


async def test_a_refusal_as_stale_in_the_middle_of_a_step_ends_the_session(operator: Operator, nodes: Nodes) -> None:
    """Trying again cannot help: what was prepared is gone there."""
    told(await operator.prepare("--json"))
    nodes["agent"].script["Commit"].append(refuse(StaleCheckpoint("was already resumed here")))
    over = await operator.step("commit", "--episodes", str(operator.episodes))
    assert over.returncode == 1
    assert "has expired and was removed" in over.stderr
    assert nodes.all_open()
    assert not operator.session.exists()


def test_blockers_of_all_participants_the_oldest_first() -> None:
    reports = {
        name: PrepareReport((Blocker(BlockerReason.RUNNING, age, worker=name),), 1)
        for name, age in (("young", 1.0), ("old", 9.0), ("middle", 5.0))
    }
    listed = operate.blockers_of(FleetReport(ready=False, participants=reports))
    assert [blocker["worker"] for blocker in listed] == ["old", "middle", "young"]


async def test_an_expired_session_names_who_is_not_known_to_be_open(operator: Operator, nodes: Nodes) -> None:
    """One process is new, another does not answer: the session stays, since resume may still reach that one."""
    told(await operator.prepare("--json"))
    await nodes["agent"].restart()
    await nodes["res"].stop()
    expired = await operator.step("commit", "--episodes", str(operator.episodes))
    assert expired.returncode == 1
    assert "not known to be open: resources/res/0" in expired.stderr
    assert f"gym-ckpt resume --session {operator.session}" in expired.stderr
    await nodes["res"].start()
    told(await operator.step("resume", "--json"))
    assert nodes.all_open()
    assert not operator.session.exists()


async def test_one_session_is_used_by_one_command_at_a_time(operator: Operator, nodes: Nodes) -> None:
    told(await operator.prepare("--json"))
    gate = Gate()
    nodes["agent"].script["Commit"].append(gate.hold())
    with started("commit", "--session", str(operator.session), "--episodes", str(operator.episodes)) as committing:
        await gate.entered.wait()
        refused = await operator.step("publish")
        assert (refused.returncode, "in use by another command" in refused.stderr) == (2, True)
        gate.open.set()
        assert await asyncio.to_thread(committing.popen.wait) == 0
    told(await operator.step("resume", "--json"))
