"""Inference workers in the test's own process: begun, held at a token, cut, continued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gym_ckpt_grpc.capture import CaptureAdmission, Coordinates, FileTokenStore, TokenRecord, admission_to_json
from gym_ckpt_grpc.control import CallIdentity, Continuation, CutDisposition, CutEvidence
from gym_ckpt_grpc.minigym.counter import TOOLS
from gym_ckpt_grpc.minigym.inference_worker import InferenceWorker, WorkerConfig
from gym_ckpt_grpc.minigym.worker_calls import WorkerCall, WorkerRequest
from gym_ckpt_grpc.minigym.worker_controls import HoldBody
from gym_ckpt_grpc.protocol import EpisodeId

ROLLOUT = "5-0"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "count to nine"}]


@asynccontextmanager
async def running_worker(directory: Path, **settings: Any) -> AsyncIterator[InferenceWorker]:
    """A worker with a token store; as fast as it can be."""
    defaults: dict[str, Any] = {"log": directory / "inference.jsonl", "staged": directory / "staged", "controls": True}
    config = WorkerConfig(**{**defaults, "tick": 0, **settings})
    worker = InferenceWorker(config)
    async with worker.serving():
        yield worker


def root(call_id: str, *, attempt: int = 0, continuation: Continuation | None = None) -> CaptureAdmission:
    """The admission of a call without a parent."""
    key = EpisodeId(ROLLOUT, attempt).capture_key
    return CaptureAdmission(key, call_id, "text", 1, continuation=continuation)


def child(call_id: str, parent: Coordinates) -> CaptureAdmission:
    """The admission of a call that begins with the tokens of a completed one."""
    return replace(
        root(call_id),
        mode="token_in",
        parent_id=parent.call_id,
        previous_length=parent.total_length,
        parent_chain_hash=parent.chain_hash,
        staging_chain=parent.staging_chain,
    )


def request(admission: CaptureAdmission | None, **changes: Any) -> WorkerRequest:
    """A request for counter calls, in the attempt of its admission."""
    attempt = EpisodeId.from_capture_key(admission.capture_key).attempt if admission else 0
    fields = {
        "messages": MESSAGES,
        "tools": list(TOOLS),
        "seed": 11,
        "rollout_id": ROLLOUT,
        "attempt": attempt,
        "capture": admission_to_json(admission) if admission else None,
        **changes,
    }
    return WorkerRequest(**fields)


async def generate(worker: InferenceWorker, admission: CaptureAdmission | None, **changes: Any) -> WorkerCall:
    """A call from its beginning to its end."""
    call = await worker.begin(request(admission, **changes))
    await worker.run(call)
    return call


async def run_until(worker: InferenceWorker, call: WorkerCall, tokens: int) -> asyncio.Task[None]:
    """Run a call until it has so many tokens, and hold it there."""
    running = asyncio.create_task(worker.run(call))
    await go_on_until(worker, call, tokens)
    return running


async def go_on_until(worker: InferenceWorker, call: WorkerCall, tokens: int) -> None:
    """Let a running call have so many tokens, and hold it there instead of where it was held."""
    worker.controls.release(None)
    worker.controls.hold(HoldBody(after=tokens))
    while not call.held or len(call.generations[0].ids) < tokens:  # noqa: ASYNC110 - turns of the decode loop
        await asyncio.sleep(0)


async def cut(worker: InferenceWorker, call: WorkerCall) -> CutEvidence:
    """Cut a call, as a sweep would."""
    assert call.staged is not None
    episode = EpisodeId.from_capture_key(call.staged.admission.capture_key)
    outcome = await worker.cuts.cut(CallIdentity("t1", episode, call.id, "0" * 64), 0.0)
    assert outcome.disposition in (CutDisposition.CUT, CutDisposition.FINISHED), outcome
    assert outcome.evidence is not None
    return outcome.evidence


def continuing(call: WorkerCall, evidence: CutEvidence) -> Continuation:
    """What rides in the admission of a call that continues a cut."""
    assert call.staged is not None
    return Continuation(
        call.staged.admission.capture_key,
        call.id,
        evidence.staging_keys,
        evidence.prefix_tokens,
        evidence.prefix_digest,
        evidence.output_limit,
        evidence.weight_version,
        evidence.finish_reason,
        evidence.stop_reason,
    )


def staged_record(directory: Path, key: str) -> TokenRecord:
    """What stands on disk under a key, read anew."""
    store = FileTokenStore(directory / "staged")
    try:
        record = store.get(key)
    finally:
        store.close()
    assert record is not None
    return record


def told(call: WorkerCall, directory: Path) -> dict[str, Any]:
    """Everything that must be equal between an uncut and a continued generation."""
    generation = call.generations[0]
    assert call.coordinates is not None
    assert not call.coordinates.capture_failed
    record = staged_record(directory, call.coordinates.staging_key)
    return {
        "ids": generation.ids,
        "logprobs": generation.logprobs,
        "message": call.message(0),
        "finish_reason": (generation.finish_reason, generation.stop_reason),
        "staged": (record.ids, record.masks, record.logprobs, record.finish_reason, record.stop_reason),
        "hashes": (record.chain_hash, record.cumulative_hash, call.coordinates.prefix_digest),
    }
