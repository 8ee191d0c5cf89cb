"""The pure machine of one participant: (state, call, now) -> verdict, with no I/O, clock or task in it.

The shell in `control/` asks `decide` what is allowed, does the work, and tells the machine what happened
(`begin`, `move`, `record`, `keep`, `end`). Every refusal is a typed error that leaves the machine unchanged.
Source: protocol section 5; order of checks: C11.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    ControlError,
    IncarnationChanged,
    InvalidPhase,
    OutOfTime,
    StaleCheckpoint,
    StaleController,
)
from gym_ckpt_grpc.protocol.fences import EpochFence, ResumedIds
from gym_ckpt_grpc.protocol.ids import EpisodeScope
from gym_ckpt_grpc.protocol.lease import Lease
from gym_ckpt_grpc.protocol.phases import ARROWS, NEW_ID, RESUMED_ID, SAME_ID, Operation, Phase, Verdict


@dataclass(frozen=True, slots=True)
class CommitArguments:
    """What makes two Commits the same call. The scope is compared as a set."""

    scope: EpisodeScope
    storage_uri: str
    base_checkpoint_uri: str = ""
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One mutating call, as far as legality is concerned.

    arguments: what makes two calls of the operation the same; a retry with other arguments is a conflict.
    left: seconds until the caller's deadline. expected_incarnation: empty if the caller does not pin one.
    """

    operation: Operation
    checkpoint_id: str
    controller_id: str
    epoch: int
    arguments: Hashable = None
    left: float = 60.0
    expected_incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, and for REPLAY of a recorded reply that reply."""

    verdict: Verdict
    reply: Any = None


LastCheck = Callable[[Decision], None]
"""The shell's own check of readiness, the last in the order: it raises a ControlError to refuse the call."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What binds the Commit of records kept after Resume: epoch, scope captured, and the Commit sent before, if any."""

    epoch: int
    scope: Hashable
    commit: Hashable = None


@dataclass(slots=True)
class OpenCheckpoint:
    """The checkpoint or restore that is open: who opened it, its lease, what was asked and what was answered."""

    checkpoint_id: str
    controller_id: str
    epoch: int
    lease: Lease
    arguments: dict[Operation, Hashable] = field(default_factory=dict)
    replies: dict[Operation, Any] = field(default_factory=dict)


