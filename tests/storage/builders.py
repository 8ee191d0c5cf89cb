"""Small checkpoints for the tests of this room."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    AggregateManifest,
    CheckpointRoot,
    EpisodeLists,
    FileLayer,
    Finding,
    IdentityBlock,
    Intent,
    Level,
    Member,
    PartManifestInfo,
    Published,
    Record,
    check_members,
    encode,
    verify_checkpoint,
    write_aggregate,
    write_part,
)

AGENT = ParticipantIdentity(ParticipantKind.AGENT, "office", "0", incarnation_id="inc-a")
COUNTER = ParticipantIdentity(ParticipantKind.RESOURCES, "counter", "0", incarnation_id="inc-r")


def make_records(count: int = 4, *, size: int = 20, turn: int = 0) -> list[Record]:
    """Records of `count` episodes with two payloads each; `turn` makes them differ."""
    return [
        Record(
            EpisodeId(f"roll-{number}", number % 3),
            "agent_session",
            2,
            owner=f"worker-{number % 2}",
            revision=number or None,
            fields={"turn": turn, "tags": ["a", "b"]},
            payloads={
                "state": encode({"turn": turn, "text": f"{number}" * size}),
                "conversation": encode([{"role": "user", "content": f"hello {number}"}, 2**70]),
            },
        )
        for number in range(count)
    ]


def write(
    files: FileLayer,
    root: CheckpointRoot,
    checkpoint_id: str,
    *,
    identity: ParticipantIdentity = AGENT,
    records: Iterable[Record] | None = None,
    chunk_size: int = 64,
    **more: object,
) -> PartManifestInfo:
    """Write one part with small chunks."""
    return write_part(
        files,
        root.location(checkpoint_id),
        identity,
        checkpoint_id=checkpoint_id,
        records=make_records() if records is None else records,
        chunk_size=chunk_size,
        **more,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Done:
    """A published checkpoint."""

    manifest: AggregateManifest
    digest: str
    published: Published


def complete(
    root: CheckpointRoot, checkpoint_id: str, *, epoch: int, turn: int = 0, base: str = "", compress: bool = False
) -> tuple[AggregateManifest, str]:
    """Intent, two parts, and the aggregate manifest. base: the checkpoint that keeps what `turn` did not change."""
    files = root.files
    members = (IdentityBlock.of(AGENT), IdentityBlock.of(COUNTER))
    location = root.write_intent(
        Intent(checkpoint_id=checkpoint_id, run_id="run", controller_id="ctl", epoch=1, members=members)
    )
    records = make_records(turn=turn)
    how: dict[str, Any] = {"base": root.location(base) if base else None, "compress": compress}
    infos = [
        write(files, root, checkpoint_id, identity=AGENT, records=records, documents={"keys": {"a": [turn]}}, **how),
        write(files, root, checkpoint_id, identity=COUNTER, records=records[:2], restarts=1, **how),
    ]
    manifest = AggregateManifest(
        checkpoint_id=checkpoint_id,
        run_id="run",
        controller_id="ctl",
        epoch=1,
        members=tuple(Member.of(who, info) for who, info in zip((AGENT, COUNTER), infos, strict=True)),
    )
    lists = EpisodeLists(infos[0].episodes, {EpisodeId("late"): "straggler"})
    manifest, digest = write_aggregate(files, location, manifest, episodes=lists)
    check_members(files, location, manifest)
    return manifest, digest


def commit(
    root: CheckpointRoot, checkpoint_id: str, *, epoch: int, turn: int = 0, base: str = "", compress: bool = False
) -> Done:
    """A whole checkpoint, published."""
    manifest, digest = complete(root, checkpoint_id, epoch=epoch, turn=turn, base=base, compress=compress)
    return Done(manifest, digest, root.publish(checkpoint_id, digest, epoch=epoch))


def faults(root: CheckpointRoot, checkpoint_id: str) -> list[Finding]:
    """What is wrong with a checkpoint; empty if it passes."""
    findings = list(verify_checkpoint(root, checkpoint_id))
    verdict = findings.pop()
    found = [finding for finding in findings if finding.is_fault]
    assert verdict.level is (Level.FAILED if found else Level.PASSED)
    return found


def same(first: Any, second: Any) -> bool:
    """Equal in type, value, key order, and the bits of floats; iterative, so that depth does not matter."""
    pairs = [(first, second)]
    while pairs:
        one, two = pairs.pop()
        if type(one) is not type(two):
            return False
        if isinstance(one, float):
            if struct.pack(">d", one) != struct.pack(">d", two):
                return False
        elif isinstance(one, dict):
            if list(one) != list(two):
                return False
            pairs.extend((one[key], two[key]) for key in one)
        elif isinstance(one, list):
            if len(one) != len(two):
                return False
            pairs.extend(zip(one, two, strict=True))
        elif one != two:
            return False
    return True
