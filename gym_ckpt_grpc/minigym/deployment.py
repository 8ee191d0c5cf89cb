"""One deployment of minigym: its servers, ports, files, and how to start them.

Everything lives in one directory: `minigym.json` (this plan), `fleet.yaml` (what a coordinator reads), `tokens/`,
`logs/`, `checkpoints` (the root) and `inference.jsonl` (the worker's own log over all lives).
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from gym_ckpt_grpc.coordinator import Fleet
from gym_ckpt_grpc.minigym.inference_worker import LOG_NAME
from gym_ckpt_grpc.minigym.ports import LOOPBACK, free_ports
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.protocol.identity import ParticipantKind

Role = Literal["environment", "agent", "policy_model", "inference", "counter", "blackjack"]

SERVED_KINDS: dict[Role, ParticipantKind] = {
    "environment": ParticipantKind.ENVIRONMENT,
    "agent": ParticipantKind.AGENT,
    "policy_model": ParticipantKind.POLICY_MODEL,
    "counter": ParticipantKind.RESOURCES,
    "blackjack": ParticipantKind.RESOURCES,
}
"""Role -> kind, for the roles that are participants. The inference worker keeps no state of a rollout."""

ROLES: tuple[Role, ...] = (*SERVED_KINDS, "inference")
TICK = 0.008
"""Seconds per generated token and stream, as of a small engine under load."""


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server: its HTTP port, and its control port if it is a participant (0 if not), both on loopback."""

    role: Role
    port: int
    control_port: int = 0

    @property
    def url(self) -> str:
        """Base of its HTTP routes."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def control_address(self) -> str:
        """Where its ParticipantService is served."""
        return f"{LOOPBACK}:{self.control_port}"


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan of one deployment. tick: seconds per token. Two lives of it share everything, ports included."""

    directory: str
    tick: float = TICK
    servers: tuple[ServerPlan, ...]

    @classmethod
    def create(cls, directory: Path, *, tick: float = TICK) -> Deployment:
        """Plan a deployment in a new or empty directory and write its files."""
        ports = iter(free_ports(len(ROLES) + len(SERVED_KINDS)))
        servers = tuple(
            ServerPlan(role=role, port=next(ports), control_port=next(ports) if role in SERVED_KINDS else 0)
            for role in ROLES
        )
        plan = cls(directory=str(directory.resolve()), tick=tick, servers=servers)
        for made in (directory, plan.logs, plan.root):
            made.mkdir(parents=True, exist_ok=True)
        plan.tokens.mkdir(mode=0o700)
        for role in ("controller", "observer"):
            _write_secret(plan.token_file(role), secrets.token_urlsafe(32))
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
        """The inference worker's own log."""
        return Path(self.directory) / LOG_NAME

    def token_file(self, role: str) -> Path:
        """The token of `controller` or `observer`."""
        return self.tokens / role

    def server(self, role: Role) -> ServerPlan:
        """The server of a role."""
        return next(server for server in self.servers if server.role == role)

    def specs(self, *, life: int) -> Sequence[ProcessSpec]:
        """How to start every server; life: number of this one, from 1."""
        module = "gym_ckpt_grpc.minigym.serve"
        return [
            ProcessSpec(
                name=server.role,
                argv=(sys.executable, "-m", module, server.role, "--plan", str(self.file), "--life", str(life)),
                port=server.port,
            )
            for server in self.servers
        ]

    def fleet(self) -> Fleet:
        """The participants, as a coordinator wants them."""
        return Fleet.from_yaml(self.fleet_file)

    def _fleet_entries(self) -> list[dict[str, object]]:
        return [
            {"kind": str(SERVED_KINDS[server.role]), "service": server.role, "address": server.control_address}
            if server.role in SERVED_KINDS
            else {"service": server.role, "address": f"{LOOPBACK}:{server.port}", "participant": False}
            for server in self.servers
        ]


def _write_secret(path: Path, secret: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")
