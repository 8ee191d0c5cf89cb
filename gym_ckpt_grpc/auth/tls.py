"""TLS of servers and channels, from files that are read again when they change.

A new file that is damaged, half written, expired, or whose key is another certificate's is warned of once and not
used: the last good ones go on. Nothing here has the content of a file in its repr or its errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gym_ckpt_grpc.auth import certificates
from gym_ckpt_grpc.auth.files import Kept, log

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, repr=False)
class _Files:
    """The contents of certificate, key and CA; b"" for what is not asked for. validity: of the certificate."""

    certificate: bytes
    key: bytes
    authorities: bytes
    validity: certificates.Validity | None


class CertificateFiles:
    """Certificate, key and CA files, together. Raises ValueError naming the file that is not usable."""

    def __init__(self, certificate: AnyPath | None, key: AnyPath | None, authorities: AnyPath | None) -> None:
        if (certificate is None) is not (key is None):
            raise ValueError("a certificate needs its key, and a key its certificate")
        self._certificate = Path(certificate) if certificate is not None else None
        self._key = Path(key) if key is not None else None
        self._authorities = Path(authorities) if authorities is not None else None
        self._warned: tuple[float, str] | None = None
        paths = [path for path in (self._certificate, self._key, self._authorities) if path is not None]
        self._kept = Kept("TLS file", paths, self._checked, looked=self._warn_of_age)

    @property
    def version(self) -> int:
        """Rises with each change of the files."""
        return self._kept.version

    def refresh(self) -> None:
        """Look at the files now. Blocks, and raises nothing."""
        self._kept.refresh()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Look at the files every second, and tell of changes in another thread; call what is returned to end it."""
        return self._kept.listen(listener)

    def _checked(self, contents: Sequence[bytes]) -> _Files:
        left = list(contents)
        certificate = key = authorities = b""
        validity = None
        if self._certificate is not None and self._key is not None:
            certificate, key = left.pop(0), left.pop(0)
            validity = certificates.chain_validity("certificate", self._certificate, certificate)
            certificates.check_pair(self._certificate, self._key, (certificate, key))
        if self._authorities is not None:
            authorities = left.pop(0)
            certificates.check_authorities(self._authorities, authorities)
        return _Files(certificate, key, authorities, validity)

    def _warn_of_age(self, files: _Files) -> None:
        validity = files.validity
        if validity is None:
            return
        left = validity.ends - certificates.now()
        state = "has expired" if left <= 0 else "expires soon" if left <= validity.early else ""
        if state and self._warned != (validity.ends, state):
            self._warned = (validity.ends, state)
            log.warning("certificate %s %s: %s", self._certificate, state, certificates.instant(validity.ends))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._certificate}, {self._key}, {self._authorities})"


class ServerTls(CertificateFiles):
    """TLS of servers. certificate: the server's chain. key: its key. client_ca: if given, each client must show a
    certificate that comes from one of these, and no other connects at all.

    The files are looked at for each new connection; connections that stand are left alone.
    """

    def __init__(self, certificate: AnyPath, key: AnyPath, *, client_ca: AnyPath | None = None) -> None:
        super().__init__(certificate, key, client_ca)

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self._authorities is not None

    def credentials(self) -> grpc.ServerCredentials:
        """For one server."""
        used = self.version

        def newer() -> Any:
            """Called by the core, in a thread of its own, for each handshake; None: as before."""
            nonlocal used
            self.refresh()
            version, configuration = self.version, self._configuration()
            if version == used:
                return None
            used = version
            return configuration

        return grpc.dynamic_ssl_server_credentials(self._configuration(), newer, self.asks_clients)

    def _configuration(self) -> Any:
        files = self._kept.value
        return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.authorities or None)


class ClientTls(CertificateFiles):
    """TLS of channels. ca: whom servers' certificates come from, the system's authorities if None. certificate, key:
    what servers that ask for it are shown. server_name: the name that servers' certificates must have, where it is
    not the address's host; names are always compared.
    """

    def __init__(
        self,
        ca: AnyPath | None = None,
        *,
        certificate: AnyPath | None = None,
        key: AnyPath | None = None,
        server_name: str = "",
    ) -> None:
        super().__init__(certificate, key, ca)
        self.server_name = server_name
        self._ca = ca

    @property
    def has_certificate(self) -> bool:
        """Whether servers are shown one."""
        return self._certificate is not None

    def without_certificate(self) -> ClientTls:
        """The same, for a caller who has none."""
        return ClientTls(self._ca, server_name=self.server_name)

    def credentials(self) -> grpc.ChannelCredentials:
        """For one channel, as the files are now: a channel keeps what it was made with."""
        files = self._kept.value
        return grpc.ssl_channel_credentials(files.authorities or None, files.key or None, files.certificate or None)
