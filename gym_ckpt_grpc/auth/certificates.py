"""What must hold of certificate files before they are used. Texts name files and dates, never content.

The validity is read from the certificate's own encoding, since the standard library shows it of a peer's only.
"""

from __future__ import annotations

import binascii
import functools
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gym_ckpt_grpc.auth.files import FileProblem, read_file

now = time.time
"""The clock that validity is compared with: seconds since 1970."""

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----\s.*?-----END CERTIFICATE-----", re.DOTALL)
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_BOOLEAN, _OCTETS, _EXTENSIONS = 0x01, 0x04, 0xA3
_ALTERNATIVE_NAMES = b"\x06\x03\x55\x1d\x11"
"""The identifier of the extension with the subject's alternative names."""
_TEXTS = (0x81, 0x82, 0x86)
"""email, DNS and URI."""


@dataclass(frozen=True, slots=True)
class Validity:
    """From when to when, in seconds since 1970."""

    begins: float
    ends: float

    @property
    def early(self) -> float:
        """Seconds before the end at which it is time to worry: a tenth of the whole, at most a week."""
        return min(7 * 86400.0, (self.ends - self.begins) / 10)


def chain_validity(what: str, path: Path, content: bytes) -> Validity:
    """When all certificates of a file hold. Raises FileProblem for a damaged file, and for one not valid now."""
    every = _validities(what, path, content)
    validity = Validity(max(one.begins for one in every), min(one.ends for one in every))
    if now() >= validity.ends:
        raise FileProblem(f"{what} {path} has expired on {instant(validity.ends)}")
    if now() < validity.begins:
        raise FileProblem(f"{what} {path} is not valid before {instant(validity.begins)}")
    return validity


def check_authorities(path: Path, content: bytes) -> None:
    """Raise FileProblem unless these are certificates of which one is valid now."""
    every = _validities("CA file", path, content)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except ssl.SSLError:
        raise FileProblem(f"CA file {path} has something that is no certificate") from None
    if not any(one.begins <= now() < one.ends for one in every):
        raise FileProblem(f"CA file {path} has no certificate that is valid now")


def check_pair(certificate: Path, key: Path, contents: Sequence[bytes]) -> None:
    """Raise FileProblem unless the key is the certificate's, and both files are still what was read of them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key under a passphrase would ask the terminal for it.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError):
        raise FileProblem(f"certificate {certificate} and key {key} are damaged or do not belong together") from None
    if [read_file("certificate", certificate), read_file("key", key)] != list(contents):
        raise FileProblem(f"certificate {certificate} and key {key} are being replaced")


@functools.lru_cache(maxsize=256)
def has_whole_names(certificate: bytes) -> bool:
    """Whether no name in a certificate (PEM) has a NUL: gRPC shows such a name as if it ended there."""
    try:
        names = _alternative_names(ssl.PEM_cert_to_DER_cert(certificate.decode("ascii")))
    except (ValueError, IndexError, binascii.Error):
        return False
    return not any(b"\0" in name for name in names)


def instant(seconds: float) -> str:
    """A point in time, for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _validities(what: str, path: Path, content: bytes) -> list[Validity]:
    blocks = _BLOCK.findall(content)
    if not blocks or len(blocks) != content.count(_BEGIN):
        raise FileProblem(f"{what} {path} has no whole certificate")
    try:
        return [_validity(ssl.PEM_cert_to_DER_cert(block.decode("ascii"))) for block in blocks]
    except (ValueError, IndexError, binascii.Error):
        raise FileProblem(f"{what} {path} is damaged") from None


# ---- DER: tag, length, content


def _validity(certificate: bytes) -> Validity:
    signed, _ = _open(certificate, _SEQUENCE)
    fields, _ = _open(signed, _SEQUENCE)
    if fields[0] == _VERSION:
        _, fields = _open(fields, _VERSION)
    for _ in range(3):  # serial number, algorithm, issuer
        _, fields = _open(fields, fields[0])
    validity, _ = _open(fields, _SEQUENCE)
    begins, rest = _open(validity, validity[0])
    ends, _ = _open(rest, rest[0])
    return Validity(_seconds(validity[0], begins), _seconds(rest[0], ends))


def _alternative_names(certificate: bytes) -> list[bytes]:
    """The names that are texts."""
    signed, _ = _open(certificate, _SEQUENCE)
    fields, _ = _open(signed, _SEQUENCE)
    while fields and fields[0] != _EXTENSIONS:
        _, fields = _open(fields, fields[0])
    found: list[bytes] = []
    if not fields:
        return found
    wrapped, _ = _open(fields, _EXTENSIONS)
    extensions, _ = _open(wrapped, _SEQUENCE)
    while extensions:
        extension, extensions = _open(extensions, _SEQUENCE)
        if extension.startswith(_ALTERNATIVE_NAMES):
            value = extension[len(_ALTERNATIVE_NAMES) :]
            if value[0] == _BOOLEAN:  # whether it is critical
                _, value = _open(value, _BOOLEAN)
            wrapped, _ = _open(value, _OCTETS)
            names, _ = _open(wrapped, _SEQUENCE)
            while names:
                tag = names[0]
                name, names = _open(names, tag)
                found += [name] if tag in _TEXTS else []
    return found


def _open(data: bytes, tag: int) -> tuple[bytes, bytes]:
    """The content of the first element, and what follows it."""
    if data[0] != tag:
        raise ValueError("another element was expected")
    length, at = data[1], 2
    if length & 0x80:
        count = length & 0x7F
        length, at = int.from_bytes(data[2 : 2 + count], "big"), 2 + count
    if at + length > len(data):
        raise ValueError("an element is cut off")
    return data[at : at + length], data[at + length :]


def _seconds(tag: int, text: bytes) -> float:
    if tag == _UTC_TIME:  # two digits of the year, 1950 to 2049
        text = (b"20" if int(text[:2]) < 50 else b"19") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(text.decode("ascii"), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
