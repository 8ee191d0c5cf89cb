"""The pure machine: every phase x operation x class of id x class of epoch, against a table written out here."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    ControlError,
    ErrorCode,
    IncarnationChanged,
    InvalidPhase,
    OutOfTime,
    StaleCheckpoint,
    StaleController,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.protocol.machine import Call, CommitArguments, Decision, Machine
from gym_ckpt_grpc.protocol.phases import ARROWS, PHASES, SAME_ID, Operation, Phase, Verdict

P, S, C, L = "INVALID_PHASE", "STALE_CHECKPOINT", "CHECKPOINT_CONFLICT", "STALE_CONTROLLER"
SCOPE = EpisodeScope.of([EpisodeId("a"), EpisodeId("b")])
ARGUMENTS: dict[Operation, Any] = {
    Operation.PREPARE: 30.0,
    Operation.CAPTURE: SCOPE,
    Operation.COMMIT: CommitArguments(SCOPE, "/root/checkpoints/open"),
    Operation.RESTORE: ("uri", frozenset({("a", 1)})),
}

# The table of control section 1, columns: prepare capture commit resume restore retire forget renew_lease.
SAME = {
    Phase.PREPARING: ("join", P, P, "run", P, "run", P, "run"),
    Phase.PREPARED: ("replay", "run", "run", "run", P, "run", P, "run"),
    Phase.CAPTURED: ("replay", "replay", "run", "run", P, P, P, "run"),
    Phase.COMMITTING: ("replay", "replay", "join", "run", P, P, P, "run"),
    Phase.COMMITTED: ("replay", "replay", "replay", "run", P, P, P, "run"),
    Phase.RESTORING: (P, P, P, "run", "join", "wait", P, "run"),
    Phase.RESTORED: (P, P, P, "run", "replay", "run", "run", "run"),
    Phase.RESUMING: (P, P, P, "join", P, P, P, P),
}
NEW = ("run", P, P, "fence", "run", "run", "run", P)
RESUMED_IN_IDLE = (S, S, S, "replay", S, "run", "run", S)
RESUMED_WHILE_OPEN = (S, S, S, "replay", S, S, S, S)
OTHER = (C, C, C, "fence", C, C, C, C)

EPOCH = 5
ROADS: dict[Phase, tuple[Phase, ...]] = {
    Phase.IDLE: (),
    Phase.PREPARING: (),
    Phase.PREPARED: (Phase.PREPARED,),
    Phase.CAPTURED: (Phase.PREPARED, Phase.CAPTURED),
    Phase.COMMITTING: (Phase.PREPARED, Phase.CAPTURED, Phase.COMMITTING),
    Phase.COMMITTED: (Phase.PREPARED, Phase.CAPTURED, Phase.COMMITTING, Phase.COMMITTED),
    Phase.RESTORING: (),
    Phase.RESTORED: (Phase.RESTORED,),
    Phase.RESUMING: (Phase.PREPARED, Phase.RESUMING),
}


def call(operation: Operation, checkpoint_id: str = "open", **changes: Any) -> Call:
    values: dict[str, Any] = {"controller_id": "me", "epoch": EPOCH, "arguments": ARGUMENTS.get(operation), **changes}
    return Call(operation, checkpoint_id, **values)


def machine_in(phase: Phase) -> Machine:
    """A machine in this phase, with everything recorded that a real one would have; `old` was resumed."""
    machine = Machine("here")
    machine.epochs.obey(EPOCH)
    machine.fence("old")
    if phase is Phase.IDLE:
        return machine
    first = Operation.RESTORE if phase in (Phase.RESTORING, Phase.RESTORED) else Operation.PREPARE
    machine.begin(call(first), ttl=30, now=0)
    for step in ROADS[phase]:
        machine.move(step)
        if step is Phase.PREPARED:
            machine.record(Operation.PREPARE, "prepared")
        elif step is Phase.CAPTURED:
            machine.ask(Operation.CAPTURE, SCOPE)
            machine.record(Operation.CAPTURE, "captured")
        elif step is Phase.COMMITTING:
            machine.ask(Operation.COMMIT, ARGUMENTS[Operation.COMMIT])
        elif step is Phase.COMMITTED:
            machine.record(Operation.COMMIT, "committed")
        elif step is Phase.RESTORED:
            machine.record(Operation.RESTORE, "restored")
    assert machine.phase is phase
    return machine


def snapshot(machine: Machine) -> object:
    """All that a machine is, for comparing before and after."""
    opened = machine.open
    return copy.deepcopy(
        (
            machine.phase,
            machine.epochs.highest,
            list(machine.resumed._ids),
            machine.kept,
            opened and (opened.checkpoint_id, opened.controller_id, opened.epoch, opened.arguments, opened.replies),
        )
    )


def outcome(machine: Machine, asked: Call) -> str:
    """The verdict's word or the code's name; a refusal must leave the machine as it was."""
    before = snapshot(machine)
    try:
        return machine.decide(asked).verdict.value
    except ControlError as refusal:
        told = (refusal.phase, refusal.active_checkpoint_id)
        name = refusal.code.name
    assert told == (machine.phase.name, machine.active_checkpoint_id)
    assert snapshot(machine) == before
    return name


def expected(phase: Phase, operation: Operation, which: str, epoch: str) -> str:
    """What the design says, before arguments are compared."""
    column = list(Operation).index(operation)
    if epoch in ("lower", "zero"):
        return L
    if which == "same" and phase is not Phase.IDLE:
        return C if epoch == "equal, other controller" else SAME[phase][column]
    if which == "resumed":
        return (RESUMED_IN_IDLE if phase is Phase.IDLE else RESUMED_WHILE_OPEN)[column]
    return (NEW if phase is Phase.IDLE else OTHER)[column]


IDS = {"same": "open", "new": "fresh", "resumed": "old", "none": ""}
EPOCHS: dict[str, dict[str, Any]] = {
    "lower": {"epoch": EPOCH - 1},
    "zero": {"epoch": 0},
    "equal, same controller": {},
    "equal, other controller": {"controller_id": "other"},
    "higher": {"epoch": EPOCH + 1, "controller_id": "other"},
}
CELLS = [
    (phase, operation, which, epoch)
    for phase, operation, which, epoch in itertools.product(PHASES, Operation, IDS, EPOCHS)
    if which != "none" or operation in (Operation.RETIRE, Operation.FORGET)
]


@pytest.mark.behaviour("C10", "C12", "C14", "C15", "C16", "C17", "C19", "C21", "C61", "C67")
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_every_cell_of_the_legality_table(phase: Phase) -> None:
    """Phase x operation x class of id x class of epoch: the designed verdict or refusal, and no other."""
    for cell in CELLS:
        if cell[0] is phase:
            _, operation, which, epoch = cell
            asked = call(operation, IDS[which], **EPOCHS[epoch])
            assert outcome(machine_in(phase), asked) == expected(*cell), cell


def test_the_walk_is_complete() -> None:
    """The walk has every phase and operation, and the machine's table has exactly the designed pairs."""
    assert {(cell[0], cell[1]) for cell in CELLS} == set(itertools.product(PHASES, Operation))
    assert set(SAME_ID) == set(itertools.product(SAME, Operation))


