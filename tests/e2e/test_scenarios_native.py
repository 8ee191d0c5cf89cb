"""What a crash costs a native rollout: nothing that was done. Real processes, SIGKILL of every group.

"a" is a rollout of two calls: call 0 increments the counter, call 1 gives the answer. That nothing is repeated is
read from the inference worker's own log.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.tasks import make_tasks
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.e2e.plays import counting, play
from tests.e2e.rig import COUNTER, HELD_AFTER, rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

WITHOUT_CUTS = Topology(resources=("counter",), controls=True, cuts=False)


async def test_a_run_without_any_crash_equals_the_play_computed_without_servers(tmp_path: Path) -> None:
    """So that every other scenario may be compared with the latter."""
    tasks = [*make_tasks(12, seed=5), counting("exact")]
    async with rig(tmp_path) as gym:
        await gym.start()
        gym.send(tasks)
        results = await gym.finish()
        for task in tasks:
            expected = play(task)
            assert results[task.rollout_id] == expected.result
            assert [call.ids_digest for call in gym.calls(task.rollout_id)] == expected.digests
    assert results["exact"].reward == 1.0


@pytest.mark.behaviour("E1", "E6", "E7")
async def test_the_second_call_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    """One call after the crash, with the same messages; it continues the cut, and its lineage is the delivered call."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(counting("a"), turn=1)
        checkpoint = await gym.checkpoint()
        assert [len(r.decode("cuts")) for r in gym.records("policy_model", checkpoint.id).values()] == [1]
        await gym.crash()
        restored = await gym.restore()
        results = await gym.finish()
        [listed] = await gym.listed()
    [first, cut], [again] = gym.calls("a", life=1), gym.calls("a", life=2)
    expected = play(gym.tasks["a"])
    assert restored.continued == (EpisodeId("a", 1),)
    assert results["a"] == expected.result
    assert results["a"].reward == 1.0
    # Nothing repeated: one call, and of its tokens only those that were not made before.
    assert (again.turn, again.attempt, again.messages, cut.messages) == (1, 1, 3, 3)
    assert (again.continued_from, again.reused) == (cut.call_id, HELD_AFTER)
    assert again.reused + again.tokens == expected.tokens[1]
    assert again.ids_digest == expected.digests[1]
    # Lineage: the admission is attempt 1's, its parent the delivered call; the undelivered call is nowhere.
    assert listed["capture"]["capture_key"] == EpisodeId("a", 1).capture_key
    assert listed["capture"]["parent_id"] == first.call_id
    assert gym.lineage(EpisodeId("a", 1)) == [first.call_id, again.call_id]


@pytest.mark.behaviour("E1", "E7")
async def test_without_cuts_the_second_call_is_generated_again(tmp_path: Path) -> None:
    """The negative control of the cut: the same rollout, the same reward, and every token of that call once more."""
    async with rig(tmp_path, WITHOUT_CUTS) as gym:
        await gym.start()
        await gym.held_at_call(counting("a"), turn=1)
        await gym.checkpoint()
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
    [again] = gym.calls("a", life=2)
    expected = play(gym.tasks["a"])
    assert results["a"] == expected.result
    assert (again.turn, again.messages, again.continued_from, again.reused) == (1, 3, "", 0)
    assert (again.tokens, again.ids_digest) == (expected.tokens[1], expected.digests[1])


@pytest.mark.behaviour("E2")
async def test_a_second_crash_before_the_replacement_starts(tmp_path: Path) -> None:
    """The unclaimed state is checkpointed as attempt 1; attempt 2 goes on at the same place with one call."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(counting("a"), turn=1)
        await gym.checkpoint()
        await gym.crash()
        unclaimed = await gym.installed()
        second = await gym.checkpoint(unclaimed.continued)
        await gym.crash()
        restored = await gym.restore()
        results = await gym.finish()
    assert second.continued == (EpisodeId("a", 1),)
    assert restored.continued == (EpisodeId("a", 2),)
    assert gym.calls("a", life=2) == []
    [again] = gym.calls("a", life=3)
    assert (again.turn, again.attempt, again.messages, again.reused) == (1, 2, 3, HELD_AFTER)
    assert results["a"] == play(gym.tasks["a"]).result


@pytest.mark.behaviour("E3")
async def test_one_checkpoint_restored_twice(tmp_path: Path) -> None:
    """The run in between made calls and died: none of them is in the lineage of the next."""
    task = counting("a", turns=2)
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(task, turn=1)
        await gym.checkpoint()
        await gym.crash()
        await gym.installed()
        await gym.hold_tokens(HELD_AFTER, turn=2)
        gym.send([task], {"a": 1})
        await gym.held_tokens("a")
        await gym.crash()
        await gym.restore()
        results = await gym.finish()
        calls = await gym.listed()
    [first, _], [dead, unfinished], again = (gym.calls("a", life=life) for life in (1, 2, 3))
    assert [call.turn for call in (dead, unfinished, *again)] == [1, 2, 1, 2]
    assert calls[0]["capture"]["parent_id"] == first.call_id
    assert again[0].reused == HELD_AFTER
    assert gym.lineage(EpisodeId("a", 1)) == [first.call_id, *(call.call_id for call in again)]
    assert results["a"] == play(task).result
