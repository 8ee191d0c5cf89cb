"""The fixed parts of a records file (`records-<hex>.gck`); see storage.proto for the whole of it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"\x89GCK\r\n\x1a\n"
END_MAGIC = b"GCKEND\r\n"
FORMAT_VERSION = 2
"""Of what is written. Version 1 has neither compression nor references into other files."""
READABLE = (1, 2)
CHUNK_SIZE = 4 << 20
"""Bytes after which a chunk is closed."""

MAX_EXPANSION = 1 << 16
"""How many bytes one stored byte may stand for; zstd reaches half of it. A file that claims more is refused."""

MAX_INDEX = 256 << 20
"""Largest index, in bytes: about two million records. What would have a larger one is refused when it is written."""

_HEADER = struct.Struct("<8sII")
_FOOTER = struct.Struct("<QQ32s8s")
HEADER_SIZE = _HEADER.size
FOOTER_SIZE = _FOOTER.size
DIGEST_SIZE = 32


@dataclass(frozen=True, slots=True)
class Footer:
    """Where the index is. offset, length in bytes; digest: its sha256, the root digest of the file."""

    offset: int
    length: int
    digest: bytes


def header(version: int = FORMAT_VERSION) -> bytes:
    """The first bytes of every file of a format version."""
    return _HEADER.pack(MAGIC, version, 0)


def readable() -> str:
    """The readable format versions, for people."""
    return ", ".join(map(str, READABLE))


def header_problem(data: bytes) -> str | None:
    """What is wrong with a header, or None."""
    magic, version, zero = _HEADER.unpack(data)
    if magic != MAGIC:
        return "does not begin like a records file"
    if version not in READABLE:
        return f"has format version {version}; readable here: {readable()}"
    return "has a damaged header" if zero else None


def pack_footer(footer: Footer) -> bytes:
    """The last bytes of a file."""
    return _FOOTER.pack(footer.offset, footer.length, footer.digest, END_MAGIC)


def unpack_footer(data: bytes) -> Footer | None:
    """Read a footer; None if it is none."""
    offset, length, digest, magic = _FOOTER.unpack(data)
    return Footer(offset, length, digest) if magic == END_MAGIC else None


def records_name(root_digest: str) -> str:
    """The file name for a root digest in hex."""
    return f"records-{root_digest}.gck"
