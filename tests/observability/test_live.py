"""Each alert that can be provoked fires, on a Gym of real servers under a real Prometheus, and is silent before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from gym_ckpt_grpc import telemetry
from gym_ckpt_grpc.auth import TokenValue
from gym_ckpt_grpc.control import open_channel
from gym_ckpt_grpc.protocol.errors import GymCkptError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc
from tests.e2e.plays import counting
from tests.e2e.rig import COUNTER, LIMIT, Rig, rig
from tests.observability.prometheus import Prometheus, eventually, prometheus, write_targets
from tests.observability.shortened import DIRECTORY, PREFIX, alerts, shortened
from tests.telemetry.otlp_receiver import Collector

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NOT_PROVOKED = {
    "TaskTooOld": "needs a file system, or a hook, that hangs",
    "OpeningFails": "needs a server whose hook of opening raises",
    "MostRolloutsRestarted": "needs a server whose records do not fit the checkpoint",
}
"""Alert -> why it is tested with made series only (alerts_test.yaml)."""


@dataclass
class Stage:
    """The Gym, the Prometheus that looks at it, and the alerts that have fired."""

    gym: Rig
    seen: Prometheus
    fired: set[str]

    @asynccontextmanager
    async def provoking(self, *names: str) -> AsyncIterator[None]:
        """These alerts are silent before the block, and fire during it or after."""
        before = await self.seen.firing()
        assert not {PREFIX + name for name in names} & before.keys()
        yield
        for name in names:
            await self.fires(name)

    async def fires(self, name: str) -> None:
        """Wait until it does; its summary is written out."""
        # By its series and not by what fires at the moment: some fire for as long as their cause lasts.
        expression = f'last_over_time(ALERTS{{alertname="{PREFIX}{name}",alertstate="firing"}}[1m])'
        await eventually(lambda: self.seen.query(expression), bool)
        self.fired.add(name)
        if summary := (await self.seen.firing()).get(PREFIX + name):
            assert "<no value>" not in summary
            assert "{{" not in summary

    async def prepare(self, server: str, checkpoint_id: str, *, epoch: int, lease: int) -> pb.PrepareResponse:
        """By hand, as a coordinator that never renews."""
        asked = pb.PrepareRequest(
            context=pb.ControlContext(checkpoint_id=checkpoint_id, controller_id="by-hand", epoch=epoch),
            ready_within=Duration(nanos=200_000_000),
            lease_ttl=Duration(seconds=lease),
        )
        async with self.gym.stub(server) as stub:
            answer: pb.PrepareResponse = await stub.Prepare(asked, timeout=LIMIT)
            return answer


async def a_closed_server_that_nobody_opens(stage: Stage) -> None:
    """A tool call holds up the cut; the controller asks again, gives up and renews nothing."""
    gym = stage.gym
    await gym.hold("counter", "/increment")
    gym.send([counting("a")])
    await gym.held("counter", "/increment")
    async with stage.provoking(
        "BlockerTooOld", "PrepareNotReady", "ClosedTooLong", "LeaseExpiring", "LeaseExpired", "PauseTooLong"
    ):
        for _ in range(3):
            answer = await stage.prepare("counter", "by-hand", epoch=1, lease=14)
            assert answer.phase == pb.PHASE_PREPARING
    await gym.until("counter", lambda status: status.active_checkpoint_id == "")
    await gym.release("counter", "/increment")
    await gym.finish()


async def a_checkpoint_that_cannot_be_written(stage: Stage) -> None:
    """Where the root was, there is a file."""
    gym, root = stage.gym, stage.gym.plan.root
    gym.send([counting("b", turns=2)])
    async with stage.provoking("CommitsFailing", "NothingPublished"), gym.coordinator() as coordinator:
        with contextlib.suppress(GymCkptError):
            async with coordinator.checkpoint(deadline=LIMIT) as checkpoint:
                await checkpoint.prepare(ready_within=LIMIT)
                away = root.with_suffix(".away")
                root.rename(away)
                root.touch()
                try:
                    await checkpoint.commit(checkpoint.report.continued(gym.in_flight))
                finally:
                    root.unlink()
                    away.rename(root)
    await gym.finish()


async def refused_calls(stage: Stage) -> None:
    """A wrong token, a coordinator that was replaced, and an attempt that is retired."""
    gym = stage.gym
    async with stage.provoking("CredentialsRefused"):
        channel = open_channel(gym.plan.server("agent").control_address, token=TokenValue("wrong"))
        async with channel as opened:
            stub = participant_pb2_grpc.ParticipantServiceStub(opened)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetStatus(pb.GetStatusRequest(), timeout=LIMIT)
    async with stage.provoking("TwoCoordinators"):
        with pytest.raises(grpc.aio.AioRpcError):
            await stage.prepare("counter", "late", epoch=1, lease=5)
    async with stage.provoking("AdmissionRefused"):
        await gym.retire([EpisodeId("gone")])
        url = gym.plan.server("policy_model").url + f"/rollout/{EpisodeId('gone').capture_key}/v1/chat/completions"
        async with gym.http.post(url, json={"model": "minigym", "messages": [], "tools": []}) as answer:
            assert answer.status == 409, await answer.text()


async def a_server_that_stands_still(stage: Stage) -> None:
    """While it is closed, and then goes on; a request waits at another one's gate."""
    gym = stage.gym
    pid = gym.servers.pids["environment"]
    async with stage.provoking("LoopLag"), gym.prepared():
        asking = asyncio.create_task(gym.ask("asked", 0, "Hello"))
        await eventually(lambda: stage.seen.query("gym_checkpoint_held_requests > 0"), bool)
        os.killpg(pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)  # this long is the event itself
        os.killpg(pid, signal.SIGCONT)
    await asking


