"""Looking into a root as far as anything in it can be read: nothing here trusts, writes, or stops at the first fault.

What a restore needs is read by `root.py`, `aggregate.py` and `part_reading.py`, which refuse at the first fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from gym_ckpt_grpc.protocol.errors import ControlError, StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import checkpoint_id_problem
from gym_ckpt_grpc.storage import documents
from gym_ckpt_grpc.storage.aggregate import (
    AggregateManifest,
    EpisodeLists,
    Member,
    find_episodes,
    read_aggregate,
    read_episodes,
)
from gym_ckpt_grpc.storage.files import FileLayer, file_size, read_file
from gym_ckpt_grpc.storage.intent import Intent, read_intent
from gym_ckpt_grpc.storage.locations import PARTICIPANTS, CheckpointLocation, PartLocation, Place
from gym_ckpt_grpc.storage.names import unescape
from gym_ckpt_grpc.storage.part_manifest import (
    MAX_MANIFEST,
    RECORDS,
    FileEntry,
    IdentityBlock,
    PartManifest,
    parse_manifest,
    read_manifest,
)
from gym_ckpt_grpc.storage.part_reading import base_paths
from gym_ckpt_grpc.storage.record_format import records_name
from gym_ckpt_grpc.storage.record_reader import RecordFile
from gym_ckpt_grpc.storage.removal import removing_id
from gym_ckpt_grpc.storage.root import LATEST, CheckpointRoot
from gym_ckpt_grpc.storage.sequence import Publication


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that cannot be read, or is not there. file: from the root. participant: whose it is, or empty."""

    file: str
    message: str
    participant: str = ""

    def __str__(self) -> str:
        whose = f"{self.participant}: " if self.participant and self.participant not in self.message else ""
        named = "" if self.file in self.message else f"{self.file}: "
        return f"{whose}{named}{self.message}"


@dataclass(frozen=True, slots=True)
class PartView:
    """One participant's part, as far as it can be read.

    identity: by the manifest, else by checkpoint.json, the intent, or the name of its directory, which does not tell
    the process. member: what checkpoint.json says of it.
    manifest: None if it cannot be read. records: its records file, by whoever names it, or None.
    """

    identity: IdentityBlock
    location: PartLocation
    member: Member | None
    manifest: PartManifest | None
    records: FileEntry | None
    trouble: Trouble | None = None

    @property
    def place(self) -> Place:
        return self.identity.place

    @property
    def name(self) -> str:
        """`kind/service/instance`."""
        return str(self.identity)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file that it is known to need."""
        known = self.manifest or self.member
        if known is not None:
            return known.files
        return (self.records,) if self.records else ()

    @property
    def count(self) -> int | None:
        """How many records it has by its manifest, or by checkpoint.json; None if neither can be read."""
        known = self.manifest or self.member
        return known.records if known else None

    @property
    def written_bytes(self) -> int:
        """Of its own files; 0 if unknown."""
        known = self.manifest or self.member
        return known.bytes if known else 0

    @property
    def state_bytes(self) -> int:
        """Of all its payloads, wherever they are; 0 if unknown. Manifests of version 1 know only what was written."""
        if self.manifest is not None and self.manifest.schema_version > 1:
            return self.manifest.state_bytes
        return (self.member.state_bytes if self.member else 0) or self.written_bytes

    @property
    def chain(self) -> int:
        """Incremental checkpoints since the last full one."""
        known = self.manifest or self.member
        return known.chain if known else 0


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One checkpoint, as far as it can be read.

    nameless: directories of parts of which nothing tells whose they are; only where checkpoint.json cannot be read.
    troubles: what cannot be read, in the order in which it was looked at. doubts: those of them that may be a later
    publication, where this one was chosen as the newest.
    """

    root: CheckpointRoot
    location: CheckpointLocation
    publication: Publication | None
    manifest: AggregateManifest | None
    manifest_digest: str
    lists: EpisodeLists | None
    intent: Intent | None
    parts: tuple[PartView, ...]
    nameless: tuple[str, ...]
    troubles: tuple[Trouble, ...]
    doubts: tuple[Trouble, ...] = ()

    @property
    def checkpoint_id(self) -> str:
        return self.location.checkpoint_id

    def open_records(self, part: PartView) -> RecordFile:
        """A part's records file, its index checked. Raises StateNotFound, StateCorrupt."""
        if part.records is None:
            raise StateCorrupt(f"{part.location.directory!r} has no records file that anything names")
        path = part.location.file(part.records.name)
        size = part.records.size or None  # unknown where only the file's own name tells of it
        bases = base_paths(self.root.files, self.location, part.place)
        file = RecordFile(self.root.files, path, root_digest=part.records.digest, size=size, bases=bases)
        if part.count not in (None, len(file)):
            file.close()
            raise file.index.corrupt(f"has {len(file)} records, not {part.count}")
        return file


