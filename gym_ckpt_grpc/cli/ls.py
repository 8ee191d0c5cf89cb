"""`gym-ckpt ls`: what a root holds, newest first, and what is wrong with it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, print_json, size, table
from gym_ckpt_grpc.cli.roots import described_troubles, open_root, tell, tell_troubles
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.storage import CheckpointRoot
from gym_ckpt_grpc.storage.viewing import CheckpointView, Trouble, Unpublished, view_root

NEWEST = 20
"""Published checkpoints that are looked into without --all."""
COLUMNS = ("number", "id", "created", "run", "members", "continue", "restart", "written", "state", "kind", "held", "")
WORDS = {
    "complete": "complete, not published",
    "unfinished": "unfinished: its writer still writes it, gave up, or died",
    "unreadable": "cannot be read",
    "foreign": "none of this project's: without a readable intent it is never removed",
    "tombstone": "being deleted; the next removal finishes it",
}


def ls(root: str, *, everything: bool, as_json: bool) -> Exit:
    """List a root; FAILED if something published, or the sequence, cannot be read as it was written."""
    opened = open_root(root)
    view = view_root(opened, limit=None if everything else NEWEST)
    held, troubles = _held(opened)
    troubles = [*view.troubles, *troubles]
    rows = [described(checkpoint, held) for checkpoint in view.newest]
    damaged = bool(troubles) or any(row["problems"] for row in rows)
    code = Exit.FAILED if damaged else Exit.OK
    if as_json:
        print_json(
            {
                "root": opened.uri,
                "published": rows,
                "published_count": view.published,
                "deleted_count": view.deleted,
                "unpublished": [_unpublished(each) for each in view.unpublished],
                "problems": described_troubles(troubles),
            }
        )
        return code
    people.print(table("", COLUMNS, [_row(row) for row in rows]))
    if view.published > len(rows):
        tell(f"{view.published - len(rows):,} older ones are published; --all shows them")
    if not rows:
        tell("nothing is published, as far as can be read" if troubles else "nothing is published")
    for each in view.unpublished:
        epoch = f" epoch {each.intent.epoch} by {each.intent.controller_id}:" if each.intent else ""
        problem = f" ({each.problem})" if each.problem else ""
        tell(f"{each.name or 'checkpoints'}:{epoch} {WORDS[each.kind]}{problem}")
    for checkpoint in view.newest:
        if checkpoint.troubles:
            tell((checkpoint.checkpoint_id, "bold"))
            tell_troubles(checkpoint.troubles, limit=5)
    tell_troubles(troubles)
    return code


def described(view: CheckpointView, held: dict[str, list[str]]) -> dict[str, Any]:
    """One published checkpoint, for programs. Counts are None where nothing says them."""
    manifest = view.manifest
    episodes = manifest.episodes if manifest else None
    bases = sorted({entry.checkpoint for part in view.parts for entry in part.files if entry.checkpoint})
    return {
        "number": view.publication.number if view.publication else 0,
        "checkpoint_id": view.checkpoint_id,
        "created": manifest.created if manifest else "",
        "epoch": view.publication.epoch if view.publication else 0,
        "run_id": manifest.run_id if manifest else (view.intent.run_id if view.intent else ""),
        "members": len(view.parts),
        "continued": episodes.continued if episodes else (len(view.lists.continued) if view.lists else None),
        "restarts": episodes.restarts if episodes else (len(view.lists.restarts) if view.lists else None),
        "written_bytes": sum(part.written_bytes for part in view.parts),
        "state_bytes": sum(part.state_bytes for part in view.parts),
        "chain": max((part.chain for part in view.parts), default=0),
        "bases": bases,
        "held_by": held.get(view.checkpoint_id, []),
        "problems": [str(trouble) for trouble in view.troubles],
    }


def _row(row: dict[str, Any]) -> list[object]:
    kind = f"+{row['chain']} on {', '.join(row['bases'])}" if row["bases"] else "full"
    problems = row["problems"]
    return [
        row["number"],
        row["checkpoint_id"],
        row["created"][:19],
        row["run_id"],
        row["members"],
        "?" if row["continued"] is None else row["continued"],
        "?" if row["restarts"] is None else row["restarts"],
        size(row["written_bytes"]),
        size(row["state_bytes"]),
        kind,
        ", ".join(row["held_by"]),
        f"problems: {len(problems)}, see below" if problems else "",
    ]


def _unpublished(each: Unpublished) -> dict[str, Any]:
    return {
        "name": each.name,
        "kind": each.kind,
        "epoch": each.intent.epoch if each.intent else 0,
        "controller_id": each.intent.controller_id if each.intent else "",
        "problem": each.problem,
    }


def _held(root: CheckpointRoot) -> tuple[dict[str, list[str]], list[Trouble]]:
    """Checkpoint id -> what holds it, and what could not be asked."""
    held: dict[str, list[str]] = defaultdict(list)
    troubles = []
    try:
        for pin in root.pins():
            held[pin.checkpoint_id].append(f"restore of epoch {pin.epoch}")
    except StateCorrupt as error:
        troubles.append(Trouble("pins", error.message))
    try:
        for hold in root.holds():
            held[hold.checkpoint_id].append(hold.name)
    except StateCorrupt as error:
        troubles.append(Trouble("holds", error.message))
    return held, troubles
