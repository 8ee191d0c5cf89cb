"""Every span and every instrument: what is emitted, where, with which attributes.

Call sites name these objects, and the reference page is made from them, so that neither can say something else.
Source: telemetry sections 2 and 3.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gym_ckpt_grpc.telemetry import attributes as at


class Group(enum.StrEnum):
    """Groups of spans that can be switched on; `GYM_CKPT_SPAN_GROUPS` names them or a preset."""

    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class SpanType:
    """One kind of span. where: who makes it. parent: the usual parent's name, empty for the caller's span."""

    name: str
    where: str
    meaning: str
    attributes: tuple[str, ...] = ()
    parent: str = ""
    group: Group = Group.CHECKPOINT


class Kind(enum.StrEnum):
    """Kinds of instruments."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "observable gauge"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One instrument. buckets: upper bounds of a histogram, in its unit."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus, as the `/metrics` of `configure` has it; a histogram's series have suffixes."""
        name, unit = self.name.replace(".", "_"), _PROMETHEUS_UNITS.get(prometheus_unit(self.name, self.unit), "")
        return name if not unit or name.endswith(unit) else f"{name}{unit}"


_PROMETHEUS_UNITS = {"s": "_seconds", "ms": "_milliseconds", "By": "_bytes"}


def prometheus_unit(name: str, unit: str) -> str:
    """The unit that a Prometheus exporter is to see, to make a suffix of it: none where a name of ours has it."""
    return "" if name.startswith("gym.checkpoint.") else unit


# ---- spans ---------------------------------------------------------------------------------------------------

_WHO = (at.ID, at.PARTICIPANT_KIND, at.SERVICE, at.INSTANCE, at.OUTCOME, at.PHASE, at.REPLAYED)
_CUTS = (at.CALLS_CUT, at.CALLS_FINISHED, at.CALLS_NOT_FOUND, at.CALLS_UNCUTTABLE, at.CALLS_FAILED)


def _operation(name: str, meaning: str, *more: str) -> SpanType:
    return SpanType(f"gym.checkpoint.{name}", "participant", meaning, (*_WHO, *more))


def _step(name: str, parent: str, meaning: str, *more: str, where: str = "participant") -> SpanType:
    return SpanType(f"gym.checkpoint.{name}", where, meaning, (at.OUTCOME, *more), f"gym.checkpoint.{parent}")


PREPARE = _operation("prepare", "closing admission and waiting for a safe cut", at.BLOCKERS, at.RESTARTS)
CAPTURE = _operation("capture", "freezing the records", at.RECORDS)
COMMIT = _operation("commit", "writing the records", at.RECORDS, at.BYTES)
RESTORE = _operation("restore", "reading and installing records", at.RECORDS, at.BYTES, at.SOURCE)
RESUME = _operation("resume", "opening admission")
RETIRE = _operation("retire", "stopping attempts for good", at.EPISODES)
FORGET = _operation("forget", "ending refusals", at.ROLLOUTS)
LEASE_REOPEN = _operation("lease_reopen", "opening admission after a lease ran out")

OPERATIONS: dict[str, SpanType] = {
    span.name.removeprefix("gym.checkpoint."): span
    for span in (PREPARE, CAPTURE, COMMIT, RESTORE, RESUME, RETIRE, FORGET, LEASE_REOPEN)
}
"""Name of a participant's operation -> its span."""

WAIT_READY = _step("wait_ready", "prepare", "the wait for a safe cut")
EXPORT = _step(
    "export", "capture", "the owner's hook freezes records (a child of commit where that captures)", at.RECORDS
)
WRITE = _step("write", "commit", "the file is written and synced", at.RECORDS, at.BYTES)
CLEANUP = _step("cleanup", "commit", "restored episodes outside the scope are freed", at.EPISODES)
READ = _step("read", "restore", "the part is read and verified", at.RECORDS, at.BYTES)
INSTALL = _step("install", "restore", "records are made live", at.RECORDS)
GENERATION_CUT = SpanType(
    "gym.checkpoint.generation_cut",
    "policy model",
    "one sweep of one inference worker",
    (at.OUTCOME, at.BACKEND, at.SWEEP, at.CALLS, *_CUTS),
    "gym.checkpoint.prepare",
)

_FLEET = (at.ID, at.PARTICIPANTS, at.OUTCOME)


def _coordinate(name: str, meaning: str, *more: str) -> SpanType:
    return SpanType(
        f"gym.checkpoint.coordinate.{name}",
        "coordinator",
        meaning,
        (*_FLEET, *more),
        "gym.checkpoint.coordinate.restoring" if name == "restore" else "gym.checkpoint.coordinate.checkpoint",
    )


