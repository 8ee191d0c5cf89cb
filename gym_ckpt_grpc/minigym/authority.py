"""A certificate authority for a deployment on one machine, and for tests. Needs the package `cryptography`.

Not for production: its key lies beside the certificates.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_ckpt_grpc.protocol.errors import UsageError

if TYPE_CHECKING:
    from cryptography import x509

LOCAL_NAMES = ("DNS:localhost", "IP:127.0.0.1", "IP:::1")
YEAR = 365 * 86400.0


class Authority:
    """Signs certificates. directory: gets `NAME.pem` and `NAME.key`, the authority's own as `ca`; files are replaced
    by renaming, keys have mode 0600. Raises UsageError without the package."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric import ec
        except ModuleNotFoundError:
            raise UsageError("certificates are made with the package cryptography: pip install cryptography") from None
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = f"{name} {secrets.token_hex(4)}"
        self.file = directory / f"{name}.pem"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(name, self._signed(self._name, self._key.public_key(), (), 10 * YEAR, authority=True), self._key)

    def issue(
        self, name: str, sans: Sequence[str], *, seconds: float = YEAR, begins: float = -3600.0
    ) -> tuple[Path, Path]:
        """A certificate and its key, as files. sans: `DNS:`, `IP:`, `URI:` or `email:` and a value. seconds: how long
        from now it holds. begins: from when, counted from now."""
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        return self._write(name, self._signed(name, key.public_key(), sans, seconds, begins=begins), key)

    def _signed(
        self,
        name: str,
        public: object,
        sans: Sequence[str],
        seconds: float,
        *,
        begins: float = -3600.0,
        authority: bool = False,
    ) -> x509.Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import NameOID

        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(self._name))
            .public_key(public)  # type: ignore[arg-type]
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(seconds=begins))
            .not_valid_after(now + timedelta(seconds=seconds))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
            # Python 3.13 and other strict clients want the next ones.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)  # type: ignore[arg-type]
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(_usage(authority=authority), critical=True)
        )
        if sans:
            builder = builder.add_extension(x509.SubjectAlternativeName([_name(san) for san in sans]), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, certificate: x509.Certificate, key: object) -> tuple[Path, Path]:
        from cryptography.hazmat.primitives import serialization as form

        secret = key.private_bytes(  # type: ignore[attr-defined]
            form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
        )
        files = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        replace_file(files[1], secret)
        replace_file(files[0], certificate.public_bytes(form.Encoding.PEM))
        return files


def replace_file(path: Path, content: bytes) -> None:
    """Put a file that only its owner can read in the place of another, at once and whole."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    os.replace(new, path)


def _usage(*, authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _name(san: str) -> x509.GeneralName:
    from cryptography import x509

    kind, _, value = san.partition(":")
    if kind == "IP":
        return x509.IPAddress(ipaddress.ip_address(value))
    made: dict[str, Any] = {"DNS": x509.DNSName, "URI": x509.UniformResourceIdentifier, "email": x509.RFC822Name}
    name: x509.GeneralName = made[kind](value)
    return name
