"""Participants that are broken on purpose, each in one way that the conformance kit must find."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import grpc

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue
from gym_ckpt_grpc.control import ControlPlane
from gym_ckpt_grpc.control.authenticating import AuthServerInterceptor
from gym_ckpt_grpc.control.capturing import capture
from gym_ckpt_grpc.control.error_details import grpc_status
from gym_ckpt_grpc.control.interceptors import ErrorsInterceptor
from gym_ckpt_grpc.control.servicer import ParticipantServicer
from gym_ckpt_grpc.control.status import Status
from gym_ckpt_grpc.control.work import Work
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import path_to_uri
from gym_ckpt_grpc.testing import QUICK, FakeOwner
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc

CONTROLLER, OBSERVER = "controller-token", "observer-token"


# ---- planes


class RepeatsWork(ControlPlane):
    """A replay of Capture exports once more."""

    async def capture(self, call: Any, scope: Any, *, budget: Any) -> Any:
        reply, replayed = await super().capture(call, scope, budget=budget)
        if replayed:
            return await capture(self._core.owner, scope, Work("again", closed_at=0.0)), False
        return reply, replayed


class ForgetsEpochs(ControlPlane):
    """The epoch fence falls at each Resume."""

    async def resume(self, call: Any, *, keep_write: bool, budget: Any) -> Any:
        reply = await super().resume(call, keep_write=keep_write, budget=budget)
        self._core.machine.epochs.highest = 0
        return reply


class ObeysBeforeChecking(ControlPlane):
    """A refused call raises the epoch."""

    def _ask(self, call: Any, last_check: Any) -> Any:
        if not self._core.machine.epochs.refuses(call.epoch):
            self._core.machine.epochs.obey(call.epoch)
        return super()._ask(call, last_check)


class FencesNothingUnknown(ControlPlane):
    """Resume of an id that is not open here leaves no trace."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        machine, fence = self._core.machine, self._core.machine.fence

        def only_open(checkpoint_id: str) -> None:
            if checkpoint_id == machine.active_checkpoint_id:
                fence(checkpoint_id)

        machine.fence = only_open  # type: ignore[method-assign]


class NeverExpires(ControlPlane):
    """The lease never ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch.look = lambda work: None  # type: ignore[method-assign]


class StaysOpen(ControlPlane):
    """Admission stays open whatever the phase says."""

    def status(self) -> Status:
        return replace(super().status(), closed_for=None)


class TakesAnyArguments(ControlPlane):
    """Calls with other arguments get the recorded reply."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._core.machine._check_arguments = lambda call, current: None  # type: ignore[method-assign]


class VerifiesNothing(ControlPlane):
    """Restore does not compare the manifest's digest."""

    async def restore(self, *args: Any, expected_digest: str, **kwargs: Any) -> Any:
        return await super().restore(*args, expected_digest="", **kwargs)


class ErasesNewerMarks(ControlPlane):
    """Forget takes every mark of the rollout."""

    async def forget(self, call: Any, rollouts: Any, *, budget: Any) -> Any:
        return await super().forget(call, [(rollout, 2**31) for rollout, _ in rollouts], budget=budget)