@dataclass(frozen=True, slots=True)
class _Order:
    """The sequence of a root, as far as it can be read. publications: newest first."""

    publications: tuple[Publication, ...]
    troubles: tuple[Trouble, ...]

    def of(self, checkpoint_id: str) -> Publication | None:
        """The publication of a checkpoint."""
        return next((entry for entry in self.publications if entry.checkpoint_id == checkpoint_id), None)


def _order(root: CheckpointRoot) -> _Order:
    try:
        history = root.sequence.history()
    except StateCorrupt as error:
        return _Order((), (_trouble(root, error, root.sequence.directory),))
    troubles = (_trouble(root, error, root.sequence.directory) for error in history.problems)
    return _Order(history.publications[::-1], tuple(troubles))


def view_checkpoint(root: CheckpointRoot, selector: str = LATEST) -> CheckpointView:
    """Look at a checkpoint of an id, or at the newest published one. Blocks; reads manifests, not state.

    Raises InvalidArgument for an illegal id, StateNotFound if there is neither a directory nor a publication.
    """
    order = _order(root)
    location = _select(root, order, selector)
    publication = order.of(location.checkpoint_id)
    # What cannot be read may be a later publication, or the one of this checkpoint.
    troubles = order.troubles if selector == LATEST or publication is None else ()
    view = _view(root, location, publication, troubles)
    return replace(view, doubts=order.troubles) if selector == LATEST else view


def _view(
    root: CheckpointRoot,
    location: CheckpointLocation,
    publication: Publication | None,
    before: tuple[Trouble, ...] = (),
) -> CheckpointView:
    files, troubles = root.files, list(before)

    def note(error: ControlError, path: str, participant: str = "") -> Trouble:
        troubles.append(_trouble(root, error, path, participant))
        return troubles[-1]

    manifest, digest, lists, intent = None, "", None, None
    try:
        expected = publication.manifest_digest if publication else None
        manifest, digest = read_aggregate(files, location, expected_digest=expected)
    except (StateCorrupt, StateNotFound) as error:
        note(error, location.aggregate)
    try:
        lists = read_episodes(files, location, manifest) if manifest else find_episodes(files, location)
    except StateCorrupt as error:
        name = manifest.episodes.name if manifest and manifest.episodes else "episodes-<hex>.json"
        note(error, location.file(name))
    try:
        intent = read_intent(files, location)
    except (StateCorrupt, StateNotFound) as error:
        if manifest is None or isinstance(error, StateCorrupt):  # a restore needs none
            note(error, location.intent)
    parts = tuple(_parts(root, location, manifest, intent))
    for part in parts:
        if part.trouble is not None:
            troubles.append(part.trouble)
        troubles += _missing_files(root, location, part)
    nameless = _nameless(root, location, parts) if manifest is None else ()
    troubles += (Trouble(directory, "has a part, and whose it is cannot be told") for directory in nameless)
    seen = tuple(troubles)
    return CheckpointView(root, location, publication, manifest, digest, lists, intent, parts, nameless, seen)


def _select(root: CheckpointRoot, order: _Order, selector: str) -> CheckpointLocation:
    publications = order.publications
    if selector == LATEST:
        if not publications:
            damaged = "".join(f"; {trouble}" for trouble in order.troubles[:3])
            raise StateNotFound(f"nothing is published in {root.path!r}{damaged}")
        return root.location(publications[0].checkpoint_id)
    location, publication = root.location(selector), order.of(selector)
    if not _may_be_dir(root.files, location.directory):
        if publication is None:
            raise StateNotFound(f"there is no checkpoint {selector!r} in {root.path!r}")
        if publication != publications[0]:
            raise StateNotFound(f"checkpoint {selector!r} was deleted")
    return location


