"""Two small checkpoints as a deployment writes them, the second incremental on the first, and ways to damage them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from gym_ckpt_grpc.capture import row_staging_key
from gym_ckpt_grpc.participants.policy_records import CutRecord, PolicyModelRecord, staging_index
from gym_ckpt_grpc.participants.records import AgentRecord, EnvironmentRecord, ResourcesRecord
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    AggregateManifest,
    CheckpointRoot,
    EpisodeLists,
    FileSource,
    IdentityBlock,
    Intent,
    LocalFiles,
    Member,
    OpaqueBlock,
    Record,
    encode,
    write_aggregate,
    write_part,
)
from gym_ckpt_grpc.storage.viewing import view_checkpoint

ENVIRONMENT = ParticipantIdentity(ParticipantKind.ENVIRONMENT, "environment", "0", incarnation_id="inc-e")
POLICY = ParticipantIdentity(ParticipantKind.POLICY_MODEL, "policy_model", "0", incarnation_id="inc-p")
AGENT = ParticipantIdentity(ParticipantKind.AGENT, "agent", "0", incarnation_id="inc-a")
COUNTER = ParticipantIdentity(ParticipantKind.RESOURCES, "counter", "0", incarnation_id="inc-c")
MAIL = ParticipantIdentity(ParticipantKind.RESOURCES, "mail box", "0", incarnation_id="inc-m")
MEMBERS = (ENVIRONMENT, POLICY, AGENT, COUNTER, MAIL)
ROLLOUTS = tuple(EpisodeId(f"roll-{number}", number % 3) for number in range(6))
LATE = EpisodeId("late", 1)
TRAINER = {"step": 7}
EVIL = "\x1b]0;owned\x07\x9b2J\u202e"
"""What a terminal would obey, in state that a server stored."""


def records_of(who: ParticipantIdentity, *, turn: int) -> list[Record]:
    """What a participant has of the rollouts; each has state at one of the two resources servers."""
    return [record for record in (_record(who, at, each, turn) for at, each in enumerate(ROLLOUTS)) if record]


def _record(who: ParticipantIdentity, at: int, episode: EpisodeId, turn: int) -> Record | None:
    moved = turn if at % 2 else 0  # half of the rollouts stand still from one checkpoint to the next
    if who is ENVIRONMENT:
        return EnvironmentRecord(episode, "d" * 64, {"seed": "e" * 64}, {"next": "invoke_agent"}).to_record()
    if who is POLICY:
        return PolicyModelRecord(episode, [_row(episode, 1), _row(episode, 2)], [_cut(episode, moved)]).to_record()
    if who is AGENT:
        said = [{"role": "user", "content": f"begin {at}{EVIL}"}, {"role": "assistant", "content": f"answer {moved}"}]
        return AgentRecord(episode, f"agent-{at}", {"seed": 2**70}, {"messages": said}).to_record()
    if who is (COUNTER if at % 2 else MAIL):
        state = {"count": moved, "odd": float("inf"), "log": [f"{at}-{n}" for n in range(40)]}
        return ResourcesRecord(episode, f"session-{at}", state).to_record()
    return None


def _row(episode: EpisodeId, number: int) -> dict[str, object]:
    key = f"{episode.capture_key}/{number}"
    return {"kind": "staged", "call_id": f"call-{number}", "staging_key": key, "total_length": 9 * number}


def _cut(episode: EpisodeId, turn: int) -> CutRecord:
    return CutRecord(
        request_digest="a" * 64,
        service="policy_model",
        model="m",
        backend="b",
        incarnation_id="i",
        snapshot_id="s",
        source_capture_key=episode.capture_key,
        source_call_id="call-3",
        cut_id=f"cut-{turn}",
        staging_keys=(f"cuts/{episode.capture_key}/{turn}",),
        prefix_tokens=7,
        prefix_digest="b" * 64,
        output_limit=256,
        weight_version=3,
    )


def make_checkpoint(
    root: CheckpointRoot,
    checkpoint_id: str,
    *,
    turn: int = 0,
    base: str = "",
    lists: EpisodeLists | None = None,
    published: bool = True,
    extra: dict[str, object] | None = None,
    records: Callable[[ParticipantIdentity], Sequence[Record]] | None = None,
) -> None:
    """A whole checkpoint under epoch 1. extra: facts that the counter server's manifest has."""
    members = tuple(IdentityBlock.of(who) for who in MEMBERS)
    location = root.write_intent(
        Intent(checkpoint_id=checkpoint_id, run_id="run", controller_id="ctl", epoch=1, members=members)
    )
    infos = []
    for who in MEMBERS:
        found = records(who) if records else records_of(who, turn=turn)
        added = staging_index(found, row_staging_key) if who is POLICY else None
        infos.append(
            write_part(
                root.files,
                location,
                who,
                checkpoint_id=checkpoint_id,
                records=found,
                restarts=1,
                extra=added.manifest if added else (extra or {}) if who is COUNTER else {},
                documents=added.documents if added else {},
                base=root.location(base) if base else None,
                chunk_size=512,
            )
        )
    manifest = AggregateManifest(
        checkpoint_id=checkpoint_id,
        run_id="run",
        controller_id="ctl",
        epoch=1,
        created="2026-01-02T03:04:05+00:00",
        members=tuple(Member.of(who, info) for who, info in zip(MEMBERS, infos, strict=True)),
        trainer=OpaqueBlock.of(encode(TRAINER)),
        policy_versions={"policy_model": "v3"},
    )
    lists = lists or EpisodeLists(ROLLOUTS, {LATE: "straggler"})
    _, digest = write_aggregate(root.files, location, manifest, episodes=lists)
    if published:
        root.publish(checkpoint_id, digest, epoch=1)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on the disk; a few thousand syncs take minutes."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def make_root(directory: Path, **two: object) -> CheckpointRoot:
    """A root with `one` and `two`, published in this order."""
    root = CheckpointRoot(str(directory))
    root.sequence.claim("ctl", "run")
    make_checkpoint(root, "one")
    make_checkpoint(root, "two", turn=1, base="one", **two)  # type: ignore[arg-type]
    return root


