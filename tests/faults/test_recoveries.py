"""What happens to a fleet of real processes when one of them, or the controller, goes away in a checkpoint."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from gym_ckpt_grpc.coordinator import CommitFailed, Coordinator, Fleet, FleetError, Server
from gym_ckpt_grpc.protocol import ControlError
from gym_ckpt_grpc.protocol.errors import LeaseLost
from gym_ckpt_grpc.storage import CheckpointRoot, Level, verify_checkpoint
from gym_ckpt_grpc.testing import Network
from gymckpt.v1 import participant_pb2 as pb
from tests.faults.harness import Participants, participants

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

LEASE = 2.0
KEEPALIVE = 15.0
"""Seconds until a server gives up a connection whose client answers no ping (protocol section 4)."""
SLACK = 5.0
"""What a loaded machine may add."""


def coordinator(fleet: Participants, controller: str = "test") -> Coordinator:
    return Coordinator(
        Fleet.from_yaml(fleet.fleet_file), root=fleet.root.as_uri(), controller_id=controller, lease_ttl=LEASE
    )


@pytest.mark.behaviour("C120", "C235")
async def test_a_killed_controller_costs_one_lease(tmp_path: Path) -> None:
    """Nobody calls Resume: each participant reopens by itself, and nothing is published."""
    with participants(tmp_path, "policy_model", "resources") as fleet:
        controller = fleet.controller(lease=LEASE)
        assert await fleet.phase("resources") == pb.PHASE_PREPARED
        controller.kill()
        for kind in ("policy_model", "resources"):
            assert await fleet.seconds_until_idle(kind, 30) <= LEASE + SLACK
        assert list(CheckpointRoot(str(fleet.root)).published()) == []


@pytest.mark.behaviour("C123")
async def test_a_stopped_controller_costs_a_lease_and_the_keepalive(tmp_path: Path) -> None:
    """SIGSTOP inside a Prepare that waits: its connection looks alive to the kernel, but answers no ping."""
    with participants(tmp_path, "policy_model") as fleet:
        fleet.processes["policy_model"].tell("run r")
        controller = fleet.controller(lease=LEASE, wait_in="preparing")
        async with fleet.stub("policy_model") as stub:
            async for reply in stub.WatchStatus(pb.WatchStatusRequest(), timeout=30):
                if reply.status.phase == pb.PHASE_PREPARING:
                    break
        controller.signal(signal.SIGSTOP)
        try:
            waited = await fleet.seconds_until_idle("policy_model", 60)
            assert waited <= LEASE + KEEPALIVE + SLACK
            assert waited >= LEASE / 2  # not at once: the lease is honoured
        finally:
            controller.signal(signal.SIGCONT)
            controller.kill()


async def test_a_cut_off_controller_costs_a_lease_and_the_keepalive(tmp_path: Path) -> None:
    """The cable is pulled inside a Prepare that waits: no reset arrives, and the controller lives on elsewhere."""
    with participants(tmp_path, "policy_model") as fleet:
        fleet.processes["policy_model"].tell("run r")
        async with Network() as network:
            cable = await network.cable(fleet.addresses["policy_model"])
            far = Server(kind="policy_model", service="scripted", address=cable.address)
            control = Coordinator(Fleet([far]), root=fleet.root.as_uri(), lease_ttl=LEASE, exit_timeout=1.0)

            async def wait_in_prepare() -> None:
                async with control, control.checkpoint(deadline=300) as checkpoint:
                    await checkpoint.prepare(ready_within=250)

            waiting = asyncio.create_task(wait_in_prepare())
            async with fleet.stub("policy_model") as stub:
                async for reply in stub.WatchStatus(pb.WatchStatusRequest(), timeout=30):
                    if reply.status.phase == pb.PHASE_PREPARING:
                        break
            cable.stall()
            try:
                assert await fleet.seconds_until_idle("policy_model", 60) <= LEASE + KEEPALIVE + SLACK
                with pytest.raises(LeaseLost, match="policy_model/scripted/0"):
                    await waiting
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)


async def test_a_controller_killed_at_random_moments_publishes_whole_or_not_at_all(
    tmp_path: Path, rng: random.Random
) -> None:
    """SIGKILL while it commits and publishes: what the root says is published restores, and the fleet opens."""
    with participants(tmp_path, "policy_model", "resources") as fleet:
        for name in ("a", "b", "c"):
            fleet.processes["resources"].tell(f"live {name}")
        for _ in range(6):
            controller = fleet.controller(lease=LEASE)
            controller.tell("go on", answer=False)
            await asyncio.sleep(rng.uniform(0.0, 0.15))  # a moment, not a condition: any is as good as another
            controller.kill()
            for kind in ("policy_model", "resources"):
                await fleet.seconds_until_idle(kind, 30)
            root = CheckpointRoot(str(fleet.root))
            for listed in root.published():
                findings = list(verify_checkpoint(root, listed.publication.checkpoint_id))
                assert findings[-1].level is Level.PASSED, [f for f in findings if f.is_fault]


@pytest.mark.behaviour("C215", "C217")
async def test_a_participant_restarted_after_prepare_fails_the_commit_by_name(tmp_path: Path) -> None:
    """INCARNATION_CHANGED, not an odd phase error; nothing published; the others are open again."""
    with participants(tmp_path, "policy_model", "resources") as fleet:
        async with coordinator(fleet) as control, control.checkpoint(deadline=20) as checkpoint:
            await checkpoint.prepare(ready_within=10)
            address = fleet.addresses["resources"]
            fleet.processes["resources"].kill()
            fleet.start("resources", address)
            with pytest.raises((CommitFailed, FleetError, ControlError)) as failed:
                await checkpoint.commit([])
        assert "INCARNATION_CHANGED" in str(failed.value)
        assert "resources/scripted/0" in str(failed.value)
        assert await fleet.phase("policy_model") == pb.PHASE_IDLE
        assert list(CheckpointRoot(str(fleet.root)).published()) == []


async def test_a_participant_killed_for_good_fails_the_commit_and_frees_the_rest(tmp_path: Path) -> None:
    """It is named; the others reopen at once and do not wait for it."""
    with participants(tmp_path, "policy_model", "resources") as fleet:
        async with coordinator(fleet) as control:
            async with control.checkpoint(deadline=6) as checkpoint:
                await checkpoint.prepare(ready_within=5)
                fleet.processes["resources"].kill()
                with pytest.raises((FleetError, ControlError)) as failed:  # LeaseLost, or the Commit's own failure
                    await checkpoint.commit([])
            assert "resources/scripted/0" in str(failed.value)
            assert await fleet.phase("policy_model") == pb.PHASE_IDLE


@pytest.mark.behaviour("C19", "C240")
async def test_a_second_controller_takes_over_and_the_first_is_refused(tmp_path: Path) -> None:
    """The newer epoch ends what it finds open; the older controller publishes nothing."""
    with participants(tmp_path, "policy_model") as fleet:
        first = fleet.controller(lease=60)
        first.signal(signal.SIGSTOP)
        try:
            async with coordinator(fleet, "second") as second:
                assert await fleet.phase("policy_model") == pb.PHASE_IDLE
                async with second.checkpoint(deadline=20) as checkpoint:
                    await checkpoint.prepare(ready_within=10)
                    await checkpoint.commit([])
                    await checkpoint.publish()
            first.signal(signal.SIGCONT)
            first.tell("go on", answer=False)
            assert first.popen.wait(60) != 0
        finally:
            first.kill()
        [only] = CheckpointRoot(str(fleet.root)).published()
        assert only.publication.checkpoint_id == checkpoint.id


@pytest.mark.behaviour("C114", "C225")
async def test_a_resume_that_does_not_open_is_pending_and_the_publication_stands(tmp_path: Path) -> None:
    """The opening hook hangs: the checkpoint is published all the same, and the result names the participant."""
    with participants(tmp_path, "policy_model") as fleet:
        control = Coordinator(
            Fleet.from_yaml(fleet.fleet_file), root=fleet.root.as_uri(), lease_ttl=LEASE, exit_timeout=2.0
        )
        async with control:
            async with control.checkpoint(deadline=20) as checkpoint:
                await checkpoint.prepare(ready_within=10)
                await checkpoint.commit([])
                await checkpoint.publish()
                fleet.processes["policy_model"].tell("swallow")
            assert checkpoint.result is not None
            assert checkpoint.result.state.name == "PUBLISHED"
            assert [str(identity) for identity in checkpoint.result.resume_pending] == ["policy_model/scripted/0"]
            assert await fleet.phase("policy_model") == pb.PHASE_RESUMING


@pytest.mark.behaviour("C190")
async def test_a_blocked_event_loop_is_found_silent_within_the_deadline(tmp_path: Path) -> None:
    """Liveness is a GetStatus with a deadline: keepalive does not see a blocked loop."""
    with participants(tmp_path, "policy_model") as fleet:
        fleet.processes["policy_model"].tell("block 8", answer=False)
        await asyncio.sleep(0.3)  # the line reaches the other process; nothing else can tell
        control = Coordinator(Fleet.from_yaml(fleet.fleet_file), root=fleet.root.as_uri(), discovery_timeout=2.0)
        with pytest.raises(FleetError, match=r"SILENT|DOWN"):
            async with control:
                pytest.fail("it was entered")


@pytest.mark.parametrize("where", ["port", "socket"])
async def test_a_second_process_on_the_same_address_does_not_start(where: str, tmp_path: Path) -> None:
    """The first one goes on serving; the second ends with an error that names the address."""
    with participants(tmp_path) as fleet:
        wanted = "127.0.0.1:0" if where == "port" else f"unix:{tmp_path}/s.sock"
        first = fleet.start("policy_model", wanted)
        address = fleet.addresses["policy_model"]
        with pytest.raises(AssertionError, match="ended with 1"):
            fleet.start("policy_model", address)
        fleet.processes["second"] = fleet.processes["policy_model"]
        fleet.processes["policy_model"] = first
        fleet.addresses["policy_model"] = address
        assert await fleet.phase("policy_model") == pb.PHASE_IDLE