def _trouble(root: CheckpointRoot, error: ControlError, path: str, participant: str = "") -> Trouble:
    """Paths are told from the root, as people see them."""
    message = root.shortened(error.message)
    return Trouble(path.removeprefix(f"{root.path}/"), message, participant or error.participant)


def _parts(
    root: CheckpointRoot, location: CheckpointLocation, manifest: AggregateManifest | None, intent: Intent | None
) -> Iterator[PartView]:
    """Those that checkpoint.json names; without it, those of the intent and whatever else is in the directory."""
    if manifest is not None:
        for member in manifest.members:
            yield _part(root, location, member.participant, member)
        return
    named = {block.place: block for block in intent.members} if intent else {}
    directories = set(_part_directories(root.files, location)) - {location.part(place).directory for place in named}
    found = [_identity(root.files, location, directory) for directory in sorted(directories)]
    for block in (*named.values(), *filter(None, found)):
        yield _part(root, location, block, None)


def _nameless(root: CheckpointRoot, location: CheckpointLocation, parts: tuple[PartView, ...]) -> tuple[str, ...]:
    """Directories of parts that are not among these, from the root."""
    known = {part.location.directory for part in parts}
    found = (directory for directory in _part_directories(root.files, location) if directory not in known)
    # Of a name that is no Unicode, what cannot be text is escaped.
    told = (directory.encode("utf-8", "backslashreplace").decode() for directory in found)
    return tuple(directory.removeprefix(f"{root.path}/") for directory in told)


def _identity(files: FileLayer, location: CheckpointLocation, directory: str) -> IdentityBlock | None:
    """Whose part a directory is: by the manifest, if it lies where it says, else by the directory's own name."""
    try:
        path = f"{directory}/manifest.json"
        found = parse_manifest(read_file(files, path, limit=MAX_MANIFEST), path=path).participant
    except (StateCorrupt, StateNotFound):
        kind, *names = directory.rsplit("/", 3)[1:]
        service, instance = map(unescape, names)
        if service is None or instance is None:
            return None
        found = IdentityBlock(kind=ParticipantKind(kind), service=service, instance=instance, incarnation_id="")
    return found if location.part(found.place).directory == directory else None


def _part_directories(files: FileLayer, location: CheckpointLocation) -> Iterator[str]:
    """Every directory that has a part's manifest or records, whoever's it is; none that cannot be read."""

    def below(directory: str) -> list[str]:
        try:
            names = files.names(directory)
        except StateCorrupt:
            return []
        return [path for name in names if _may_be_dir(files, path := f"{directory}/{name}")]

    for kind in ParticipantKind:
        for service in below(f"{location.directory}/{PARTICIPANTS}/{kind.value}"):
            yield from filter(partial(_has_part, files), below(service))


def _has_part(files: FileLayer, directory: str) -> bool:
    try:
        return any(name == "manifest.json" or name.endswith(".gck") for name in files.names(directory))
    except StateCorrupt:
        return True


def _may_be_dir(files: FileLayer, path: str) -> bool:
    """Whether there is a directory, or nobody can tell: then whoever looks into it will say why."""
    try:
        return files.is_dir(path)
    except StateCorrupt:
        return True


def _part(
    root: CheckpointRoot, location: CheckpointLocation, identity: IdentityBlock, member: Member | None
) -> PartView:
    part = location.part(identity.place)
    try:
        manifest, _ = read_manifest(
            root.files,
            part,
            identity.place,
            checkpoint_id=location.checkpoint_id,
            expected_digest=member.manifest_digest if member else None,
        )
    except (StateCorrupt, StateNotFound) as error:
        records = _own_records(member.files) if member else _lone_records(root.files, part)
        trouble = _trouble(root, error, part.manifest, str(identity))
        return PartView(identity, part, member, None, records, trouble)
    return PartView(manifest.participant, part, member, manifest, manifest.records_file)


def _own_records(files: tuple[FileEntry, ...]) -> FileEntry | None:
    return next((entry for entry in files if entry.role == RECORDS and not entry.checkpoint), None)


