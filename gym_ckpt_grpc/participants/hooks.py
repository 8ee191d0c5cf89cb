"""Calling an author's hook within a budget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.protocol.errors import OutOfTime

T = TypeVar("T")


async def within(budget: Budget, work: Awaitable[T], step: str) -> T:
    """Await `work` no longer than is left. Raises OutOfTime naming the step, before it begins if nothing is left."""
    try:
        left = budget.require(step)
    except OutOfTime:
        if asyncio.iscoroutine(work):
            work.close()
        raise
    limit = asyncio.timeout(left)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise  # the work's own
        raise OutOfTime(f"{step} did not end in time") from error
