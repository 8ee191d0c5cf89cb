"""Where commands find the fleet, the token and certificates. A token comes from a file or the environment, never from
argv."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gym_ckpt_grpc.auth import (
    Authenticator,
    ClientTls,
    NamedRolesFile,
    Role,
    ServerTls,
    TokenFile,
    TokenSource,
    TokenValue,
)
from gym_ckpt_grpc.coordinator import Fleet
from gym_ckpt_grpc.protocol.errors import UsageError

T = TypeVar("T")

TOKEN_VARIABLE = "GYM_CKPT_TOKEN"
TOKEN_FILE_VARIABLE = "GYM_CKPT_TOKEN_FILE"
FLEET_VARIABLE = "GYM_CKPT_FLEET"
CA_VARIABLE = "GYM_CKPT_TLS_CA"
CERTIFICATE_VARIABLE = "GYM_CKPT_TLS_CERT"
KEY_VARIABLE = "GYM_CKPT_TLS_KEY"
SERVER_NAME_VARIABLE = "GYM_CKPT_TLS_SERVER_NAME"
SYSTEM = "system"
"""In place of a CA file: the authorities that come with gRPC."""

_TLS_OPTIONS: dict[str, Any] = {
    "tls_ca": Annotated[
        str | None, typer.Option("--tls-ca", help=f"CA file of servers, or `{SYSTEM}`: use TLS; else {CA_VARIABLE}.")
    ],
    "tls_cert": Annotated[
        Path | None, typer.Option("--tls-cert", help=f"Certificate to show to servers; else {CERTIFICATE_VARIABLE}.")
    ],
    "tls_key": Annotated[Path | None, typer.Option("--tls-key", help=f"Its key file; else {KEY_VARIABLE}.")],
}


@dataclass(frozen=True, slots=True)
class _Given:
    tls_ca: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


_given: ContextVar[_Given] = ContextVar("gym_ckpt_tls_options")


def with_tls(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with the options `--tls-ca`, `--tls-cert` and `--tls-key`, which `client_tls` in it obeys."""

    @functools.wraps(command)
    def wider(*arguments: Any, **options: Any) -> None:
        _given.set(_Given(**{name: options.pop(name, None) for name in _TLS_OPTIONS}))
        command(*arguments, **options)

    signature = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _TLS_OPTIONS.items()
    ]
    known = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    wider.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    wider.__annotations__ = {**known, **_TLS_OPTIONS, "return": None}
    return wider


def client_tls() -> ClientTls | None:
    """What the options of the command say, else the environment; None for plain text."""
    given = _given.get(_Given())
    ca = given.tls_ca or os.environ.get(CA_VARIABLE) or None
    certificate = given.tls_cert or os.environ.get(CERTIFICATE_VARIABLE) or None
    key = given.tls_key or os.environ.get(KEY_VARIABLE) or None
    if not (ca or certificate or key):
        return None
    if ca is None:
        raise UsageError(f"a certificate alone says not whom to trust: give --tls-ca or {CA_VARIABLE}")
    name = os.environ.get(SERVER_NAME_VARIABLE, "")
    return _usable(lambda: ClientTls(None if ca == SYSTEM else ca, certificate=certificate, key=key, server_name=name))


def server_tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """TLS of a server that a command starts; None for plain text."""
    if certificate is None and key is None:
        if client_ca is not None:
            raise UsageError("--client-ca needs --server-cert and --server-key")
        return None
    if certificate is None or key is None:
        raise UsageError("--server-cert needs --server-key, and the other way round")
    return _usable(lambda: ServerTls(certificate, key, client_ca=client_ca))


def authenticator_of(
    token: TokenSource | None, observer_token: TokenSource | None, roles_file: Path | None
) -> Authenticator | None:
    """Who is let in by a server that a command starts; None: everyone on this host."""
    tokens = {Role.CONTROLLER: token, Role.OBSERVER: observer_token}
    known = {role: source for role, source in tokens.items() if source is not None}
    if roles_file is not None:
        return Authenticator(known, certificates=_usable(lambda: NamedRolesFile(roles_file)))
    return Authenticator(known) if known else None


def _usable(make: Callable[[], T]) -> T:
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from error


def token_source(token_file: Path | None) -> TokenSource | None:
    """The given file, else the one that GYM_CKPT_TOKEN_FILE names, else GYM_CKPT_TOKEN, else none."""
    path = token_file or (Path(named) if (named := os.environ.get(TOKEN_FILE_VARIABLE)) else None)
    if path is not None:
        return _usable(lambda: TokenFile(path))
    value = os.environ.get(TOKEN_VARIABLE, "").strip()
    return _usable(lambda: TokenValue(value)) if value else None


def fleet_of(fleet_file: Path | None) -> Fleet:
    """The fleet of a file, else of the one that GYM_CKPT_FLEET names."""
    path = fleet_file or (Path(named) if (named := os.environ.get(FLEET_VARIABLE)) else None)
    if path is None:
        raise UsageError(f"name the fleet's file with --fleet or {FLEET_VARIABLE}")
    return Fleet.from_yaml(path)
