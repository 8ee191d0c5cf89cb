"""The inference worker as a real process with its control port: cuts of what runs, found in another process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gym_ckpt_grpc.capture import GrpcGenerationBackend, admission_to_json
from gym_ckpt_grpc.control import (
    Budget,
    CallIdentity,
    Continuation,
    CutAck,
    CutDisposition,
    CutPresence,
    Sweep,
)
from gym_ckpt_grpc.minigym.event_stream import data_of, split_events
from gym_ckpt_grpc.minigym.inference_log import calls_of, read_rows
from gym_ckpt_grpc.minigym.ports import LOOPBACK, free_ports
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.supervisor import Supervisor
from gym_ckpt_grpc.protocol import EpisodeId
from tests.minigym.workers import request, root

pytestmark = pytest.mark.e2e

BUSY = 64
"""Data connections that all generate: every one that the client has."""


@dataclass
class _Service:
    """A running worker: its data connections, and the backend that cuts."""

    directory: Path
    url: str
    http: aiohttp.ClientSession
    backend: GrpcGenerationBackend
    supervisor: Supervisor

    async def control(self, route: str, **body: Any) -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.post(f"{self.url}/control/{route}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    async def held(self, count: int) -> None:
        url = f"{self.url}/control/held?count={count}&within=20"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            assert answer.status == 200, await answer.text()

    async def listed(self, what: str) -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/control/{what}") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def ask(self, call_id: str, **changes: Any) -> dict[str, Any]:
        body = request(root(call_id), **changes).model_dump(exclude_none=True)
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            if not changes.get("stream"):
                reply: dict[str, Any] = await answer.json()
                return reply
            events = [data_of(each) async for each in split_events(answer.content.iter_any())]
            return {"events": events}

    async def sweep(self, call_ids: list[str], *, number: int = 1, within: float = 10.0) -> list[CutAck]:
        """The acknowledgements of one sweep. Raises OutOfTime if they are not all there in time."""
        calls = [(CallIdentity(f"t-{each}", EpisodeId("5-0"), each, "0" * 64), 1.0) for each in call_ids]
        sweep = Sweep("ckpt-1", "policy", 1, number, calls)
        acks: list[CutAck] = []
        async for part in self.backend.cut(sweep, Budget(within)):
            acks += part if isinstance(part, list | tuple) else ()
        return acks


@asynccontextmanager
async def _service(directory: Path, *, tick: float = 0.002) -> AsyncIterator[_Service]:
    port, control_port = free_ports(2)
    script = str(Path(__file__).with_name("children") / "worker.py")
    control = f"{LOOPBACK}:{control_port}"
    files = [str(directory / "log"), "1", str(tick), str(directory / "staged")]
    argv = [sys.executable, script, str(port), *files, control]
    spec = ProcessSpec("inference", argv, port, env={"PYTHONPATH": os.pathsep.join(sys.path)})
    backend = GrpcGenerationBackend("inference", control, allow_insecure=True)
    connector = aiohttp.TCPConnector(limit=BUSY)
    async with Supervisor(directory) as supervisor, aiohttp.ClientSession(connector=connector) as http:
        await supervisor.start([spec])
        try:
            yield _Service(directory, f"http://{LOOPBACK}:{port}", http, backend, supervisor)
        finally:
            await backend.close()


@pytest.mark.behaviour("P162")
async def test_cut_control_answers_within_a_second_while_every_data_connection_generates(tmp_path: Path) -> None:
    """Who it is, and the cuts of all that runs: each has one second, and misses it or not."""
    async with _service(tmp_path, tick=0.02) as service:
        names = [f"busy-{number}" for number in range(BUSY)]
        asking = [asyncio.create_task(service.ask(name, stream=True, seed=n)) for n, name in enumerate(names)]
        # Held at the fifteenth token, which every reply has: still generating, and none of them can end.
        await service.control("hold", after=15)
        await service.held(BUSY)
        queued = asyncio.create_task(service.ask("queued"))
        assert (await service.backend.describe(Budget(1.0))).backend_id == "inference"
        acks = await service.sweep(names, within=1.0)
        assert [ack.disposition for ack in acks] == [CutDisposition.CUT] * BUSY
        calls = {call["call_id"] for call in (await service.listed("calls"))["calls"]}
        assert "queued" not in calls
        await service.control("release")
        replies = await asyncio.gather(*asking)
        assert all(reply["events"][-1] is None for reply in replies)
        assert (await queued)["finish_reason"] == "tool_calls"


_READER = """
import sys
from gym_ckpt_grpc.capture import FileTokenStore
directory, *keys = sys.argv[1:]
records = [FileTokenStore(directory).get(key) for key in keys]
print([sum(record.masks) for record in records])
"""


@pytest.mark.behaviour("P158", "P159")
async def test_what_an_ack_names_is_read_by_a_new_process_and_the_generation_goes_on(tmp_path: Path) -> None:
    async with _service(tmp_path) as service:
        whole = await service.ask("whole")
        await service.control("hold", after=6)
        asking = asyncio.create_task(service.ask("cut"))
        await service.held(1)
        (ack,) = await service.sweep(["cut"])
        assert ack.evidence is not None
        reader = [sys.executable, "-c", _READER, str(tmp_path / "staged"), *ack.evidence.staging_keys]
        read = await asyncio.to_thread(subprocess.run, reader, capture_output=True, text=True, check=True)
        assert read.stdout.strip() == "[6]"
        await service.control("release")
        reply = await asking
        for name in ("token_ids", "logprobs", "choices", "text"):
            assert reply[name] == whole[name]
        # It is finished now, and a later sweep says so; the first cut stands until it is given up.
        (later,) = await service.sweep(["cut"], number=2)
        assert later.disposition is CutDisposition.FINISHED
        assert await service.backend.check([ack.evidence], Budget(5.0)) == [CutPresence.PRESENT]
        await service.backend.release([ack.evidence.cut_id], Budget(5.0))
        assert await service.backend.check([ack.evidence], Budget(5.0)) == [CutPresence.MISSING]
        assert (await service.listed("sweeps"))["released"] == [ack.evidence.cut_id]


async def test_a_killed_worker_continues_its_cut_in_its_next_life_and_the_log_counts_what_was_made(
    tmp_path: Path,
) -> None:
    async with _service(tmp_path) as service:
        whole = await service.ask("whole")
        await service.control("hold", after=7)
        asking = asyncio.create_task(service.ask("cut"))
        await service.held(1)
        (ack,) = await service.sweep(["cut"])
        await service.supervisor.crash()
        await asyncio.gather(asking, return_exceptions=True)
    evidence = ack.evidence
    assert evidence is not None
    async with _service(tmp_path) as service:
        continuation = Continuation(
            "5-0", "cut", evidence.staging_keys, 7, evidence.prefix_digest, evidence.output_limit, 0
        )
        capture = admission_to_json(root("next", attempt=1, continuation=continuation))
        reply = await service.ask("next", capture=capture, attempt=1)
    assert reply["token_ids"] == whole["token_ids"]
    logged = calls_of(read_rows(tmp_path / "log"))
    made = {(call.call_id, call.continued_from, call.reused, call.tokens) for call in logged}
    total = len(whole["token_ids"])
    assert ("next", "cut", 7, total - 7) in made


async def test_controls_break_cuts_hold_calls_change_weights_and_are_absent_otherwise(tmp_path: Path) -> None:
    async with _service(tmp_path) as service:
        await service.control("weights", version=4)
        assert (await service.backend.describe(Budget(5.0))).weight_version == 4
        hold = await service.control("hold", after=3, attempt=0, turn=0)
        other = await service.control("hold", after=0, rollout_id="another")
        asking = asyncio.create_task(service.ask("held"))
        await service.held(1)
        await service.control("cuts", mode="fail")
        assert [ack.disposition for ack in await service.sweep(["held"])] == [CutDisposition.FAILED]
        await service.control("cuts", mode="hang")
        hung = asyncio.create_task(service.sweep(["held"], number=2, within=20.0))
        await service.control("release", id=hold["id"])
        assert (await asking)["weight_version"] == 4
        assert not hung.done()
        await service.control("release")
        assert [ack.disposition for ack in await hung] == [CutDisposition.FINISHED]
        assert other["id"] != hold["id"]
        (call,) = (await service.listed("calls"))["calls"]
        assert (call["call_id"], call["state"], call["made"], call["reused"]) == ("held", "end", call["tokens"], 0)
        assert call["capture"] == admission_to_json(root("held"))
        assert call["request"]["messages"]
