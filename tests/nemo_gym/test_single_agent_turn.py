"""The released single-agent-turn environments with an agent session: captured in the middle, restored, finished."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.nemo_gym.turn_rig import ENVIRONMENTS, Upstream, living, row_of

R0 = EpisodeId("7-0")


def said(kind: str, answer: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of an answer does not differ between twins: reward, and what the model said and was told."""
    result = answer["result"] if kind == "typed" else answer
    return result["reward"], [
        (item["type"], item.get("output"), [part["text"] for part in item.get("content") or ()])
        for item in result["response"]["output"]
    ]


@pytest.mark.parametrize("kind", sorted(ENVIRONMENTS))
async def test_an_episode_goes_on_where_it_was_and_ends_as_its_twin(tmp_path: Path, kind: str) -> None:
    upstream = Upstream()
    upstream.held = asyncio.Event()
    async with living(tmp_path, upstream, kind) as first:
        running = asyncio.create_task(first.run(row_of(kind)))
        await upstream.waiting.wait()
        async with first.coordinator(tmp_path / "root") as coordinator:
            async with coordinator.checkpoint() as checkpoint:
                report = await checkpoint.prepare(ready_within=20)
                assert not report.restarts
                await checkpoint.commit(report.continued([R0]))
                await checkpoint.publish()
            upstream.held.set()
            status, twin = await running
        assert status == 200
        assert first.servers["weather"]._session_episodes == {}
        (seeded,) = first.servers["weather"]._closed_session_ids

    before = upstream.calls
    async with living(tmp_path, upstream, kind) as second:
        weather = second.servers["weather"]
        async with second.coordinator(tmp_path / "root") as coordinator:
            async with coordinator.restoring("latest") as restored:
                assert list(restored.continued) == [R0.next()]
            assert set(weather._session_episodes) == {seeded}
            status, answer = await second.run(row_of(kind, attempt=1))
        assert status == 200
        assert said(kind, answer) == said(kind, twin)
        assert said(kind, twin)[0] == 1.0
        # One model call was under way, and is made again; nothing before it is.
        assert upstream.calls == before + 1
        assert [each.rpartition("/")[2] for each in second.heard["weather"].paths] == ["verify", "close_session"]
        assert [each.removeprefix("/ng-rollout/7-0-a1") for each in second.heard["agent"].paths] == [
            "/v1/responses",
            "/v1/agent_sessions/close",
        ]
        # The session it closes is the one that was seeded in the first life.
        assert weather._session_episodes == {}
        assert weather._closed_session_ids == {seeded}


@pytest.mark.parametrize("kind", sorted(ENVIRONMENTS))
async def test_a_run_that_arrives_while_closed_is_held_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    upstream = Upstream()
    async with living(tmp_path, upstream, kind) as turns, turns.coordinator(tmp_path / "root") as coordinator:
        _, twin = await turns.run(row_of(kind))
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=20)
            row = row_of(kind, attempt=3)
            running = asyncio.create_task(turns.run(row))
            await turns.heard["env"].reaches(2)
            assert not running.done()
        status, answer = await running
        assert (status, said(kind, answer)) == (200, said(kind, twin))
