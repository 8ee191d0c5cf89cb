"""One rollout in a checkpoint, across all participants: only what holds it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.payloads import Codec
from gym_ckpt_grpc.storage.record_reader import RecordFile
from gym_ckpt_grpc.storage.records import FieldValue, Record
from gym_ckpt_grpc.storage.viewing import CheckpointView, PartView, Trouble


@dataclass(frozen=True, slots=True)
class PayloadView:
    """What the index says of a payload. stored_in: the checkpoint that has the bytes. length in bytes."""

    name: str
    codec: Codec
    content_type: str
    length: int
    sha256: str
    stored_in: str


@dataclass(frozen=True, slots=True)
class RecordView:
    """A record of the rollout. record: with its state, or None if that cannot be read; problem says why."""

    participant: str
    episode: EpisodeId
    schema: str
    schema_version: int
    owner: str
    revision: int | None
    fields: Mapping[str, FieldValue]
    payloads: tuple[PayloadView, ...]
    record: Record | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout in a checkpoint.

    continued: the attempt that continues, or None. restarts: attempts that start over, with the reason. lists_known:
    False if the episode lists cannot be read. troubles: parts that cannot be read, whose records are not known, and
    what may be a later checkpoint.
    """

    rollout_id: str
    continued: EpisodeId | None
    restarts: Mapping[EpisodeId, str]
    lists_known: bool
    records: tuple[RecordView, ...]
    troubles: tuple[Trouble, ...]


def view_rollout(view: CheckpointView, rollout_id: str, *, attempt: int | None = None) -> RolloutView:
    """Look at a rollout, or at one attempt of it. Blocks; reads every index, and the payloads of this rollout only."""

    def wanted(episode: EpisodeId) -> bool:
        return episode.rollout_id == rollout_id and attempt in (None, episode.attempt)

    records: list[RecordView] = []
    troubles: list[Trouble] = list(view.doubts)
    for part in view.parts:
        try:
            with view.open_records(part) as file:
                found = [at for at, episode in enumerate(file.episodes) if wanted(episode)]
                records += (_record(view, part, file, at) for at in found)
        except (StateCorrupt, StateNotFound) as error:
            if part.count == 0:
                continue
            message = view.root.shortened(error.message)
            relative = part.location.directory.removeprefix(f"{view.root.path}/")
            troubles.append(
                Trouble(relative, f"{message}; whether it has state of {rollout_id} is not known", part.name)
            )
    lists = view.lists
    continued = next(filter(wanted, lists.continued), None) if lists else None
    restarts = {episode: reason for episode, reason in lists.restarts.items() if wanted(episode)} if lists else {}
    return RolloutView(rollout_id, continued, restarts, lists is not None, tuple(records), tuple(troubles))


def _record(view: CheckpointView, part: PartView, file: RecordFile, at: int) -> RecordView:
    index, columns = file.index, file.index.raw.records
    (schema, version), revision = index.schemas[columns.schemas[at]], columns.revisions[at]
    record, problem, fields = None, "", dict[str, FieldValue]()
    try:
        fields = dict(index.fields(at))
        [record] = file.read_at([at])
    except (StateCorrupt, StateNotFound) as error:
        problem = view.root.shortened(error.message)
    return RecordView(
        participant=part.name,
        episode=index.episodes[at],
        schema=schema,
        schema_version=version,
        owner=index.names[columns.owners[at]],
        revision=revision - 1 if revision else None,
        fields=fields,
        payloads=tuple(_payloads(view, file, at)),
        record=record,
        problem=problem,
    )


def _payloads(view: CheckpointView, file: RecordFile, at: int) -> Iterator[PayloadView]:
    index = file.index
    for position in index.payload_range(at):
        entry = index.payload(position)
        base = index.chunks[entry.chunk].base
        yield PayloadView(
            name=index.payload_name(position),
            codec=Codec(index.codecs[position]),
            content_type=index.content_types[index.type_of[position]],
            length=entry.length,
            sha256=entry.digest.hex(),
            stored_in=base.checkpoint_id if base else view.checkpoint_id,
        )
