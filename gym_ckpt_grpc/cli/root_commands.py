"""The commands that look at a root, added to `gym-ckpt`. They change nothing but what they say they make."""

from __future__ import annotations

from typing import Annotated

import typer

from gym_ckpt_grpc.cli.app import Json, KeepEvery, KeepLast, KeepWithin, app, ended
from gym_ckpt_grpc.cli.exits import Exit

__all__ = ["app"]

Root = Annotated[str, typer.Option("--root", help="The checkpoint root: a directory or a file:// URI.")]
Checkpoint = Annotated[str, typer.Argument(help="A checkpoint id, or 'latest'.")]


@app.command("ls")
def list_root(
    root: Root,
    everything: Annotated[
        bool, typer.Option("--all", help="Look into every published checkpoint, not the 20 newest.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List what a root holds, newest first, and what is wrong with it."""
    from gym_ckpt_grpc.cli.ls import ls as run

    ended(lambda: run(root, everything=everything, as_json=as_json))


@app.command()
def show(root: Root, checkpoint: Checkpoint = "latest", as_json: Json = False) -> None:
    """Show what a checkpoint holds; exit 1 if something of it cannot be read."""
    from gym_ckpt_grpc.cli.show import show as run

    ended(lambda: run(root, checkpoint, as_json=as_json))


@app.command()
def timeline(root: Root, checkpoint: Checkpoint = "latest", as_json: Json = False) -> None:
    """Show how long each participant took for each step of a checkpoint, as a bar."""
    from gym_ckpt_grpc.cli.timeline import timeline as run

    ended(lambda: run(root, checkpoint, as_json=as_json))


@app.command()
def episode(
    root: Root,
    rollout: Annotated[str, typer.Argument(help="A rollout id, or a capture key, which names an attempt.")],
    checkpoint: Annotated[str, typer.Option("--checkpoint", help="A checkpoint id, or 'latest'.")] = "latest",
    attempt: Annotated[int | None, typer.Option("--attempt", min=0, help="Only this attempt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The state as it is stored; no conversation.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Everything, however long.")] = False,
    as_json: Json = False,
) -> None:
    """Show one rollout at every participant: where it stands, its conversation, its state."""
    from gym_ckpt_grpc.cli.episode import episode as run

    ended(lambda: run(root, rollout, checkpoint=checkpoint, attempt=attempt, raw=raw, full=full, as_json=as_json))


@app.command()
def verify(
    root: Root,
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint id, or 'latest', which is the default.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Every published checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """Read every byte of a checkpoint; exit 1 if anything is damaged or missing."""
    from gym_ckpt_grpc.cli.show import verify as run

    ended(lambda: run(root, checkpoint, everything=everything, as_json=as_json))


@app.command()
def diff(
    root: Root,
    first: Annotated[str, typer.Argument(help="The checkpoint to begin from: an id, or 'latest'.")],
    second: Annotated[str, typer.Argument(help="The checkpoint to compare with it.")] = "latest",
    other_root: Annotated[str, typer.Option("--other-root", help="Where the second one is, if elsewhere.")] = "",
    rollouts: Annotated[bool, typer.Option("--rollouts", help="List the rollouts, not only their numbers.")] = False,
    as_json: Json = False,
) -> None:
    """Show what changed between two checkpoints. Reads no state."""
    from gym_ckpt_grpc.cli.diff import diff as run

    ended(lambda: run(root, first, second, other_root=other_root, rollouts=rollouts, as_json=as_json))


@app.command()
def salvage(
    root: Root,
    to: Annotated[str, typer.Option("--to", help="The new root: a directory that is empty or not there.")],
    checkpoint: Checkpoint = "latest",
    as_json: Json = False,
) -> None:
    """Save every intact record of a damaged checkpoint into a new root; exit 1 if anything is lost."""
    from gym_ckpt_grpc.cli.salvage import salvage_checkpoint as run

    ended(lambda: run(root, checkpoint, to, as_json=as_json))


@app.command()
def gc(
    root: Root,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_within: KeepWithin = None,
    grace: Annotated[str, typer.Option("--grace", help="How long an orphan is left alone: 90s, 15m, 1h, 2d.")] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; show what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Remove checkpoints that no --keep option keeps, and what crashed runs left. Without one, only the latter.

    May run beside a coordinator. Never removed: the newest, what is pinned, held, or needed by another, what cannot be
    read, and what is not of this root. Exit 1: something could not be removed, or the root is damaged.
    """
    from gym_ckpt_grpc.cli.gc import gc as run
    from gym_ckpt_grpc.cli.gc import policy_of, seconds

    def command() -> Exit:
        policy = policy_of(keep_last, keep_every, keep_within)
        return run(root, policy, grace=seconds("--grace", grace), dry_run=dry_run, as_json=as_json)

    ended(command)
