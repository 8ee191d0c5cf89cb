"""Building many records on the event loop without holding it long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from gym_ckpt_grpc.protocol.report import MAX_LISTED

T = TypeVar("T")

SLICE = 0.005
"""Seconds of work between two turns of the loop; one item that takes longer is not divided."""


async def in_slices(items: Iterable[T], *, most: int = MAX_LISTED) -> AsyncIterator[list[T]]:
    """Take items that are made while they are taken; give them in batches, with a turn of the loop after each.

    A batch is as much as SLICE allows, and at most `most`.
    """
    batch: list[T] = []
    ends = time.perf_counter() + SLICE
    for item in items:
        batch.append(item)
        if len(batch) >= most or time.perf_counter() >= ends:
            yield batch
            batch = []
            await asyncio.sleep(0)
            ends = time.perf_counter() + SLICE
    if batch:
        yield batch
