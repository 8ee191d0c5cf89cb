"""The environment's stages and the agent's loop: what they call, and where they go on."""

from __future__ import annotations

from typing import Any

import pytest

from gym_ckpt_grpc.control import EpisodeListKind
from gym_ckpt_grpc.minigym.tally_server import TallyServer
from gym_ckpt_grpc.minigym.weather_server import WeatherServer
from gym_ckpt_grpc.participants import VerifyMode
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.minigym.local import Life, Model, ended
from tests.participants.fakes import R1, R, close, exported, listed, reopen, spin

SETUP, TURNS = {"target": 20}, 2
SEED, SEED_AGENT, INVOKE, ASK, TOOL, CLOSE_AGENT, VERIFY, CLOSE = (
    "resources/seed_session",
    "agent/seed_session",
    "agent/v1/responses",
    "policy/v1/chat/completions",
    "resources/increment",
    "agent/close_session",
    "resources/verify",
    "resources/close_session",
)
WHOLE = [SEED, SEED_AGENT, INVOKE, ASK, TOOL, ASK, TOOL, ASK, CLOSE_AGENT, VERIFY, CLOSE]


async def twin(**options: Any) -> Any:
    """The result of an uninterrupted episode."""
    undisturbed = Life(**options)
    result = (await ended(await undisturbed.run(undisturbed.task(SETUP, TURNS)))).json()
    assert (undisturbed.peers.made, undisturbed.idle()) == (WHOLE, True)
    return result


@pytest.mark.behaviour("P90")
@pytest.mark.parametrize("lost", [SEED_AGENT, SEED, INVOKE])
async def test_a_lost_reply_leaves_no_session_behind(lost: str) -> None:
    """The agent's cleanup is registered before the agent is seeded, and not before that."""
    life = Life()
    life.peers.lost.add(lost)
    with pytest.raises(ConnectionError):
        await ended(await life.run(life.task(SETUP, TURNS)))
    assert life.idle()
    assert life.peers.made.count(CLOSE_AGENT) == (lost != SEED)
    assert life.peers.made[-1] == CLOSE


@pytest.mark.behaviour("P91")
async def test_an_episode_counted_in_replay_is_never_found_in_the_wait_step() -> None:
    """The boundary `close_agent` comes before it: looked at in every turn of the loop."""
    result, life = await twin(), Life()
    hold = life.peers.hold(INVOKE, after=True)
    run = await life.run(life.task(SETUP, TURNS))
    await hold.wait()
    owner = life.owners["environment"]
    await close(owner)
    boundaries = []
    for turn in range(40):
        (record,) = await exported(owner)  # and it is ready
        boundaries.append(record.decode("boundary")["next"])
        if turn == 0:
            hold.go.set()
        await spin(1)
    assert (boundaries[0], boundaries[-1]) == ("invoke_agent", "close_agent")
    assert boundaries == sorted(boundaries, key=["invoke_agent", "close_agent"].index)
    assert CLOSE_AGENT not in life.peers.made
    closes = life.peers.hold(CLOSE_AGENT)
    await reopen(owner)
    await closes.wait()
    await close(owner, 2)
    assert [(each.reason, each.place) for each in owner.report(9).blockers] == [
        (BlockerReason.WAIT_STEP, "close_agent")
    ]
    closes.go.set()
    await spin(40)
    (record,) = await exported(owner)
    boundary = record.decode("boundary")
    assert (boundary["next"], boundary["observations"]) == ("verify", {"closed": True})
    await reopen(owner)
    assert (await ended(run)).json() == result


@pytest.mark.behaviour("P92")
async def test_an_episode_restored_at_return_calls_nothing_but_the_resources_close() -> None:
    result, first = await twin(), Life()
    hold = first.peers.hold(VERIFY, after=True)
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    await close(first.owners["environment"])
    hold.go.set()
    await spin(40)
    for name in ("agent", "resources"):
        await close(first.owners[name])
    records = await first.taken()
    assert records["environment"][0].decode("boundary")["next"] == "return"
    second = Life()
    await second.restore(records)
    assert (await ended(await second.run(second.task(SETUP, TURNS), R1))).json() == result
    assert (second.peers.made, second.model.asked) == ([CLOSE], [])
    await first.bury(run)