def _lone_records(files: FileLayer, part: PartLocation) -> FileEntry | None:
    """The only records file of a directory: its name is its digest, so it needs nobody to vouch for it."""
    try:
        names = files.names(part.directory)
    except StateCorrupt:
        return None
    digests = (name[len("records-") : -len(".gck")] for name in names)
    named = [digest for digest in digests if documents.is_digest(digest) and records_name(digest) in names]
    if len(named) != 1:
        return None
    return FileEntry(name=records_name(named[0]), role=RECORDS, size=0, digest=named[0])


def _missing_files(root: CheckpointRoot, location: CheckpointLocation, part: PartView) -> Iterator[Trouble]:
    """What a part names and is not there, or has another size. Opens each file, reads none."""
    if part.manifest is None and part.member is None:
        return
    for entry in part.files:
        path = location.part_file(part.place, entry.name, checkpoint=entry.checkpoint)
        try:
            size = file_size(root.files, path)
        except (StateCorrupt, StateNotFound) as error:
            base = f", which has state of {location.checkpoint_id}" if entry.checkpoint else ""
            text = root.shortened(f"{error.message}{base}")
            yield Trouble(path.removeprefix(f"{root.path}/"), text, part.name)
            continue
        if size != entry.size:
            text = f"has {size} bytes, not {entry.size}"
            yield Trouble(path.removeprefix(f"{root.path}/"), text, part.name)


# ---- a whole root


@dataclass(frozen=True, slots=True)
class Unpublished:
    """A directory below `checkpoints/` that no publication names.

    kind: `complete`, `unfinished` (its checkpoint.json is not there), `unreadable`, `tombstone`, or `foreign` (without
    an intent of this project). intent: None if there is none.
    """

    name: str
    kind: str
    intent: Intent | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RootView:
    """A root. newest: the published checkpoints looked at, newest first. published: how many there are.

    deleted: how many publications have no directory any more.
    """

    newest: tuple[CheckpointView, ...]
    published: int
    deleted: int
    unpublished: tuple[Unpublished, ...]
    troubles: tuple[Trouble, ...]


def view_root(root: CheckpointRoot, *, limit: int | None = None) -> RootView:
    """Look at a root. limit: look into this many of the newest published checkpoints. Raises StateNotFound."""
    if not root.files.is_dir(root.path):
        raise StateNotFound(f"{root.path!r} is no directory")
    order = _order(root)
    troubles = list(order.troubles)
    there, deleted = list[Publication](), 0
    for publication in order.publications:
        checkpoint_id = publication.checkpoint_id
        if problem := checkpoint_id_problem(checkpoint_id):
            troubles.append(Trouble("sequence", f"publishes {checkpoint_id[:80]!r}, whose id {problem}"))
        elif there and not _may_be_dir(root.files, root.location(checkpoint_id).directory):
            deleted += 1
        else:
            there.append(publication)
    views = tuple(_view(root, root.location(each.checkpoint_id), each) for each in there[:limit])
    unpublished = tuple(_unpublished(root, {each.checkpoint_id for each in order.publications}))
    return RootView(views, len(there), deleted, unpublished, tuple(troubles))


def _unpublished(root: CheckpointRoot, published: set[str]) -> Iterator[Unpublished]:
    directory = f"{root.path}/checkpoints"
    try:
        names = root.files.names(directory)
    except StateCorrupt as error:
        yield Unpublished("", "unreadable", None, error.message)
        return
    for name in names:
        if name in published or not _may_be_dir(root.files, f"{directory}/{name}"):
            continue
        if checkpoint_id_problem(name):
            yield Unpublished(name, "tombstone" if removing_id(name) else "foreign", None)
        else:
            yield _without_publication(root, root.location(name))


def _without_publication(root: CheckpointRoot, location: CheckpointLocation) -> Unpublished:
    name, intent = location.checkpoint_id, None
    try:
        intent = read_intent(root.files, location)
        read_aggregate(root.files, location)
    except StateNotFound as error:
        if intent is None:
            return Unpublished(name, "foreign", None, _trouble(root, error, location.intent).message)
        return Unpublished(name, "unfinished", intent)
    except StateCorrupt as error:
        return Unpublished(name, "unreadable", intent, _trouble(root, error, location.directory).message)
    return Unpublished(name, "complete", intent)