def copy_of_part(who: ParticipantIdentity, checkpoint_id: str) -> str:
    """A part's directory, from the root."""
    escaped = who.service.replace(" ", "=20")
    return f"checkpoints/{checkpoint_id}/participants/{who.kind}/{escaped}/{who.instance}"


def only(directory: Path, pattern: str) -> Path:
    """The one file below a directory that matches."""
    [found] = sorted(directory.glob(pattern))
    return found


def flip(path: Path, at: int | None = None, bit: int = 1) -> Path:
    """Flip a bit of a file: in the middle, unless said where. Gives the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= bit
    path.write_bytes(data)
    return path


def cut_short(path: Path, *, left: int | None = None) -> Path:
    """Keep the first bytes of a file: half, unless said how many."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 if left is None else left])
    return path


def flip_payload(
    root: CheckpointRoot, checkpoint_id: str, place: object, episode: EpisodeId, payload: int = -1
) -> Path:
    """Flip a bit of a record's payload, wherever its bytes are. Gives the file. place: as in an identity."""
    view = view_checkpoint(root, checkpoint_id)
    [part] = [part for part in view.parts if part.place == place]
    with view.open_records(part) as file:
        entry = file.index.payload(file.index.payload_range(file.episodes.index(episode))[payload])
        chunk = file.index.chunks[entry.chunk]
        assert not chunk.compressed
        path = file.path
    if chunk.base is not None:
        name = f"records-{chunk.base.root_digest}.gck"
        path = root.location(checkpoint_id).part_file(part.place, name, checkpoint=chunk.base.checkpoint_id)
    return flip(Path(path), chunk.offset + entry.offset)


def tree(directory: Path) -> dict[str, str]:
    """Path -> what is there, of everything below a directory: to see that nothing was changed."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = os.fsencode(path.relative_to(directory)).hex()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "directory"
    return found


def episodes_of(records: Iterable[Record]) -> set[EpisodeId]:
    """Whose records these are."""
    return {record.episode for record in records}


class CountingFiles(LocalFiles):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def open(self, path: str) -> FileSource:  # type: ignore[override]
        return _Counting(super().open(path), self)


class _Counting:
    def __init__(self, source: FileSource, files: CountingFiles) -> None:
        self._source, self._files = source, files
        self.size = source.size

    def read(self, offset: int, length: int) -> bytes:
        self._files.read += length
        return self._source.read(offset, length)

    def close(self) -> None:
        self._source.close()
