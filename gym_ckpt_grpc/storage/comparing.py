"""What changed from one checkpoint to another, by manifests and indexes: no state is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.locations import Place
from gym_ckpt_grpc.storage.record_index import RecordIndex
from gym_ckpt_grpc.storage.viewing import CheckpointView, PartView, Trouble

_Key = tuple[str, str, int]  # rollout, schema, which of its records of that schema


@dataclass(frozen=True, slots=True)
class PartDifference:
    """One participant.

    change: `added`, `removed`, `replaced` (another process of the same place), or `same`. Record counts compare a
    rollout's records by fields and payload digests, whatever its attempt. changed_bytes: of payloads in the second
    that its record in the first has not. records_known: False if an index cannot be read; then the counts are 0.
    """

    name: str
    change: str
    records_known: bool = True
    unchanged: int = 0
    changed: int = 0
    added: int = 0
    removed: int = 0
    changed_bytes: int = 0
    state_bytes: tuple[int, int] = (0, 0)
    written_bytes: tuple[int, int] = (0, 0)
    changed_rollouts: tuple[str, ...] = ()
    """Rollouts of the changed, added and removed records, sorted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What changed. Rollouts are sorted by id; those in both have the attempts of both.

    restarted: rollouts that the first continues and the second starts over, with the reason. rollouts_known: False if
    the lists of one cannot be read; then all of these are empty.
    """

    parts: tuple[PartDifference, ...]
    only_first: tuple[EpisodeId, ...]
    only_second: tuple[EpisodeId, ...]
    both: Mapping[str, tuple[int, int]]
    restarts_first: Mapping[EpisodeId, str]
    restarts_second: Mapping[EpisodeId, str]
    restarted: Mapping[EpisodeId, str] = field(default_factory=dict)
    rollouts_known: bool = True
    troubles: tuple[Trouble, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs that is known."""
        still = all(part.change == "same" and not part.changed_rollouts for part in self.parts)
        attempts = any(first != second for first, second in self.both.values())
        restarts = self.restarts_first.keys() != self.restarts_second.keys()
        return still and not (self.only_first or self.only_second or attempts or restarts or self.troubles)


def compare(first: CheckpointView, second: CheckpointView) -> Difference:
    """Compare two checkpoints, of one root or two, as far as both can be read. Blocks; reads indexes only."""
    troubles = [*first.troubles, *second.troubles]
    parts = tuple(_parts(first, second, troubles))
    if first.lists is None or second.lists is None:
        return Difference(parts, (), (), {}, {}, {}, {}, False, _once(troubles))
    ours = {episode.rollout_id: episode.attempt for episode in first.lists.continued}
    theirs = {episode.rollout_id: episode.attempt for episode in second.lists.continued}
    return Difference(
        parts,
        tuple(EpisodeId(rollout, ours[rollout]) for rollout in sorted(ours.keys() - theirs.keys())),
        tuple(EpisodeId(rollout, theirs[rollout]) for rollout in sorted(theirs.keys() - ours.keys())),
        {rollout: (ours[rollout], theirs[rollout]) for rollout in sorted(ours.keys() & theirs.keys())},
        first.lists.restarts,
        second.lists.restarts,
        {episode: reason for episode, reason in second.lists.restarts.items() if episode.rollout_id in ours},
        True,
        _once(troubles),
    )


def _once(troubles: list[Trouble]) -> tuple[Trouble, ...]:
    """Each said once: what two checkpoints need, and what two looks find."""
    return tuple({str(trouble): trouble for trouble in reversed(troubles)}.values())[::-1]


def _parts(first: CheckpointView, second: CheckpointView, troubles: list[Trouble]) -> Iterator[PartDifference]:
    ours: dict[Place, PartView] = {part.place: part for part in first.parts}
    theirs: dict[Place, PartView] = {part.place: part for part in second.parts}
    for place in dict.fromkeys([*ours, *theirs]):
        yield _part((first, ours.get(place)), (second, theirs.get(place)), troubles)


def _part(
    first: tuple[CheckpointView, PartView | None],
    second: tuple[CheckpointView, PartView | None],
    troubles: list[Trouble],
) -> PartDifference:
    present = [part for _, part in (first, second) if part is not None]
    ours, theirs = (_records(view, part, troubles) if part else {} for view, part in (first, second))
    known, (before, after) = ours is not None and theirs is not None, (ours or {}, theirs or {})
    if not known:
        before, after = {}, {}
    changed = [key for key in after if key in before and after[key] != before[key]]
    added, removed = after.keys() - before.keys(), before.keys() - after.keys()
    return PartDifference(
        present[0].name,
        _change(first[1], second[1]),
        known,
        unchanged=len(after) - len(changed) - len(added),
        changed=len(changed),
        added=len(added),
        removed=len(removed),
        changed_bytes=sum(after[key].bytes_beside(before.get(key)) for key in (*changed, *added)),
        state_bytes=(first[1].state_bytes if first[1] else 0, second[1].state_bytes if second[1] else 0),
        written_bytes=(first[1].written_bytes if first[1] else 0, second[1].written_bytes if second[1] else 0),
        changed_rollouts=tuple(sorted({key[0] for key in (*changed, *added, *removed)})),
    )


def _change(first: PartView | None, second: PartView | None) -> str:
    if first is None or second is None:
        return "removed" if second is None else "added"
    return "same" if first.identity.incarnation_id == second.identity.incarnation_id else "replaced"


@dataclass(frozen=True, slots=True)
class _Content:
    """What a record says. payloads: name -> (digest, codec, length)."""

    fields: bytes
    payloads: Mapping[str, tuple[bytes, int, int]]

    def bytes_beside(self, other: _Content | None) -> int:
        """Bytes of the payloads that the other has not."""
        known = other.payloads if other else {}
        return sum(entry[2] for name, entry in self.payloads.items() if known.get(name) != entry)


def _records(view: CheckpointView, part: PartView, troubles: list[Trouble]) -> dict[_Key, _Content] | None:
    """By rollout, schema and count, or None if the index cannot be read."""
    try:
        with view.open_records(part) as file:
            return _contents(file.index)
    except (StateCorrupt, StateNotFound) as error:
        message = view.root.shortened(error.message)
        troubles.append(Trouble(f"{view.location.directory}/".removeprefix(f"{view.root.path}/"), message, part.name))
        return None


def _contents(index: RecordIndex) -> dict[_Key, _Content]:
    found: dict[_Key, _Content] = {}
    seen: dict[tuple[str, str], int] = {}
    records = index.raw.records
    for at, episode in enumerate(index.episodes):
        kind = (episode.rollout_id, index.schemas[records.schemas[at]][0])
        seen[kind] = seen.get(kind, -1) + 1
        payloads = {}
        for position in index.payload_range(at):
            entry = index.payload(position)
            payloads[index.payload_name(position)] = (entry.digest, index.codecs[position], entry.length)
        found[(*kind, seen[kind])] = _Content(records.fields[at], payloads)
    return found
