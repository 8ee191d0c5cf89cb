"""The legacy agent behind its relay: what it calls, and where it goes on after a crash."""

from __future__ import annotations

from typing import Any

import pytest

from gym_ckpt_grpc.control import InvalidState
from gym_ckpt_grpc.coordinator import Fleet
from gym_ckpt_grpc.minigym.deployment import Deployment
from gym_ckpt_grpc.minigym.environment_server import LegacyRelay
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.participants import RestoredSession
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.minigym.local import Life, Model, ended
from tests.participants.fakes import R1, R2, R, call, close, exported, reopen, retire, spin

SETUP, TURNS = {"target": 20}, 2
RUN, SEED, LOOP, ASK, TOOL, VERIFY, CLOSE = (
    "agent/run",
    "resources/seed_session",
    "agent/v1/responses",
    "policy/v1/chat/completions",
    "resources/increment",
    "resources/verify",
    "resources/close_session",
)
WHOLE = [RUN, SEED, LOOP, ASK, TOOL, ASK, TOOL, ASK, VERIFY, CLOSE]


def life(model: Model | None = None) -> Life:
    return Life("legacy", model)


async def twin() -> Any:
    """The result of an uninterrupted run."""
    undisturbed = life()
    result = (await ended(await undisturbed.run(undisturbed.task(SETUP, TURNS)))).json()
    assert (undisturbed.peers.made, undisturbed.idle()) == (WHOLE, True)
    return result


async def test_a_run_goes_through_its_steps_and_leaves_nothing() -> None:
    result = await twin()
    assert 0 < result["reward"] < 1
    assert [each["role"] for each in result["transcript"]] == ["user", *["assistant", "tool"] * 2, "assistant"]


async def test_it_continues_after_a_crash_from_its_last_boundary() -> None:
    """Message counts 1, 3, 3: the second call was not delivered, and is made again."""
    result, model = await twin(), Model()
    first = life(model)
    hold = first.peers.hold(ASK, 2, after=True)
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    await first.close()
    second = life(model)
    await second.restore(await first.taken())
    again = await second.run(second.task(SETUP, TURNS), R1)
    assert (await ended(again)).json() == result
    assert [len(each) for each in model.asked] == [1, 3, 3, 5]
    assert second.peers.made == [RUN, LOOP, *WHOLE[5:]]
    assert second.idle()
    await first.bury(run, hold)


@pytest.mark.behaviour("P191", "P182")
@pytest.mark.parametrize("number", range(1, len(WHOLE) - 2))
async def test_a_crash_at_each_call_that_may_be_repeated_continues_there(number: int) -> None:
    """And once more before the replacement begins. Nothing that was answered is asked again."""
    result, model = await twin(), Model()
    name, first = WHOLE[number], life(model)
    hold = first.peers.hold(name, WHOLE[: number + 1].count(name))
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    await first.close()
    if name == TOOL:  # the counter may not count twice: the agent must wait for it
        assert not first.owners["agent"].is_ready()
        await first.reopen()
        hold.go.set()
        assert (await ended(run)).json() == result
        return
    second, third = life(model), life(model)
    await second.restore(await first.taken())
    await second.close()
    await third.restore(await second.taken())
    answer = await ended(await third.run(third.task(SETUP, TURNS), R2))
    assert answer.json() == result
    assert [len(each) for each in model.asked] == [1, 3, 5]
    assert sum(each.peers.made.count(TOOL) for each in (first, third)) == 2
    assert third.idle()
    await first.bury(run, hold)


async def test_a_verification_of_the_counter_is_waited_for() -> None:
    """It is declared `wait`, as the seed's reply said; then the run is at `return`."""
    first = life()
    hold = first.peers.hold(VERIFY)
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    owner = first.owners["agent"]
    await close(owner)
    assert [(each.reason, each.place) for each in owner.report(9).blockers] == [(BlockerReason.WAIT_STEP, "verify")]
    hold.go.set()
    await spin(20)
    (record,) = await exported(owner)
    assert record.decode("protocol_boundary")["next"] == "return"
    await reopen(owner)
    assert (await ended(run)).json() == await twin()


@pytest.mark.parametrize("stop", [None, 2])
async def test_read_as_streams_its_policy_replies_are_the_same(stop: int | None) -> None:
    """Over a crash too, while the second one is on its way."""
    result, model = await twin(), Model()
    first = life(model)
    task = {**first.task(SETUP, TURNS), "stream": True}
    hold = first.peers.hold(ASK, stop, after=True) if stop else None
    run = await first.run(task)
    if hold is None:
        assert (await ended(run)).json() == result
        return
    await hold.wait()
    await first.close()
    second = life(model)
    await second.restore(await first.taken())
    assert (await ended(await second.run(task, R1))).json() == result
    assert [len(each) for each in model.asked] == [1, 3, 3, 5]
    await first.bury(run, hold)


async def test_its_sessions_are_empty_and_anything_else_is_refused() -> None:
    agent = life().agent
    assert await agent.export_sessions(["run:r"]) == {"run:r": {}}
    await agent.restore_sessions([RestoredSession("run:r-a1", R1, {})])
    with pytest.raises(InvalidState):
        await agent.restore_sessions([RestoredSession("run:r-a1", R1, [])])
    await agent.retire_session("run:r")


# ---- the relay -----------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P93")
async def test_the_relay_passes_a_run_on_and_its_answer_back() -> None:
    """While the agent is closed the run is held there; the relay itself always answers."""
    first = life()
    await close(first.owners["agent"])
    run = await first.run(first.task(SETUP, TURNS))
    await spin()
    assert (first.owners["agent"].report(9).counts["waiting"], first.peers.made) == (1, [RUN])
    assert (await ended(call(first.apps["environment"], "/health", method="GET"))).status == 200
    await reopen(first.owners["agent"])
    assert (await ended(run)).json() == await twin()


@pytest.mark.behaviour("P93", "P44")
async def test_the_relay_passes_refusals_on_unchanged() -> None:
    first = life()
    await retire(first.owners["agent"], first.ports["agent"], R)
    answer = await ended(await first.run(first.task(SETUP, TURNS)))
    direct = await ended(call(first.apps["agent"], "/rollout/r/run", {}))
    assert (answer.status, answer.json()) == (direct.status, direct.json())
    assert (answer.status, answer.code) == (409, "STALE_ATTEMPT")
    owner = first.owners["agent"]
    await close(owner)
    owner.admission._max_waiting = 0
    answer = await ended(await first.run(first.task(SETUP, TURNS), R1))
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "ADMISSION_CLOSED", "1")
    nobody = await ended(call(first.apps["environment"], "/run", {}))
    assert nobody.status == 404


@pytest.mark.behaviour("P93")
@pytest.mark.parametrize("protocol", ["legacy", "proof"])
def test_the_relay_is_no_participant(protocol: Any, tmp_path: Any) -> None:
    """It has no owner; its deployment gives it no control port, and a coordinator asks it nothing."""
    assert not hasattr(LegacyRelay, "owner")
    plan = Deployment.create(tmp_path / "d", topology=Topology(protocol=protocol))
    assert plan.server("environment").participant_kind is None
    assert plan.server("environment").control_port == 0
    fleet: Fleet = plan.fleet()
    assert "environment" not in {each.service for each in fleet.participants}
