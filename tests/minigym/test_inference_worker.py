"""The inference worker as a real process: equal replies in every life, and a log that outlives SIGKILL."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gym_ckpt_grpc.minigym.counter import TOOLS
from gym_ckpt_grpc.minigym.generation import chosen_call, reply_length, request_digest, text_of
from gym_ckpt_grpc.minigym.inference_log import PROGRESS_EVERY, Call, calls_of, ids_digest, read_rows
from gym_ckpt_grpc.minigym.ports import free_ports
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.supervisor import Supervisor

pytestmark = pytest.mark.e2e


class _Worker:
    """Starts lives of one worker, one after another, on one port and one log."""

    def __init__(self, directory: Path, supervisor: Supervisor, session: aiohttp.ClientSession) -> None:
        self.log = directory / "inference.jsonl"
        self._port = free_ports(1)[0]
        self._lives = 0
        self._supervisor, self._session = supervisor, session

    async def start(self, *, tick: float) -> None:
        self._lives += 1
        script = str(Path(__file__).with_name("children") / "worker.py")
        argv = [sys.executable, script, str(self._port), str(self.log), str(self._lives), str(tick)]
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        await self._supervisor.start([ProcessSpec("inference", argv, self._port, env=path)])

    async def ask(self, **changes: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"rollout_id": "0-0", "attempt": 0, "seed": 5, "tools": TOOLS, **changes}
        body.setdefault("messages", [{"role": "user", "content": "count"}])
        url = f"http://127.0.0.1:{self._port}/v1/chat/completions"
        async with self._session.post(url, json=body) as answer:
            reply: dict[str, Any] = await answer.json()
            return {"status": answer.status, **reply}

    def calls(self) -> list[Call]:
        return calls_of(read_rows(self.log))

    async def until_logged(self, event: str, count: int = 1) -> None:
        """Wait for lines of the log, the only thing a dead worker leaves."""
        while sum(row.event == event for row in read_rows(self.log)) < count:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.005)


@pytest.mark.behaviour("P319")
async def test_a_reply_is_the_same_in_every_life_and_attempt_and_is_logged(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor, aiohttp.ClientSession() as session:
        worker = _Worker(tmp_path, supervisor, session)
        await worker.start(tick=0)
        first = await worker.ask()
        await supervisor.crash()
        await worker.start(tick=0)
        second = await worker.ask(attempt=1)
    assert first["status"] == 200
    assert first.pop("id") != second.pop("id")
    assert first == second
    digest = request_digest([{"role": "user", "content": "count"}], list(TOOLS), model="minigym", seed=5)
    ids, message = first["token_ids"], first["choices"][0]["message"]
    call = chosen_call(ids, TOOLS)
    assert len(ids) == len(first["logprobs"]) == first["usage"]["completion_tokens"] == reply_length(digest)
    assert first["text"] == message["content"] == text_of(ids)
    assert call is not None
    assert message["tool_calls"][0]["function"]["name"] == call.name
    assert first["finish_reason"] == first["choices"][0]["finish_reason"] == "tool_calls"
    logged = [(c.life, c.attempt, c.turn, c.messages, c.tokens, c.outcome) for c in worker.calls()]
    assert logged == [(1, 0, 0, 1, len(ids), "end"), (2, 1, 0, 1, len(ids), "end")]
    assert {(c.context_digest, c.ids_digest) for c in worker.calls()} == {(digest.hex(), ids_digest(ids))}


async def test_tokens_of_calls_killed_midway_are_counted(tmp_path: Path) -> None:
    """Many calls progress together; SIGKILL in their middle leaves what each had made, to 16 tokens."""
    async with Supervisor(tmp_path) as supervisor, aiohttp.ClientSession() as session:
        worker = _Worker(tmp_path, supervisor, session)
        await worker.start(tick=0.02)
        history = [{"role": "user", "content": "count"}, {"role": "assistant", "content": ""}]
        asks = [asyncio.create_task(worker.ask(rollout_id=f"{n}-0", seed=n, messages=history)) for n in range(8)]
        await worker.until_logged("tokens", 8)
        await supervisor.crash()
        results = await asyncio.gather(*asks, return_exceptions=True)
    killed = [call for call in worker.calls() if call.outcome == "unfinished"]
    assert killed
    # A reply can have been logged as ended and not have arrived.
    assert len(killed) <= sum(isinstance(result, aiohttp.ClientError) for result in results)
    assert all(call.tokens >= PROGRESS_EVERY and call.tokens % PROGRESS_EVERY == 0 for call in killed)
    assert {(call.turn, call.messages) for call in worker.calls()} == {(1, 2)}


async def test_a_caller_that_goes_away_stops_its_tokens(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor, aiohttp.ClientSession() as session:
        worker = _Worker(tmp_path, supervisor, session)
        await worker.start(tick=0.02)
        left = asyncio.create_task(worker.ask(rollout_id="left"))
        stays = asyncio.create_task(worker.ask(rollout_id="stays", seed=6))
        await worker.until_logged("start", 2)
        left.cancel()
        await worker.until_logged("cancelled")
        assert (await stays)["status"] == 200
    calls = {call.rollout_id: call for call in worker.calls()}
    assert calls["left"].outcome == "cancelled"
    assert calls["left"].tokens < calls["stays"].tokens
    assert calls["stays"].outcome == "end"


async def test_limits_and_seeds_default_and_bad_requests_are_refused(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor, aiohttp.ClientSession() as session:
        worker = _Worker(tmp_path, supervisor, session)
        await worker.start(tick=0)
        short, whole = await worker.ask(max_tokens=10), await worker.ask()
        assert (short["token_ids"], short["finish_reason"]) == (whole["token_ids"][:10], "length")
        unseeded = [await worker.ask(seed=None, rollout_id=rollout) for rollout in ("1-0", "1-0", "1-1")]
        assert unseeded[0]["token_ids"] == unseeded[1]["token_ids"] != unseeded[2]["token_ids"]
        assert (await worker.ask(tools=[]))["finish_reason"] == "stop"
        free = {"name": "say", "parameters": {"properties": {}, "required": ["text"]}}
        for bad in ({"attempt": -1}, {"seed": 1.5}, {"max_tokens": 0}, {"tools": [free]}, {"colour": 1}):
            refused = await worker.ask(**bad)
            assert (refused["status"], refused["error"]["code"]) == (400, "INVALID_ARGUMENT")
    assert len(worker.calls()) == 6
