"""One call: what is tried again, how often, and until when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from gym_ckpt_grpc.coordinator.calls import Retries, call, repeatable
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.fleet import Endpoint
from gym_ckpt_grpc.coordinator.member import Connections, Credentials, Member
from gym_ckpt_grpc.protocol.errors import (
    ERRORS,
    AdmissionClosed,
    ErrorCode,
    IncarnationChanged,
    InvalidPhase,
    OutOfTime,
    StaleController,
    StateUnwritable,
    WorkerUnavailable,
)
from gymckpt.v1 import participant_pb2 as pb
from tests.coordinator.fleet_of_nodes import Gate, Node, Nodes, broken, refuse


class NoPause:
    """Always the shortest pause, and a list of the ceilings asked for."""

    def __init__(self) -> None:
        self.ceilings: list[float] = []

    def uniform(self, a: float, b: float, /) -> float:
        self.ceilings.append(b)
        return a


FAST = Retries(shortest=0.001)


@pytest.fixture
def node(nodes: Nodes) -> Node:
    return nodes["agent"]


@pytest_asyncio.fixture
async def member(node: Node) -> AsyncIterator[Member]:
    connections = Connections(Credentials())
    yield connections.member(Endpoint(node.server, node.address), node.identity)
    await connections.close()


def resume(seconds: float) -> pb.ResumeRequest:
    return pb.ResumeRequest(context=pb.ControlContext(checkpoint_id="c", controller_id="t", epoch=1))


@pytest.mark.behaviour("C218")
@pytest.mark.parametrize(
    "action", [broken(), broken(after=True), broken(grpc.StatusCode.INTERNAL), refuse(WorkerUnavailable("gone"))]
)
async def test_transient_failures_are_tried_again_as_one_operation(node: Node, member: Member, action: Any) -> None:
    node.script["Resume"] = [action, action]
    outcome = await call(member, "Resume", resume, Deadline(10), retries=FAST)
    assert outcome.ok
    assert outcome.tries == 3
    assert len(node.calls["Resume"]) == 3


@pytest.mark.behaviour("C218")
async def test_the_level_is_read_from_the_descriptor(node: Node, member: Member, monkeypatch: Any) -> None:
    assert all(repeatable(method.name) for method in pb.DESCRIPTOR.services_by_name["ParticipantService"].methods)
    monkeypatch.setattr("gym_ckpt_grpc.coordinator.calls.repeatable", lambda method: method != "Resume")
    node.script["Resume"] = [broken()]
    outcome = await call(member, "Resume", resume, Deadline(10), retries=FAST)
    assert (outcome.tries, outcome.transport) == (1, "UNAVAILABLE")


@pytest.mark.behaviour("C218")
async def test_retries_stop_at_the_deadline(node: Node, member: Member) -> None:
    node.always["Resume"] = broken()
    begun = time.monotonic()
    outcome = await call(member, "Resume", resume, Deadline(0.5), retries=Retries(shortest=0.01, longest=0.1))
    assert time.monotonic() - begun < 0.6
    assert outcome.tries > 2
    assert isinstance(outcome.error, WorkerUnavailable)
    assert node.address in outcome.error.message


@pytest.mark.behaviour("C218")
async def test_retry_after_is_honoured(node: Node, member: Member) -> None:
    node.script["Resume"] = [refuse(AdmissionClosed("busy", retry_after=0.3))]
    begun = time.monotonic()
    outcome = await call(member, "Resume", resume, Deadline(10), retries=FAST)
    assert outcome.ok
    assert time.monotonic() - begun >= 0.3
    node.script["Resume"] = [refuse(AdmissionClosed("busy", retry_after=30))]
    outcome = await call(member, "Resume", resume, Deadline(1), retries=FAST)
    assert isinstance(outcome.error, AdmissionClosed)
    assert outcome.duration < 0.5


@pytest.mark.behaviour("C218")
async def test_pauses_are_jittered_between_100_ms_and_2_s(node: Node, member: Member) -> None:
    jitter = NoPause()
    retries = Retries(jitter=jitter)
    pauses = [retries.pause(n, WorkerUnavailable("")) for n in range(1, 10)]
    assert jitter.ceilings == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert set(pauses) == {0.1}


@pytest.mark.parametrize("code", [code for code, row in ERRORS.items() if not row.retryable])
async def test_what_the_table_calls_final_is_sent_once(node: Node, member: Member, code: ErrorCode) -> None:
    node.always["Resume"] = refuse(ERRORS[code].exception("no"))
    outcome = await call(member, "Resume", resume, Deadline(10), retries=FAST)
    assert (outcome.tries, outcome.error and outcome.error.code) == (1, code)


async def test_a_stale_controller_is_never_tried_again(node: Node, member: Member, monkeypatch: Any) -> None:
    """Whatever the table says one day."""
    monkeypatch.setattr(StaleController, "retryable", True)
    node.always["Resume"] = refuse(StaleController("a newer one"))
    outcome = await call(member, "Resume", resume, Deadline(10), retries=FAST)
    assert outcome.tries == 1


async def test_the_core_s_own_refusals_are_sent_once(node: Node, member: Member) -> None:
    node.always["Resume"] = broken(grpc.StatusCode.RESOURCE_EXHAUSTED)
    outcome = await call(member, "Resume", resume, Deadline(10), retries=FAST)
    assert (outcome.tries, outcome.transport) == (1, "RESOURCE_EXHAUSTED")


async def test_a_try_has_its_own_limit_and_the_next_one_joins(node: Node, member: Member) -> None:
    node.script["Resume"] = [Gate().hold()]
    outcome = await call(member, "Resume", resume, Deadline(10), retries=FAST, try_limit=0.2)
    assert (outcome.ok, outcome.tries) == (True, 2)


async def test_with_no_time_left_nothing_is_sent(node: Node, member: Member) -> None:
    outcome = await call(member, "Resume", resume, Deadline(0), retries=FAST)
    assert isinstance(outcome.error, OutOfTime)
    assert (outcome.tries, node.calls["Resume"]) == (0, [])


async def test_a_reply_of_another_process_is_a_failure_that_names_both(node: Node, member: Member) -> None:
    await node.restart()
    outcome = await call(member, "Resume", resume, Deadline(10), retries=FAST)
    assert isinstance(outcome.error, IncarnationChanged)
    assert member.identity.incarnation_id in outcome.error.message
    assert node.identity.incarnation_id in outcome.error.message


async def test_errors_name_the_participant(node: Node, member: Member) -> None:
    node.script["Resume"] = [refuse(InvalidPhase("no"))]
    outcome = await call(member, "Resume", resume, Deadline(10))
    assert outcome.error is not None
    assert outcome.error.participant == node.place
    with pytest.raises(InvalidPhase):
        assert outcome.answer


async def test_a_restarted_server_is_reached_within_two_seconds(node: Node, member: Member) -> None:
    await node.stop()
    failed = asyncio.Event()
    work = call(member, "Resume", resume, Deadline(20), pin=False, on_retry=lambda tries, error: failed.set())
    working = asyncio.create_task(work)
    await failed.wait()
    await node.start()
    begun = time.monotonic()
    outcome = await working
    assert outcome.ok
    assert time.monotonic() - begun < 3


async def test_a_disk_full_is_tried_again_until_the_deadline(node: Node, member: Member) -> None:
    node.always["Resume"] = refuse(StateUnwritable("no space"))
    outcome = await call(member, "Resume", resume, Deadline(1.0), retries=FAST)
    assert outcome.tries > 1
    assert isinstance(outcome.error, StateUnwritable | OutOfTime)  # the last try may meet the deadline itself
