"""`gym-ckpt serve-coordinator`: a process of its own, ended while a client has a checkpoint open."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
import yaml

from gym_ckpt_grpc.auth import TokenFile
from gym_ckpt_grpc.control import open_channel, wire
from gym_ckpt_grpc.storage import CheckpointRoot
from gymckpt.v1 import coordinator_pb2 as pb
from gymckpt.v1 import coordinator_pb2_grpc
from tests.coordinator.fleet_of_nodes import Nodes, episodes

pytestmark = pytest.mark.e2e
COMMAND = Path(sys.executable).parent / "gym-ckpt"


def files(tmp_path: Path, nodes: Nodes) -> list[str]:
    """The command's files, and the options that name them."""
    fleet, token = tmp_path / "fleet.yaml", tmp_path / "token"
    fleet.write_text(yaml.safe_dump(nodes.fleet().to_mapping()))
    token.write_text("token-of-the-test\n")
    return ["--fleet", str(fleet), "--root", str(nodes.root), "--token-file", str(token), "--address", "127.0.0.1:0"]


async def test_it_waits_for_its_fleet_serves_and_leaves_it_open(tmp_path: Path) -> None:
    nodes = await Nodes(tmp_path / "root").start()
    in_flight = nodes.add(*episodes(2))
    options = files(tmp_path, nodes)
    await nodes["res"].stop()
    process = await asyncio.create_subprocess_exec(
        str(COMMAND),
        "serve-coordinator",
        *options,
        "--json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert b"waiting for res" in await process.stderr.readline()
        await nodes["res"].start()
        nodes["res"].add(*in_flight)
        printed = json.loads(await process.stdout.readuntil(b"}\n"))
        assert printed["epoch"] == 1
        async with open_channel(printed["address"], token=TokenFile(tmp_path / "token")) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            run = pb.RunCheckpointRequest(checkpoint_id="ck-1", in_flight=wire.episode_list(in_flight))
            messages = [message async for message in stub.RunCheckpoint(run, timeout=30)]
            assert messages[-1].result.checkpoint.state == pb.CHECKPOINT_STATE_PUBLISHED
            await stub.PrepareCheckpoint(pb.PrepareCheckpointRequest(checkpoint_id="ck-2"), timeout=30)
            assert nodes.phases() == {"PREPARED"}
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 130
        assert nodes.all_open()
        sequence = CheckpointRoot(str(nodes.root)).sequence
        assert [entry.checkpoint_id for entry in sequence.publications()] == ["ck-1"]
        assert sequence.epoch() == (1, True)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await nodes.stop()
