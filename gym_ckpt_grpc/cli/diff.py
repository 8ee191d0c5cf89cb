"""`gym-ckpt diff`: what changed between two checkpoints, by manifests and indexes."""

from __future__ import annotations

from typing import Any

from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, print_json, size, table
from gym_ckpt_grpc.cli.roots import described_troubles, open_root, tell, tell_episodes, tell_troubles
from gym_ckpt_grpc.storage.comparing import Difference, PartDifference, compare
from gym_ckpt_grpc.storage.viewing import CheckpointView, view_checkpoint

COLUMNS = (
    *("participant", "", "unchanged", "changed", "added", "removed"),
    *("changed bytes", "state before", "state after", "written before", "written after"),
)


def diff(root: str, first: str, second: str, *, other_root: str, rollouts: bool, as_json: bool) -> Exit:
    """Compare two checkpoints; FAILED if something of either cannot be read, whether or not they differ."""
    opened = open_root(root)
    views = view_checkpoint(opened, first), view_checkpoint(open_root(other_root) if other_root else opened, second)
    found = compare(*views)
    code = Exit.FAILED if found.troubles else Exit.OK
    if as_json:
        print_json(described(*views, found))
        return code
    tell(f"from {views[0].checkpoint_id} to {views[1].checkpoint_id}")
    people.print(table("", COLUMNS, [_row(part) for part in found.parts]))
    if found.rollouts_known:
        tell(
            f"rollouts that continue: {len(found.both):,} in both, {len(found.only_first):,} only in the first, "
            f"{len(found.only_second):,} only in the second"
        )
        starts = f"{len(found.restarts_first):,} in the first, {len(found.restarts_second):,} in the second"
        tell(f"rollouts that start over: {starts}")
    else:
        tell("which rollouts continue cannot be compared: the lists of one of them cannot be read")
    if rollouts:
        _tell_rollouts(found)
    if found.is_empty:
        tell("nothing differs")
    tell_troubles(found.troubles)
    return code


def _row(part: PartDifference) -> list[object]:
    counts = (part.unchanged, part.changed, part.added, part.removed)
    shown: list[object] = [*counts, size(part.changed_bytes)] if part.records_known else ["?"] * 5
    before, after = part.state_bytes
    sizes = (before, after, *part.written_bytes)
    return [part.name, "" if part.change == "same" else part.change, *shown, *map(size, sizes)]


def _tell_rollouts(found: Difference) -> None:
    every = 1 << 62
    tell_episodes("only in the first", found.only_first, limit=every)
    tell_episodes("only in the second", found.only_second, limit=every)
    moved = [f"{r} (attempt {a} to {b})" if a != b else r for r, (a, b) in found.both.items()]
    tell_episodes("in both", moved, limit=every)
    for episode, reason in found.restarted.items():
        tell(f"continued in the first, starts over in the second: {episode}: {reason}")
    for part in found.parts:
        tell_episodes(f"records differ at {part.name}", part.changed_rollouts, limit=every)


def described(first: CheckpointView, second: CheckpointView, found: Difference) -> dict[str, Any]:
    """A difference, for programs."""
    return {
        "first": first.checkpoint_id,
        "second": second.checkpoint_id,
        "same": found.is_empty,
        "participants": [
            {
                "participant": part.name,
                "change": part.change,
                "records_known": part.records_known,
                "unchanged": part.unchanged,
                "changed": part.changed,
                "added": part.added,
                "removed": part.removed,
                "changed_bytes": part.changed_bytes,
                "state_bytes": list(part.state_bytes),
                "written_bytes": list(part.written_bytes),
                "changed_rollouts": list(part.changed_rollouts),
            }
            for part in found.parts
        ],
        "rollouts": {
            "known": found.rollouts_known,
            "only_first": [str(episode) for episode in found.only_first],
            "only_second": [str(episode) for episode in found.only_second],
            "both": {rollout: list(attempts) for rollout, attempts in found.both.items()},
            "restarts_first": {str(episode): reason for episode, reason in found.restarts_first.items()},
            "restarts_second": {str(episode): reason for episode, reason in found.restarts_second.items()},
            "restarted": {str(episode): reason for episode, reason in found.restarted.items()},
        },
        "problems": described_troubles(found.troubles),
    }
