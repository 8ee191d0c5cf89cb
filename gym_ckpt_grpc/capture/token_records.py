"""Staged tokens: one record per key, its hashes, and its bytes.

Hashes, all SHA-256 in lower-case hex:

- `tokens_digest`: of token ids, four bytes each, big-endian. The *prefix digest* is that of the generated tokens, the
  *cumulative hash* that of the whole sequence, the previous tokens included.
- `staging_digest`: of a record's ids and masks. `extras_digest`: of what it has beside them.
- `chain_hash`: of the chain hash that the record follows ("" for a root) and its staging digest.

Source: participants section 13.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from gym_ckpt_grpc.capture.json_fields import MAX_TOKEN_ID, call_id_problem, capture_key_problem
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, Violation

Kind = Literal["completion", "cut", "chunk"]
"""`completion`: all of a call. `cut`: all of it up to a token. `chunk`: generated tokens that follow a cut."""

FORMAT_VERSION = 1
CUTS = "cuts"


def staging_key(capture_key: str, call_id: str) -> str:
    """The key of a completed call. Raises InvalidArgument for ids that cannot be a part of a key."""
    _check_parts(capture_key=capture_key, call_id=call_id)
    return f"{capture_key}/{call_id}"


def cut_key(capture_key: str, call_id: str, cut_id: str) -> str:
    """The key of a cut or chunk. Raises InvalidArgument for ids that cannot be a part of a key."""
    _check_parts(capture_key=capture_key, call_id=call_id, cut_id=cut_id)
    return f"{CUTS}/{capture_key}/{call_id}/{cut_id}"


def cut_id_of(key: str) -> str | None:
    """The cut id in a key, or None if it is that of a completed call."""
    parts = key.split("/")
    return parts[3] if len(parts) == 4 and parts[0] == CUTS else None


def _check_parts(**parts: str) -> None:
    for name, text in parts.items():
        if problem := (capture_key_problem if name == "capture_key" else call_id_problem)(text):
            raise InvalidArgument(f"{name} {problem}", violations=[Violation(name, problem)])


def tokens_digest(ids: Sequence[int]) -> str:
    """SHA-256 of token ids, four bytes each, big-endian. Raises ValueError for one outside 0..2**32-1."""
    return hashlib.sha256(_pack_ids(ids)).hexdigest()


def chained(previous: str, staging_digest: str) -> str:
    """The chain hash of a record after the one whose chain hash is `previous` ("": it is the first)."""
    return hashlib.sha256(f"{previous}\n{staging_digest}".encode()).hexdigest()


def _pack_ids(ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f">{len(ids)}I", *ids)
    except struct.error:
        raise ValueError(f"a token id is not a whole number in 0..{MAX_TOKEN_ID}") from None


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Tokens of one call that stand under one key: those after the first `previous_length` of its sequence.

    ids, masks, logprobs: one of each per token. masks: 0 for prompt tokens, which come first, 1 for generated ones.
    logprobs: natural, 0.0 for prompt tokens. weight_version: the oldest that made one of them. cut_id: "" for a
    completion. parent_id: "" for a root. finish_reason: "" unless the reply is complete. Build it with `build`.
    """

    key: str
    kind: Kind
    capture_key: str
    call_id: str
    cut_id: str
    mode: str
    parent_id: str
    previous_length: int
    ids: tuple[int, ...]
    masks: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    output_limit: int
    finish_reason: str
    stop_reason: str
    staging_digest: str
    extras_digest: str
    chain_hash: str
    cumulative_hash: str

    @property
    def total_length(self) -> int:
        """Tokens of the whole sequence up to the end of this record."""
        return self.previous_length + len(self.ids)

    @property
    def generated_ids(self) -> tuple[int, ...]:
        """The generated tokens in it."""
        return self.ids[len(self.ids) - sum(self.masks) :]

    def problem(self) -> str | None:
        """Say what does not agree in it, or None."""
        count = len(self.ids)
        if (len(self.masks), len(self.logprobs)) != (count, count):
            return f"has {count} tokens, {len(self.masks)} masks and {len(self.logprobs)} log-probabilities"
        generated = sum(self.masks)
        if self.masks != (0,) * (count - generated) + (1,) * generated:
            return "has masks other than 0 for prompt tokens and then 1 for generated ones"
        if not all(math.isfinite(value) for value in self.logprobs):
            return "has a log-probability that is no number"
        if min(self.previous_length, self.weight_version) < 0 or self.output_limit < 1:
            return "has a negative length or weight version, or an output limit below 1"
        try:
            digests = (_staging_digest(self.ids, self.masks), _extras_digest(self))
        except ValueError as error:
            return str(error)
        return None if digests == (self.staging_digest, self.extras_digest) else "has other contents than its digests"


