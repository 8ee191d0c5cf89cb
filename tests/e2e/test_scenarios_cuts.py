"""Generations cut by a checkpoint, in every situation they can be in. Real processes, SIGKILL of every group."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from gym_ckpt_grpc.capture import FileTokenStore
from gym_ckpt_grpc.minigym.tasks import Task
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.e2e.plays import answer, counting, play
from tests.e2e.rig import COUNTER, HELD_AFTER, Rig, places, rig, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.mark.behaviour("E8")
async def test_a_cut_of_a_cut(tmp_path: Path) -> None:
    """Crashed in the continued generation, attempt 2 continues that: the whole equals the uncut run."""
    task = counting("a")
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(task, turn=1)
        await gym.checkpoint()
        await gym.crash()
        await gym.installed()
        await gym.hold_tokens(HELD_AFTER + 4, turn=1)
        gym.send([task], {"a": 1})
        await gym.held_tokens("a")
        await gym.checkpoint()
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
    [middle], [last] = gym.calls("a", life=2), gym.calls("a", life=3)
    expected = play(task)
    assert middle.reused == HELD_AFTER
    assert (last.attempt, last.continued_from, last.reused) == (2, middle.call_id, HELD_AFTER + 4)
    assert last.reused + last.tokens == expected.tokens[1]
    assert last.ids_digest == expected.digests[1]
    assert results["a"] == expected.result


@pytest.mark.behaviour("E9", "E6")
async def test_a_generation_that_finished_while_held(tmp_path: Path) -> None:
    """The replacement gets the finished text, and no token is generated. The undelivered call is not in the lineage."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(counting("a"), turn=1)
        async with gym.prepared() as checkpoint:
            await gym.release_tokens()
            await gym.until("policy_model", lambda status: status.report.counts["held_bytes"] > 0)
            await gym.commit(checkpoint)
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
        lineage = gym.lineage(EpisodeId("a", 1))
    [first, done], [again] = gym.calls("a", life=1), gym.calls("a", life=2)
    assert lineage == [first.call_id, again.call_id]
    expected = play(gym.tasks["a"])
    assert (done.outcome, done.tokens) == ("end", expected.tokens[1])
    assert (again.continued_from, again.reused, again.tokens) == (done.call_id, expected.tokens[1], 0)
    assert again.ids_digest == expected.digests[1]
    assert results["a"] == expected.result


@pytest.mark.behaviour("E10")
async def test_two_parallel_calls_of_one_episode(tmp_path: Path) -> None:
    """Both are held, and both are continued after the crash: each from its own cut."""
    prompts = ["the first of two", "the second of two"]
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        task = counting("a")
        await gym.held_at_call(task, turn=1)
        await gym.hold_tokens(HELD_AFTER, rollout_id="a", turn=0)
        asked = [asyncio.create_task(gym.ask("a", 0, prompt)) for prompt in prompts]
        await gym.held_tokens("a", count=3)
        await gym.checkpoint()
        await gym.crash()
        await asyncio.gather(*asked, return_exceptions=True)
        await gym.restore()
        replies = await asyncio.gather(*(gym.ask("a", 1, prompt) for prompt in prompts))
        await gym.finish()
    cut = {call.context_digest: call for call in gym.calls("a", life=1) if call.tokens < 16}
    again = gym.calls("a", life=2)
    assert len(again) == 3
    assert all(call.reused == HELD_AFTER for call in again)
    assert all(call.continued_from == cut[call.context_digest].call_id for call in again)
    assert [reply["token_ids"] for reply in replies] == [list(answer(prompt)) for prompt in prompts]


@pytest.mark.behaviour("E11")
async def test_a_call_that_reaches_its_backend_after_the_close(tmp_path: Path) -> None:
    """It was admitted and not sent on when admission closed: a later sweep cuts it, and it is continued."""
    task = counting("a")
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.hold_tokens(HELD_AFTER, turn=1)
        await gym.hold("counter", "/increment")
        gym.send([task])
        await gym.held("counter", "/increment")
        await gym.hold("policy_model", "/completions")
        await gym.release("counter", "/increment")
        await gym.held("policy_model", "/completions")

        async def released() -> None:
            await gym.until("policy_model", lambda status: "generation_cut" in places(status))
            assert [call.turn for call in gym.calls("a")] == [0]
            await gym.release("policy_model", "/completions")

        async with gym.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
            await gym.prepare_while(checkpoint, released, server="policy_model")
            await gym.commit(checkpoint)
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
    [_, cut], [again] = gym.calls("a", life=1), gym.calls("a", life=2)
    assert again.continued_from == cut.call_id
    assert results["a"] == play(task).result


