"""Verifying a checkpoint: every byte of every file it needs, every digest and every cross-reference."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from gym_ckpt_grpc.protocol.errors import ControlError, InvalidArgument, StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.aggregate import (
    AggregateManifest,
    Member,
    find_episodes,
    read_aggregate,
    read_episodes,
)
from gym_ckpt_grpc.storage.files import FileLayer, file_size
from gym_ckpt_grpc.storage.locations import PARTICIPANTS, CheckpointLocation, PartLocation, check_part_path
from gym_ckpt_grpc.storage.part_manifest import (
    DOCUMENT,
    FileEntry,
    PartManifest,
    parse_manifest,
    read_manifest_bytes,
)
from gym_ckpt_grpc.storage.part_reading import open_records, read_document
from gym_ckpt_grpc.storage.record_format import records_name
from gym_ckpt_grpc.storage.record_index import BaseFile
from gym_ckpt_grpc.storage.root import CheckpointRoot

T = TypeVar("T")


class Level(enum.StrEnum):
    """What a finding says. The last finding is PASSED or FAILED, and there is no other of these two."""

    CHECKED = "checked"
    STRAY = "stray"
    MISSING = "missing"
    DAMAGED = "damaged"
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. file: from the checkpoint's directory, or empty for the verdict. size: bytes read of it.

    participant: `kind/service/instance`, or empty. episode: whose state it is, or None.
    """

    level: Level
    file: str
    message: str = ""
    participant: str = ""
    episode: EpisodeId | None = None
    size: int = 0

    @property
    def is_fault(self) -> bool:
        """Whether the checkpoint fails for it."""
        return self.level in (Level.MISSING, Level.DAMAGED)


def verify_checkpoint(root: CheckpointRoot, checkpoint_id: str) -> Iterator[Finding]:
    """Read and check a whole checkpoint; yields findings as they are made, the verdict last.

    Of an incremental one also what it needs of earlier checkpoints. Where `checkpoint.json` cannot be read it goes on
    with what the parts say themselves. Not looked into: `intent.json`, which nothing needs any more. Raises
    InvalidArgument for an illegal id and nothing else: what cannot be read is a finding.
    """
    location = root.location(checkpoint_id)
    faults = files = 0
    for finding in _Verifying(root, location).findings():
        faults += finding.is_fault
        files += finding.level is Level.CHECKED
        yield finding
    text = f"{files} files checked, {faults} faults"
    yield Finding(Level.FAILED if faults else Level.PASSED, "", text)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part to be checked. member: what `checkpoint.json` says about it, None where that cannot be read."""

    location: PartLocation
    who: str
    member: Member | None

    def file(self, name: str) -> str:
        """A file of it, from the checkpoint's directory."""
        return f"{self.location.relative}/{name}"

    def base_file(self, checkpoint_id: str, name: str) -> str:
        """A file of the same participant in an earlier checkpoint, from this one's directory."""
        return f"../{checkpoint_id}/{self.file(name)}"


