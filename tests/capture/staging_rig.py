"""Admissions, calls and stores that tests of token staging begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gym_ckpt_grpc.capture import (
    AsyncTokenStore,
    CaptureAdmission,
    Coordinates,
    StagedCall,
    TokenRecord,
    fetch,
)
from gym_ckpt_grpc.control import Continuation, CutEvidence

PROMPT = (11, 12, 13)
LIMIT = 20


class MemoryTokenStore:
    """A `TokenStore` in memory. puts: the keys of every put that ended well. broken: what a put raises, if set."""

    def __init__(self) -> None:
        self.records: dict[str, TokenRecord] = {}
        self.puts: list[list[str]] = []
        self.broken: Exception | None = None

    def put(self, records: Sequence[TokenRecord]) -> None:
        if self.broken is not None:
            raise self.broken
        self.records.update((record.key, record) for record in records)
        self.puts.append([record.key for record in records])

    def get(self, key: str) -> TokenRecord | None:
        return self.records.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, TokenRecord]:
        return {key: self.records[key] for key in keys if key in self.records}

    def delete(self, keys: Sequence[str]) -> frozenset[str]:
        return frozenset(key for key in keys if self.records.pop(key, None))

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.records if key.startswith(prefix))


def token(position: int) -> tuple[int, float]:
    """The token that the scripted model gives at this position, and its log-probability."""
    return 100 + position, -0.125 * (position + 1)


def ids(count: int) -> tuple[int, ...]:
    """The ids of its first tokens."""
    return tuple(token(position)[0] for position in range(count))


def generate(call: StagedCall, count: int, *, weights: int = 1) -> None:
    """Give a call its next tokens."""
    for _ in range(count):
        call.add(*token(len(call.generated_ids)), weights)


def root(call_id: str = "c1", capture_key: str = "r1", **changes: Any) -> CaptureAdmission:
    """The admission of a first call."""
    return replace(CaptureAdmission(capture_key=capture_key, call_id=call_id, mode="text", number=1), **changes)


def child(parent: Coordinates, call_id: str = "c2", **changes: Any) -> CaptureAdmission:
    """The admission of a call whose prompt begins with all tokens of another."""
    admission = CaptureAdmission(
        capture_key=parent.capture_key,
        call_id=call_id,
        mode="token_in",
        number=2,
        parent_id=parent.call_id,
        previous_length=parent.total_length,
        parent_chain_hash=parent.chain_hash,
        staging_chain=parent.staging_chain,
    )
    return replace(admission, **changes)


def continuation(admission: CaptureAdmission, evidence: CutEvidence, **changes: Any) -> Continuation:
    """The continuation of a cut of the call that was admitted so."""
    value = Continuation(
        source_capture_key=admission.capture_key,
        source_call_id=admission.call_id,
        staging_keys=evidence.staging_keys,
        prefix_tokens=evidence.prefix_tokens,
        prefix_digest=evidence.prefix_digest,
        output_limit=evidence.output_limit,
        weight_version=evidence.weight_version,
        finish_reason=evidence.finish_reason,
        stop_reason=evidence.stop_reason,
    )
    return replace(value, **changes)


def again(admission: CaptureAdmission, evidence: CutEvidence, **changes: Any) -> CaptureAdmission:
    """The admission of the next attempt's equal call, which continues that cut."""
    call_id = f"{admission.call_id}x"
    return replace(
        admission,
        capture_key="r1-a1",
        call_id=call_id,
        continuation=continuation(admission, evidence),
        **changes,
    )


async def begin(
    admission: CaptureAdmission,
    tokens: AsyncTokenStore,
    suffix: Sequence[int] = PROMPT,
    *,
    weights: int = 1,
    limit: int = LIMIT,
) -> StagedCall:
    """Fetch, make the prompt as a worker does, begin."""
    fetched = await fetch(admission, tokens)
    rest = fetched.snapshot.ids if fetched.snapshot else tuple(suffix)
    prompt = (*fetched.prefix, *rest)
    return StagedCall.begin(admission, tokens, prompt, fetched=fetched, weight_version=weights, output_limit=limit)


async def whole(
    admission: CaptureAdmission, tokens: AsyncTokenStore, count: int, suffix: Sequence[int] = PROMPT
) -> Coordinates:
    """A call from its beginning to its coordinates."""
    call = await begin(admission, tokens, suffix)
    generate(call, count)
    return await call.complete("stop")
