"""A trainer that has nothing of ours: grpcurl, reflection, a token, and the served coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue
from gym_ckpt_grpc.coordinator.served import CoordinatorServer
from tests.coordinator.fleet_of_nodes import Nodes, episodes

GRPCURL = Path(sys.executable).parent / "grpcurl"
TOKEN = "token-of-the-interop-test"
SERVICE = "gymckpt.v1.CoordinatorService"


class Client:
    """Runs grpcurl against one address."""

    def __init__(self, address: str, nodes: Nodes) -> None:
        self.address = address
        self.nodes = nodes

    async def __call__(self, method: str, request: dict[str, Any], *options: str) -> list[dict[str, Any]]:
        """The replies of a call, in order; a failed one raises AssertionError with what was printed."""
        command = [str(GRPCURL), "-plaintext", "-expand-headers", "-H", "authorization: Bearer ${TOKEN}"]
        command += [*options, "-d", json.dumps(request), self.address, f"{SERVICE}/{method}"]
        process = await asyncio.create_subprocess_exec(
            *command,
            env={"PATH": os.environ["PATH"], "TOKEN": TOKEN},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, problem = await process.communicate()
        assert process.returncode == 0, problem.decode()
        decoder, text, found = json.JSONDecoder(), output.decode().strip(), []
        while text:
            value, end = decoder.raw_decode(text)
            found.append(value)
            text = text[end:].strip()
        return found


@pytest_asyncio.fixture
async def grpcurl(tmp_path: Path) -> AsyncIterator[Client]:
    nodes = await Nodes(tmp_path / "root").start()
    authenticator = Authenticator({Role.CONTROLLER: TokenValue(TOKEN)})
    try:
        async with (
            nodes.coordinator() as coordinator,
            CoordinatorServer(coordinator, authenticator=authenticator) as server,
        ):
            yield Client(server.address, nodes)
    finally:
        await nodes.stop()


async def test_a_trainer_by_hand(grpcurl: Client) -> None:
    """Look, run a whole checkpoint with its progress, and find it in the list."""
    in_flight = grpcurl.nodes.add(*episodes(2))
    (fleet,) = await grpcurl("ListParticipants", {})
    assert [server["finding"] for server in fleet["servers"]] == ["SERVER_FINDING_OK"] * 4
    columns = {"rollout_ids": [e.rollout_id for e in in_flight], "attempts": [e.attempt for e in in_flight]}
    *progress, last = await grpcurl("RunCheckpoint", {"checkpoint_id": "ck-1", "in_flight": columns}, "-max-time", "30")
    assert {event["event"]["kind"] for event in progress} >= {"EVENT_KIND_STAGE", "EVENT_KIND_PUBLICATION"}
    summary = last["result"]["checkpoint"]
    assert (summary["state"], summary["continued_count"]) == ("CHECKPOINT_STATE_PUBLISHED", "2")
    assert "error" not in last["result"]
    (page,) = await grpcurl("ListCheckpoints", {"page_size": 10})
    assert [(c["checkpoint_id"], c["sequence_number"]) for c in page["checkpoints"]] == [
        ("ck-1", summary["sequence_number"])
    ]
    *_, verdict = await grpcurl("VerifyCheckpoint", {"checkpoint_id": "latest"})
    assert verdict["verdict"]["intact"] is True
    assert grpcurl.nodes.all_open()


async def test_a_refusal_can_be_read(grpcurl: Client) -> None:
    with pytest.raises(AssertionError, match="-max-time in grpcurl"):
        await grpcurl("RunCheckpoint", {"in_flight": {}})
    with pytest.raises(AssertionError, match="STATE_NOT_FOUND"):
        await grpcurl("GetCheckpoint", {"checkpoint_id": "none"})
