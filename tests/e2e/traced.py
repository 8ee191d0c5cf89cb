"""A minigym of real processes, each of which exports its spans to a collector of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.emitting import SCOPE
from tests.e2e.rig import COUNTER, Rig, rig
from tests.telemetry.exporting import exporting, server_env
from tests.telemetry.otlp_receiver import INTERNAL_METRICS, Collector
from tests.telemetry.traces import Trace, name_of

TRAINER = "trainer"
"""The name of the test's own process, which has the coordinator."""
PARTICIPANTS = {"environment": "environment", "policy_model": "policy_model", "agent": "agent", "counter": "resources"}
"""Service -> kind, in the order of the stages of a prepare."""
INFERENCE = "inference"
PARTICIPANT_CALL, GENERATION_CALL = "gymckpt.v1.ParticipantService/", "gymckpt.v1.GenerationService/"
ASIDE = {
    # A coordinator claims its epoch and looks at the fleet before any checkpoint.
    catalogue.COORDINATE_ENTERING.name,
    # It does so below that; a test asks by itself.
    PARTICIPANT_CALL + "GetStatus",
    # What a policy model server asks its workers for at its start.
    GENERATION_CALL + "GetBackend",
    # Cuts that no durable checkpoint names are given up in the background, also where a model call finds that out.
    GENERATION_CALL + "ReleaseCuts",
}
"""Calls that may be a trace of their own: they belong to no checkpoint."""


@asynccontextmanager
async def traced(directory: Path, collector: Collector, topology: Topology = COUNTER) -> AsyncIterator[Rig]:
    """A deployment that is running. It is ended gently, so that every span has been received afterwards."""
    with pytest.MonkeyPatch.context() as environment, ExitStack() as stack:
        environment.setenv(INTERNAL_METRICS, "true")
        here = stack.enter_context(exporting(TRAINER, collector.endpoint))
        env = server_env(collector.endpoint)
        async with rig(directory, topology, env=env, telemetry=here.telemetry) as gym:
            await gym.start()
            yield gym
            await gym.leave()
            await gym.servers.stop(grace=20)


def checkpoints(collector: Collector) -> list[Trace]:
    """The traces with a checkpoint's span in them."""
    return [trace for trace in collector.traces() if trace.of(catalogue.COORDINATE_CHECKPOINT)]


def the_checkpoint(collector: Collector) -> Trace:
    """The trace of the one checkpoint there was."""
    found = checkpoints(collector)
    assert len(found) == 1, f"{len(found)} traces of one checkpoint:\n{collector.drawn()}"
    return found[0]


def others_are_aside(collector: Collector, *mine: Trace) -> None:
    """Fail if a span of ours outside of these traces is anything but a call that belongs to no checkpoint.

    Other libraries may make spans of their own (FastAPI does, of the requests that it serves): no business of ours.
    """
    taken = {trace.trace_id for trace in mine}
    strangers = {span.name for span in collector.spans if span.scope == SCOPE and span.trace_id not in taken} - ASIDE
    assert strangers == set(), f"in traces of their own: {strangers}\n{collector.drawn()}"


def all_ended(collector: Collector, *killed: str) -> None:
    """Fail if a process, but for those that were killed, ended with spans that had begun and not ended.

    Each says so itself as it ends, by the SDK's own count.
    """
    live = {process: count for process, count in collector.live().items() if name_of(process) not in killed}
    assert {name_of(process) for process in live} >= {INFERENCE, *PARTICIPANTS} - set(killed)
    assert {process: count for process, count in live.items() if count} == {}, collector.drawn()


def in_order(trace: Trace) -> None:
    """Fail if a span began before its parent: all of them read the same clock."""
    for span in trace.spans:
        parent = trace.parent(span)
        assert parent is None or parent.began <= span.began, f"{span} began before {parent}\n{trace.drawn()}"
