"""What rides with a captured call: the admission to the inference worker, and the coordinates back.

Source: participants sections 12 and 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gym_ckpt_grpc.control import Continuation

Mode = Literal["token_in", "text"]
"""`token_in`: the prompt begins with the parent's tokens. `text`: a root, or a call whose parent is unresolved."""


@dataclass(frozen=True, slots=True)
class CaptureAdmission:
    """Permission to stage one call, made by the ledger before the call reaches its backend.

    capture_key: the attempt that calls. call_id: unique. number: order of admission in the attempt, 1 and up.
    With mode `token_in`: parent_id, previous_length > 0 (tokens of the parent's whole sequence), the parent's
    chain_hash, and either exactly that many inline ids or the staging keys of the chain, oldest first.
    """

    capture_key: str
    call_id: str
    mode: Mode
    number: int
    parent_id: str = ""
    previous_length: int = 0
    parent_chain_hash: str = ""
    prefix_ids: tuple[int, ...] | None = None
    staging_chain: tuple[str, ...] = ()
    continuation: Continuation | None = None


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where the tokens of a completed call stand, without the tokens. Hashes and digests are lower-case hex.

    staging_chain: keys of the whole sequence, oldest first, this call's own last. previous, added and total
    length in tokens: total = previous + added. capture_failed: why nothing was staged, "" if it was.
    """

    capture_key: str
    call_id: str
    mode: Mode
    staging_key: str
    staging_chain: tuple[str, ...]
    weight_version: int
    previous_length: int
    added_length: int
    total_length: int
    staging_digest: str
    extras_digest: str
    chain_hash: str
    cumulative_hash: str
    prefix_tokens: int
    prefix_digest: str
    output_limit: int
    finish_reason: str
    stop_reason: str = ""
    capture_failed: str = ""
