"""The index of a records file while it is being written: columns as plain lists, put into protobuf once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import cast

from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.chunk_writer import StoredChunk
from gym_ckpt_grpc.storage.payloads import Codec, Payload
from gym_ckpt_grpc.storage.record_format import FORMAT_VERSION
from gym_ckpt_grpc.storage.record_index import BaseFile, ChunkPlace
from gym_ckpt_grpc.storage.records import HEAD, Record
from gymckpt.v1 import storage_pb2


class IndexColumns:
    """Records and payloads in the order they were added. A chunk of another file is given as -1 - its position."""

    def __init__(self) -> None:
        self._schemas: dict[tuple[str, int], int] = {}
        self._names: dict[str, int] = {}
        self._content_types: dict[str, int] = {}
        self._episodes: dict[EpisodeId, None] = {}
        self._rollout_ids: list[str] = []
        self._attempts: list[int] = []
        self._schema_of: list[int] = []
        self._owners: list[int] = []
        self._revisions: list[int] = []
        self._fields: list[bytes] = []
        self._payload_counts: list[int] = []
        self._payload_names: list[int] = []
        self._chunks: list[int] = []
        self._offsets: list[int] = []
        self._lengths: list[int] = []
        self._codecs: list[Codec] = []
        self._content_type_of: list[int] = []
        self._digests = bytearray()

    def __len__(self) -> int:
        """How many records there are."""
        return len(self._attempts)

    @property
    def episodes(self) -> Iterable[EpisodeId]:
        """Those with a record, in order, each once."""
        return self._episodes

    def add_records(self, records: Sequence[Record], fields: Sequence[bytes]) -> None:
        """Append records with their encoded fields; their payloads come next, in order."""
        schemas, names = self._schemas, self._names
        episodes = [record.episode for record in records]
        self._episodes.update(dict.fromkeys(episodes))
        self._rollout_ids += [episode.rollout_id for episode in episodes]
        self._attempts += [episode.attempt for episode in episodes]
        heads = list(map(HEAD, records))
        places = {
            head: (schemas.setdefault(head[:2], len(schemas)), names.setdefault(head[2], len(names)))
            for head in dict.fromkeys(heads)
        }
        found = [places[head] for head in heads]
        self._schema_of += [schema for schema, _ in found]
        self._owners += [owner for _, owner in found]
        self._revisions += [0 if record.revision is None else record.revision + 1 for record in records]
        self._fields += fields
        payloads = [record.payloads for record in records]
        self._payload_counts += map(len, payloads)
        labels = [*chain.from_iterable(payloads)]
        for name in dict.fromkeys(labels):
            names.setdefault(name, len(names))
        self._payload_names += map(names.__getitem__, labels)

    def add_payloads(
        self,
        payloads: Sequence[Payload],
        digests: Sequence[bytes],
        chunks: Sequence[int],
        offsets: Sequence[int],
    ) -> None:
        """Append the payloads of the records that were added last. offsets: in the raw bytes of their chunks."""
        kinds = self._content_types
        self._chunks += chunks
        self._offsets += offsets
        self._lengths += [len(payload.data) for payload in payloads]
        self._codecs += [payload.codec for payload in payloads]
        content_types = [payload.content_type for payload in payloads]
        for kind in dict.fromkeys(content_types):
            kinds.setdefault(kind, len(kinds))
        self._content_type_of += map(kinds.__getitem__, content_types)
        self._digests += b"".join(digests)

    def to_bytes(
        self, stored: Sequence[StoredChunk], base_files: Sequence[BaseFile] = (), base_chunks: Sequence[ChunkPlace] = ()
    ) -> bytes:
        """The serialized index; the same records, chunks and references give the same bytes."""
        index = storage_pb2.RecordsIndex(format_version=FORMAT_VERSION)
        for schema, version in self._schemas:
            index.schemas.add(name=schema, version=version)
        index.names.extend(self._names)
        index.content_types.extend(self._content_types)
        index.chunks.extend(_chunk_entry(chunk) for chunk in stored)
        self._fill_records(index.records)
        self._fill_payloads(index.payloads, len(stored))
        _fill_base(index, base_files, base_chunks)
        return index.SerializeToString(deterministic=True)

    def _fill_records(self, records: storage_pb2.RecordColumns) -> None:
        records.SetInParent()
        records.rollout_ids.extend(self._rollout_ids)
        records.attempts.extend(self._attempts)
        records.schemas.extend(self._schema_of)
        records.owners.extend(self._owners)
        records.revisions.extend(self._revisions)
        records.fields.extend(self._fields)
        records.payload_counts.extend(self._payload_counts)

    def _fill_payloads(self, payloads: storage_pb2.PayloadColumns, own_chunks: int) -> None:
        payloads.names.extend(self._payload_names)
        payloads.chunks.extend([chunk if chunk >= 0 else own_chunks - 1 - chunk for chunk in self._chunks])
        payloads.offsets.extend(self._offsets)
        payloads.lengths.extend(self._lengths)
        payloads.codecs.extend(cast("list[storage_pb2.Codec.ValueType]", self._codecs))
        payloads.content_types.extend(self._content_type_of)
        payloads.digests = bytes(self._digests)


def _fill_base(
    index: storage_pb2.RecordsIndex, base_files: Sequence[BaseFile], base_chunks: Sequence[ChunkPlace]
) -> None:
    positions = {file: at for at, file in enumerate(base_files)}
    for file in base_files:
        index.base_files.add(
            checkpoint_id=file.checkpoint_id, root_digest=bytes.fromhex(file.root_digest), size=file.size
        )
    for place in base_chunks:
        assert place.base is not None
        index.base_chunks.add(file=positions[place.base], chunk=_chunk_entry(place))


def _chunk_entry(chunk: StoredChunk | ChunkPlace) -> storage_pb2.ChunkEntry:
    return storage_pb2.ChunkEntry(
        offset=chunk.offset,
        stored_length=chunk.stored_length,
        raw_length=chunk.raw_length,
        compression=storage_pb2.COMPRESSION_ZSTD if chunk.compressed else storage_pb2.COMPRESSION_NONE,
        digest=chunk.digest,
    )
