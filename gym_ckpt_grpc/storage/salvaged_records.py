"""The intact records of a records file whose index is: each read and decoded, or counted as lost with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.record_reader import RecordFile
from gym_ckpt_grpc.storage.records import Record, RecordChecks

_BATCH = 16 << 20  # bytes of payloads in memory at a time


@dataclass(frozen=True, slots=True)
class Lost:
    """Something that could not be saved. episode: whose record, or None: more than one record, or no record."""

    participant: str
    episode: EpisodeId | None
    why: str


class IntactRecords:
    """Iterate it as often as needed; `lost` is complete after one whole round."""

    def __init__(self, file: RecordFile, participant: str) -> None:
        self._file = file
        self._participant = participant
        self._lost: dict[int, Lost] = {}

    @property
    def lost(self) -> tuple[Lost, ...]:
        """What was found lost so far, in file order."""
        return tuple(self._lost[at] for at in sorted(self._lost))

    def __iter__(self) -> Iterator[Record]:
        for batch in self._file.index.batches(_BATCH):
            yield from self._read(batch)

    def _read(self, chosen: Sequence[int]) -> Iterator[Record]:
        """All of them, or halves of them, down to the ones that are damaged."""
        try:
            records = self._file.read_at(chosen)
        except (StateCorrupt, StateNotFound) as error:
            if len(chosen) == 1:
                self._lose(chosen[0], error.message)
                return
            middle = len(chosen) // 2
            yield from self._read(chosen[:middle])
            yield from self._read(chosen[middle:])
            return
        for at, record in zip(chosen, records, strict=True):
            if problem := _unusable(record):
                self._lose(at, problem)
            else:
                yield record

    def _lose(self, at: int, why: str) -> None:
        directory = self._file.path.rpartition("/checkpoints/")[0]
        message = why.replace(f"{directory}/", "")
        self._lost[at] = Lost(self._participant, self._file.episodes[at], message)


def _unusable(record: Record) -> str:
    """Why a record of which every byte is intact is lost all the same: a restore would refuse the whole checkpoint for
    it, or it cannot be written again, as another writer may have written it."""
    try:
        RecordChecks().check([record])
        for name in record.payloads:
            record.decode(name)
    except (StateCorrupt, InvalidArgument) as error:
        return error.message
    return ""