def build(
    *,
    kind: Kind,
    capture_key: str,
    call_id: str,
    cut_id: str = "",
    mode: str,
    parent_id: str,
    before: Sequence[int],
    ids: Sequence[int],
    generated: int,
    logprobs: Sequence[float],
    weight_version: int,
    output_limit: int,
    finish_reason: str = "",
    stop_reason: str = "",
    chain: str,
) -> TokenRecord:
    """A record with its key and hashes.

    before: the sequence in front of it. generated: how many of `ids`, at their end, were generated. logprobs: of
    those. chain: the chain hash that it follows. Raises ValueError for arrays that do not agree.
    """
    if len(logprobs) != generated or not 0 <= generated <= len(ids):
        raise ValueError(f"{len(logprobs)} log-probabilities for {generated} generated tokens of {len(ids)}")
    prompt = len(ids) - generated
    tokens, masks = tuple(ids), (0,) * prompt + (1,) * generated
    staging_digest = _staging_digest(tokens, masks)
    record = TokenRecord(
        key=cut_key(capture_key, call_id, cut_id) if cut_id else staging_key(capture_key, call_id),
        kind=kind,
        capture_key=capture_key,
        call_id=call_id,
        cut_id=cut_id,
        mode=mode,
        parent_id=parent_id,
        previous_length=len(before),
        ids=tokens,
        masks=masks,
        logprobs=(0.0,) * prompt + tuple(map(float, logprobs)),
        weight_version=weight_version,
        output_limit=output_limit,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        staging_digest=staging_digest,
        extras_digest="",
        chain_hash=chained(chain, staging_digest),
        cumulative_hash=tokens_digest((*before, *tokens)),
    )
    record = replace(record, extras_digest=_extras_digest(record))
    if problem := record.problem():
        raise ValueError(f"the record {problem}")
    return record


def _staging_digest(ids: Sequence[int], masks: Sequence[int]) -> str:
    return hashlib.sha256(_pack_ids(ids) + bytes(masks)).hexdigest()


def _extras_digest(record: TokenRecord) -> str:
    facts = (record.weight_version, record.output_limit, record.finish_reason, record.stop_reason)
    floats = struct.pack(f">{len(record.logprobs)}d", *record.logprobs)
    return hashlib.sha256(msgspec.msgpack.encode(facts) + floats).hexdigest()


def encode(record: TokenRecord) -> bytes:
    """The bytes of a record, from which `decode` gives an equal one."""
    return msgspec.msgpack.encode((FORMAT_VERSION, record))


def decode(data: bytes, key: str) -> TokenRecord:
    """The record of bytes that stood under `key`. Raises StateCorrupt naming the key if they are no such record."""
    try:
        version, raw = msgspec.msgpack.decode(data, type=tuple[int, msgspec.Raw])
        if version != FORMAT_VERSION:
            raise ValueError(f"has format version {version}; readable here: {FORMAT_VERSION}")
        record = msgspec.msgpack.decode(raw, type=TokenRecord)
        problem = record.problem() or ("is that of another key" if record.key != key else None)
    except (msgspec.DecodeError, ValueError) as error:
        problem = str(error)
    else:
        if problem is None:
            return record
    raise StateCorrupt(f"the staged record {key} {problem}")