@pytest.mark.behaviour("C15")
def test_the_same_history_gives_the_same_decision() -> None:
    """Nothing but the calls and `now` goes into a decision."""
    for phase, operation in itertools.product(PHASES, Operation):
        assert outcome(machine_in(phase), call(operation)) == outcome(machine_in(phase), call(operation))


@pytest.mark.behaviour("C31")
@pytest.mark.parametrize(
    ("phase", "operation", "reply"),
    [
        (Phase.PREPARED, Operation.PREPARE, "prepared"),
        (Phase.COMMITTED, Operation.PREPARE, "prepared"),
        (Phase.CAPTURED, Operation.CAPTURE, "captured"),
        (Phase.COMMITTING, Operation.CAPTURE, "captured"),
        (Phase.COMMITTED, Operation.CAPTURE, "captured"),
        (Phase.COMMITTED, Operation.COMMIT, "committed"),
        (Phase.RESTORED, Operation.RESTORE, "restored"),
    ],
)
def test_recorded_replies_are_replayed(phase: Phase, operation: Operation, reply: str) -> None:
    """Equal arguments get the recorded reply, others a conflict."""
    assert machine_in(phase).decide(call(operation)).reply == reply
    assert outcome(machine_in(phase), call(operation, arguments="others")) == C


@pytest.mark.behaviour("C31", "C33", "C87", "C88", "C89")
@pytest.mark.parametrize("phase", [Phase.COMMITTING, Phase.COMMITTED, Phase.CAPTURED], ids=lambda phase: phase.name)
def test_commits_are_compared_by_all_their_arguments(phase: Phase) -> None:
    """Another order of the scope is the same call; another scope, uri, base or stop is a conflict."""
    machine = machine_in(Phase.COMMITTING)
    if phase is not Phase.COMMITTING:
        machine.move(phase)
    turned = EpisodeScope.of([EpisodeId("b"), EpisodeId("a")])
    uri = "/root/checkpoints/open"
    assert outcome(machine, call(Operation.COMMIT, arguments=CommitArguments(turned, uri))) != C
    for other in (
        CommitArguments(EpisodeScope.of([]), uri),
        CommitArguments(EpisodeScope.all(), uri),
        CommitArguments(SCOPE, "/elsewhere/checkpoints/open"),
        CommitArguments(SCOPE, uri, "/root/checkpoints/base"),
        CommitArguments(SCOPE, uri, stop=True),
    ):
        assert outcome(machine, call(Operation.COMMIT, arguments=other)) == C


