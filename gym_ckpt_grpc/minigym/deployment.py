"""One deployment of minigym: its servers, ports, files, and how to start them.

Everything lives in one directory: `minigym.json` (this plan), `fleet.yaml` (what a coordinator reads), `tokens/`,
`logs/`, `checkpoints` (the root), `inference.jsonl` (the workers' own log over all lives), and what servers keep
over their lives: `ledger/` (the policy model's rows) and `staged/` (the workers' tokens). With mTLS also
`certificates/` and `roles.yaml`, with an audit log `audit.jsonl`.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from gym_ckpt_grpc.coordinator import Fleet
from gym_ckpt_grpc.minigym.authority import LOCAL_NAMES, Authority
from gym_ckpt_grpc.minigym.inference_worker import LOG_NAME
from gym_ckpt_grpc.minigym.ports import LOOPBACK, free_ports
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.topology import Role, Topology
from gym_ckpt_grpc.protocol.identity import ParticipantKind

ROLE_NAMES = {role: f"URI:spiffe://minigym/{role}" for role in ("controller", "observer", "peer")}
"""Role -> the name in its certificate."""
TICK = 0.008
"""Seconds per generated token and stream, as of a small engine under load."""


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server: its name, its HTTP port and its control port, both on loopback.

    kind: of a participant, "" for others. control_port: a participant's ParticipantService, or an inference
    worker's GenerationService; 0 if there is neither.
    """

    name: str
    role: Role
    port: int
    control_port: int = 0
    kind: str = ""

    @property
    def url(self) -> str:
        """Base of its HTTP routes."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def control_address(self) -> str:
        """Where its ParticipantService, or an inference worker's GenerationService, is served."""
        return f"{LOOPBACK}:{self.control_port}"

    @property
    def participant_kind(self) -> ParticipantKind | None:
        """Its kind as a participant; None if it is none."""
        return ParticipantKind(self.kind) if self.kind else None


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan of one deployment. tick: seconds per token. Two lives of it share everything, ports included."""

    directory: str
    tick: float = TICK
    topology: Topology
    servers: tuple[ServerPlan, ...]

    @classmethod
    def create(cls, directory: Path, *, tick: float = TICK, topology: Topology | None = None) -> Deployment:
        """Plan a deployment in a new or empty directory and write its files."""
        topology = topology or Topology()
        wanted = topology.servers()
        ports = iter(free_ports(2 * len(wanted)))
        servers = tuple(
            ServerPlan(
                name=server.name,
                role=server.role,
                port=next(ports),
                control_port=next(ports) if server.controlled else 0,
                kind=str(server.kind or ""),
            )
            for server in wanted
        )
        plan = cls(directory=str(directory.resolve()), tick=tick, topology=topology, servers=servers)
        for made in (directory, plan.logs, plan.root):
            made.mkdir(parents=True, exist_ok=True)
        plan.tokens.mkdir(mode=0o700)
        for role in ROLE_NAMES:
            _write_secret(plan.token_file(role), secrets.token_urlsafe(32))
        if topology.mtls:
            plan._make_certificates()
        if topology.checkpointing:
            plan.fleet_file.write_text(yaml.safe_dump({"servers": plan._fleet_entries()}, sort_keys=False))
        plan.file.write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
        return plan

    @classmethod
    def load(cls, file: Path) -> Deployment:
        """Read a plan. Raises OSError or msgspec.ValidationError."""
        return msgspec.json.decode(file.read_bytes(), type=cls)

    @property
    def file(self) -> Path:
        """The plan itself, which every server process reads."""
        return Path(self.directory) / "minigym.json"

    @property
    def fleet_file(self) -> Path:
        """The fleet for a coordinator, as YAML."""
        return Path(self.directory) / "fleet.yaml"

    @property
    def logs(self) -> Path:
        """One log file per server, appended over all lives."""
        return Path(self.directory) / "logs"

    @property
    def root(self) -> Path:
        """The checkpoint root."""
        return Path(self.directory) / "root"

    @property
    def tokens(self) -> Path:
        """Token files, readable by their owner only."""
        return Path(self.directory) / "tokens"

    @property
    def inference_log(self) -> Path:
        """The inference workers' own log; several append to the same file, a line in one write each."""
        return Path(self.directory) / LOG_NAME

    @property
    def ledger(self) -> Path:
        """The policy model server's capture ledger."""
        return Path(self.directory) / "ledger"

    @property
    def staged(self) -> Path:
        """The token store of all inference workers: any of them can go on where another was."""
        return Path(self.directory) / "staged"

    def token_file(self, role: str) -> Path:
        """The token of `controller`, `observer` or `peer`, which the policy model is to its inference workers."""
        return self.tokens / role

    @property
    def certificates(self) -> Path:
        """Of a deployment with mTLS: `ca.pem`, a certificate and key of each control plane and each role."""
        return Path(self.directory) / "certificates"

    @property
    def roles_file(self) -> Path:
        """Which role the name in a certificate has."""
        return Path(self.directory) / "roles.yaml"

    @property
    def audit_log(self) -> Path | None:
        """Where control planes write down who changed what, all in one file; None for nowhere."""
        return Path(self.directory) / "audit.jsonl" if self.topology.audit else None

    def certificate(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of a server, or of `controller`, `observer` or `peer`."""
        return self.certificates / f"{name}.pem", self.certificates / f"{name}.key"

    def _make_certificates(self) -> None:
        authority = Authority(self.certificates)
        for server in self.servers:
            if server.control_port:
                authority.issue(server.name, LOCAL_NAMES)
        for role, name in ROLE_NAMES.items():
            authority.issue(role, [name])
        self.roles_file.write_text(yaml.safe_dump({role: [name] for role, name in ROLE_NAMES.items()}))

    def server(self, name: str) -> ServerPlan:
        """The server of a name, which is its role where there is one of it. Raises StopIteration for others."""
        return next(server for server in self.servers if name in (server.name, server.role))

    def workers(self) -> tuple[ServerPlan, ...]:
        """The inference workers, in the order of their numbers."""
        return tuple(server for server in self.servers if server.role == "inference")

    def resources(self) -> dict[str, str]:
        """Name of each resources server, which is the kind of its tasks -> base of its routes."""
        return {server.name: server.url for server in self.servers if server.role in self.topology.resources}

    def specs(self, *, life: int) -> Sequence[ProcessSpec]:
        """How to start every server; life: number of this one, from 1."""
        module = "gym_ckpt_grpc.minigym.serve"
        return [
            ProcessSpec(
                name=server.name,
                argv=(sys.executable, "-m", module, server.name, "--plan", str(self.file), "--life", str(life)),
                port=server.port,
            )
            for server in self.servers
        ]

    def fleet(self) -> Fleet:
        """The participants, as a coordinator wants them."""
        return Fleet.from_yaml(self.fleet_file)

    def _fleet_entries(self) -> list[dict[str, object]]:
        return [
            {"kind": server.kind, "service": server.name, "address": server.control_address}
            if server.kind
            else {"service": server.name, "address": f"{LOOPBACK}:{server.port}", "participant": False}
            for server in self.servers
        ]


def _write_secret(path: Path, secret: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")