async def a_checkpoint_and_no_other(stage: Stage) -> str:
    """Published; then nothing more."""
    gym = stage.gym
    async with stage.provoking("NoneLately"):
        await gym.held_at_call(counting("c"), turn=1)
        checkpoint = await gym.checkpoint()
        await gym.release_tokens()
        await gym.finish()
    return checkpoint.id


async def a_server_that_dies_closed(stage: Stage) -> None:
    """It cannot be resumed."""
    gym = stage.gym
    async with stage.provoking("ResumesFailing"):
        with contextlib.suppress(GymCkptError):
            async with gym.prepared():
                await gym.servers.kill("counter")


async def a_damaged_checkpoint_and_its_copy(stage: Stage, checkpoint_id: str) -> None:
    """Restoring the damaged one fails; the good one is restored, and nobody starts what it continues."""
    gym, root = stage.gym, stage.gym.plan.root
    await gym.crash()
    copy = root.with_suffix(".copy")
    shutil.copytree(root, copy)
    for file in root.rglob("*"):
        if file.is_file() and checkpoint_id in str(file) and "counter" in str(file) and file.stat().st_size:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0xFF
            file.write_bytes(content)
    await gym.start()
    async with stage.provoking("RestoresFailing"):
        with pytest.raises(GymCkptError):
            await gym.restore_here()
    shutil.rmtree(root)
    copy.rename(root)
    async with stage.provoking("RestoredNotStarted"):
        restored = await gym.restore_here()
        assert restored.continued
    gym.send_continued(restored)
    await gym.finish()


async def the_dashboard(seen: Prometheus) -> None:
    """Each query of each panel has had a series."""
    board: dict[str, Any] = json.loads((DIRECTORY / "dashboard.json").read_text())
    empty = set()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$job", ".*")
            for window in ("$__rate_interval", "$window"):
                expression = expression.replace(window, "1m")
            if not await seen.since_began(expression):
                empty.add(panel["title"])
    assert empty == set()


async def restarts_do_not_count_backwards(seen: Prometheus) -> None:
    """Over the crash: what was restored is counted as that, and no counter's increase is below 0 (field case 148)."""
    for name in ("records_total", "events_total", "operation_duration_ms_count"):
        assert await seen.query(f"increase(gym_checkpoint_{name}[10m]) < 0") == []
    restored = await seen.query('sum(gym_checkpoint_records_total{nemo_gym_checkpoint_operation="restore"})')
    assert float(restored[0]["value"][1]) > 0
    committed = await seen.query('gym_checkpoint_records_total{nemo_gym_checkpoint_operation="commit"}')
    assert committed == [], "this life has committed nothing"


async def test_alerts_fire_when_provoked_and_every_panel_shows_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_CKPT_TELEMETRY", "prometheus:0")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    trainer = tmp_path / "trainer.json"
    async with rig(tmp_path, COUNTER) as gym:
        jobs = {"gym": gym.servers.metrics.file, "trainer": trainer}
        async with prometheus(tmp_path / "prometheus", shortened(), jobs) as seen:
            with Collector() as collector:
                exporting = telemetry.configure(
                    prometheus=0, otlp=collector.endpoint, span_groups="checkpoint", service_name="trainer"
                )
                write_targets(trainer, exporting.prometheus_address)
                await gym.start()
                stage = Stage(gym, seen, set())
                await eventually(lambda: seen.query("up == 1"), lambda up: len(up) == len(gym.plan.servers) + 1)
                assert await seen.firing() == {}
                await a_closed_server_that_nobody_opens(stage)
                await a_checkpoint_that_cannot_be_written(stage)
                await refused_calls(stage)
                await a_server_that_stands_still(stage)
                published = await a_checkpoint_and_no_other(stage)
                await a_server_that_dies_closed(stage)
            async with stage.provoking("SpansDropped"):  # the collector is away now
                await a_damaged_checkpoint_and_its_copy(stage, published)
            await restarts_do_not_count_backwards(seen)
            await the_dashboard(seen)
        exporting.shutdown()
    assert stage.fired == alerts().keys() - NOT_PROVOKED.keys()