def test_a_commit_has_the_scope_of_its_capture() -> None:
    """In CAPTURED a first Commit with another scope is a conflict."""
    other = CommitArguments(EpisodeScope.of([EpisodeId("a")]), "/root/checkpoints/open")
    assert outcome(machine_in(Phase.CAPTURED), call(Operation.COMMIT, arguments=other)) == C


def test_a_running_capture_is_joined_by_equal_scopes_only() -> None:
    """In PREPARED, while records are being frozen."""
    machine = machine_in(Phase.PREPARED)
    machine.ask(Operation.CAPTURE, SCOPE)
    assert outcome(machine, call(Operation.CAPTURE)) == "run"
    assert outcome(machine, call(Operation.CAPTURE, arguments=EpisodeScope.all())) == C
    other = CommitArguments(EpisodeScope.all(), "/root/checkpoints/open")
    assert outcome(machine, call(Operation.COMMIT, arguments=other)) == C


@pytest.mark.behaviour("C32")
def test_a_prepare_that_ended_preparing_is_waited_for_again() -> None:
    """Without a recorded reply, PREPARED joins; falling back drops the reply."""
    machine = machine_in(Phase.PREPARED)
    machine.move(Phase.PREPARING)
    assert outcome(machine, call(Operation.PREPARE)) == "join"
    machine.move(Phase.PREPARED)
    assert outcome(machine, call(Operation.PREPARE)) == "join"


@pytest.mark.behaviour("C115")
@pytest.mark.parametrize("phase", [Phase.CAPTURED, Phase.COMMITTING])
def test_kept_records_take_the_same_commit_only(phase: Phase) -> None:
    """After Resume with records kept: a Commit of the captured scope, and of the arguments sent before, is KEPT."""
    machine = machine_in(phase)
    machine.keep()
    machine.move(Phase.RESUMING)
    machine.end(fenced=True)
    asked = ARGUMENTS[Operation.COMMIT]
    assert outcome(machine, call(Operation.COMMIT)) == "kept"
    other_scope = CommitArguments(EpisodeScope.all(), asked.storage_uri)
    assert outcome(machine, call(Operation.COMMIT, arguments=other_scope)) == C
    other_place = CommitArguments(SCOPE, "/other/checkpoints/open")
    assert outcome(machine, call(Operation.COMMIT, arguments=other_place)) == (
        C if phase is Phase.COMMITTING else "kept"
    )
    machine.ask_kept("open", asked)
    assert outcome(machine, call(Operation.COMMIT, arguments=other_place)) == C
    for operation in Operation:
        if operation is not Operation.COMMIT:
            assert outcome(machine, call(operation)) == RESUMED_IN_IDLE[list(Operation).index(operation)]
    machine.drop_kept("open")
    assert outcome(machine, call(Operation.COMMIT)) == S


ORDER = (OutOfTime, StaleController, IncarnationChanged, StaleCheckpoint, CheckpointConflict, InvalidPhase)


@pytest.mark.behaviour("C11", "C25")
def test_the_order_of_checks() -> None:
    """Deadline, epoch, incarnation, recorded reply, resumed id, active id, phase, readiness: the first is told."""

    def not_ready(decision: Decision) -> None:
        raise InvalidPhase("not ready")

    faults: list[dict[str, Any]] = [
        {"left": 0.0},
        {"epoch": EPOCH - 1},
        {"expected_incarnation": "elsewhere"},
    ]
    told = [OutOfTime, StaleController, IncarnationChanged]
    for index in range(len(faults)):
        changes = {key: value for fault in faults[index:] for key, value in fault.items()}
        for phase, which in itertools.product(PHASES, IDS.values()):
            with pytest.raises(told[index]):
                machine_in(phase).decide(call(Operation.COMMIT, which, **changes), not_ready)
    resumed = machine_in(Phase.PREPARED)
    with pytest.raises(StaleCheckpoint):
        resumed.decide(call(Operation.COMMIT, "old"), not_ready)
    with pytest.raises(CheckpointConflict):
        resumed.decide(call(Operation.COMMIT, "fresh"), not_ready)
    with pytest.raises(InvalidPhase, match="not legal"):
        machine_in(Phase.PREPARING).decide(call(Operation.COMMIT), not_ready)
    with pytest.raises(InvalidPhase, match="not ready"):
        resumed.decide(call(Operation.COMMIT), not_ready)
    assert machine_in(Phase.COMMITTED).decide(call(Operation.COMMIT)).verdict is Verdict.REPLAY


