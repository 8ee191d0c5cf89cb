"""Records files as a hostile or broken writer could make them: every digest right, and something else wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from gym_ckpt_grpc.storage import FileSource, Record
from gym_ckpt_grpc.storage.record_format import FOOTER_SIZE, HEADER_SIZE, Footer, pack_footer, unpack_footer
from gym_ckpt_grpc.storage.record_writer import RecordFileWriter
from gymckpt.v1 import storage_pb2
from tests.storage.recording_files import ROOT, RecordingFiles

PATH = f"{ROOT}/records-x.gck"


def index_of(data: bytes) -> storage_pb2.RecordsIndex:
    """The index of a whole file."""
    footer = unpack_footer(data[-FOOTER_SIZE:])
    assert footer is not None
    return storage_pb2.RecordsIndex.FromString(data[footer.offset : footer.offset + footer.length])


def sealed(body: bytes, index: bytes) -> bytes:
    """A file of header and chunks, an index, and the footer for it."""
    return body + index + pack_footer(Footer(len(body), len(index), hashlib.sha256(index).digest()))


def reindexed(data: bytes, change: Callable[[storage_pb2.RecordsIndex], object]) -> bytes:
    """The file with its index changed."""
    footer = unpack_footer(data[-FOOTER_SIZE:])
    assert footer is not None
    index = index_of(data)
    change(index)
    return sealed(data[: footer.offset], index.SerializeToString())


def rechunked(data: bytes, change: Callable[[int, bytes], bytes]) -> bytes:
    """The file with the stored bytes of its chunks changed, and their places and digests with them."""
    index, body = index_of(data), data[:HEADER_SIZE]
    for number, chunk in enumerate(index.chunks):
        stored = change(number, data[chunk.offset : chunk.offset + chunk.stored_length])
        chunk.offset, chunk.stored_length, chunk.digest = len(body), len(stored), hashlib.sha256(stored).digest()
        body += stored
    return sealed(body, index.SerializeToString())


def write_file(
    records: Iterable[Record], *, chunk_size: int = 64, compress: bool = False, files: RecordingFiles | None = None
) -> tuple[RecordingFiles, bytes]:
    """One records file at PATH, and its bytes."""
    files = RecordingFiles() if files is None else files
    writer = RecordFileWriter(files.create(PATH), chunk_size=chunk_size, compress=compress)
    writer.add(records)
    writer.finish()
    writer.abort()
    return files, files.all_files()[PATH]


class CountedFiles(RecordingFiles):
    """Tells what is opened and closed, by path."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.closed: list[str] = []

    def open(self, path: str) -> Counted:  # type: ignore[override]
        source = super().open(path)
        self.opened.append(path)
        return Counted(self, path, source)


class Counted:
    """A source that says when it is closed; once."""

    def __init__(self, files: CountedFiles, path: str, source: FileSource) -> None:
        self._files = files
        self._path = path
        self._source = source
        self._is_open = True

    @property
    def size(self) -> int:
        return self._source.size

    def read(self, offset: int, length: int) -> bytes:
        assert self._is_open, f"{self._path} is read after it was closed"
        return self._source.read(offset, length)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._files.closed.append(self._path)
