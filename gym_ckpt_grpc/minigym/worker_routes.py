"""The test routes of an inference worker, as told in `worker_controls`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response

from gym_ckpt_grpc.capture import CutOutcome
from gym_ckpt_grpc.control import CallIdentity
from gym_ckpt_grpc.minigym.inference_log import ids_digest
from gym_ckpt_grpc.minigym.resources_server import answer
from gym_ckpt_grpc.minigym.worker_calls import WorkerCall
from gym_ckpt_grpc.minigym.worker_controls import CutsBody, HoldBody, RateBody, ReleaseBody, WeightsBody

if TYPE_CHECKING:
    from gym_ckpt_grpc.minigym.inference_worker import InferenceWorker


MOST = 30.0
"""Seconds that one question may wait."""


def add_control_routes(app: FastAPI, worker: InferenceWorker) -> None:
    """Add the routes to a worker's application."""

    @app.post("/control/hold")
    async def hold(body: HoldBody) -> dict[str, int]:
        return {"id": worker.controls.hold(body)}

    @app.post("/control/release")
    async def release(body: ReleaseBody) -> dict[str, Any]:
        worker.controls.release(body.id)
        return {}

    @app.post("/control/rate")
    async def rate(body: RateBody) -> dict[str, Any]:
        worker.engine.tick = body.tick
        return {}

    @app.post("/control/weights")
    async def weights(body: WeightsBody) -> dict[str, Any]:
        worker.weight_version = body.version
        return {}

    @app.post("/control/cuts")
    async def cuts(body: CutsBody) -> dict[str, Any]:
        worker.controls.break_cuts(body.mode, body.count)
        return {}

    @app.get("/control/held")
    async def held(
        count: int = 1,
        within: float = 10.0,
        rollout_id: str | None = None,
        attempt: int | None = None,
        turn: int | None = None,
    ) -> Response:
        def found() -> int:
            return sum(call.held and call.name.matches(rollout_id, attempt, turn) for call in worker.calls)

        try:
            async with asyncio.timeout(min(within, MOST)):
                await worker.controls.until(lambda: found() >= count)
        except TimeoutError:
            return answer({"held": found()}, status=408)
        return answer({"held": found()})

    @app.get("/control/calls")
    async def calls() -> dict[str, Any]:
        return {"calls": [_call(call) for call in worker.calls]}

    @app.get("/control/sweeps")
    async def sweeps() -> dict[str, Any]:
        asked = [{**_identity(each.call), **_outcome(each.outcome)} for each in worker.cuts.asked]
        return {"cuts": asked, "released": worker.cuts.released}


def _call(call: WorkerCall) -> dict[str, Any]:
    first = call.generations[0]
    return {
        "call_id": call.id,
        "request": call.asked.model_dump(exclude={"rollout_id", "attempt", "capture"}),
        "capture": call.asked.capture,
        **asdict(call.name),
        "state": call.state,
        "held": call.held,
        "made": call.made,
        "reused": call.reused,
        "continued_from": call.continued_from,
        "tokens": len(first.ids),
        "ids_digest": ids_digest(first.ids),
        "weight_version": first.weight_version,
    }


def _identity(call: CallIdentity) -> dict[str, Any]:
    key = call.episode.capture_key
    return {"ticket_id": call.ticket_id, "capture_key": key, "call_id": call.model_call_id}


def _outcome(outcome: CutOutcome) -> dict[str, Any]:
    evidence = asdict(outcome.evidence) if outcome.evidence else None
    return {"disposition": outcome.disposition.name, "reason": outcome.reason, "evidence": evidence}
