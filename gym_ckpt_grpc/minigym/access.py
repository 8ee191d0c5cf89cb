"""How the parts of a minigym know each other on the control plane: by tokens, or by certificates alone."""

from __future__ import annotations

from typing import TypedDict

from gym_ckpt_grpc.auth import Authenticator, ClientTls, NamedRolesFile, Role, ServerTls, TokenFile, TokenSource
from gym_ckpt_grpc.minigym.deployment import Deployment


class Access(TypedDict):
    """What a client of control planes gives: options of `Coordinator`, `open_channel` and their like."""

    token: TokenSource | None
    tls: ClientTls | None


def access_as(role: str, plan: Deployment) -> Access:
    """As `controller`, `observer` or `peer`, to which a policy model is to its inference workers."""
    if not plan.topology.mtls:
        return Access(token=TokenFile(plan.token_file(role)), tls=None)
    certificate, key = plan.certificate(role)
    return Access(token=None, tls=ClientTls(plan.certificates / "ca.pem", certificate=certificate, key=key))


def authenticator_of(plan: Deployment, *roles: Role) -> Authenticator:
    """Lets these roles in."""
    if plan.topology.mtls:
        return Authenticator(certificates=NamedRolesFile(plan.roles_file))
    return Authenticator({role: TokenFile(plan.token_file(role)) for role in roles})


def tls_of(plan: Deployment, name: str) -> ServerTls | None:
    """The TLS of one server's control plane."""
    if not plan.topology.mtls:
        return None
    return ServerTls(*plan.certificate(name), client_ca=plan.certificates / "ca.pem")