COORDINATE_CHECKPOINT = SpanType(
    "gym.checkpoint.coordinate.checkpoint",
    "coordinator",
    "one checkpoint, from the entering of its block to its end: the root of its trace unless the caller has a span",
    (at.ID, at.RESULT, at.OUTCOME),
)
COORDINATE_RESTORING = SpanType(
    "gym.checkpoint.coordinate.restoring",
    "coordinator",
    "one restore, from the entering of its block to its end; linked to the trace of the checkpoint it restores",
    (at.ID, at.SOURCE, at.RESULT, at.OUTCOME),
)
COORDINATE_ENTERING = SpanType(
    "gym.checkpoint.coordinate.entering",
    "coordinator",
    "the start of a coordinator: it looks at the fleet, claims its epoch, and ends what it finds open",
    (at.PARTICIPANTS, at.OUTCOME),
)
COORDINATE_PREPARE = _coordinate("prepare", "Prepare of the fleet, in stages", at.STOPPED_AT)
COORDINATE_CAPTURE = _coordinate("capture", "Capture of the fleet", at.REPLAYED)
COORDINATE_COMMIT = _coordinate("commit", "Commit of the fleet")
COORDINATE_PUBLISH = _coordinate("publish", "the aggregate manifest and the sequence entry", at.REPLAYED)
COORDINATE_RESUME = _coordinate(
    "resume", "Resume of the fleet; an error where any participant stayed closed", at.REPLAYED
)
COORDINATE_RESTORE = _coordinate("restore", "Restore of the fleet")
COORDINATE_RETIRE = _coordinate("retire", "Retire over the fleet", at.EPISODES)
COORDINATE_FORGET = _coordinate("forget", "Forget over the fleet", at.ROLLOUTS)

PREPARE_STAGES: dict[str, SpanType] = {
    kind: SpanType(
        f"gym.checkpoint.coordinate.prepare.{kind}",
        "coordinator",
        f"the {kind} stage of a prepare, also where it has no member or was not reached",
        (at.STAGE, at.PARTICIPANTS, at.OUTCOME),
        "gym.checkpoint.coordinate.prepare",
    )
    for kind in ("environment", "policy_model", "agent", "resources")
}
"""Kind -> span of its stage."""

RPC_SERVER = SpanType(
    "{rpc.method}", "every server", "one call served", (at.RPC_SYSTEM, at.RPC_METHOD, at.RPC_STATUS, at.ERROR_TYPE)
)
RPC_CLIENT = SpanType(
    "{rpc.method}", "every client", "one call made", (at.RPC_SYSTEM, at.RPC_METHOD, at.RPC_STATUS, at.ERROR_TYPE)
)

SPANS: tuple[SpanType, ...] = (
    *OPERATIONS.values(),
    WAIT_READY,
    EXPORT,
    WRITE,
    CLEANUP,
    READ,
    INSTALL,
    GENERATION_CUT,
    COORDINATE_CHECKPOINT,
    COORDINATE_RESTORING,
    COORDINATE_ENTERING,
    COORDINATE_PREPARE,
    *PREPARE_STAGES.values(),
    COORDINATE_CAPTURE,
    COORDINATE_COMMIT,
    COORDINATE_PUBLISH,
    COORDINATE_RESUME,
    COORDINATE_RESTORE,
    COORDINATE_RETIRE,
    COORDINATE_FORGET,
    RPC_SERVER,
    RPC_CLIENT,
)

# ---- instruments ---------------------------------------------------------------------------------------------

_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
_DONE = (at.OPERATION, at.PARTICIPANT_KIND, at.OUTCOME)
_PLACE = (at.PARTICIPANT_KIND, at.SERVICE)


def _histogram(name: str, meaning: str, *attributes: str) -> Instrument:
    return Instrument(f"gym.checkpoint.{name}", Kind.HISTOGRAM, "ms", meaning, attributes, _MS)


def _counter(name: str, unit: str, meaning: str, *attributes: str) -> Instrument:
    return Instrument(f"gym.checkpoint.{name}", Kind.COUNTER, unit, meaning, attributes)


def _gauge(name: str, unit: str, meaning: str, *more: str) -> Instrument:
    return Instrument(f"gym.checkpoint.{name}", Kind.GAUGE, unit, meaning, (*_PLACE, *more))