@pytest.mark.parametrize("stage", ["seed", "invoke_agent"])
async def test_an_episode_restored_before_the_agent_is_closed_cleans_up_after_a_failure(stage: str) -> None:
    """Its agent session is not left behind, although this life did not seed it."""
    first = Life()
    hold = first.peers.hold({"seed": SEED, "invoke_agent": INVOKE}[stage])
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    await first.close()
    second = Life()
    await second.restore(await first.taken())
    second.peers.lost.add(INVOKE)
    with pytest.raises(ConnectionError):
        await ended(await second.run(second.task(SETUP, TURNS), R1))
    assert second.peers.made[-2:] == [CLOSE_AGENT, CLOSE]
    assert second.idle()
    await first.bury(run, hold)


@pytest.mark.parametrize(("mode", "ready"), [(None, True), (VerifyMode.WAIT, False)], ids=["replay", "wait"])
async def test_verification_runs_in_the_mode_that_the_resources_seed_reported(
    mode: VerifyMode | None, ready: bool
) -> None:
    """Weather declares replay: it does not hold up a checkpoint, and after a crash it runs once more."""
    setup, options = {"cities": 2}, {"resources": WeatherServer, "verify": mode}
    first = Life(**options)  # type: ignore[arg-type]
    hold = first.peers.hold(VERIFY)
    task = first.task(setup, 0)
    run = await first.run(task)
    await hold.wait()
    await close(first.owners["environment"])
    assert first.owners["environment"].is_ready() is ready
    if not ready:
        hold.go.set()
        await reopen(first.owners["environment"])
        assert (await ended(run)).json()["reward"] == 0.0
        return
    await first.close()
    second = Life(**options)  # type: ignore[arg-type]
    await second.restore(await first.taken())
    answer = (await ended(await second.run(task, R1))).json()
    assert (answer["reward"], second.peers.made) == (0.0, [VERIFY, CLOSE])
    await first.bury(run, hold)
    assert run.answer.json() == answer


@pytest.mark.behaviour("P84")
async def test_over_a_restart_only_resources_server_the_episode_is_a_restart() -> None:
    """For the environment and the resources; the agent's session can be captured, and no scope names it."""
    first = Life(resources=TallyServer)
    hold = first.peers.hold(ASK, 2)
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    await first.close()
    for name in ("environment", "resources"):
        assert await listed(first.owners[name], EpisodeListKind.RESTART) == [R]
        assert await exported(first.owners[name]) == []
    await first.bury(run, hold)
    assert run.answer.status == 200


async def test_a_tool_under_way_is_waited_for() -> None:
    """It may not count twice."""
    first = Life()
    hold = first.peers.hold(TOOL)
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    await close(first.owners["agent"])
    assert not first.owners["agent"].is_ready()
    await first.bury(run, hold)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gated", [True, False])
async def test_a_reply_that_came_while_closed_is_not_asked_for_again(stream: bool, gated: bool) -> None:
    """Kept before the boundary of its call; or, if its gate was not seen, in the boundary before its tools run."""
    result, model = await twin(), Model()
    first = Life(model=model)
    task = {**first.task(SETUP, TURNS), "stream": stream}
    asked = first.peers.hold(ASK, after=True)
    run = await first.run(task)
    first.agent.policy.gated = gated
    await asked.wait()
    await first.close()
    assert first.owners["agent"].is_ready() is gated
    asked.go.set()
    await spin(40)
    records = await first.taken()
    (record,) = records["agent"]
    messages = record.decode("boundary")["messages"]
    assert (len(messages), "kept_replies" in record.payloads) == ((1, True) if gated else (2, False))
    second = Life(model=model)
    await second.restore(records)
    assert (await ended(await second.run(task, R1))).json() == result
    assert second.peers.made == [INVOKE, *WHOLE[4:]]
    assert [len(each) for each in model.asked] == [1, 3, 5]
    await first.bury(run, asked)
