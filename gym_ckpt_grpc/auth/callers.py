"""Which role a client's certificate has: by the names in it (subject alternative names), as a mapping says.

    controller:
      - URI:spiffe://gym.example/trainer
    observer:
      - DNS:dashboard.gym.example
      - URI:spiffe://gym.example/people/*

`*` may stand for the last part of a URI's path, one part and not empty, and for nothing else. A certificate has the
roles of all its names. The common name is not looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import yaml

from gym_ckpt_grpc.auth.certificates import has_whole_names
from gym_ckpt_grpc.auth.files import REFRESH_SECONDS, FileProblem, Kept
from gym_ckpt_grpc.auth.roles import Role

_KINDS = {"URI": "peer_uri", "DNS": "peer_dns", "email": "peer_email"}
"""Kind of name, as openssl prints it -> its property in gRPC's context of the peer."""
_NAME = re.compile(r"(URI|DNS|email):([!-~]{1,2048})\Z")
_LAST_PART = re.compile(r"[!-~]+\Z")


class CertificateRoles(Protocol):
    """Gives the roles of a certificate; `refresh` may read a file and is called off the event loop."""

    def roles_of(self, names: Iterable[str]) -> dict[Role, str]:
        """Role -> the first of these names that has it."""

    def stale(self) -> bool:
        """Whether a refresh is due."""

    def refresh(self) -> None:
        """Read it again if it changed, and keep the old one where it is not usable."""


class NamedRoles:
    """A mapping role -> names. nobody: whether it may have no name. Raises ValueError for one that cannot be."""

    def __init__(self, names: Mapping[Role, Sequence[str]], *, nobody: bool = False) -> None:
        self._names: list[tuple[str, Role]] = []
        for role, given in names.items():
            for name in given:
                self._names.append((_pattern(name), role))
        if not self._names and not nobody:
            raise ValueError("no certificate would have a role: give at least one name")

    def roles_of(self, names: Iterable[str]) -> dict[Role, str]:
        found: dict[Role, str] = {}
        for name in names:
            for pattern, role in self._names:
                if _matches(pattern, name):
                    found.setdefault(role, name)
        return found

    def stale(self) -> bool:
        return False

    def refresh(self) -> None:
        return None


class NamedRolesFile:
    """The same mapping in a YAML file, role -> list of names, read again when it changes. Raises ValueError.

    Without any name it is refused at the start; later it means that nobody is let in any more.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._nobody = False
        self._kept = Kept("roles file", [self._path], self._usable)
        self._nobody = True

    def _usable(self, contents: Sequence[bytes]) -> NamedRoles:
        try:
            return NamedRoles(_mapping(yaml.safe_load(contents[0])), nobody=self._nobody)
        except yaml.YAMLError:
            raise FileProblem(f"roles file {self._path} is no YAML") from None
        except ValueError as error:
            raise FileProblem(f"roles file {self._path}: {error}") from None

    def roles_of(self, names: Iterable[str]) -> dict[Role, str]:
        return self._kept.value.roles_of(names)

    def stale(self) -> bool:
        return self._kept.age() >= REFRESH_SECONDS

    def refresh(self) -> None:
        self._kept.refresh()

    def __repr__(self) -> str:
        return f"NamedRolesFile({str(self._path)!r})"


def names_of(peer: Mapping[str, Iterable[bytes]]) -> list[str]:
    """The names of a verified certificate, from gRPC's context of the peer; none without one, and none of one with a
    name that gRPC cuts."""
    names = list[str]()
    if not all(map(has_whole_names, peer.get("x509_pem_cert", ()))):
        return names
    for kind, key in _KINDS.items():
        names += [_folded(f"{kind}:{value.decode('utf-8', 'replace')}") for value in peer.get(key, ())]
    return names


def _mapping(value: object) -> dict[Role, list[str]]:
    if not isinstance(value, dict):
        raise ValueError("it must map roles to lists of names")
    found: dict[Role, list[str]] = {}
    for role, names in value.items():
        if role not in set(Role):
            raise ValueError(f"{role!r:.80} is no role; there are {', '.join(Role)}")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{role} must have a list of names")
        found[Role(role)] = names
    return found


def _pattern(name: str) -> str:
    known = _NAME.match(name)
    if known is None:
        raise ValueError(f"{name!r:.80} is no name: it needs URI:, DNS: or email: before visible ASCII characters")
    kind, value = known.groups()
    legal = kind == "URI" and value.endswith("/*") and "://" in value[:-2] and "?" not in value and "#" not in value
    if "*" in value and not (legal and value.count("*") == 1):
        raise ValueError(f"{name!r:.80}: * may stand for the last part of a URI's path only")
    return _folded(name)


def _folded(name: str) -> str:
    return "DNS:" + name[4:].lower() if name.startswith("DNS:") else name


def _matches(pattern: str, name: str) -> bool:
    if not pattern.endswith("/*"):
        return name == pattern
    begin, rest = pattern[:-1], name[len(pattern) - 1 :]
    return name.startswith(begin) and _LAST_PART.match(rest) is not None and not set(rest) & set("/?#")
