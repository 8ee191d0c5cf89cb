"""Every attribute that a span or a metric of ours can have: the one place where its name is spelled.

No name contains `key` or `token`: helpers of NeMo Gym redact what does. Source: telemetry section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PREFIX: Final = "nemo.gym.checkpoint."

ID: Final = PREFIX + "id"
OPERATION: Final = PREFIX + "operation"
STEP: Final = PREFIX + "step"
PARTICIPANT_KIND: Final = PREFIX + "participant_kind"
SERVICE: Final = PREFIX + "service"
INSTANCE: Final = PREFIX + "instance"
OUTCOME: Final = PREFIX + "outcome"
PHASE: Final = PREFIX + "phase"
REPLAYED: Final = PREFIX + "replayed"
BLOCKERS: Final = PREFIX + "blockers"
RESTARTS: Final = PREFIX + "restarts"
RECORDS: Final = PREFIX + "records"
BYTES: Final = PREFIX + "bytes"
EPISODES: Final = PREFIX + "episodes"
ROLLOUTS: Final = PREFIX + "rollouts"
BACKEND: Final = PREFIX + "backend"
SWEEP: Final = PREFIX + "sweep"
CALLS: Final = PREFIX + "calls"
CALLS_CUT: Final = PREFIX + "calls_cut"
CALLS_FINISHED: Final = PREFIX + "calls_finished"
CALLS_NOT_FOUND: Final = PREFIX + "calls_not_found"
CALLS_UNCUTTABLE: Final = PREFIX + "calls_uncuttable"
CALLS_FAILED: Final = PREFIX + "calls_failed"
PARTICIPANTS: Final = PREFIX + "participants"
STOPPED_AT: Final = PREFIX + "stopped_at"
STAGE: Final = PREFIX + "stage"
RESULT: Final = PREFIX + "result"
SOURCE: Final = PREFIX + "source"
ERROR_CODE: Final = PREFIX + "error_code"
EVENT: Final = PREFIX + "event"
DISPOSITION: Final = PREFIX + "disposition"
CAUSE: Final = PREFIX + "cause"
WORK: Final = PREFIX + "work"
FATE: Final = PREFIX + "fate"
TASK: Final = PREFIX + "task"

RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.response.status_code"
ERROR_TYPE: Final = "error.type"


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute, for the page that lists them."""

    name: str
    meaning: str


ATTRIBUTES: dict[str, Attribute] = {
    name: Attribute(name, meaning)
    for name, meaning in {
        ID: "the checkpoint or restore; spans only",
        OPERATION: "`prepare`, `capture`, `commit`, `restore`, `resume`, `retire`, `forget`, `lease_reopen`, ...",
        STEP: "`wait_ready`, `export`, `write`, `cleanup`, `publish`, `read`, `install`",
        PARTICIPANT_KIND: "`environment`, `policy_model`, `agent`, `resources`, or `coordinator`",
        SERVICE: "the participant's service in the deployment",
        INSTANCE: "the participant's place: never a host or a process; spans only",
        OUTCOME: "`ok`, `not_ready`, `not_reached` (a stage), `CANCELLED` (the caller went away), or the error code",
        PHASE: "the phase it ended in (spans), or the phase that a gauge is about",
        REPLAYED: "whether the answer of an earlier call was given again",
        BLOCKERS: "all that block, not only those that are listed",
        RESTARTS: "episodes in flight that cannot be captured",
        RECORDS: "records",
        BYTES: "bytes, as counted while they were written or read",
        EPISODES: "episodes of a Retire",
        ROLLOUTS: "rollouts of a Forget",
        BACKEND: "the inference worker, by its name in the deployment",
        SWEEP: "number of the sweep in this closing, from 1",
        CALLS: "model calls that the worker was asked about",
        CALLS_CUT: "calls that were cut",
        CALLS_FINISHED: "calls that had finished",
        CALLS_NOT_FOUND: "calls that the worker did not know",
        CALLS_UNCUTTABLE: "calls that cannot be cut",
        CALLS_FAILED: "calls whose cut failed",
        PARTICIPANTS: "participants that were called",
        STOPPED_AT: "the stage at which a prepare stopped; empty if none",
        STAGE: "the kinds of a stage",
        RESULT: "`published`, `restored`, `detached` (another process goes on), `aborted`, `not_ready` or `error`",
        SOURCE: "the checkpoint that is restored; spans only",
        ERROR_CODE: "name of the error code, as docs/errors.md lists them",
        EVENT: "`lease_expired`, `prepare_not_ready`, `generation_cut`, `replayed`, `preempted`, `open_failed` (each "
        "time), `audit_lost`",
        DISPOSITION: "what became of a call: `cut`, `finished`, `not_found`, `uncuttable`, `failed`",
        CAUSE: "why admission opened: `resumed`, `lease_expired`, `restored`, `aborted`, `close_failed`",
        WORK: "`rollouts`, `turns` or `tokens`",
        FATE: "`protected`, `continued`, `redone` or `restarted`",
        TASK: "kind of a background task: `export`, `write`, `cleanup`, `install`, `reopen`",
        RPC_SYSTEM: "always `grpc`",
        RPC_METHOD: "full method name, such as `gymckpt.v1.ParticipantService/Commit`",
        RPC_STATUS: "name of the gRPC status, such as `OK`",
        ERROR_TYPE: "name of the gRPC status of a failed call",
    }.items()
}
"""Name -> attribute."""

SPANS_ONLY: frozenset[str] = frozenset({ID, INSTANCE, SOURCE})
"""Attributes with ids in them, which no metric has."""
