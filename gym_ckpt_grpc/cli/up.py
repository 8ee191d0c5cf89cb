"""`gym-ckpt up`: a small Gym of real servers to try things on."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import errors, people, print_json, say, table
from gym_ckpt_grpc.minigym.deployment import Deployment
from gym_ckpt_grpc.minigym.supervisor import Supervisor, Unhealthy
from gym_ckpt_grpc.minigym.tasks import Task, make_tasks
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.minigym.trainer import Trainer
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId

FIRST_LIFE = 1
IN_FLIGHT = "in-flight"
"""The file, in the deployment's directory, that lists what the trainer has in flight: capture keys, one per line."""


class InFlight(dict[str, EpisodeId]):
    """What a trainer has in flight, kept in a file as well, whole after every change: the scope of a checkpoint."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._write()

    def __setitem__(self, rollout_id: str, episode: EpisodeId) -> None:
        super().__setitem__(rollout_id, episode)
        self._write()

    def pop(self, rollout_id: str, *default: Any) -> Any:
        """Take one out, as a dict does."""
        episode = super().pop(rollout_id, *default)
        self._write()
        return episode

    def clear(self) -> None:
        """Take all out, as a dict does."""
        super().clear()
        self._write()

    def _write(self) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text("".join(f"{episode.capture_key}\n" for episode in self.values()))
        temporary.replace(self._file)


async def up(*, directory: Path | None, rollouts: int, mtls: bool, audit: bool, as_json: bool) -> Exit:
    """Start it, print where everything is, and stay until interrupted or a server ends."""
    temporary = directory is None
    place = Path(tempfile.mkdtemp(prefix="gym-ckpt-up-")) if directory is None else directory
    try:
        plan = _planned(place, Topology(mtls=mtls, audit=audit))
        async with Supervisor(plan.logs) as servers:
            await servers.start(plan.specs(life=FIRST_LIFE))
            in_flight = InFlight(place / IN_FLIGHT)
            _print(plan, servers, as_json=as_json)
            return await _stay(plan, servers, rollouts, in_flight)
    except Unhealthy as error:
        say(errors, "red", "error:", error)
        return Exit.FAILED
    finally:
        if temporary:
            shutil.rmtree(place, ignore_errors=True)


def _planned(place: Path, asked: Topology) -> Deployment:
    """The deployment that a directory has, else a new one. Raises UsageError where it is less safe than asked."""
    plan_file = place / "minigym.json"
    if not plan_file.exists():
        return Deployment.create(place, topology=asked)
    plan = Deployment.load(plan_file)
    for option in ("mtls", "audit"):
        if getattr(asked, option) and not getattr(plan.topology, option):
            raise UsageError(f"{place} has a deployment without --{option}: name another directory")
    return plan


async def _stay(plan: Deployment, servers: Supervisor, rollouts: int, in_flight: InFlight) -> Exit:
    """Keep `rollouts` running, until a server ends."""
    ended = asyncio.create_task(servers.first_exit(), name="watch for exits")
    try:
        async with Trainer(plan.server("environment").url) as trainer:
            trainer.in_flight = in_flight
            for seed in itertools.count():
                trainer.send(_named(task, seed) for task in make_tasks(rollouts, seed))
                finished = asyncio.create_task(trainer.finish(), name="rollouts")
                waits = {ended, finished} if rollouts else {ended}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finished.cancel()
                if ended.done():
                    say(errors, "red", "a server ended:", ended.result())
                    return Exit.FAILED
                trainer.in_flight.clear()  # a rollout whose connection broke is not sent again here
    finally:
        ended.cancel()
    return Exit.OK


def _named(task: Task, round_number: int) -> Task:
    """The same task under a rollout id of its own in each round."""
    return replace(task, rollout_id=f"{round_number}-{task.rollout_id}")


def _tls_files(plan: Deployment) -> dict[str, str]:
    """What the options --tls-ca, --tls-cert and --tls-key need; empty without mTLS."""
    if not plan.topology.mtls:
        return {}
    certificate, key = plan.certificate("controller")
    return {"ca": str(plan.certificates / "ca.pem"), "cert": str(certificate), "key": str(key)}


def _print(plan: Deployment, servers: Supervisor, *, as_json: bool) -> None:
    described = {
        "directory": plan.directory,
        "fleet": str(plan.fleet_file),
        "root": plan.root.as_uri(),
        "token_file": str(plan.token_file("controller")),
        "in_flight": str(Path(plan.directory) / IN_FLIGHT),
        "observer_token_file": str(plan.token_file("observer")),
        "tls": _tls_files(plan),
        "audit_log": str(plan.audit_log or ""),
        "servers": [
            {
                "role": server.name,
                "pid": servers.pids[server.name],
                "url": server.url,
                "control_address": server.control_address if server.kind else "",
                "metrics": servers.metrics.targets.get(server.name, ""),
            }
            for server in plan.servers
        ],
    }
    if as_json:
        print_json(described)
        return
    rows = [[s["role"], str(s["pid"]), s["url"], s["control_address"]] for s in described["servers"]]  # type: ignore[index]
    people.print(table("", ["server", "pid", "data plane", "control plane"], rows))
    people.print(f"fleet  {described['fleet']}", soft_wrap=True)
    people.print(f"root   {described['root']}", soft_wrap=True)
    if plan.topology.mtls:
        ca, certificate, key = _tls_files(plan).values()
        people.print(f"certificate  --tls-ca {ca} --tls-cert {certificate} --tls-key {key}", soft_wrap=True)
    else:
        people.print(f"token  {described['token_file']}", soft_wrap=True)
    if plan.audit_log:
        people.print(f"audit log  {plan.audit_log}", soft_wrap=True)
    if servers.metrics.targets:
        people.print(f"metrics of each server: {servers.metrics.file}", soft_wrap=True)
    people.print(f"rollouts in flight are listed in {described['in_flight']}", soft_wrap=True)
    people.print("up; Ctrl-C ends it")
