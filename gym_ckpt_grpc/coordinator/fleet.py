"""The fleet: which servers there are, as declared. Source: coordination section 2."""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import yaml

from gym_ckpt_grpc.coordinator.errors import FleetInvalid
from gym_ckpt_grpc.coordinator.resolving import Resolver, addresses_of
from gym_ckpt_grpc.protocol.identity import PROTOCOL_MINOR, ParticipantKind
from gym_ckpt_grpc.protocol.ids import checkpoint_id_problem

KIND_ORDER = (
    ParticipantKind.ENVIRONMENT,
    ParticipantKind.POLICY_MODEL,
    ParticipantKind.AGENT,
    ParticipantKind.RESOURCES,
)
"""The order in which kinds are listed and prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One declared server.

    kind: which state it owns; needed unless `participant` is false. service: its name in the deployment.
    address: `host:port`, `unix:path` or `dns:///name:port`. instance: the place it must claim, or None for any.
    instances: how many participants the address must give. required: whether a checkpoint fails without it.
    used_by: services whose rollouts need this one, for an optional server. participant: false for a server that
    keeps no state of a rollout; it is not called. capabilities: what it must be able to do. protocol_minor: the
    least version it must speak. Raises FleetInvalid for half-given or impossible values.
    """

    service: str
    address: str
    kind: ParticipantKind | str | None = None
    instance: str | None = None
    instances: int = 1
    required: bool = True
    used_by: tuple[str, ...] = ()
    participant: bool = True
    capabilities: tuple[str, ...] = ()
    protocol_minor: int = PROTOCOL_MINOR

    def __post_init__(self) -> None:
        where = f"server {self.service or self.address or '(unnamed)'!r}"
        for name in ("service", "instance"):
            value = getattr(self, name)
            if value is not None and (problem := checkpoint_id_problem(str(value))):
                raise FleetInvalid(f"{where}: {name} {problem}")
        if not self.address:
            raise FleetInvalid(f"{where}: address is empty")
        if self.instances < 1:
            raise FleetInvalid(f"{where}: instances is {self.instances}, at least 1 is needed")
        object.__setattr__(self, "kind", _kind(self.kind, self.participant, where))
        object.__setattr__(self, "used_by", tuple(self.used_by))
        object.__setattr__(self, "capabilities", tuple(self.capabilities))

    @property
    def state_kind(self) -> ParticipantKind:
        """The kind of a participant."""
        assert isinstance(self.kind, ParticipantKind)
        return self.kind

    def __str__(self) -> str:
        kind = self.kind.value if isinstance(self.kind, ParticipantKind) else "no participant"
        return f"{kind}/{self.service} at {self.address}"


def _kind(value: ParticipantKind | str | None, participant: bool, where: str) -> ParticipantKind | None:
    if value is None:
        if participant:
            raise FleetInvalid(f"{where}: kind is missing (or say participant: false)")
        return None
    try:
        return ParticipantKind(value)
    except ValueError:
        known = [kind.value for kind in ParticipantKind]
        raise FleetInvalid(f"{where}: kind {value!r} is unknown{_nearest(str(value), known)}") from None


def _nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, or the list of what is valid where nothing is near."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else f" (valid: {', '.join(known)})"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address to call, and the declaration it comes from. problem: why there is none, such as of a name."""

    server: Server
    address: str
    problem: str = ""


