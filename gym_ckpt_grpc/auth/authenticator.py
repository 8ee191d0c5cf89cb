"""The check of one call's credentials: a bearer token, or the certificate that the client showed."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gym_ckpt_grpc.auth.callers import CertificateRoles, names_of
from gym_ckpt_grpc.auth.roles import HEALTH_PREFIX, ROLES, Role
from gym_ckpt_grpc.auth.tokens import TokenSource, bearer_of
from gym_ckpt_grpc.protocol.errors import PermissionDenied, Unauthenticated

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who was let in, or known and denied. role: "" for a health check that needs none. name: of the certificate,
    such as `URI:spiffe://gym.example/trainer`; "" for a token."""

    role: str = ""
    name: str = ""


class Denied(PermissionDenied):
    """A known caller that may not call this method."""

    def __init__(self, caller: Caller, method: str) -> None:
        super().__init__(f"role {caller.role} may not call {method[:200]}")
        self.caller = caller


class Authenticator:
    """Checks a call's credentials.

    tokens: one per role. certificates: the roles of clients' certificates; needs a server whose TLS asks for them.
    A call that presents an authorization is judged by that alone: a wrong token is refused even with a good
    certificate. One that presents none is judged by its certificate. open_health: whether health checks need no
    credentials.
    """

    def __init__(
        self,
        tokens: Mapping[Role, TokenSource] | None = None,
        *,
        certificates: CertificateRoles | None = None,
        open_health: bool = False,
    ) -> None:
        if not tokens and certificates is None:
            raise ValueError("at least one role needs a token or a certificate's name")
        self._tokens = dict(tokens or {})
        self._certificates = certificates
        self._open_health = open_health

    @property
    def takes_certificates(self) -> bool:
        """Whether a certificate can have a role."""
        return self._certificates is not None

    def stale(self) -> bool:
        named = self._certificates
        return any(source.stale() for source in self._tokens.values()) or (named is not None and named.stale())

    def refresh(self) -> None:
        """Read files again; blocking."""
        for source in self._tokens.values():
            source.refresh()
        if self._certificates is not None:
            self._certificates.refresh()

    def needs_peer(self, method: str, metadata: Metadata) -> bool:
        """Whether the check of this call needs to know the client's certificate."""
        return self.takes_certificates and not self._is_open(method) and not bearer_of(metadata)[0]

    def check(self, method: str, metadata: Metadata, peer: Mapping[str, Iterable[bytes]] | None = None) -> Caller:
        """Raise Unauthenticated or Denied unless these credentials may call this method.

        peer: gRPC's context of the peer, which it has from a verified certificate.
        """
        if self._is_open(method):
            return Caller()
        presented, token = bearer_of(metadata)
        known = self._by_token(token) if presented else self._by_certificate(peer or {})
        if not known:
            raise Unauthenticated("no valid credentials")
        allowed = ROLES.get(method, frozenset())
        for caller in known:
            if caller.role in allowed:
                return caller
        raise Denied(known[0], method)

    def _is_open(self, method: str) -> bool:
        return self._open_health and method.startswith(HEALTH_PREFIX)

    def _by_token(self, presented: bytes | None) -> list[Caller]:
        found = []
        for role, source in self._tokens.items():  # every token is compared, so timing tells nothing
            if presented is not None and hmac.compare_digest(presented, source.token()):
                found.append(Caller(role))
        return found[:1]

    def _by_certificate(self, peer: Mapping[str, Iterable[bytes]]) -> list[Caller]:
        if self._certificates is None:
            return []
        return [Caller(role, name) for role, name in self._certificates.roles_of(names_of(peer)).items()]