class Machine:
    """Phase, open checkpoint and fences of one participant process."""

    def __init__(self, incarnation_id: str, *, resumed_limit: int = 1024) -> None:
        self.incarnation_id = incarnation_id
        self.phase = Phase.IDLE
        self.open: OpenCheckpoint | None = None
        self.epochs = EpochFence()
        self.resumed = ResumedIds(resumed_limit)
        self.kept: dict[str, Kept] = {}
        """Ids resumed with keep_write whose records are still held."""

    @property
    def active_checkpoint_id(self) -> str:
        return self.open.checkpoint_id if self.open else ""

    def decide(self, call: Call, last_check: LastCheck = lambda decision: None) -> Decision:
        """Say what this call may do; raises a typed ControlError if nothing.

        An accepted call's epoch is obeyed from here on; one that is refused, by `last_check` too, changes nothing.
        """
        if call.left <= 0 and call.operation is not Operation.RESUME:
            raise self._refusal(OutOfTime, f"no time was left to begin {call.operation}")
        if self.epochs.refuses(call.epoch):
            raise self._refusal(
                StaleController, f"epoch {call.epoch} is below {self.epochs.highest}, which was obeyed here"
            )
        if call.expected_incarnation and call.expected_incarnation != self.incarnation_id:
            raise self._refusal(
                IncarnationChanged, f"expected process {call.expected_incarnation}, this is {self.incarnation_id}"
            )
        decision = self._by_id(call)
        last_check(decision)
        self.epochs.obey(call.epoch)
        if self.open and self.open.checkpoint_id == call.checkpoint_id:
            self.open.epoch, self.open.controller_id = call.epoch, call.controller_id
        return decision

    def _by_id(self, call: Call) -> Decision:
        if self.open and call.checkpoint_id == self.open.checkpoint_id:
            return self._same_id(call, self.open)
        if call.checkpoint_id in self.resumed:
            return self._resumed_id(call)
        if self.open:
            if call.operation is Operation.RESUME:
                return Decision(Verdict.FENCE)
            raise self._conflict()
        return self._settle(NEW_ID[call.operation], call)

    def _same_id(self, call: Call, current: OpenCheckpoint) -> Decision:
        if call.epoch == current.epoch and call.controller_id != current.controller_id:
            raise self._refusal(
                CheckpointConflict, f"{current.controller_id} has this checkpoint open under the same epoch"
            )
        verdict = SAME_ID[self.phase, call.operation]
        if verdict in (Verdict.REPLAY, Verdict.JOIN) or self._repeats(call, current):
            self._check_arguments(call, current)
        self._check_commit_scope(call, current)
        if verdict is Verdict.REPLAY:
            if call.operation not in current.replies:
                # Nothing recorded: a Commit captured by itself, or its capture still runs. Wait for that.
                return Decision(Verdict.JOIN)
            return Decision(verdict, current.replies[call.operation])
        return self._settle(verdict, call)

    def _repeats(self, call: Call, current: OpenCheckpoint) -> bool:
        repeatable = (Operation.CAPTURE, Operation.COMMIT)
        return call.operation in repeatable and call.operation in current.arguments

    def _check_arguments(self, call: Call, current: OpenCheckpoint) -> None:
        known = current.arguments.get(call.operation, call.arguments)
        if call.operation is not Operation.RESUME and known != call.arguments:
            raise self._refusal(CheckpointConflict, f"{call.operation} was called before with other arguments")

    def _check_commit_scope(self, call: Call, current: OpenCheckpoint) -> None:
        """A Commit writes what was captured, so its scope is that of the Capture, if there was one."""
        captured = current.arguments.get(Operation.CAPTURE)
        if isinstance(call.arguments, CommitArguments) and captured not in (None, call.arguments.scope):
            raise self._refusal(CheckpointConflict, "commit names another scope than the capture")

    def _resumed_id(self, call: Call) -> Decision:
        kept = self.kept.get(call.checkpoint_id)
        # To obey a higher epoch ends what an earlier controller kept, so its Commit is refused before it is obeyed.
        if call.operation is Operation.COMMIT and kept is not None and call.epoch <= kept.epoch:
            self._check_kept(call, kept)
            return Decision(Verdict.KEPT)
        verdict = RESUMED_ID[call.operation]
        if self.open and verdict is Verdict.RUN:
            verdict = Verdict.STALE
        return self._settle(verdict, call)

    def _check_kept(self, call: Call, kept: Kept) -> None:
        if kept.commit is not None and kept.commit != call.arguments:
            raise self._refusal(CheckpointConflict, "commit was called before with other arguments")
        if isinstance(call.arguments, CommitArguments) and kept.scope != call.arguments.scope:
            raise self._refusal(CheckpointConflict, "commit names another scope than the capture")

    def _settle(self, verdict: Verdict, call: Call) -> Decision:
        if verdict is Verdict.PHASE:
            raise self._refusal(InvalidPhase, f"{call.operation} is not legal in phase {self.phase.name}")
        if verdict is Verdict.STALE:
            raise self._refusal(StaleCheckpoint, f"checkpoint {call.checkpoint_id} was already resumed here")
        return Decision(verdict)

    def _conflict(self) -> ControlError:
        return self._refusal(CheckpointConflict, f"checkpoint {self.active_checkpoint_id} is open here")

    def _refusal(self, kind: type[ControlError], message: str) -> ControlError:
        return kind(message, phase=self.phase.name, active_checkpoint_id=self.active_checkpoint_id)

    # What the shell tells the machine.

    def begin(self, call: Call, *, ttl: float, now: float) -> OpenCheckpoint:
        """Open the checkpoint of an accepted Prepare or Restore."""
        phase = Phase.PREPARING if call.operation is Operation.PREPARE else Phase.RESTORING
        self.move(phase)
        self.open = OpenCheckpoint(call.checkpoint_id, call.controller_id, call.epoch, Lease(ttl, now))
        self.open.arguments[call.operation] = call.arguments
        return self.open

    def move(self, phase: Phase) -> None:
        """Change the phase along an arrow of the design; any other change is a bug here, not an input."""
        if (self.phase, phase) not in ARROWS:
            raise AssertionError(f"no arrow from {self.phase.name} to {phase.name}")
        if phase is Phase.PREPARING and self.open:
            self.open.replies.pop(Operation.PREPARE, None)
        self.phase = phase

    def ask(self, operation: Operation, arguments: Hashable) -> None:
        """Fix the arguments of an operation that begins; a retry must repeat them."""
        assert self.open is not None
        self.open.arguments[operation] = arguments

    def unask(self, *operations: Operation) -> None:
        """Forget arguments and replies of operations that left nothing behind."""
        assert self.open is not None
        for operation in operations:
            self.open.arguments.pop(operation, None)
            self.open.replies.pop(operation, None)

    def record(self, operation: Operation, reply: Any) -> None:
        """Keep the reply of a finished operation for its replays."""
        assert self.open is not None
        self.open.replies[operation] = reply

    def keep(self) -> None:
        """The records of the open checkpoint stay after its Resume, for a Commit of the same scope."""
        assert self.open is not None
        asked = self.open.arguments
        kept = Kept(self.open.epoch, asked[Operation.CAPTURE], asked.get(Operation.COMMIT))
        self.kept[self.open.checkpoint_id] = kept

    def ask_kept(self, checkpoint_id: str, arguments: Hashable) -> None:
        """Fix the arguments of the Commit of kept records."""
        self.kept[checkpoint_id] = replace(self.kept[checkpoint_id], commit=arguments)

    def drop_kept(self, checkpoint_id: str) -> None:
        """Kept records are gone: a Commit of the id is stale from here on."""
        self.kept.pop(checkpoint_id, None)

    def fence(self, checkpoint_id: str) -> None:
        """Remember an id as resumed."""
        self.resumed.add(checkpoint_id)

    def end(self, *, fenced: bool) -> None:
        """Back to IDLE; with `fenced` the id counts as resumed. Recorded replies go with it."""
        if fenced and self.open:
            self.fence(self.open.checkpoint_id)
        self.move(Phase.IDLE)
        self.open = None
