"""A whole deployment whose control planes know each other by certificates: cuts, checkpoint, crash, restore."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from gym_ckpt_grpc.minigym.authority import LOCAL_NAMES, Authority, replace_file
from gym_ckpt_grpc.minigym.deployment import ROLE_NAMES, Deployment
from tests.e2e.plays import counting, play
from tests.e2e.rig import COUNTER, HELD_AFTER, rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SECURED = msgspec.structs.replace(COUNTER, mtls=True, audit=True)


def renewed(plan: Deployment) -> None:
    """New certificates of a new authority, which is trusted beside the old one; all of them while servers run."""
    ca = plan.certificates / "ca.pem"
    new = Authority(plan.certificates / "new")
    replace_file(ca, ca.read_bytes() + new.file.read_bytes())
    names = {server.name: LOCAL_NAMES for server in plan.servers if server.control_port}
    for name, sans in {**names, **{role: (san,) for role, san in ROLE_NAMES.items()}}.items():
        for issued, file in zip(new.issue(name, sans), plan.certificate(name), strict=True):
            replace_file(file, issued.read_bytes())


@pytest.mark.behaviour("C317")
async def test_certificates_of_a_deployment_change_between_two_checkpoints(tmp_path: Path) -> None:
    """Nothing is restarted: the second checkpoint is made with the new certificates, cut included, and restored."""
    task = counting("a")
    async with rig(tmp_path, SECURED) as gym:
        await gym.start()
        await gym.held_at_call(task, turn=1)
        await gym.checkpoint()
        await asyncio.to_thread(renewed, gym.plan)
        await gym.checkpoint()
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
    [last] = gym.calls("a", life=2)
    assert last.reused == HELD_AFTER
    assert results["a"] == play(task).result
    assert gym.plan.audit_log is not None
    told = [json.loads(line) for line in gym.plan.audit_log.read_text().splitlines()]
    assert {(line["role"], line["by"], line["certificate"]) for line in told} == {
        (role, "certificate", ROLE_NAMES[role]) for role in ("controller", "peer")
    }
    done = {line["method"].rpartition("/")[2] for line in told if line["code"] == "OK"}
    assert {"Prepare", "Commit", "Resume", "Restore", "CutGenerations"} <= done
    assert {line["code"] for line in told if line["method"].endswith("/Commit")} == {"OK"}
