"""A full run of the minigym with every secret marked and everything logged: checkpoint, crash, restore, the operator's
commands, a served coordinator, and every refusal that a wrong caller or a wrong argument can get."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from gym_ckpt_grpc.auth import Authenticator, Role, TokenFile, TokenValue
from gym_ckpt_grpc.control import error_from, open_channel, wire
from gym_ckpt_grpc.coordinator.served import CoordinatorServer
from gym_ckpt_grpc.minigym.access import access_as
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.tasks import Task
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.storage import encode
from gymckpt.v1 import coordinator_pb2 as coordinator_pb
from gymckpt.v1 import coordinator_pb2_grpc, participant_pb2_grpc
from gymckpt.v1 import participant_pb2 as pb
from tests.e2e.marks import TOKENS, Evidence, Marks, command_lines, files_under, reprs
from tests.e2e.plays import counting
from tests.e2e.processes import run
from tests.e2e.rig import HELD_AFTER, Rig, rig
from tests.telemetry.exporting import exporting, server_env
from tests.telemetry.otlp_receiver import Collector

REPOSITORY = Path(__file__).resolve().parents[2]
AUDIT = "coordinator-audit.jsonl"
NEAR = 10.0
"""Seconds for one call."""


class LoudRig(Rig):
    """Servers that log everything; the policy model's gRPC core too."""

    def specs(self) -> list[ProcessSpec]:
        return [
            replace(
                spec,
                argv=(spec.argv[0], "-m", "tests.e2e.loudly", *spec.argv[2:]),
                env={**spec.env, **({"GRPC_VERBOSITY": "debug"} if spec.name == "policy_model" else {})},
            )
            for spec in super().specs()
        ]