class _Verifying:
    """One verification. What may fail is done in `_guarded`, so that nothing ends it."""

    def __init__(self, root: CheckpointRoot, location: CheckpointLocation) -> None:
        self._root = root
        self._files: FileLayer = root.files
        self._location = location
        self._known = {"checkpoint.json", "intent.json", "events.jsonl", PARTICIPANTS}
        """Names in the checkpoint's directory that have a place there."""

    def findings(self) -> Iterator[Finding]:
        digest, published = "", False
        try:
            mine = [each for each in self._root.sequence.publications() if each.checkpoint_id == self._checkpoint_id]
            published = bool(mine)
            digest = mine[0].manifest_digest if mine else ""
        except (StateCorrupt, StateNotFound) as error:
            yield self._fault(error, "../../sequence")
        if not published:
            yield from self._check_sequence()
        parts: list[_Part] = []
        try:
            manifest, _ = read_aggregate(self._files, self._location, expected_digest=digest or None)
        except (StateCorrupt, StateNotFound) as error:
            yield self._fault(error, "checkpoint.json")
            yield from self._check_found_lists()
            parts.extend(self._found_parts())
        else:
            text = "published" if published else "complete, not published"
            yield Finding(Level.CHECKED, "checkpoint.json", text, size=self._size(self._location.aggregate))
            yield from self._check_lists(manifest)
            for member in manifest.members:
                place = self._location.part(member.participant.place)
                parts.append(_Part(place, str(member.participant), member))
        for part in parts:
            yield from self._check_part(part)
        yield from self._strays(parts)

    @property
    def _checkpoint_id(self) -> str:
        return self._location.checkpoint_id

    # ---- the checkpoint as a whole

    def _check_sequence(self) -> Iterator[Finding]:
        """For a checkpoint that nothing readable publishes: an entry that cannot be read may be the one that did."""
        try:
            problems = self._root.sequence.problems()
        except (StateCorrupt, StateNotFound):
            return  # told already
        for problem in problems:
            text = problem.message.replace(f"{self._root.path}/", "../../")
            yield Finding(Level.DAMAGED, "../../sequence", f"{text}: whether it published this checkpoint is not known")

    def _check_lists(self, manifest: AggregateManifest) -> Iterator[Finding]:
        name = manifest.episodes.name if manifest.episodes else ""
        self._known.add(name)
        try:
            lists = read_episodes(self._files, self._location, manifest)
        except (StateCorrupt, StateNotFound) as error:
            yield self._fault(error, name)
            return
        text = f"{len(lists.continued)} continued, {len(lists.restarts)} restarts"
        yield Finding(Level.CHECKED, name, text, size=manifest.episodes.size if manifest.episodes else 0)

    def _check_found_lists(self) -> Iterator[Finding]:
        """The episode lists, where nothing readable names them."""
        try:
            names = self._files.names(self._location.directory)
            found = [name for name in names if name.startswith("episodes-") and name.endswith(".json")]
            if not found:
                return
            self._known.update(found)
            lists = find_episodes(self._files, self._location)
        except (StateCorrupt, StateNotFound) as error:
            yield self._fault(error, "episodes-*.json")
            return
        yield Finding(Level.CHECKED, found[0], f"{len(lists.continued)} continued, {len(lists.restarts)} restarts")

    def _found_parts(self) -> Iterator[_Part]:
        """The parts that are there, where nothing readable says which should be."""
        for relative in self._directories(PARTICIPANTS, 3):
            location = PartLocation(self._location.root, self._location.file(relative), relative)
            yield _Part(location, relative.removeprefix(f"{PARTICIPANTS}/"), None)

    def _directories(self, relative: str, depth: int) -> Iterator[str]:
        """Directories so many levels below one of this checkpoint; links are not followed."""
        if depth == 0:
            yield relative
            return
        for name in self._names(relative):
            if self._is_dir(f"{relative}/{name}"):
                yield from self._directories(f"{relative}/{name}", depth - 1)

    def _strays(self, parts: list[_Part]) -> Iterator[Finding]:
        expected = {part.location.relative for part in parts}
        for name in self._names(""):
            if name not in self._known:
                yield Finding(Level.STRAY, name, "has no place in a checkpoint")
        for relative in self._directories(PARTICIPANTS, 3):
            if relative not in expected:
                yield Finding(Level.STRAY, relative, "is the part of no member")

    # ---- one part

    def _check_part(self, part: _Part) -> Iterator[Finding]:
        try:
            check_part_path(part.location, self._files)
            data = read_manifest_bytes(self._files, part.location)
            manifest = self._parse(part, data)
        except (StateCorrupt, StateNotFound, InvalidArgument) as error:
            yield self._fault(error, part.file("manifest.json"), part.who)
            return
        yield Finding(Level.CHECKED, part.file("manifest.json"), "", part.who, size=len(data))
        lost: set[BaseFile] = set()
        for entry in manifest.base_files:
            if finding := self._check_base(part, manifest, entry):
                lost.add(BaseFile(entry.checkpoint, entry.digest, entry.size))
                yield finding
        for entry in manifest.own_files:
            faulty = False
            for finding in self._guarded(part, part.file(entry.name), self._check_file(part, manifest, entry, lost)):
                faulty = True
                yield finding
            if not faulty:
                yield Finding(Level.CHECKED, part.file(entry.name), "", part.who, size=entry.size)
        known = {entry.name for entry in manifest.own_files} | {"manifest.json"}
        for name in self._names(part.location.relative):
            if name not in known:
                yield Finding(Level.STRAY, part.file(name), "is named by no manifest", part.who)

    def _parse(self, part: _Part, data: bytes) -> PartManifest:
        path = part.location.manifest
        digest = documents.sha256(data)
        if part.member is not None and digest != part.member.manifest_digest:
            raise StateCorrupt(f"{path!r} has the sha256 {digest}, not the expected {part.member.manifest_digest}")
        manifest = parse_manifest(data, path=path)
        if manifest.checkpoint_id != self._checkpoint_id:
            raise StateCorrupt(f"{path!r} belongs to checkpoint {manifest.checkpoint_id[:200]!r}")
        if self._location.part(manifest.participant.place) != part.location:
            raise StateCorrupt(f"{path!r} is the part of {manifest.participant}")
        if part.member is not None and part.member != Member.from_manifest(self._location, manifest, digest):
            raise StateCorrupt(f"{path!r} differs from what 'checkpoint.json' says about it")
        return manifest

    def _check_base(self, part: _Part, manifest: PartManifest, entry: FileEntry) -> Finding | None:
        """Whether a file of an earlier checkpoint is there, and of the size it must have."""
        path = self._location.part_file(manifest.participant.place, entry.name, checkpoint=entry.checkpoint)
        try:
            size = file_size(self._files, path)
            if size == entry.size:
                return None
            problem, level = f"has {size} bytes, not {entry.size}", Level.DAMAGED
        except StateNotFound:
            problem, level = "is not there", Level.MISSING
        except StateCorrupt as error:
            problem, level = error.message, Level.DAMAGED
        text = f"of checkpoint {entry.checkpoint!r} {problem}; {part.file('manifest.json')} needs it"
        return Finding(level, part.base_file(entry.checkpoint, entry.name), text, part.who)

    def _check_file(
        self, part: _Part, manifest: PartManifest, entry: FileEntry, lost: set[BaseFile]
    ) -> Iterator[Finding]:
        """Faults in one file of a part; for the records file also in what earlier checkpoints have of it."""
        if entry.role == DOCUMENT:
            read_document(self._files, part.location, entry)
            return
        with open_records(self._files, self._location, manifest) as file:
            for damage in file.check_payloads(passing=lost):
                name = part.file(entry.name)
                if damage.base is not None:
                    name = part.base_file(damage.base.checkpoint_id, records_name(damage.base.root_digest))
                problem = f"payload {damage.payload!r} {damage.problem}"
                yield Finding(Level.DAMAGED, name, self._shorten(problem), part.who, damage.episode)
            for at in range(len(file)):
                file.index.fields(at)

    # ---- reporting

    def _guarded(self, part: _Part, name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
        try:
            yield from findings
        except (StateCorrupt, StateNotFound) as error:
            yield self._fault(error, name, part.who)

    def _fault(self, error: ControlError, file: str, participant: str = "") -> Finding:
        level = Level.MISSING if isinstance(error, StateNotFound) else Level.DAMAGED
        episode = error.episodes[0] if error.episodes else None
        return Finding(level, file, self._shorten(error.message), participant or error.participant, episode)

    def _shorten(self, message: str) -> str:
        return message.replace(f"{self._location.directory}/", "")

    def _size(self, path: str) -> int:
        """Bytes of a file that was read a moment ago."""
        return self._tried(lambda: file_size(self._files, path), 0)

    def _names(self, relative: str) -> list[str]:
        """Names in a directory of this checkpoint; none if it cannot be read, which shows elsewhere."""
        path = f"{self._location.directory}/{relative}".rstrip("/")
        return self._tried(lambda: self._files.names(path), [])

    def _is_dir(self, relative: str) -> bool:
        return self._tried(lambda: self._files.is_dir(self._location.file(relative)), False)

    def _tried(self, look: Callable[[], T], otherwise: T) -> T:
        try:
            return look()
        except (StateCorrupt, StateNotFound):
            return otherwise
