"""R10: every committed checkpoint restores into a fresh participant, exactly its episodes, which is then open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.random.ops import Op, op

if TYPE_CHECKING:
    from tests.random.world import World

CHECKED = 2
"""Checkpoints of a sequence that are restored at its end, the newest first."""


async def check_restores(world: World) -> None:
    """Restore the newest checkpoints of the sequence, each into a process of its own."""
    for source in list(world.manifests)[-CHECKED:]:
        await world.crash()
        await _check_restore(world, source)


async def _check_restore(world: World, source: str) -> None:
    counts = dict(world.manifests[source].counts)
    who = {"epoch": 1, "controller": "t", "deadline": 30.0}
    scope = [episode.capture_key for episode in counts]
    install = [episode.attempt + 1 for episode in counts]
    restore = op("restore", id=f"again-{source}", source=source, scope=scope, install_as=install, ttl=30.0, **who)
    nexts = {EpisodeId(episode.rollout_id, episode.attempt + 1): n for episode, n in counts.items()}
    await _must(world, restore, "RESTORED")
    assert world.node.owner.restored_pending() == set(nexts), f"R10: {source} restored other episodes"
    await _must(world, op("resume", id=f"again-{source}", keep=False, **who), "IDLE")
    assert world.node.subject.is_open(), "R10: closed after Resume"
    target = f"next-{source}"
    await _must(world, op("prepare", id=target, within=1.0, ttl=30.0, **who), "PREPARED")
    listed = [episode.capture_key for episode in nexts] if world.node.subject.lists_only else None
    await _must(world, op("commit", id=target, scope=listed, place=target, stop=False, **who), "COMMITTED")
    again = world.manifests[target].counts
    assert again == nexts, f"R10: {source} had {nexts}, the next checkpoint has {again}"
    await _must(world, op("resume", id=target, keep=False, **who), "IDLE")


async def _must(world: World, step: Op, phase: str) -> None:
    await world.do(step)
    assert not world.pending, f"R10: {step} has not ended"
    assert world.model.phase == phase, f"R10: {step} led to {world.model.phase}"
