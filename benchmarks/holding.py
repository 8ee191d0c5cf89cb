"""Baseline 2: the peers' way. A full copy, with admission held until the last byte is synced.

It runs through our own servers, coordinator and writer, and differs only in when admission opens. A server written for
the comparison would differ in everything else too: its codec, its writer, its RPCs; whatever it lost there would be
called the cost of holding. This way the baseline has the fast writer as well, so that what is measured is the way of
working and nothing else; peers that write JSON or tar archives hold for longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from gym_ckpt_grpc.coordinator import Checkpoint
from gym_ckpt_grpc.protocol.ids import EpisodeId


async def hold_until_synced(checkpoint: Checkpoint, scope: Iterable[EpisodeId]) -> None:
    """Write a prepared checkpoint and keep admission closed meanwhile."""
    await checkpoint.commit(scope, reopen_when_captured=False)


def held_ms(checkpoint: Checkpoint) -> float:
    """Milliseconds from the safe cut to the last byte synced, of a checkpoint that was left.

    In its favour: admission counts as open at that moment, before publication and before any reply to a Resume.
    """
    timing = checkpoint.timing
    assert timing.prepared_at is not None
    assert timing.durable_at is not None
    return 1000 * (timing.durable_at - timing.prepared_at)
