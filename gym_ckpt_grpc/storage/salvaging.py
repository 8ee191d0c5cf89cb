"""Salvage: every intact record of a damaged checkpoint, written into a root of its own. The source is only read.

Two results. The parts: for each participant a records file and a manifest with its intact records. And, where it is
certain what belongs together, a whole checkpoint of the same id, published in the new root, in which a rollout
continues only if all of its state is there; every other one starts over. What is certain:

- Damage inside a records file costs the records it hits: the index, intact, says whose they are. A damaged index costs
  the whole file: nothing verifies what is in it, and nothing says which rollouts had state there. So nothing continues.
- A rollout without a record in an intact index had none there.
- A part's manifest that is lost is made anew only if its bytes have the digest that checkpoint.json knows; a document
  only if they have the digest in its name.
- Without checkpoint.json the intent says who belongs to it, and the episode lists are found by their own name; without
  the lists nothing continues, unless the records have exactly as many rollouts as checkpoint.json counts.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
import orjson

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateNotFound, Violation
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.aggregate import AggregateManifest, EpisodeLists, Member, check_members, write_aggregate
from gym_ckpt_grpc.storage.fsck import verify_checkpoint
from gym_ckpt_grpc.storage.intent import Intent
from gym_ckpt_grpc.storage.part import PartManifestInfo, write_part
from gym_ckpt_grpc.storage.placing import create_once
from gym_ckpt_grpc.storage.repairing import MendedPart, Repairs, mend_part
from gym_ckpt_grpc.storage.root import LATEST, CheckpointRoot
from gym_ckpt_grpc.storage.salvaged_records import IntactRecords, Lost
from gym_ckpt_grpc.storage.viewing import CheckpointView, PartView, view_checkpoint

CONTROLLER = "salvage"
"""Who writes the new root."""
REASON = "salvage: "
"""How the reason of a rollout begins that starts over for what was lost."""

Progress = Callable[[str, int], None]
"""Called with a participant and how many of its records are written, after each chunk."""


@dataclass(frozen=True, slots=True)
class SalvagedPart:
    """One participant's part. total: how many records it had, or None if nobody knows."""

    name: str
    records: int
    total: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What a salvage gave.

    refused: why there is no whole checkpoint, or empty: then it is published as `number` and restores. continued,
    restarts: of the whole one; restarts has those of the source too. notes: what is lost or different besides records.
    """

    checkpoint_id: str
    target: str
    parts: tuple[SalvagedPart, ...]
    lost: tuple[Lost, ...]
    notes: tuple[str, ...]
    refused: str = ""
    number: int = 0
    continued: tuple[EpisodeId, ...] = ()
    restarts: Mapping[EpisodeId, str] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing at all was lost."""
        return not (self.lost or self.notes or self.refused)

    def described(self) -> dict[str, object]:
        """For programs; what `salvage-<id>.json` in the new root says."""
        return {
            "checkpoint_id": self.checkpoint_id,
            "target": self.target,
            "restorable": not self.refused,
            "refused": self.refused,
            "number": self.number,
            "parts": [
                {"participant": part.name, "records": part.records, "total": part.total, "bytes": part.bytes}
                for part in self.parts
            ],
            "lost": [
                {"participant": lost.participant, "episode": str(lost.episode or ""), "why": lost.why}
                for lost in self.lost
            ],
            "notes": list(self.notes),
            "continued": [str(episode) for episode in self.continued],
            "restarts": {str(episode): reason for episode, reason in (self.restarts or {}).items()},
        }


@dataclass(frozen=True, slots=True)
class _Extracted:
    """A part in the new root. lost_whole: why all of its records are lost, or empty. unsafe: why it fits no whole."""

    part: PartView
    identity: ParticipantIdentity
    info: PartManifestInfo
    lost: tuple[Lost, ...]
    lost_whole: str
    unsafe: str

    @property
    def damaged(self) -> dict[EpisodeId, str]:
        return {lost.episode: lost.why for lost in self.lost if lost.episode is not None}


class _CannotBeWhole(Exception):
    """Why no whole checkpoint is made of the parts."""


