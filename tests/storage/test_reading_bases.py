"""State that an earlier checkpoint has: read from there without asking, verified, and missed by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    FileLayer,
    LocalFiles,
    Part,
    PartManifestInfo,
    Record,
    encode,
    path_to_uri,
    raw,
    read_part,
)
from gym_ckpt_grpc.storage.record_format import FOOTER_SIZE, unpack_footer
from gym_ckpt_grpc.storage.record_index import RecordIndex
from gymckpt.v1 import storage_pb2
from tests.storage.assembling import CountedFiles, index_of, reindexed
from tests.storage.builders import AGENT, write
from tests.storage.recording_files import ROOT

COUNT = 12
COMPRESSED = pytest.mark.parametrize("compress", [False, True], ids=["plain", "zstd"])


def records_at(turn: int, *, count: int = COUNT) -> list[Record]:
    """Every third record changes at each turn after 0, and one payload of every record stays for ever."""
    return [
        Record(
            EpisodeId(f"r{at}"),
            "s",
            revision=turn,
            payloads={
                "state": encode({"at": at, "turn": turn if at % 3 == 0 else 0, "text": f"{at} " * 300}),
                "seed": raw(f"seed {at}".encode() * 20, "x/y"),
            },
        )
        for at in range(count)
    ]


class Chain:
    """Checkpoints c0, c1, ... of one participant, each but the first incremental on the one before it."""

    def __init__(self, files: FileLayer, root: str, *, length: int = 2, compress: bool = False) -> None:
        self.files = files
        self.root = CheckpointRoot(root, files)
        self.infos: list[PartManifestInfo] = []
        for turn in range(length):
            base = self.root.location(f"c{turn - 1}") if turn else None
            self.infos.append(
                write(
                    files,
                    self.root,
                    f"c{turn}",
                    records=records_at(turn),
                    base=base,
                    compress=compress,
                    chunk_size=3000,
                )
            )
        self.newest = f"c{length - 1}"

    def path(self, turn: int) -> str:
        """The records file of a checkpoint."""
        return self.root.location(f"c{turn}").part(AGENT.place).file(self.infos[turn].files[0].name)

    def read(self, checkpoint_id: str = "", **more: Any) -> Part:
        name = checkpoint_id or self.newest
        return read_part(self.files, self.root.location(name), AGENT.place, checkpoint_id=name, **more)


def in_memory(*, length: int = 2, compress: bool = False) -> tuple[Chain, CountedFiles]:
    files = CountedFiles()
    chain = Chain(files, ROOT, length=length, compress=compress)
    files.opened.clear()
    files.closed.clear()
    files.reads.clear()
    return chain, files


@pytest.mark.behaviour("C183", "C182")
@COMPRESSED
def test_a_restore_needs_no_knowledge_of_the_files_that_have_the_state(compress: bool) -> None:
    chain, files = in_memory(length=4, compress=compress)
    assert [info.chain for info in chain.infos] == [0, 1, 2, 3]
    for turn in range(4):
        part = chain.read(f"c{turn}")
        assert list(part.records) == records_at(turn)
        assert part.manifest.base_files or turn == 0
    files.opened.clear()
    files.closed.clear()
    chain.read()
    records_files = [path for path in files.opened if path.endswith(".gck")]
    assert len(records_files) == len(set(records_files)) == 1 + len(chain.read().manifest.base_files)
    assert sorted(files.closed[: len(files.opened)]) == sorted(files.opened[: len(files.closed)])


@pytest.mark.behaviour("C161", "C181")
def test_a_scope_opens_and_reads_only_what_has_it() -> None:
    chain, files = in_memory(length=3)
    own = len(files.all_files()[chain.path(2)]) - index_size(chain, 2)
    assert own > 0

    def reads(*numbers: int) -> dict[str, int]:
        files.reads.clear()
        scope = EpisodeScope.of(EpisodeId(f"r{number}") for number in numbers)
        part = chain.read(scope=scope)
        assert list(part.records) == [records_at(2)[number] for number in numbers]
        assert part.total_count == COUNT
        sizes: dict[str, int] = {}
        for path, _, length in files.reads:
            if path.endswith(".gck"):
                sizes[path] = sizes.get(path, 0) + length
        assert part.bytes_read == sum(sizes.values())
        return sizes

    wanted = records_at(2)
    nothing = reads()
    assert set(nothing) == {chain.path(2)}
    unchanged = reads(1, 4)  # state and seed both of c0
    assert set(unchanged) == {chain.path(2), chain.path(0)}
    assert unchanged[chain.path(2)] == nothing[chain.path(2)]
    assert unchanged[chain.path(0)] == sum(len(p.data) for at in (1, 4) for p in wanted[at].payloads.values())
    changed = reads(3)
    assert changed[chain.path(2)] == nothing[chain.path(2)] + len(wanted[3].payloads["state"].data)
    assert changed[chain.path(0)] == len(wanted[3].payloads["seed"].data)


def index_size(chain: Chain, turn: int) -> int:
    return len(index_of(chain.files.all_files()[chain.path(turn)]).SerializeToString())  # type: ignore[attr-defined]


# ---- damage


@COMPRESSED
def test_a_missing_base_is_named_with_who_needs_it_and_only_missed_by_who_does(compress: bool) -> None:
    chain, files = in_memory(length=3, compress=compress)
    files.remove(chain.path(0))
    with pytest.raises(StateCorrupt) as caught:
        chain.read()
    for text in (chain.path(0), "'c0'", chain.path(2), "is not there"):
        assert text in caught.value.message
    assert caught.value.participant == "agent/office/0"
    assert EpisodeId("r0") in caught.value.episodes
    assert sorted(files.closed) == sorted(files.opened)
    assert chain.read(scope=EpisodeScope.of([])).total_count == COUNT


@COMPRESSED
def test_a_base_of_another_size_is_refused(compress: bool) -> None:
    chain, files = in_memory(compress=compress)
    data = files.all_files()[chain.path(0)]
    for bad in (data[:-1], data + b"\x00", b""):
        files.damage(chain.path(0), bad)
        with pytest.raises(StateCorrupt) as caught:
            chain.read()
        assert (chain.path(0) in caught.value.message, chain.path(1) in caught.value.message) == (True, True)
    assert sorted(files.closed) == sorted(files.opened)


@pytest.mark.behaviour("C184")
@COMPRESSED
def test_each_flipped_byte_of_state_in_a_base_fails_who_needs_it_by_name(compress: bool) -> None:
    """And only them: what was changed since then is in another place."""
    chain, files = in_memory(compress=compress)
    data = files.all_files()[chain.path(0)]
    hit = missed = 0
    for chunk in index_of(data).chunks:
        for at in range(chunk.offset, chunk.offset + chunk.stored_length, 7 if compress else 97):
            files.damage(chain.path(0), data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
            try:
                assert list(chain.read().records) == records_at(1)
                missed += 1
            except StateCorrupt as error:
                hit += ("'c0'" in error.message) and bool(error.episodes)
                continue
    assert hit > 20
    assert (missed > 0) is not compress  # the old state of what changed; a compressed chunk is needed whole


def test_a_base_that_another_file_took_the_place_of_is_noticed() -> None:
    chain, files = in_memory()
    data = files.all_files()[chain.path(0)]
    files.damage(chain.path(0), bytes(len(data)))
    with pytest.raises(StateCorrupt, match="damaged"):
        chain.read()


# ---- manifest and index must agree


def _edit(chain: Chain, change: Callable[[list[dict[str, Any]]], object]) -> None:
    path = chain.root.location(chain.newest).part(AGENT.place).manifest
    document = msgspec.json.decode(chain.files.all_files()[path])  # type: ignore[attr-defined]
    change(document["files"])
    document["bytes"] = sum(entry["size"] for entry in document["files"] if not entry.get("checkpoint"))
    chain.files.damage(path, msgspec.json.encode(document))  # type: ignore[attr-defined]


def _another(files: list[dict[str, Any]]) -> None:
    digest = "a" * 64
    files.append(
        {"name": f"records-{digest}.gck", "role": "records", "size": 9, "digest": digest, "checkpoint": "elsewhere"}
    )


@pytest.mark.behaviour("C169")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda files: files.pop(1), "does not name and it needs"),
        (lambda files: files[1].update(size=files[1]["size"] + 1), "differs from"),
        (lambda files: files[1].update(checkpoint="other"), "differs from"),
        (_another, "names and it does not need"),
        (lambda files: files[1].update(checkpoint="../c0"), "of no possible earlier checkpoint"),
        (lambda files: files[1].update(checkpoint="c1"), "of no possible earlier checkpoint"),
        (lambda files: files[1].update(checkpoint="/"), "of no possible earlier checkpoint"),
        (lambda files: files[1].update(name="../../x.gck"), "misnamed or outside"),
        (lambda files: files.append(dict(files[1])), "names a file twice"),
    ],
    ids=["left out", "size", "checkpoint", "one more", "parent", "itself", "absolute", "outside", "twice"],
)
def test_the_manifest_lists_what_the_index_needs_no_more_and_no_less(
    change: Callable[[list[dict[str, Any]]], object], text: str
) -> None:
    chain, files = in_memory()
    _edit(chain, change)
    with pytest.raises(StateCorrupt, match=text):
        chain.read()
    assert all(path.startswith(chain.root.location("c1").directory) for path in files.opened)
    assert sorted(files.closed) == sorted(files.opened)


def test_the_bytes_of_state_are_compared_too() -> None:
    chain, files = in_memory()
    path = chain.root.location("c1").part(AGENT.place).manifest
    document = msgspec.json.decode(files.all_files()[path])
    document["state_bytes"] += 1
    files.damage(path, msgspec.json.encode(document))
    with pytest.raises(StateCorrupt, match="bytes of state"):
        chain.read()


@pytest.mark.behaviour("C185")
def test_a_link_on_the_way_to_a_base_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    chain = Chain(LocalFiles(), path_to_uri(str(root)))
    (root / "checkpoints" / "c0").rename(outside)
    (root / "checkpoints" / "c0").symlink_to(outside)
    with pytest.raises(StateCorrupt, match="leads through a link") as caught:
        chain.read()
    assert caught.value.participant == "agent/office/0"
    (root / "checkpoints" / "c0").unlink()
    outside.rename(root / "checkpoints" / "c0")
    real = Path(chain.path(0))
    real.rename(tmp_path / "file")
    real.symlink_to(tmp_path / "file")
    with pytest.raises(StateCorrupt):
        chain.read()


# ---- an index that lies about its bases


def _lies() -> dict[str, Callable[[storage_pb2.RecordsIndex], object]]:
    big = 2**63

    def chunk(at: int = 0, **values: Any) -> Callable[[storage_pb2.RecordsIndex], object]:
        def change(index: storage_pb2.RecordsIndex) -> None:
            for name, value in values.items():
                setattr(index.base_chunks[at].chunk, name, value)

        return change

    def overlap(index: storage_pb2.RecordsIndex) -> None:
        first, second = index.base_chunks[0].chunk, index.base_chunks[1].chunk
        second.offset = first.offset + first.stored_length - 1

    def share(index: storage_pb2.RecordsIndex) -> None:
        own = len(index.chunks)
        inside = [at for at, each in enumerate(index.payloads.chunks) if each == own]
        assert len(inside) > 1
        for at in inside:
            index.payloads.offsets[at] = 0

    def spread(column: str, value: int) -> Callable[[storage_pb2.RecordsIndex], object]:
        def change(index: storage_pb2.RecordsIndex) -> None:
            at = next(at for at, each in enumerate(index.payloads.chunks) if each >= len(index.chunks))
            getattr(index.payloads, column)[at] = value

        return change

    return {
        "base file: illegal id": lambda index: setattr(index.base_files[0], "checkpoint_id", "../c0"),
        "base file: no id": lambda index: setattr(index.base_files[0], "checkpoint_id", ""),
        "base file: no digest": lambda index: setattr(index.base_files[0], "root_digest", b"x"),
        "base file: small": lambda index: setattr(index.base_files[0], "size", 71),
        "base file: twice": lambda index: index.base_files.append(index.base_files[0]),
        "base file: unused": lambda index: index.base_files.add(checkpoint_id="x", root_digest=b"x" * 32, size=999),
        "base file: gone": lambda index: index.ClearField("base_files"),
        "base chunk: no file": lambda index: setattr(index.base_chunks[0], "file", 7),
        "base chunk: in the header": chunk(offset=0),
        "base chunk: beyond": chunk(offset=big),
        "base chunk: length": chunk(stored_length=big, raw_length=big),
        "base chunk: two lengths": chunk(raw_length=5),
        "base chunk: no digest": chunk(digest=b""),
        "base chunk: compression": chunk(compression=9),
        "base chunk: twice": lambda index: index.base_chunks.append(index.base_chunks[0]),
        "base chunk: overlap": overlap,
        "base chunk: unused": lambda index: index.base_chunks.add(
            file=0, chunk=storage_pb2.ChunkEntry(offset=16, digest=b"x" * 32, compression=storage_pb2.COMPRESSION_NONE)
        ),
        "base chunk: gone": lambda index: index.ClearField("base_chunks"),
        "payloads that share": share,
        "payload: beyond": spread("offsets", big),
        "payload: length": spread("lengths", 2**62),
        "payload: chunk": spread("chunks", 999),
        "format 1": lambda index: setattr(index, "format_version", 1),
    }


@pytest.mark.parametrize("lie", _lies(), ids=list(_lies()))
def test_an_index_that_lies_about_its_bases_is_refused_before_they_are_opened(lie: str) -> None:
    chain, files = in_memory()
    data = reindexed(files.all_files()[chain.path(1)], _lies()[lie])
    footer = unpack_footer(data[-FOOTER_SIZE:])
    assert footer is not None
    with pytest.raises(StateCorrupt, match="the file"):
        RecordIndex(data[footer.offset : -FOOTER_SIZE], path="the file", end=footer.offset)


def test_a_payload_of_a_base_is_known_by_its_own_digest() -> None:
    """Two payloads of one length in each other's places: every chunk is as it should be, and the index lies."""
    chain, files = in_memory()

    def swap(index: storage_pb2.RecordsIndex) -> None:
        own, payloads = len(index.chunks), index.payloads
        here = [at for at, each in enumerate(payloads.chunks) if each >= own]
        first, second = next(
            (a, b)
            for a in here
            for b in here
            if a < b and payloads.lengths[a] == payloads.lengths[b] and payloads.names[a] == payloads.names[b]
        )
        for column in (payloads.chunks, payloads.offsets):
            column[first], column[second] = column[second], column[first]

    data = reindexed(files.all_files()[chain.path(1)], swap)
    _replace_records_file(chain, data)
    with pytest.raises(StateCorrupt, match="damaged"):
        chain.read()


def _replace_records_file(chain: Chain, data: bytes) -> None:
    """Another records file for the newest checkpoint, with a manifest that names it."""
    index = index_of(data).SerializeToString()
    digest = hashlib.sha256(index).hexdigest()
    files = chain.files
    part = chain.root.location(chain.newest).part(AGENT.place)
    files.put(part.file(f"records-{digest}.gck"), data)  # type: ignore[attr-defined]
    _edit(chain, lambda named: named[0].update(name=f"records-{digest}.gck", digest=digest, size=len(data)))
