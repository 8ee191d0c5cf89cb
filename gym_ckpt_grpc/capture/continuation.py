"""Continuing a cut: how its name travels as JSON, and what its tokens are once fetched.

Source: participants sections 8.4 and 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gym_ckpt_grpc.capture.json_fields import Fields, call_id_problem, capture_key_problem, digest_problem
from gym_ckpt_grpc.capture.token_records import TokenRecord, tokens_digest
from gym_ckpt_grpc.control import Continuation
from gym_ckpt_grpc.control.generation import FINISH_REASONS
from gym_ckpt_grpc.protocol.errors import StateCorrupt

SCHEMA_VERSION = 1


def continuation_to_json(continuation: Continuation) -> dict[str, Any]:
    """JSON-able fields of a continuation; empty reasons are left out."""
    value: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "source_capture_key": continuation.source_capture_key,
        "source_call_id": continuation.source_call_id,
        "staging_keys": list(continuation.staging_keys),
        "prefix_tokens": continuation.prefix_tokens,
        "prefix_digest": continuation.prefix_digest,
        "output_limit": continuation.output_limit,
        "weight_version": continuation.weight_version,
    }
    reasons = {"finish_reason": continuation.finish_reason, "stop_reason": continuation.stop_reason}
    return value | {name: reason for name, reason in reasons.items() if reason}


def continuation_from_json(value: object, path: str = "continuation") -> Continuation:
    """The continuation of decoded JSON. Raises InvalidArgument naming every bad field."""
    fields = Fields(value, path)
    if fields.number("schema_version") != SCHEMA_VERSION:
        fields.bad("schema_version", f"is not {SCHEMA_VERSION}, the only one known here")
    continuation = Continuation(
        source_capture_key=fields.text("source_capture_key", capture_key_problem),
        source_call_id=fields.text("source_call_id", call_id_problem),
        staging_keys=fields.texts("staging_keys", least=1),
        prefix_tokens=fields.number("prefix_tokens"),
        prefix_digest=fields.text("prefix_digest", digest_problem),
        output_limit=fields.number("output_limit", least=1),
        weight_version=fields.number("weight_version"),
        finish_reason=fields.text("finish_reason", required=False),
        stop_reason=fields.text("stop_reason", required=False),
    )
    if not fields.found:
        check_reasons(fields, continuation.finish_reason, continuation.stop_reason)
        if continuation.prefix_tokens > continuation.output_limit:
            fields.bad("prefix_tokens", f"is above the output_limit {continuation.output_limit}")
    fields.done()
    return continuation


def check_reasons(fields: Fields, finish: str, stop: str) -> None:
    """A finish reason is `stop` or `length`, and a stop reason never stands alone."""
    if finish and finish not in FINISH_REASONS:
        fields.bad("finish_reason", "is neither stop nor length")
    if stop and not finish:
        fields.bad("stop_reason", "stands without a finish_reason")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tokens of a cut, joined from its records, which stand in order.

    ids, masks, logprobs: the delta from `previous_length` on, prompt tokens
    (mask 0, log-probability 0) before generated ones (mask 1). weight_version: the oldest. chain_hash: of the last.
    """

    records: tuple[TokenRecord, ...]
    capture_key: str
    call_id: str
    parent_id: str
    mode: str
    previous_length: int
    ids: tuple[int, ...]
    masks: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    output_limit: int
    finish_reason: str
    stop_reason: str
    chain_hash: str

    @classmethod
    def of(cls, records: Sequence[TokenRecord]) -> Snapshot:
        """Join the records of one cut: the first, and the chunks that follow. Raises StateCorrupt if they do not."""
        first, last = records[0], records[-1]
        reached = first.previous_length
        for record in records:
            same_call = (record.capture_key, record.call_id) == (first.capture_key, first.call_id)
            if record.previous_length != reached or not (same_call or record.kind == "chunk"):
                raise StateCorrupt(f"the staged record {record.key} does not follow the one before it")
            reached = record.total_length
        return cls(
            records=tuple(records),
            capture_key=last.capture_key,
            call_id=last.call_id,
            parent_id=first.parent_id,
            mode=first.mode,
            previous_length=first.previous_length,
            ids=tuple(token for record in records for token in record.ids),
            masks=tuple(mask for record in records for mask in record.masks),
            logprobs=tuple(logprob for record in records for logprob in record.logprobs),
            weight_version=min(record.weight_version for record in records),
            output_limit=last.output_limit,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            chain_hash=last.chain_hash,
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of its records, in order."""
        return tuple(record.key for record in self.records)

    @property
    def generated(self) -> int:
        """Number of generated tokens in it."""
        return sum(self.masks)

    @property
    def generated_ids(self) -> tuple[int, ...]:
        """The generated tokens: they stand at the end."""
        return self.ids[len(self.ids) - self.generated :]

    @property
    def generated_logprobs(self) -> tuple[float, ...]:
        """Their log-probabilities."""
        return self.logprobs[len(self.ids) - self.generated :]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of the delta that were not generated."""
        return self.ids[: len(self.ids) - self.generated]

    @property
    def prefix_digest(self) -> str:
        """Digest of the generated tokens, as evidence has it."""
        return tokens_digest(self.generated_ids)
