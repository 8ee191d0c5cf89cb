"""Roots with something to keep and something to remove, for the tests of retention."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from gym_ckpt_grpc.storage import (
    AggregateManifest,
    CheckpointRoot,
    EpisodeLists,
    FileEntry,
    IdentityBlock,
    Intent,
    Member,
    Plan,
    Retention,
    RetentionOutcome,
    apply_retention,
    plan_retention,
    write_aggregate,
)
from gym_ckpt_grpc.storage.record_format import records_name
from tests.storage.builders import AGENT, COUNTER, make_records, write

HOUR = 3600.0


def put(root: CheckpointRoot, *names: str, epoch: int = 1, created: str = "", needs: Iterable[str] = ()) -> None:
    """Published checkpoints. needs: checkpoints whose records files each names, as an incremental one does."""
    for name in names:
        intent = Intent(checkpoint_id=name, run_id="run", controller_id="ctl", epoch=epoch, members=_blocks())
        location = root.write_intent(intent)
        info = write(root.files, root, name, records=make_records(1), documents={"staging_keys": {"r": [f"r/{name}"]}})
        member = Member.of(AGENT, info)
        bases = tuple(_base_file(base) for base in needs)
        manifest = AggregateManifest(
            checkpoint_id=name,
            run_id="run",
            controller_id="ctl",
            epoch=epoch,
            created=created,
            members=(msgspec.structs.replace(member, files=member.files + bases),),
        )
        _, digest = write_aggregate(root.files, location, manifest, episodes=EpisodeLists())
        root.publish(name, digest, epoch=epoch)


def _blocks() -> tuple[IdentityBlock, ...]:
    return (IdentityBlock.of(AGENT), IdentityBlock.of(COUNTER))


def _base_file(checkpoint_id: str) -> FileEntry:
    digest = hashlib.sha256(checkpoint_id.encode()).hexdigest()
    return FileEntry(name=records_name(digest), role="records", size=9, digest=digest, checkpoint=checkpoint_id)


def unfinished(root: CheckpointRoot, name: str, *, epoch: int, controller: str = "ctl") -> None:
    """A directory with an intent and a part, and no more."""
    root.write_intent(
        Intent(checkpoint_id=name, run_id="run", controller_id=controller, epoch=epoch, members=_blocks())
    )
    write(root.files, root, name)


def decided(plan: Plan) -> dict[str, str]:
    """Name -> reason, empty for what is to be removed."""
    return {each.name: "" if each.removed else each.reason for each in (*plan.published, *plan.unpublished)}


def prune(root: CheckpointRoot, policy: Retention | None = None, *, epoch: int | None = 1, **more: Any) -> list[str]:
    """What is there afterwards, sorted."""
    outcome = pruned(root, policy, epoch=epoch, **more)
    assert outcome.failures == ()
    return root.files.names(f"{root.path}/checkpoints")


def pruned(
    root: CheckpointRoot, policy: Retention | None = None, *, epoch: int | None = 1, **more: Any
) -> RetentionOutcome:
    more.setdefault("grace", 0.0)
    return apply_retention(root, plan_retention(root, policy, epoch=epoch, **more))
