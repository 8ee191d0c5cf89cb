"""`commit --reopen` and `--incremental`: an operator's fleet works on while it is written, process by process."""

from __future__ import annotations

import pytest

from gym_ckpt_grpc.protocol.errors import StateUnwritable
from gym_ckpt_grpc.storage import CheckpointRoot
from tests.cli.test_operate import EPISODES, Operator, operator, told
from tests.coordinator.fleet_of_nodes import Nodes, refuse

__all__ = ["operator"]
pytestmark = [pytest.mark.timeout(120)]


async def test_a_fleet_is_open_from_commit_on(operator: Operator, nodes: Nodes) -> None:
    told(await operator.prepare("--json"))
    nodes["env"].owner.live[EPISODES[0]] = "at the cut"
    committed = told(await operator.step("commit", "--episodes", str(operator.episodes), "--reopen", "--json"))
    assert (committed["released"], committed["step"], committed["base"]) == (True, "committed", "")
    assert nodes.all_open()
    published = told(await operator.step("publish", "--json"))
    resumed = told(await operator.step("resume", "--json"))
    assert (resumed["state"], resumed["sequence_number"]) == ("published", published["sequence_number"])
    assert (resumed["failure"], resumed["resume_pending"]) == ("", [])
    assert not operator.session.exists()
    people = await operator.prepare()
    assert "prepared" in people.stdout
    people = await operator.step("commit", "--episodes", str(operator.episodes), "--reopen", "--incremental")
    assert "committed, not published" in people.stdout
    assert "released once frozen" in people.stdout
    assert f"unchanged records stay in {committed['checkpoint_id']}" in people.stdout
    assert f"open again: next gym-ckpt publish --session {operator.session}" in people.stderr
    assert (await operator.step("publish")).returncode == 0
    assert (await operator.step("resume")).returncode == 0
    [call] = [c for c in nodes["env"].calls["Commit"] if c.base_checkpoint_uri]
    assert call.base_checkpoint_uri.endswith(committed["checkpoint_id"])


async def test_a_write_that_fails_after_the_release_is_tried_again_or_given_up(
    operator: Operator, nodes: Nodes
) -> None:
    """The fleet stays open either way, the session says so, and what is given up names what stands."""
    first = told(await operator.prepare("--json"))["checkpoint_id"]
    told(await operator.step("commit", "--episodes", str(operator.episodes), "--json"))
    told(await operator.step("publish", "--json"))
    told(await operator.step("resume", "--json"))
    again = ("commit", "--episodes", str(operator.episodes), "--reopen")
    for ending in ("written", "given up"):
        told(await operator.prepare("--json"))
        nodes["agent"].always["Commit"] = refuse(StateUnwritable("disk full"))
        failed = await operator.step(*again, "--deadline", "3")
        assert failed.returncode == 1
        assert "kept at step released: the fleet is open" in failed.stderr
        assert "disk full" in failed.stderr
        assert first in failed.stderr
        assert nodes.all_open()
        nodes["agent"].always.clear()
        if ending == "written":
            told(await operator.step(*again, "--json"))
            first = told(await operator.step("publish", "--json"))["checkpoint_id"]
        resumed = told(await operator.step("resume", "--json"))
        assert resumed["state"] == ("published" if ending == "written" else "aborted")
        assert (first in resumed["failure"]) is (ending == "given up")
        assert not operator.session.exists()
    newest = CheckpointRoot(operator.root).sequence.latest()
    assert newest is not None
    assert newest.checkpoint_id == first