def salvage(
    source: CheckpointRoot,
    selector: str,
    target: CheckpointRoot,
    *,
    repairs: Repairs | None = None,
    progress: Progress | None = None,
) -> Salvaged:
    """Extract the intact records of a checkpoint into a new root; publish a whole one there if that is safe. Blocks.

    target: a place where nothing is yet, outside of the source and not around it. repairs: what kinds know about
    their documents. Raises InvalidArgument for another target, StateNotFound if there is no such checkpoint,
    StateUnwritable; damage is in the result.
    """
    _check_target(source, target)
    view = view_checkpoint(source, selector or LATEST)
    target.preflight(expected_bytes=sum(part.state_bytes for part in view.parts))
    extracted = [_extract(view, part, target, repairs, progress) for part in view.parts]
    parts = tuple(
        SalvagedPart(each.part.name, each.info.record_count, each.part.count, each.info.bytes) for each in extracted
    )
    nameless = (Lost("", None, f"{directory}: whose part it is cannot be told") for directory in view.nameless)
    lost = (*(lost for each in extracted for lost in each.lost), *nameless)
    doubts = tuple(f"whether this is the newest is not known: {doubt}" for doubt in view.doubts)
    result = Salvaged(view.checkpoint_id, target.location(view.checkpoint_id).uri, parts, lost, doubts)
    try:
        result = _publish(view, extracted, target, result)
    except _CannotBeWhole as problem:
        result = replace(result, refused=str(problem))
    data = orjson.dumps(result.described(), option=orjson.OPT_INDENT_2) + b"\n"
    create_once(target.files, f"{target.path}/salvage-{view.checkpoint_id}.json", data, root=target.path)
    return result


def _check_target(source: CheckpointRoot, target: CheckpointRoot) -> None:
    problem = ""
    if posixpath.commonpath([source.path, target.path]) in (source.path, target.path):
        problem = "is the source, in it or around it"
    elif target.files.exists(target.path) and (not target.files.is_dir(target.path) or target.files.names(target.path)):
        problem = "is there and not an empty directory"
    if problem:
        raise InvalidArgument(f"target {target.path!r} {problem}", violations=(Violation("to", problem),))


def _extract(
    view: CheckpointView, part: PartView, target: CheckpointRoot, repairs: Repairs | None, progress: Progress | None
) -> _Extracted:
    """Write one part anew, with what is intact of it: perhaps nothing."""
    identity = ParticipantIdentity(*part.place, incarnation_id=part.identity.incarnation_id)

    def tell(records: int, size: int) -> None:
        if progress is not None:
            progress(part.name, records)

    def write(records: IntactRecords | tuple[()], mended: MendedPart) -> PartManifestInfo:
        return write_part(
            target.files,
            target.location(view.checkpoint_id),
            identity,
            checkpoint_id=view.checkpoint_id,
            records=records,
            restarts=mended.restarts,
            extra=mended.extra,
            documents=mended.documents,
            progress=tell,
        )

    try:
        file = view.open_records(part)
    except (StateCorrupt, StateNotFound) as error:
        mended = mend_part(view, part, repairs, None)
        info = write((), mended)
        if part.count == 0:
            return _Extracted(part, identity, info, mended.lost, "", mended.unsafe)
        count = "all" if part.count is None else f"all {part.count}"
        why = view.root.shortened(error.message)
        whole = Lost(part.name, None, f"{count} records: {why}")
        return _Extracted(part, identity, info, (whole, *mended.lost), why, mended.unsafe)
    with file:
        records = IntactRecords(file, part.name)
        mended = mend_part(view, part, repairs, records)
        info = write(records, mended)
        return _Extracted(part, identity, info, (*records.lost, *mended.lost), "", mended.unsafe)


# ---- the whole checkpoint


def _publish(view: CheckpointView, extracted: list[_Extracted], target: CheckpointRoot, result: Salvaged) -> Salvaged:
    """Write the aggregate manifest, read everything back, publish. Raises _CannotBeWhole."""
    run_id = _known_members(view, extracted)
    for each in extracted:
        if each.unsafe:
            raise _CannotBeWhole(each.unsafe)
    lists = _settled(_lists(view, extracted), extracted)
    moved = view.lists is None or lists.continued != view.lists.continued
    epoch = view.manifest.epoch if view.manifest else view.intent.epoch if view.intent else 0
    claim = target.sequence.claim(CONTROLLER, run_id, above=epoch)
    manifest, notes = _manifest(view, extracted, claim.epoch, moved=moved)
    if view.publication is None:
        notes.append("it was never published, as far as the sequence can be read: its run may have gone on without it")
    location = target.write_intent(
        Intent(
            checkpoint_id=view.checkpoint_id,
            run_id=run_id,
            controller_id=CONTROLLER,
            epoch=claim.epoch,
            members=tuple(member.participant for member in manifest.members),
        )
    )
    manifest, digest = write_aggregate(target.files, location, manifest, episodes=lists)
    check_members(target.files, location, manifest)
    faults = [finding for finding in verify_checkpoint(target, view.checkpoint_id) if finding.is_fault]
    if faults:
        raise StateCorrupt(f"what was written does not read back: {faults[0].file}: {faults[0].message}")
    published = target.publish(view.checkpoint_id, digest, epoch=claim.epoch)
    target.sequence.release(claim)
    return replace(
        result,
        number=published.publication.number,
        continued=lists.continued,
        restarts=lists.restarts,
        notes=(*result.notes, *notes, *([published.latest_error] if published.latest_error else [])),
    )


