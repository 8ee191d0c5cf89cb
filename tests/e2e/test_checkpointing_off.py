"""The same servers with checkpointing off: nothing of it is in the path. Real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from gym_ckpt_grpc.minigym.tasks import make_tasks
from gym_ckpt_grpc.minigym.topology import Topology
from tests.e2e.plays import play
from tests.e2e.rig import TICK, rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.mark.behaviour("P37")
@pytest.mark.parametrize("protocol", ["native", "legacy"])
async def test_no_header_no_count_and_no_gate(protocol: Literal["native", "legacy"], tmp_path: Path) -> None:
    """Every rollout gives what it gives with checkpointing; no server has a control port, no reply a header of ours."""
    topology = Topology(protocol=protocol, checkpointing=False, capture=False, cuts=False)
    tasks = make_tasks(6, 3)
    async with rig(tmp_path, topology, tick=TICK) as gym:
        assert {server.control_port for server in gym.plan.servers} == {0}
        assert not gym.plan.fleet_file.exists()
        await gym.start()
        headers: dict[str, list[str]] = {}
        for name, path in (
            ("counter", "/rollout/r/seed_session"),
            ("policy_model", "/rollout/r/v1/chat/completions"),
            ("environment", "/health"),
            ("agent", "/health"),
        ):
            body = {"target": 3} if name == "counter" else {"messages": [{"role": "user", "content": "hello"}]}
            url = gym.plan.server(name).url + path
            asking = gym.http.get(url) if path == "/health" else gym.http.post(url, json=body)
            async with asking as reply:
                assert reply.status == 200, await reply.text()
                headers[name] = [header for header in reply.headers if "gymckpt" in header.lower()]
        assert headers == {name: [] for name in headers}
        gym.send(tasks)
        results = await gym.finish()
    assert results == {task.rollout_id: play(task).result for task in tasks}