@pytest.mark.behaviour("C22")
def test_a_refused_call_is_not_obeyed() -> None:
    """A higher epoch counts only once its call was accepted, the shell's own last check included."""

    def not_ready(decision: Decision) -> None:
        raise InvalidPhase("not ready")

    machine = machine_in(Phase.PREPARED)
    for asked in (call(Operation.PREPARE, "fresh", epoch=9), call(Operation.FORGET, epoch=9)):
        with pytest.raises(ControlError):
            machine.decide(asked)
    with pytest.raises(InvalidPhase):
        machine.decide(call(Operation.COMMIT, epoch=9), not_ready)
    assert machine.epochs.highest == EPOCH
    machine.decide(call(Operation.RENEW_LEASE, epoch=9, controller_id="next"))
    assert machine.epochs.highest == 9
    assert machine.open is not None
    assert (machine.open.epoch, machine.open.controller_id) == (9, "next")


@pytest.mark.behaviour("C22")
def test_epoch_zero_is_obeyed_until_a_higher_one_was() -> None:
    """By hand, and only while nobody else was there."""
    machine = Machine("here")
    assert machine.decide(call(Operation.RETIRE, "", epoch=0)).verdict is Verdict.RUN
    machine.decide(call(Operation.RETIRE, "", epoch=1))
    with pytest.raises(StaleController):
        machine.decide(call(Operation.RETIRE, "", epoch=0))


@pytest.mark.behaviour("C20")
def test_two_controllers_of_one_checkpoint() -> None:
    """The higher epoch is obeyed, each call of the lower one is refused from then on."""
    machine = machine_in(Phase.PREPARED)
    machine.decide(call(Operation.RENEW_LEASE, epoch=EPOCH + 1, controller_id="next"))
    for operation in Operation:
        assert outcome(machine, call(operation)) == L


@pytest.mark.behaviour("C23")
def test_an_id_that_dropped_from_memory_is_fenced_by_its_epoch() -> None:
    """The bounded memory is enough, since the epoch fences the rest."""
    machine = Machine("here", resumed_limit=64)
    for number in range(65):
        machine.decide(call(Operation.RESUME, f"c{number}", epoch=number + 1))
        machine.fence(f"c{number}")
    assert outcome(machine, call(Operation.PREPARE, "c0", epoch=1)) == L
    assert outcome(machine, call(Operation.PREPARE, "c1", epoch=65)) == S


@pytest.mark.behaviour("C149")
def test_out_of_time_is_told_before_anything_else_but_not_to_a_resume() -> None:
    """Every operation but Resume is refused when no time is left."""
    for phase, operation in itertools.product(PHASES, Operation):
        told = outcome(machine_in(phase), call(operation, left=0.0))
        if operation is Operation.RESUME:
            assert told == ("fence" if phase is Phase.IDLE else SAME[phase][3])
        else:
            assert told == ErrorCode.DEADLINE_EXCEEDED.name


@pytest.mark.behaviour("C35")
def test_replies_go_with_the_end_of_a_checkpoint() -> None:
    """Fenced or not, nothing recorded outlives it."""
    machine = machine_in(Phase.COMMITTED)
    machine.move(Phase.RESUMING)
    machine.end(fenced=True)
    assert machine.open is None
    assert outcome(machine, call(Operation.COMMIT)) == S
    failed = machine_in(Phase.RESTORING)
    failed.end(fenced=False)
    assert outcome(failed, call(Operation.RESTORE)) == "run"


def test_only_designed_arrows() -> None:
    """Any other change of phase is a fault of the shell and raises."""
    for source, target in itertools.product(PHASES, PHASES):
        machine = machine_in(source)
        if (source, target) in ARROWS:
            machine.move(target)
        else:
            with pytest.raises(AssertionError):
                machine.move(target)
    assert all(
        target is Phase.RESUMING or source is not Phase.RESUMING
        for source, target in ARROWS - {(Phase.RESUMING, Phase.IDLE)}
    )