OPERATION_DURATION = _histogram(
    "operation_duration_ms", "each operation once; a repeat that is replayed is not", *_DONE
)
STEP_DURATION = _histogram("step_duration_ms", "each step once", at.STEP, at.PARTICIPANT_KIND, at.OUTCOME)
RECORDS_TOTAL = _counter(
    "records_total", "1", "records written and installed, each once", at.OPERATION, at.PARTICIPANT_KIND
)
BYTES_TOTAL = _counter("bytes_total", "By", "bytes written and read, each once", at.OPERATION, at.PARTICIPANT_KIND)
CONTROL_ERRORS = _counter(
    "control_errors_total", "1", "failed control calls, where their status is made", at.RPC_METHOD, at.ERROR_CODE
)
ADMISSION_REFUSED = _counter(
    "admission_refused_total",
    "1",
    "requests of the data plane that were refused, where the refusal becomes an answer; they are no control errors",
    at.PARTICIPANT_KIND,
    at.ERROR_CODE,
)
ADMISSION_HELD = _histogram(
    "admission_held_ms",
    "how long a request of the data plane was held, whatever became of it; once each time it is held",
    at.PARTICIPANT_KIND,
)
EVENTS_TOTAL = _counter(
    "events_total",
    "1",
    "what happened, once each; `operation` with `replayed` and `preempted`, `disposition` with `generation_cut`",
    at.EVENT,
    at.PARTICIPANT_KIND,
    at.OPERATION,
    at.DISPOSITION,
)
ATTEMPTS_TOTAL = _counter(
    "attempts_total", "1", "times that an export, write or install was begun", at.STEP, at.PARTICIPANT_KIND
)
PAUSE = _histogram("pause_ms", "from admission closed to admission open", at.PARTICIPANT_KIND, at.CAUSE)
WORK_TOTAL = _counter(
    "work_total",
    "1",
    "what checkpoints saved and what was lost, each piece once, however many checkpoints have it. Tokens are those of "
    "policy models: of captured calls, and of cuts (the only ones that are redone). Turns of an environment are the "
    "steps between its boundaries, of which only those protected are known; turns of an agent are activations with an "
    "index: do not add them up. What one process does not know, such as the turns of a run that starts over, is not "
    "counted",
    at.WORK,
    at.FATE,
    at.PARTICIPANT_KIND,
)
WATCHDOG_TOTAL = _counter(
    "slow_tasks_total",
    "1",
    "background tasks that ran longer than slow_task_warn_seconds, once each",
    at.TASK,
    at.PARTICIPANT_KIND,
)
SPANS_DROPPED = _counter("spans_dropped_total", "1", "spans that were lost: exporting was too slow, or failed")

PHASE = _gauge("phase", "1", "1 for the phase it is in, 0 for the others", at.PHASE)
CLOSED_SECONDS = _gauge("closed_seconds", "s", "since admission was closed; 0 while it is open")
LEASE_REMAINING = _gauge("lease_remaining_seconds", "s", "of the open checkpoint's lease; nothing while none is open")
MARKS_HELD = _gauge("marks_held", "1", "retired rollouts that are still refused")
OLDEST_MARK_AGE = _gauge("oldest_mark_age_seconds", "s", "of the oldest such mark; 0 if there is none")
BLOCKERS = _gauge("blockers", "1", "what blocks a safe cut now")
OLDEST_BLOCKER_AGE = _gauge("oldest_blocker_age_seconds", "s", "of the oldest blocker; 0 if there is none")
RESTORED_PENDING = _gauge("restored_pending", "1", "restored episodes that nothing has started yet")
HELD_REQUESTS = _gauge("held_requests", "1", "requests of the data plane that wait at the gate")
HELD_RESPONSES = _gauge("held_responses", "1", "replies that wait for admission to open, and streams that stand still")
OLDEST_TASK_AGE = _gauge("oldest_task_age_seconds", "s", "of the oldest background task of a kind; 0 if none", at.TASK)
LOOP_LAG = _gauge("loop_lag_ms", "ms", "longest lag of the event loop in the last checkpoint")

RPC_DURATION: dict[str, Instrument] = {
    side: Instrument(
        f"rpc.{side}.call.duration",
        Kind.HISTOGRAM,
        "s",
        f"calls, as the {side} saw them (stable RPC conventions)",
        (at.RPC_SYSTEM, at.RPC_METHOD, at.RPC_STATUS, at.ERROR_TYPE),
        _SECONDS,
    )
    for side in ("server", "client")
}

GAUGES: tuple[Instrument, ...] = (
    PHASE,
    CLOSED_SECONDS,
    LEASE_REMAINING,
    MARKS_HELD,
    OLDEST_MARK_AGE,
    BLOCKERS,
    OLDEST_BLOCKER_AGE,
    RESTORED_PENDING,
    HELD_REQUESTS,
    HELD_RESPONSES,
    OLDEST_TASK_AGE,
    LOOP_LAG,
)
INSTRUMENTS: tuple[Instrument, ...] = (
    OPERATION_DURATION,
    STEP_DURATION,
    RECORDS_TOTAL,
    BYTES_TOTAL,
    CONTROL_ERRORS,
    ADMISSION_REFUSED,
    ADMISSION_HELD,
    EVENTS_TOTAL,
    ATTEMPTS_TOTAL,
    PAUSE,
    WORK_TOTAL,
    WATCHDOG_TOTAL,
    SPANS_DROPPED,
    *GAUGES,
    *RPC_DURATION.values(),
)