@dataclass
class MarkedRun:
    """One run in a directory. mtls: by certificates in place of tokens. errors: the text of everything that failed."""

    directory: Path
    collector: Collector
    mtls: bool = False
    marks: Marks = field(default_factory=Marks.new)
    errors: list[str] = field(default_factory=list)
    commands: dict[str, bytes] = field(default_factory=dict)
    lines: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    evidence: Evidence = field(init=False)

    # ---- the run

    async def go(self) -> None:
        """All of it; what it left behind is in `evidence`."""
        log = StringIO()
        handler = logging.StreamHandler(log)
        root = logging.getLogger()
        before = root.level
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        try:
            await self._go()
        finally:
            root.removeHandler(handler)
            root.setLevel(before)
        self.evidence = self._evidence(log.getvalue())

    async def _go(self) -> None:
        topology = Topology(resources=("counter", "inbox"), controls=True, mtls=self.mtls, audit=True)
        env = {
            **server_env(self.collector.endpoint),
            "OTEL_EXPORTER_OTLP_HEADERS": f"x-marked={self.marks.secret['otlp-header'].value}",
            "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",  # of `loudly`
            "PYTHONASYNCIODEBUG": "1",
        }
        with exporting("trainer", self.collector.endpoint) as here:
            async with rig(self.directory, topology, env=env, telemetry=here.telemetry, kind=LoudRig) as gym:
                for name in TOKENS:
                    gym.plan.token_file(name).write_text(self.marks.secret[name].value + "\n")
                self.marks.private_keys(self.directory)
                await self._first_life(gym)
                if self.mtls:  # what differs by then is how a caller is known: no second life for that
                    await self._operator(gym)
                else:
                    await gym.crash()
                    await self._second_life(gym)
                await gym.leave()
                await gym.servers.stop(grace=20)

    async def _first_life(self, gym: Rig) -> None:
        await gym.start()
        for task in self._tasks():
            await gym.held_at_call(task, turn=1)
        self.lines |= await asyncio.to_thread(command_lines, gym.servers.pids)
        await self._refused_requests(gym)
        trainer = encode({"state": self.marks.payload["trainer-state"].value})
        async with gym.prepared() as checkpoint:
            scope = checkpoint.report.continued(gym.in_flight)
            await checkpoint.commit(scope, trainer=trainer, reopen_when_captured=True)
            await checkpoint.publish()
            self.objects |= await asyncio.to_thread(reprs)
        await self._strangers(gym)
        await self._wrong_arguments(gym)
        await self._served(gym)

    async def _second_life(self, gym: Rig) -> None:
        restored = await gym.installed()
        await gym.hold_tokens(HELD_AFTER + 1)
        gym.send_continued(restored)
        await self._operator(gym)
        await gym.release_tokens()
        await gym.finish()

    def _tasks(self) -> list[Task]:
        prompt = self.marks.payload["prompt"].value
        inbox = Task("mail", "inbox", 5, f"{prompt}: answer the mail.", 4, {"seed": 3})
        return [replace(counting("a", turns=2), prompt=f"{prompt}: count."), inbox]

    # ---- the data plane

    async def _refused_requests(self, gym: Rig) -> None:
        """Requests with marked headers, and with arguments that nobody takes."""
        secret, argument = self.marks.secret, self.marks.payload["tool-argument"].value
        headers = {"authorization": f"Bearer {secret['authorization-header'].value}"}
        cookies = {"session": secret["cookie"].value}
        bodies = [f'{{"by": "{argument}"}}', f'{{"folder": "{argument}"}}', f'{{"{argument}": 1}}', f'{{"{argument}']
        for server, path in (
            ("counter", "/increment"),
            ("inbox", "/read"),
            ("inbox", "/nothing"),
            ("agent", "/rollout/x-0/v1/responses"),
            ("policy_model", "/rollout/x-0/v1/chat/completions"),
            ("environment", "/rollout/x-0/run"),
        ):
            url = gym.plan.server(server).url + path
            for body in bodies:
                # A connection each: a server may close one after a failure.
                async with aiohttp.request("POST", url, data=body, headers=headers, cookies=cookies) as answer:
                    assert answer.status >= 400, f"{server}{path} took {body}"

    # ---- refusals of the control plane

    async def _fails(self, call: Callable[[], Awaitable[Any]]) -> None:
        """Keep everything that the failure says, in every form."""
        try:
            await call()
        except Exception as error:
            self.errors.append("".join(traceback.format_exception(error)) + repr(error))
            if isinstance(error, grpc.aio.AioRpcError):
                typed = error_from(error)
                self.errors.append(f"{typed!r} {typed} {error.details()} {error.debug_error_string()}")
        else:
            raise AssertionError("it was not refused")

    async def _strangers(self, gym: Rig) -> None:
        """Callers that are not who they say, whose every argument is marked: nothing is told or kept of them."""
        wrong = self.marks.secret["wrong-token"].value
        said = self.marks.secret["refused-argument"].value
        credentials: list[tuple[tuple[str, str], ...]] = [
            (),
            (("authorization", f"Bearer {wrong}"),),
            (("authorization", wrong),),
            (("authorization", f"Basic {wrong}"),),
            (("authorization", f"Bearer {wrong}"), ("authorization", f"Bearer {wrong}")),
            (("authorization", f"Bearer {wrong} {wrong}"), ("x-token", wrong)),
        ]
        requests: dict[str, Any] = {
            "GetStatus": pb.GetStatusRequest(),
            "Prepare": pb.PrepareRequest(context=pb.ControlContext(checkpoint_id=said, controller_id=said)),
            "Commit": pb.CommitRequest(storage_uri=said, base_checkpoint_uri=said),
            "Retire": pb.RetireRequest(),
        }
        for server in ("environment", "policy_model", "inbox"):
            async with self._bare(gym, server) as channel:
                stub = participant_pb2_grpc.ParticipantServiceStub(channel)
                for metadata in credentials:
                    for name, request in requests.items():
                        call = partial(getattr(stub, name), request, metadata=metadata, timeout=NEAR)
                        await self._fails(call)
        if not self.mtls:
            await self._refused_observer(gym)

    @asynccontextmanager
    async def _bare(self, gym: Rig, server: str) -> AsyncIterator[grpc.aio.Channel]:
        """A channel of somebody without credentials; with a certificate of no role where there must be one."""
        tls = access_as("peer", gym.plan)["tls"]  # a peer may do nothing at a participant
        async with open_channel(gym.plan.server(server).control_address, tls=tls) as channel:
            yield channel

    async def _refused_observer(self, gym: Rig) -> None:
        token = TokenFile(gym.plan.token_file("observer"))
        async with open_channel(gym.plan.server("agent").control_address, token=token) as channel:
            stub = participant_pb2_grpc.ParticipantServiceStub(channel)
            await self._fails(lambda: stub.Resume(pb.ResumeRequest(), timeout=NEAR))
        broken = self.directory / "empty-token"
        broken.write_text(f"{self.marks.secret['wrong-token'].value} {self.marks.secret['wrong-token'].value}\n")

        async def read() -> TokenFile:
            return TokenFile(broken)

        async def take() -> TokenValue:
            return TokenValue(broken.read_text())

        await self._fails(read)
        await self._fails(take)
        broken.unlink()

    async def _wrong_arguments(self, gym: Rig) -> None:
        """A good caller whose calls cannot be obeyed while the records are marked."""
        async with gym.stub("counter") as stub:
            await self._fails(lambda: stub.Prepare(pb.PrepareRequest(), timeout=NEAR))
            await self._fails(lambda: stub.Commit(pb.CommitRequest(), timeout=NEAR))
            await self._fails(lambda: stub.Restore(pb.RestoreRequest(), timeout=NEAR))

    # ---- a served coordinator

    async def _served(self, gym: Rig) -> None:
        """It takes a trainer's state by its requests, and refuses strangers with marked ones."""
        authenticator = Authenticator({Role(name): TokenFile(gym.plan.token_file(name)) for name in TOKENS})
        audit = self.directory / AUDIT
        token = TokenFile(gym.plan.token_file("controller"))
        state = self.marks.payload["trainer-state"].value.encode()
        async with (
            gym.coordinator() as coordinator,
            CoordinatorServer(coordinator, authenticator=authenticator, audit_log=audit) as server,
            open_channel(server.address, token=token, telemetry=gym.telemetry) as channel,
            open_channel(server.address) as stranger,
        ):
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            scope = wire.episode_list(gym.in_flight)
            commit = coordinator_pb.CommitCheckpointRequest(checkpoint_id="ck", scope=scope, trainer_state=state)
            await self._fails(lambda: stub.CommitCheckpoint(commit, timeout=NEAR))  # nothing is prepared
            metadata = (("authorization", f"Bearer {self.marks.secret['wrong-token'].value}"),)
            other = coordinator_pb2_grpc.CoordinatorServiceStub(stranger)
            await self._fails(lambda: other.CommitCheckpoint(commit, metadata=metadata, timeout=NEAR))
            prepare = coordinator_pb.PrepareCheckpointRequest(checkpoint_id="ck")
            await stub.PrepareCheckpoint(prepare, timeout=60)
            await stub.CommitCheckpoint(commit, timeout=60)
            await stub.PublishCheckpoint(coordinator_pb.PublishCheckpointRequest(checkpoint_id="ck"), timeout=60)
            await stub.ResumeCheckpoint(coordinator_pb.ResumeCheckpointRequest(checkpoint_id="ck"), timeout=60)
            self.objects |= await asyncio.to_thread(reprs)

    # ---- the operator's commands

    async def _operator(self, gym: Rig) -> None:
        in_flight = self.directory / "in-flight"
        in_flight.write_text("".join(f"{episode.capture_key}\n" for episode in gym.in_flight))
        wrong = self.directory / "wrong-token"
        wrong.write_text(self.marks.secret["wrong-token"].value)
        env = {"GYM_CKPT_FLEET": str(gym.plan.fleet_file), **server_env(self.collector.endpoint), **self._access(gym)}
        session = ("--session", str(self.directory / "session"))
        root = ("--root", str(gym.plan.root))
        for name, arguments in (
            ("prepare", ("prepare", *session, *root)),
            ("commit", ("commit", *session, "--episodes", str(in_flight))),
            ("publish", ("publish", *session)),
            ("resume", ("resume", *session)),
        ):
            await self._command(name, 0, arguments, env)
        looking = [
            self._command("status", 0, ("status", "--json"), env),
            self._command("timeline", 0, ("timeline", *root), env),
            self._command("verify", 0, ("verify", *root), env),
        ]
        if not self.mtls:
            strange = {**env, "GYM_CKPT_TOKEN_FILE": str(wrong)}
            other = ("--session", str(self.directory / "strange-session"))
            looking += [
                self._command("prepare, a wrong token", None, ("prepare", *other, *root), strange),
                self._command("status, a wrong token", None, ("status",), strange),
            ]
        await asyncio.gather(*looking)
        wrong.unlink()

    def _access(self, gym: Rig) -> dict[str, str]:
        if not self.mtls:
            return {"GYM_CKPT_TOKEN_FILE": str(gym.plan.token_file("controller"))}
        certificate, key = gym.plan.certificate("controller")
        files = {"CA": gym.plan.certificates / "ca.pem", "CERT": certificate, "KEY": key}
        return {f"GYM_CKPT_TLS_{name}": str(file) for name, file in files.items()}

    async def _command(self, name: str, wanted: int | None, arguments: tuple[str, ...], env: dict[str, str]) -> None:
        ended = await asyncio.to_thread(run, *arguments, **env)
        said = f"{ended.stdout}\n{ended.stderr}"
        assert ended.returncode == wanted or (wanted is None and ended.returncode), said
        self.commands[name] = said.encode()

    # ---- what it left behind

    def _evidence(self, logged: str) -> Evidence:
        gym = self.directory / "gym"
        logs, audits = [gym / "logs"], [self.directory / AUDIT, gym / "audit.jsonl"]
        own = [gym / "tokens", *gym.rglob("*.key")]
        places = payload_places(gym)
        return Evidence(
            self.marks,
            {
                "logs": {**files_under(self.directory, only=logs), "the trainer": logged.encode()},
                "commands": self.commands,
                "telemetry": {f"request {n}": request for n, request in enumerate(self.collector.requests)},
                "errors": {f"error {n}": text.encode() for n, text in enumerate(self.errors)},
                "reprs": self.objects,
                "audit": files_under(self.directory, only=audits),
                "command lines": self.lines,
                "files": files_under(self.directory, but=[*logs, *audits, *own, *places]),
            },
            stored=files_under(self.directory, only=places),
        )


def payload_places(gym: Path) -> list[Path]:
    """Where payloads belong: what rollouts said and did in the parts of checkpoints, in the ledger and in the staged
    tokens of workers; a trainer's state in its manifest."""
    root = gym / "root" / "checkpoints"
    return [gym / "ledger", gym / "staged", *root.rglob("*.gck"), *root.glob("*/checkpoint.json")]
