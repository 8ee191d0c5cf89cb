"""The manifest of an attempt: what the training framework reads of its ledger.

    {"capture_key": "r1-a1",
     "calls": [{"call_id", "capture_key", "number", "mode", "parent_id", "staging_key", "staging_chain",
                "weight_version", "previous_length", "added_length", "total_length", "staging_digest",
                "extras_digest", "chain_hash", "cumulative_hash", "response_id"}, ...],
     "failures": [{"call_id", "number", "reason"}, ...]}

Calls and failures are in the order they were admitted. A call that was carried over a restore has the capture key
it was staged under.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gym_ckpt_grpc.capture.rows import AnyRow, FailureRow, StagedRow
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId

Manifest = dict[str, Any]

_CALL_FIELDS = (
    "call_id",
    "number",
    "mode",
    "parent_id",
    "staging_key",
    "staging_chain",
    "weight_version",
    "previous_length",
    "added_length",
    "total_length",
    "staging_digest",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
    "response_id",
)


def build_manifest(episode: EpisodeId, rows: Iterable[AnyRow]) -> Manifest:
    """The manifest of an attempt's rows. Raises StateCorrupt naming calls that poison it: never a partial list."""
    ordered = sorted(rows, key=lambda row: row.number)
    staged = [row for row in ordered if isinstance(row, StagedRow)]
    if poison := [f"{row.call_id} has no {missing[0]}" for row in staged if (missing := row.missing())]:
        problem = f"the ledger of {episode} has calls that cannot be read: {', '.join(poison[:10])}"
        raise StateCorrupt(problem, episodes=[episode])
    return {
        "capture_key": episode.capture_key,
        "calls": [_call(row, episode) for row in staged],
        "failures": [
            {"call_id": row.call_id, "number": row.number, "reason": row.reason}
            for row in ordered
            if isinstance(row, FailureRow)
        ],
    }


def _call(row: StagedRow, episode: EpisodeId) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in _CALL_FIELDS}
    fields["staging_chain"] = list(row.staging_chain)
    return {**fields, "capture_key": row.capture_key or episode.capture_key}
