"""What one call of an operation tells telemetry: its span, its outcome, and whether it did anything itself.

Kept out of the control plane's own text as one decorator. Source: telemetry sections 2 and 3.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar, cast

from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.work import Captured, CommitReply, PrepareReply, RestoreReply, RetireReply
from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.protocol.machine import Call
from gym_ckpt_grpc.protocol.phases import Operation, Phase
from gym_ckpt_grpc.telemetry import Timed
from gym_ckpt_grpc.telemetry import attributes as at


class _Plane(Protocol):
    _core: Core


Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


def recorded(method: Method) -> Method:
    """Record each call of a control plane's operation: once for what it did, as an event if that was nothing."""
    names = list(inspect.signature(method).parameters)[2:]  # after self and call

    @functools.wraps(method)
    async def operation(self: _Plane, call: Call, *args: object, **named: object) -> object:
        core = self._core
        with core.recorder.operation(call.operation.value, checkpoint_id=call.checkpoint_id) as timed:
            _describe_call(timed, call, dict(zip(names, args, strict=False)) | named)
            try:
                answer = await method(self, call, *args, **named)
            finally:
                timed.set(at.PHASE, core.machine.phase.name)
            reply = answer[0] if isinstance(answer, tuple) else answer
            _describe_reply(timed, reply)
            if isinstance(reply, PrepareReply) and reply.phase is not Phase.PREPARED:
                core.recorder.event("prepare_not_ready")
            elif not core.untold.first(call):
                timed.replayed()
            return answer

    return cast(Method, operation)


def _describe_call(timed: Timed, call: Call, given: Mapping[str, Any]) -> None:
    """What the call asks for: known also where it is refused."""
    if call.operation is Operation.RETIRE:
        timed.set(at.EPISODES, len(given["episodes"]))
    elif call.operation is Operation.FORGET:
        timed.set(at.ROLLOUTS, len(given["rollouts"]))
    elif call.operation is Operation.RESTORE:
        timed.set(at.SOURCE, given["location"].checkpoint_id)


def _describe_reply(timed: Timed, reply: object) -> None:
    match reply:
        case PrepareReply():
            timed.set(at.PHASE, reply.phase.name)
            timed.set(at.BLOCKERS, reply.report.blocker_count)  # what is listed beside it is cut
            timed.set(at.RESTARTS, reply.report.restart_count)
            if reply.phase is not Phase.PREPARED:
                timed.not_ready()
        case Captured():
            timed.set(at.RECORDS, len(reply.records))
        case CommitReply() | RestoreReply():
            timed.set(at.RECORDS, reply.record_count)
            timed.set(at.BYTES, reply.bytes)
        case RetireReply() if any(problem is not None for _, problem in reply.outcomes):
            timed.failed(ErrorCode.RETIRE_INCOMPLETE.name)
