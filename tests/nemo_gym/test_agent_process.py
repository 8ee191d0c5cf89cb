"""The released SimpleAgent as a real process, started by `gym-ckpt nemo-gym`: killed, restored, finished."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gym_ckpt_grpc.auth import TokenFile
from gym_ckpt_grpc.coordinator import Coordinator, Fleet, NotPrepared, Server
from gym_ckpt_grpc.minigym.ports import LOOPBACK, free_ports
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.supervisor import Supervisor
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.nemo_gym.agent_rig import PROMPT, TwoCalls, World, heard, loopback, port_of, served

WITHIN = 120.0
TOLD = ['{"count":1}', '{"count":3}', 'I was told {"count":1}, {"count":3}.']


class Process:
    """The agent, and what it needs to be started, again and again, at the same addresses."""

    def __init__(self, directory: Path, ports: Mapping[str, int]) -> None:
        self.port, self.control = free_ports(2)
        self.root, token = directory / "root", directory / "token"
        self.root.mkdir()
        token.write_text("a-token-of-24-characters-or-more")
        token.chmod(0o600)
        self.token = TokenFile(str(token))
        address = f"{LOOPBACK}:{self.control}"
        agent = {
            "resources_server": {"type": "resources_servers", "name": "world"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
        }
        self.config = {
            "head_server": {"host": LOOPBACK, "port": 1},
            "dry_run": False,
            "gym_ckpt": {
                "root": str(self.root),
                "token_file": str(token),
                "instances": {"agent": {"control": address}},
            },
            "world": _block("resources_servers", "example_session_state_mgmt", ports["world"]),
            "policy_model": _block("responses_api_models", "openai_model", ports["policy_model"]),
            "agent": _block("responses_api_agents", "simple_agent", self.port, **agent),
        }
        self.fleet = Fleet([Server(kind="agent", service="agent", address=address)], require_kinds=[])
        self.supervisor = Supervisor(directory / "logs")

    async def start(self) -> None:
        argv = [str(Path(sys.executable).parent / "gym-ckpt"), "nemo-gym", "agent"]
        env = {"NEMO_GYM_CONFIG_DICT": json.dumps(self.config)}
        spec = ProcessSpec("agent", argv, self.port, health="/healthz", env=env)
        await self.supervisor.start([spec], within=WITHIN)

    async def kill(self) -> None:
        """`kill -9` of the server's process group."""
        os.killpg(self.supervisor.pids["agent"], signal.SIGKILL)
        await self.supervisor.crash()

    def coordinator(self) -> Coordinator:
        return Coordinator(self.fleet, root=str(self.root), token=self.token)

    async def run(self, http: aiohttp.ClientSession, rollout: str, attempt: int = 0) -> Any:
        ids = {"_ng_task_index": 0, "_ng_rollout_index": 0, "_ng_rollout_id": rollout, "_ng_attempt_index": attempt}
        row = {"responses_create_params": {"input": [{"role": "user", "content": PROMPT}]}, **ids}
        async with http.post(f"http://{LOOPBACK}:{self.port}/run", json=row) as answer:
            return answer.status, await answer.json(content_type=None)


def _block(kind: str, implementation: str, port: int, **more: Any) -> dict[str, Any]:
    return {kind: {implementation: {"entrypoint": "app.py", "host": LOOPBACK, "port": port, **more}}}


@pytest.mark.timeout(300)
async def test_killed_between_two_tool_calls_and_in_a_generation_and_restored(tmp_path: Path) -> None:
    """One rollout of each kind in one checkpoint; both end as their twins, who were not killed."""
    world, model = World(), TwoCalls()
    world.hold("/first", 2)  # of the second rollout: the checkpoint waits for it and takes it before /second
    model.hold("model", 2)  # of the first rollout
    listening = {"world": loopback(), "policy_model": loopback()}
    async with (
        served(world.app, listening["world"]),
        served(model.app, listening["policy_model"]),
        aiohttp.ClientSession() as http,
    ):
        process = Process(tmp_path, {name: port_of(each) for name, each in listening.items()})
        async with process.supervisor:
            await process.start()
            generating = asyncio.create_task(process.run(http, "generating"))
            await model.at("model", 2)
            between = asyncio.create_task(process.run(http, "between"))
            await world.at("/first", 2)
            async with process.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
                with pytest.raises(NotPrepared) as early:
                    await checkpoint.prepare(ready_within=1)
                waited_for = [(each.episode, each.reason) for _, each in early.value.report.blockers]
                assert waited_for == [(EpisodeId("between"), BlockerReason.RUNNING)]
                world.release()
                report = await checkpoint.prepare(ready_within=30)
                episodes = [EpisodeId("generating"), EpisodeId("between")]
                await checkpoint.commit(report.continued(episodes))
                await checkpoint.publish()
                assert world.paths().count("/second") == 1
                picture = dict(world.counters)
            model.release()
            for running in (generating, between):
                status, twin = await running
                assert (status, heard(twin), twin["reward"]) == (200, TOLD, 3.0)

            await process.kill()
            world.counters = dict(picture)
            called, asked = len(world.calls), len(model.asked)
            await process.start()
            async with process.coordinator() as coordinator, coordinator.restoring("latest") as restored:
                assert sorted(restored.continued) == sorted(each.next() for each in episodes)
            for rollout in ("generating", "between"):
                status, result = await process.run(http, rollout, 1)
                assert (status, heard(result), result["reward"]) == (200, TOLD, 3.0)
            again = [(each[0], each[1]) for each in world.calls[called:]]
            assert again == [("generating-a1", "/verify"), ("between-a1", "/second"), ("between-a1", "/verify")]
            assert len(model.asked) - asked == 2
