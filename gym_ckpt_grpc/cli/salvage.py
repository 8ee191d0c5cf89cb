"""`gym-ckpt salvage`: the intact records of a damaged checkpoint, and a whole checkpoint of them where that is safe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gym_ckpt_grpc.capture import row_staging_key
from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, print_json, size, table
from gym_ckpt_grpc.cli.roots import LISTED, open_root, progress, root_at, tell, tell_reasons
from gym_ckpt_grpc.participants.policy_records import staging_facts, staging_index
from gym_ckpt_grpc.storage import STAGING_KEYS, Record
from gym_ckpt_grpc.storage.salvaging import REASON, Salvaged, salvage


class KindRepairs:
    """What the kinds of this project know about their documents: the policy model's index of staging keys."""

    def document(self, label: str, records: Iterable[Record]) -> Mapping[str, Any] | None:
        """The index that these records give, by the rows of this project's ledger."""
        return staging_index(records, row_staging_key).documents[STAGING_KEYS] if label == STAGING_KEYS else None

    def extra(self, blocks: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Count and digest of the keys that an index has."""
        index = blocks.get(STAGING_KEYS)
        return {STAGING_KEYS: staging_facts(index)[1]} if index is not None else {}


def salvage_checkpoint(root: str, checkpoint: str, to: str, *, as_json: bool) -> Exit:
    """Salvage into a new root; FAILED if anything was lost, whatever else came of it."""

    def done(participant: str, records: int) -> None:
        progress(f"{participant}: {records:,} records")

    found = salvage(open_root(root), checkpoint, root_at(to), repairs=KindRepairs(), progress=done)
    progress("")
    code = Exit.OK if found.is_complete else Exit.FAILED
    if as_json:
        print_json(found.described())
        return code
    rows = [
        (part.name, part.records, "?" if part.total is None else f"{part.total:,}", size(part.bytes))
        for part in found.parts
    ]
    people.print(table("", ["participant", "saved", "of", "written"], rows))
    for lost in found.lost[:LISTED]:
        tell(("lost: ", "red"), f"{lost.participant} {lost.episode or ''}".rstrip(), f": {lost.why}")
    if len(found.lost) > LISTED:
        tell(("lost: ", "red"), f"{len(found.lost) - LISTED:,} more; see the report")
    for note in found.notes:
        tell(("note: ", "yellow"), note)
    _tell_whole(found)
    tell(f"the report is salvage-{found.checkpoint_id}.json in {to}")
    return code


def _tell_whole(found: Salvaged) -> None:
    if found.refused:
        tell(("no whole checkpoint: ", "red"), found.refused)
        tell(f"the intact records are in {found.target}")
        return
    restarts = found.restarts or {}
    tell((found.checkpoint_id, "bold"), f"  restores from the new root, where it is number {found.number}")
    tell(f"{len(found.continued):,} rollouts continue, {len(restarts):,} start over")
    tell_reasons(reason for reason in restarts.values() if reason.startswith(REASON))