def _known_members(view: CheckpointView, extracted: list[_Extracted]) -> str:
    """Check that it is certain who belongs to the checkpoint; gives its run. Raises _CannotBeWhole."""
    if view.manifest is not None:
        return view.manifest.run_id
    if view.intent is None:
        raise _CannotBeWhole("neither checkpoint.json nor intent.json can be read: who belongs to it is not known")
    if view.nameless:
        raise _CannotBeWhole(f"whose part is in {view.nameless[0]} is not known; checkpoint.json is lost")
    named = {block.place: block for block in view.intent.members}
    for each in extracted:
        if each.part.place not in named:
            raise _CannotBeWhole(f"{each.part.name} has a part and is not in intent.json; checkpoint.json is lost")
        if each.part.identity != named[each.part.place]:
            raise _CannotBeWhole(f"{each.part.name} was written by another process than intent.json names")
    return view.intent.run_id


def _lists(view: CheckpointView, extracted: list[_Extracted]) -> EpisodeLists:
    """The lists, or what the records and checkpoint.json's counts prove of them. Raises _CannotBeWhole."""
    if view.lists is not None:
        return view.lists
    if view.manifest is None or view.manifest.episodes is None:
        raise _CannotBeWhole("the episode lists and checkpoint.json are lost: what continued is not known")
    reference = view.manifest.episodes
    if reference.restarts:
        raise _CannotBeWhole(
            f"the episode lists are lost, and with them which {reference.restarts} rollouts were to start over"
        )
    if whole := [each.part.name for each in extracted if each.lost_whole]:
        raise _CannotBeWhole(f"the episode lists are lost, and so are the records of {', '.join(whole)}")
    # What continues has a record somewhere: if as many rollouts have one as continue, they are the same.
    episodes = dict.fromkeys(episode for each in extracted for episode in (*each.info.episodes, *each.damaged))
    if len(episodes) != reference.continued or len({e.rollout_id for e in episodes}) != len(episodes):
        raise _CannotBeWhole(
            f"the episode lists are lost: {len(episodes)} rollouts have records, and {reference.continued} of them "
            "continued: which is not known"
        )
    return EpisodeLists(tuple(sorted(episodes)))


def _settled(lists: EpisodeLists, extracted: list[_Extracted]) -> EpisodeLists:
    """Who still continues: nobody whose state may be missing at any participant."""
    written = {episode for each in extracted for episode in each.info.episodes}
    damaged = {episode: each.part.name for each in reversed(extracted) for episode in each.damaged}
    whole = ", ".join(each.part.name for each in extracted if each.lost_whole)
    continued: list[EpisodeId] = []
    restarts = dict(lists.restarts)
    for episode in lists.continued:
        if whole:
            restarts[episode] = f"{REASON}every record of {whole} is lost, and with them whose they were"
        elif episode in damaged:
            restarts[episode] = f"{REASON}its record at {damaged[episode]} is damaged"
        elif episode not in written:
            restarts[episode] = f"{REASON}no record of it was found"
        else:
            continued.append(episode)
    return EpisodeLists(tuple(continued), restarts)


def _manifest(
    view: CheckpointView, extracted: list[_Extracted], epoch: int, *, moved: bool
) -> tuple[AggregateManifest, list[str]]:
    """The new aggregate manifest, its lists still to be written, and what it does not have of the old one."""
    members = tuple(Member.of(each.identity, each.info) for each in extracted)
    notes: list[str] = []
    old = view.manifest
    if old is None:
        assert view.intent is not None
        notes.append(
            "checkpoint.json is lost, and with it the trainer's own state, if there was any, policy versions, "
            "who was excluded, and the digests of the parts' manifests: their facts are taken as they stand there"
        )
        old = AggregateManifest(
            checkpoint_id=view.checkpoint_id,
            run_id=view.intent.run_id,
            controller_id="",
            epoch=0,
            members=(),
            frontier=view.intent.frontier,
        )
    if old.frontier is not None and moved:
        notes.append("the proof of the trainer's frontier is left out: other rollouts continue than it says")
    kept = None if moved else old.frontier
    manifest = msgspec.structs.replace(
        old,
        schema_version=AggregateManifest.VERSION,
        controller_id=CONTROLLER,
        epoch=epoch,
        members=members,
        episodes=None,
        frontier=kept,
    )
    return manifest, notes
