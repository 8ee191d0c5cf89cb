"""One participant, and its calls: straight to the control plane, or over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc import status_pb2

from gym_ckpt_grpc.control import (
    Budget,
    ControlPlane,
    ControlSettings,
    ParticipantServer,
    error_from,
    open_channel,
    wire,
)
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import RestoreScope
from gym_ckpt_grpc.protocol.machine import Call, CommitArguments
from gym_ckpt_grpc.protocol.phases import Operation
from gymckpt.v1 import errors_pb2, participant_pb2_grpc
from gymckpt.v1 import participant_pb2 as pb
from tests.random.faulty_owner import FaultyOwner
from tests.random.kinds import KINDS
from tests.random.model import arguments
from tests.random.ops import Op, episodes, scope_of
from tests.random.steered_files import SteeredFiles
from tests.random.subjects import Outside, Subject
from tests.random.virtual_time import CountingLoop, VirtualLoop

Clock = Callable[[], float]
PATIENCE = 5.0
"""Real seconds for what must come by itself, where time is real."""
LEAST_DEADLINE = 2.0
"""Seconds over gRPC: of a shorter one too little is left for the answer where the machine is busy."""
OTHER_INCARNATION = "another-process"


@dataclass(frozen=True)
class Answer:
    """What a call came to: `ok` or an error code; the reply, and whether it was a recorded one."""

    code: str
    reply: Any = None
    replayed: bool = False
    text: str = ""


class Node:
    """One process of a participant, as far as its checkpoints go."""

    def __init__(
        self,
        kind: str,
        root: Path,
        clock: Clock,
        files: SteeredFiles,
        settings: ControlSettings,
        outside: Outside,
    ) -> None:
        self.root, self.clock, self.files = root, clock, files
        self.subject: Subject = KINDS[kind](clock, outside)
        self.owner = FaultyOwner(self.subject.owner)
        self.identity = ParticipantIdentity(self.owner.kind, "server")
        self.plane = ControlPlane(
            self.owner, self.identity, roots=[str(root)], files=files, clock=clock, settings=settings
        )

    async def start(self) -> None:
        return None

    async def arrived(self, call: asyncio.Task[Answer]) -> None:
        """Wait until the participant has decided on this call."""

    async def stop(self) -> None:
        """End the process: nothing of it runs on."""
        await self.subject.end()
        await self.plane.close()

    def uri(self, checkpoint_id: str) -> str:
        return (self.root / "checkpoints" / checkpoint_id).as_uri()

    def wait_more(self, call: Op) -> float:
        """Seconds that a call may take."""
        return float(call["deadline"])

    async def send(self, call: Op) -> Answer:
        """Make a call; gives its answer, typed errors included."""
        try:
            return await getattr(self, f"_{call.name}")(call)  # type: ignore[no-any-return]
        except ControlError as error:
            return Answer(error.code.name, text=error.message)

    # ---- straight

    def _call(self, op: Op, budget: Budget, args: Any = None) -> Call:
        incarnation = OTHER_INCARNATION if op.args.get("incarnation") == "other" else ""
        operation = Operation(op.name)
        return Call(operation, op["id"], op["controller"], op["epoch"], args, budget.left(), incarnation)

    def _budget(self, op: Op) -> Budget:
        least = 0.1 if op.name == "resume" else 0.0
        return Budget(max(least, op["deadline"]), self.clock)

    async def _prepare(self, op: Op) -> Answer:
        budget = self._budget(op)
        call = self._call(op, budget, op["ttl"])
        return Answer(
            "ok", *await self.plane.prepare(call, ready_within=op["within"], lease_ttl=op["ttl"], budget=budget)
        )

    async def _capture(self, op: Op) -> Answer:
        budget, scope = self._budget(op), scope_of(op["scope"])
        return Answer("ok", *await self.plane.capture(self._call(op, budget, scope), scope, budget=budget))

    async def _commit(self, op: Op) -> Answer:
        budget = self._budget(op)
        location = await self.plane.resolve(self.uri(op["place"]), "storage_uri", budget=budget)
        args = CommitArguments(scope_of(op["scope"]), self.uri(op["place"]), stop=op["stop"])
        return Answer("ok", *await self.plane.commit(self._call(op, budget, args), args, location, budget=budget))

    async def _resume(self, op: Op) -> Answer:
        budget = self._budget(op)
        return Answer("ok", *await self.plane.resume(self._call(op, budget), keep_write=op["keep"], budget=budget))

    async def _restore(self, op: Op) -> Answer:
        budget = self._budget(op)
        location = await self.plane.resolve(self.uri(op["source"]), "storage_uri", budget=budget)
        scope = RestoreScope.plan(episodes(op["scope"]), op["install_as"])
        reply = await self.plane.restore(
            self._call(op, budget, arguments(op)),
            scope,
            location,
            expected_digest="",
            lease_ttl=op["ttl"],
            budget=budget,
        )
        return Answer("ok", *reply)

    async def _retire(self, op: Op) -> Answer:
        budget = self._budget(op)
        reply = await self.plane.retire(self._call(op, budget), episodes(op["episodes"]), budget=budget)
        return Answer("ok", {str(episode): problem for episode, problem in reply.outcomes})

    async def _forget(self, op: Op) -> Answer:
        budget = self._budget(op)
        return Answer("ok", await self.plane.forget(self._call(op, budget), op["rollouts"], budget=budget))

    async def _renew_lease(self, op: Op) -> Answer:
        return Answer("ok", await self.plane.renew_lease(self._call(op, self._budget(op))))


class ServedNode(Node):
    """The same over gRPC on loopback. decided: an event that each decision on a call sets."""

    async def start(self) -> None:
        self.decided = asyncio.Event()
        decide = self.plane._core.machine.decide

        def told(*args: Any) -> Any:
            self.decided.set()
            return decide(*args)

        self.plane._core.machine.decide = told  # type: ignore[method-assign, assignment]
        self.server = ParticipantServer(self.plane)
        await self.server.start()
        self.channel = open_channel(self.server.address)
        self.stub: Any = participant_pb2_grpc.ParticipantServiceStub(self.channel)

    async def arrived(self, call: asyncio.Task[Answer]) -> None:
        decided = asyncio.ensure_future(self.decided.wait())
        await asyncio.wait({call, decided}, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
        decided.cancel()
        self.decided.clear()

    async def stop(self) -> None:
        await self.subject.end()
        await self.channel.close()
        await self.server.stop(0)

    async def send(self, call: Op) -> Answer:
        self.decided.clear()
        request, method = self._request(call), "".join(part.title() for part in call.name.split("_"))
        try:
            reply = await getattr(self.stub, method)(request, timeout=max(LEAST_DEADLINE, call["deadline"]))
        except grpc.aio.AioRpcError as failure:
            return self._refused(call, failure)
        assert reply.participant.incarnation_id == self.identity.incarnation_id
        told = reply
        if call.name == "retire":
            told = {
                wire.episode_from(o.episode).capture_key: o.message if o.state == pb.RETIRE_STATE_INCOMPLETE else None
                for o in reply.outcomes
            }
        return Answer("ok", told, getattr(reply, "replayed", False))

    def _refused(self, call: Op, failure: grpc.aio.AioRpcError) -> Answer:
        error = error_from(failure)
        assert error is not None, f"{call}: an untyped failure: {failure}"
        assert reply_identity(failure) == self.identity.incarnation_id
        return Answer(error.code.name, text=error.message)

    def _request(self, op: Op) -> Any:
        made = {"context": pb.ControlContext(checkpoint_id=op["id"], controller_id=op["controller"], epoch=op["epoch"])}
        fields: dict[str, Any] = dict(made)
        if op.args.get("incarnation") == "other":
            fields["expected_incarnation_id"] = OTHER_INCARNATION
        if "ttl" in op.args:
            fields["lease_ttl"] = wire.duration(op["ttl"])
        if op.name == "prepare":
            return pb.PrepareRequest(ready_within=wire.duration(op["within"]), **fields)
        if op.name == "capture":
            return pb.CaptureRequest(scope=wire.scope_to(scope_of(op["scope"])), **fields)
        if op.name == "commit":
            scope = wire.scope_to(scope_of(op["scope"]))
            return pb.CommitRequest(scope=scope, storage_uri=self.uri(op["place"]), stop=op["stop"], **fields)
        if op.name == "resume":
            return pb.ResumeRequest(keep_write=op["keep"], **fields)
        if op.name == "restore":
            fields |= {"scope": wire.episode_list(episodes(op["scope"])), "install_as": op["install_as"]}
            uri = self.uri(op["source"])
            return pb.RestoreRequest(storage_uri=uri, source_checkpoint_id=op["source"], **fields)
        if op.name == "retire":
            return pb.RetireRequest(episodes=wire.episode_list(episodes(op["episodes"])), **fields)
        if op.name == "forget":
            entries = [pb.ForgetRollout(rollout_id=r, through_attempt=a) for r, a in op["rollouts"]]
            return pb.ForgetRequest(rollouts=entries, **fields)
        return pb.RenewLeaseRequest(**fields)


def reply_identity(failure: grpc.aio.AioRpcError) -> str:
    """The incarnation that a typed failure names."""
    for key, value in failure.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            control = errors_pb2.ControlError()
            status_pb2.Status.FromString(value).details[0].Unpack(control)
            return control.participant.incarnation_id
    return ""


class VirtualTime:
    """Time of a VirtualLoop."""

    exact = True

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop

    def clock(self) -> float:
        return self._loop.now

    def hold(self, by: int) -> None:
        self._loop.hold(by)

    async def settle(self) -> None:
        await self._loop.settle()

    async def advance(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._loop.settle()


class RealTime:
    """Real time for a served participant; only its clock can be moved ahead."""

    exact = False
    TURN, TURNS = 0.003, 4

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        self._loop = loop
        self._ahead = 0.0

    def clock(self) -> float:
        return self._loop.time() + self._ahead

    def hold(self, by: int) -> None:
        self._loop.hold(by)

    async def settle(self) -> None:
        quiet = 0
        while quiet < self.TURNS:
            await asyncio.sleep(self.TURN)
            quiet = 0 if self._loop.threads_work else quiet + 1

    async def advance(self, seconds: float) -> None:
        self._ahead += seconds
        await self.settle()
