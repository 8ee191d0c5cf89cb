"""Rollouts given up: in mid-flight, and inside an open checkpoint that they hold up. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.coordinator import NotPrepared
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.e2e.plays import counting, play
from tests.e2e.rig import COUNTER, rig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.mark.behaviour("E20")
async def test_a_rollout_retired_in_mid_flight_leaves_nothing(tmp_path: Path) -> None:
    """No further call, every count zero, one mark per server; Forget ends the refusals, but not the ledger's."""
    gone = EpisodeId("a")
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.held_at_call(counting("a"), turn=1)
        async with gym.coordinator() as coordinator:
            await coordinator.retire([gone])
            statuses = await gym.statuses()
            # 0 if the environment's own cleanup closed the session before the Retire reached this server
            assert statuses["counter"].extra["retired_sessions"] in ("0", "1")
            for name, status in statuses.items():
                assert set(status.report.counts.values()) <= {0}, name
                assert status.marks_held == 1, name
            gym.send([gym.tasks["a"]])
            await gym.ended()
            assert "STALE_ATTEMPT" in gym.trainer.failures["a"]
            await coordinator.forget([gone])
        statuses = await gym.statuses()
        assert {status.marks_held for status in statuses.values()} == {0}
        assert statuses["counter"].extra["retired_sessions"] == "0"
        with pytest.raises(StaleAttempt):
            gym.lineage(gone)
        await gym.release_tokens()
    assert [call.turn for call in gym.calls("a")] == [0, 1]
    assert [call.outcome for call in gym.calls("a")] == ["end", "cancelled"]


@pytest.mark.behaviour("E21")
async def test_a_straggler_is_retired_within_the_open_checkpoint(tmp_path: Path) -> None:
    """A hung wait step blocks; retired, it does not, and the checkpoint commits all others."""
    async with rig(tmp_path, COUNTER) as gym:
        await gym.start()
        await gym.hold("counter", "/verify")
        gym.send([counting("hung")])
        await gym.held("counter", "/verify")
        await gym.held_at_call(counting("a"), turn=1)
        async with gym.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
            with pytest.raises(NotPrepared, match="hung"):
                await checkpoint.prepare(ready_within=1)
            await coordinator.retire([EpisodeId("hung")])
            await checkpoint.prepare(ready_within=10)
            await gym.commit(checkpoint, [EpisodeId("a")])
        assert checkpoint.continued == (EpisodeId("a"),)
        await gym.release("counter", "/verify")
        await gym.release_tokens()
        await gym.ended()
        assert "STALE_ATTEMPT" in gym.trainer.failures["hung"]
        assert gym.trainer.results == {"a": play(gym.tasks["a"]).result}
        assert gym.faults(checkpoint.id) == []
