"""The benchmark of the gates measures requests that are admitted and answered."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.nemo_gate import Loop, loops


@pytest.mark.parametrize("loop", loops(), ids=lambda loop: loop.name)
async def test_each_request_of_a_rollout_is_admitted_by_its_gate(loop: Loop) -> None:
    statuses: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"_ng_task_index": 7, "_ng_rollout_index": 0}'}

    for path in loop.paths:
        await loop.gated({**loop._scope(path), "state": {}}, receive, send)
    assert statuses == [200] * len(loop.paths)