class Discovery(Protocol):
    """Where servers come from. Called at each Prepare and Restore."""

    async def resolve(self) -> list[Endpoint]:
        """All endpoints of participants, in listing order."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Declared servers. Raises FleetInvalid if a kind of `require_kinds` has none.

    resolver: what `dns:///` names stand for, if the system is not to be asked.
    """

    servers: tuple[Server, ...]
    require_kinds: tuple[ParticipantKind | str, ...] = field(default=(ParticipantKind.POLICY_MODEL,))
    resolver: Resolver | None = field(default=None, compare=False, repr=False)

    def __init__(
        self,
        servers: Iterable[Server],
        *,
        require_kinds: Iterable[ParticipantKind | str] = (ParticipantKind.POLICY_MODEL,),
        resolver: Resolver | None = None,
    ) -> None:
        object.__setattr__(self, "resolver", resolver)
        ordered = sorted(servers, key=_listing_order)
        kinds = tuple(_kind(kind, True, "require_kinds") for kind in require_kinds)
        object.__setattr__(self, "servers", tuple(ordered))
        object.__setattr__(self, "require_kinds", kinds)
        present = {server.kind for server in ordered if server.participant}
        missing = [kind.value for kind in kinds if kind is not None and kind not in present]
        if missing:
            raise FleetInvalid(f"the fleet has no server of kind {', '.join(missing)}, which require_kinds asks for")
        if not present:
            raise FleetInvalid("the fleet has no participant")

    @property
    def participants(self) -> tuple[Server, ...]:
        """The servers that are called, in listing order: kind, then service, then instance."""
        return tuple(server for server in self.servers if server.participant)

    async def resolve(self) -> list[Endpoint]:
        """One endpoint per address, names resolved anew at each call; one with a problem for a name without any."""
        servers = self.participants
        found = await asyncio.gather(*(addresses_of(server.address, self.resolver) for server in servers))
        endpoints = []
        for server, (addresses, problem) in zip(servers, found, strict=True):
            endpoints += [Endpoint(server, address) for address in addresses]
            if problem:
                endpoints.append(Endpoint(server, server.address, problem))
        return endpoints

    def to_mapping(self) -> dict[str, Any]:
        """Plain data that `from_mapping` reads back as an equal fleet."""
        kinds = [ParticipantKind(kind).value for kind in self.require_kinds]
        return {"servers": [_plain(server) for server in self.servers], "require_kinds": kinds}

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Fleet:
        """Read a fleet's file: `servers`, and optionally `require_kinds`. Raises FleetInvalid naming the key."""
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeError, yaml.YAMLError) as error:
            raise FleetInvalid(f"{path} cannot be read as YAML: {error}") from error
        return cls.from_mapping(loaded, source=str(path))

    @classmethod
    def from_mapping(cls, loaded: Any, *, source: str = "the fleet") -> Fleet:
        """Build a fleet from plain data, as a YAML file gives it."""
        if not isinstance(loaded, Mapping):
            raise FleetInvalid(f"{source} is no mapping with the key 'servers'")
        _refuse_unknown(loaded, ("servers", "require_kinds"), source)
        entries = loaded.get("servers")
        if not isinstance(entries, list):
            raise FleetInvalid(f"{source}: servers is missing or no list")
        servers = [_server(entry, f"{source}: servers[{i}]") for i, entry in enumerate(entries)]
        kinds = loaded.get("require_kinds", [ParticipantKind.POLICY_MODEL])
        if not isinstance(kinds, list):
            raise FleetInvalid(f"{source}: require_kinds is no list")
        return cls(servers, require_kinds=kinds)


def _listing_order(server: Server) -> tuple[int, str, str, str]:
    place = KIND_ORDER.index(server.state_kind) if server.participant else len(KIND_ORDER)
    return (place, server.service, server.instance or "", server.address)


def _plain(server: Server) -> dict[str, Any]:
    values = {
        item.name: getattr(server, item.name) for item in fields(server) if getattr(server, item.name) is not None
    }
    return {name: list(value) if isinstance(value, tuple) else _word(value) for name, value in values.items()}


def _word(value: Any) -> Any:
    return value.value if isinstance(value, ParticipantKind) else value


_TYPES: dict[str, tuple[type, str]] = {
    "service": (str, "a text"),
    "address": (str, "a text"),
    "kind": (str, "a text"),
    "instances": (int, "a whole number"),
    "required": (bool, "true or false"),
    "participant": (bool, "true or false"),
    "protocol_minor": (int, "a whole number"),
    "used_by": (list, "a list of services"),
    "capabilities": (list, "a list of names"),
}


def _server(entry: Any, where: str) -> Server:
    if not isinstance(entry, Mapping):
        raise FleetInvalid(f"{where} is no mapping")
    _refuse_unknown(entry, [item.name for item in fields(Server)], where)
    values: dict[str, Any] = dict(entry)
    for name in ("service", "address"):
        if name not in values:
            raise FleetInvalid(f"{where}: {name} is missing")
    if isinstance(values.get("instance"), int) and not isinstance(values["instance"], bool):
        values["instance"] = str(values["instance"])
    for name, value in values.items():
        kind, words = _TYPES.get(name, (str, "a text"))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FleetInvalid(f"{where}: {name} must be {words}, not {value!r}")
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            raise FleetInvalid(f"{where}: {name} must be {words}, not {value!r}")
    try:
        return Server(**values)
    except FleetInvalid as error:
        raise FleetInvalid(f"{where}: {error}") from None


def _refuse_unknown(entry: Mapping[Any, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in entry:
        if key not in known:
            raise FleetInvalid(f"{where}: unknown key {key!r}{_nearest(str(key), known)}")