@pytest.mark.behaviour("E12")
async def test_one_of_two_backends_hangs(tmp_path: Path) -> None:
    """Prepare succeeds in time; the other's calls are continued, the hung one's are generated again."""
    tasks = [counting(f"r{number}") for number in range(6)]
    workers = ("inference-0", "inference-1")
    async with rig(tmp_path, Topology(resources=("counter",), controls=True, inference_workers=2)) as gym:
        await gym.start()
        for worker in workers:
            await gym.hold_tokens(HELD_AFTER, turn=1, worker=worker)
        gym.send(tasks)
        served = await gym.spread(tasks, workers)
        assert all(served.values()), "each worker serves one rollout at least"
        await gym.control("inference-1", "cuts", mode="hang", count=len(tasks) * 2)
        async with gym.prepared(ready_within=6) as checkpoint:
            counts = checkpoint.report.participants["policy_model/policy_model/0"].counts
            assert (counts["cut"], counts["cut_failed"]) == tuple(len(served[worker]) for worker in workers)
            await gym.commit(checkpoint)
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
    reused = {call.rollout_id: call.reused for call in gym.calls(life=2)}
    assert reused == {**dict.fromkeys(served["inference-0"], HELD_AFTER), **dict.fromkeys(served["inference-1"], 0)}
    assert results == {task.rollout_id: play(task).result for task in tasks}


def cut_keys(gym: Rig) -> set[str]:
    """What the worker's token store holds of cuts."""
    return set(FileTokenStore(gym.plan.staged).keys("cuts/"))


@pytest.mark.behaviour("E13")
async def test_without_a_crash_a_finished_generation_is_held_and_delivered(tmp_path: Path) -> None:
    """Nothing else moves while prepared; two calls in total; the prefix that was cut is released."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(counting("a"), turn=1)
        async with gym.prepared() as checkpoint:
            assert len(cut_keys(gym)) == 1
            await gym.release_tokens()
            await gym.until("policy_model", lambda status: status.report.counts["held_bytes"] > 0)
            assert gym.trainer.results == {}
            assert (await gym.status("agent")).report.counts["waiting_policy"] == 1
            assert len(gym.calls("a")) == 2
            await gym.commit(checkpoint)
        results = await gym.finish()
        await until(lambda: not cut_keys(gym))
    assert len(gym.calls("a")) == 2
    assert results["a"] == play(gym.tasks["a"]).result


def streaming(rollout_id: str) -> Task:
    return dataclasses.replace(counting(rollout_id), stream=True)


@pytest.mark.behaviour("E14")
async def test_a_stream_is_paused_and_complete_afterwards(tmp_path: Path) -> None:
    """An agent that waits and reads a stream: it stands still while prepared, and misses nothing."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(streaming("a"), turn=1)
        async with gym.prepared() as checkpoint:
            await gym.release_tokens()
            await gym.counted("policy_model", "paused", 1)
            assert gym.trainer.results == {}
            await gym.commit(checkpoint)
        results = await gym.finish()
    assert len(gym.calls("a")) == 2
    assert results["a"] == play(gym.tasks["a"]).result


@pytest.mark.behaviour("E14")
async def test_a_stream_that_a_crash_ended_goes_on_from_its_cut(tmp_path: Path) -> None:
    """The other half: after a crash the agent's stream is whole again, and only the rest was generated."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(streaming("a"), turn=1)
        await gym.checkpoint()
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
    [again] = gym.calls("a", life=2)
    assert again.reused == HELD_AFTER
    assert again.ids_digest == play(gym.tasks["a"]).digests[1]
    assert results["a"] == play(gym.tasks["a"]).result