class FencesFailedRestores(ControlPlane):
    """A Restore that failed cannot be tried again."""

    async def restore(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().restore(call, *args, **kwargs)
        except ControlError:
            self._core.machine.fence(call.checkpoint_id)
            raise


# ---- owners


class AlwaysReady(FakeOwner):
    """Says that it is ready while executions run."""

    def is_ready(self) -> bool:
        return True


class InstallsHalf(FakeOwner):
    """Restores every second record and says nothing."""

    async def activate(self, staged: dict[EpisodeId, Any]) -> None:
        await super().activate(dict(list(staged.items())[::2]))


class KeepsRestored(FakeOwner):
    """Never frees what a restore installed."""

    async def delete_restored(self, episode: EpisodeId) -> None:
        return None


# ---- servicers and interceptors


class NeedsNoDeadline(ParticipantServicer):
    """Takes calls without a deadline."""

    def _time_left(self, context: Any) -> float:
        return 60.0 if context.time_remaining() is None else super()._time_left(context)


class TakesEveryId(ParticipantServicer):
    """Looks at no field of a Resume."""

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        request.context.checkpoint_id = request.context.checkpoint_id or "any"
        return pb.ResumeResponse(participant=self._identity, phase=pb.PHASE_IDLE)


class PlainText(ErrorsInterceptor):
    """Answers with the right status and a text, and no details."""

    async def _abort(self, method: str, error: Exception, context: Any) -> NoReturn:
        assert isinstance(error, ControlError)
        await context.abort(grpc_status(error.code), error.message)
        raise AssertionError


class WrongStatus(ErrorsInterceptor):
    """Answers FAILED_PRECONDITION whatever it was."""

    async def _abort(self, method: str, error: Exception, context: Any) -> NoReturn:
        real = context.abort

        class Context:
            async def abort(self, code: object, *rest: Any) -> None:
                await real(grpc.StatusCode.FAILED_PRECONDITION, *rest)

        await super()._abort(method, error, Context())  # type: ignore[arg-type]


class LetsObserversWrite(AuthServerInterceptor):
    """Every token may do everything."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        reading = "/gymckpt.v1.ParticipantService/GetStatus"
        self._authenticator.check(reading, tuple(handler_call_details.invocation_metadata or ()))
        return await continuation(handler_call_details)


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to be broken. ids: the behaviours of which the kit must report at least the first as broken."""

    ids: Sequence[str]
    plane: type[ControlPlane] = ControlPlane
    owner: Callable[[], FakeOwner] = FakeOwner
    servicer: type[ParticipantServicer] = ParticipantServicer
    errors: type[ErrorsInterceptor] = ErrorsInterceptor
    auth: type[AuthServerInterceptor] = AuthServerInterceptor
    nameless: bool = False
    running: Sequence[str] = field(default_factory=tuple)


FAULTS = {
    "a replay repeats the work": Fault(["C31"], plane=RepeatsWork),
    "the epoch fence falls": Fault(["R13", "C19", "C22"], plane=ForgetsEpochs),
    "a refused call raises the epoch": Fault(["C22"], plane=ObeysBeforeChecking),
    "Resume does not fence unknown ids": Fault(["C17"], plane=FencesNothingUnknown),
    "errors have no identity": Fault(["C24"], nameless=True),
    "a deadline is not required": Fault(["C7"], servicer=NeedsNoDeadline),
    "the lease never ends": Fault(["C120"], plane=NeverExpires),
    "text instead of a typed error": Fault(["C39", "C16"], errors=PlainText),
    "one status for every error": Fault(["C37"], errors=WrongStatus),
    "PREPARED with blockers": Fault(["C44"], owner=AlwaysReady, running=["busy"]),
    "admission and phase disagree": Fault(["R1", "C51"], plane=StaysOpen),
    "a restore installs half": Fault(["C130"], owner=InstallsHalf),
    "restored state is never freed": Fault(["C326", "C93"], owner=KeepsRestored),
    "arguments are not compared": Fault(["C88", "C145"], plane=TakesAnyArguments),
    "digests are not verified": Fault(["C147"], plane=VerifiesNothing),
    "a delayed Forget erases a newer mark": Fault(["C30"], plane=ErasesNewerMarks),
    "a failed Restore fences its id": Fault(["C146"], plane=FencesFailedRestores),
    "ids are not looked at": Fault(["C1"], servicer=TakesEveryId),
    "observers may write": Fault(["C316"], auth=LetsObserversWrite),
}


@asynccontextmanager
async def serve_broken(fault: Fault, root: Path) -> AsyncIterator[tuple[str, list[EpisodeId]]]:
    """Serve a broken participant; gives its address and its expendable episodes."""
    owner = fault.owner()
    identity = ParticipantIdentity(owner.kind, "broken")
    plane = fault.plane(owner, identity, roots=[path_to_uri(str(root))], settings=QUICK)
    tokens = {Role.CONTROLLER: TokenValue(CONTROLLER), Role.OBSERVER: TokenValue(OBSERVER)}
    interceptors: list[grpc.aio.ServerInterceptor] = [
        fault.errors(None if fault.nameless else identity),
        fault.auth(Authenticator(tokens)),
    ]
    server = grpc.aio.server(interceptors=interceptors)
    participant_pb2_grpc.add_ParticipantServiceServicer_to_server(fault.servicer(plane), server)
    port = server.add_insecure_port("127.0.0.1:0")
    expendable = owner.add("spare-1", "spare-2")
    owner.add(*fault.running, running=True)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", expendable
    finally:
        await server.stop(0)
        await plane.close()
