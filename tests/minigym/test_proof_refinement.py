"""The proof refinement agent, crashed before each of its outside calls."""

from __future__ import annotations

from typing import Any

import pytest

from gym_ckpt_grpc.control import EpisodeListKind, InvalidState
from gym_ckpt_grpc.minigym.proof_checker import ProofChecker
from gym_ckpt_grpc.participants import ResourcesMode, RestoredSession, VerifyMode
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.minigym.local import Life, Model, ended
from tests.participants.fakes import R1, R, call, close, exported, listed, reopen, spin

SETUP, TURNS = {"difficulty": 4}, 9
SEED, ASK, VERIFY, CLOSE = (
    "resources/seed_session",
    "policy/v1/chat/completions",
    "resources/verify",
    "resources/close_session",
)


class RestartChecker(ProofChecker):
    """The same, restart-only."""

    checkpoint_mode = ResourcesMode.RESTART_ONLY
    checkpoint_verify = VerifyMode.WAIT


def life(model: Model | None = None, **options: Any) -> Life:
    return Life("proof", model, resources=options.pop("resources", ProofChecker), **options)


async def twin() -> tuple[Any, list[str], int]:
    """What an uninterrupted run gives, the calls of its agent, and how many proofs it asked for."""
    undisturbed = life()
    result = (await ended(await undisturbed.run(undisturbed.task(SETUP, TURNS)))).json()
    assert undisturbed.idle()
    return result, undisturbed.peers.made[1:], len(undisturbed.model.asked)


async def test_it_asks_again_with_what_was_wrong_until_a_proof_holds_or_the_tries_are_used_up() -> None:
    result, calls, proofs = await twin()
    assert (result["reward"], result["attempts"][-1]["reward"]) == (1.0, 1.0)
    assert 2 <= proofs == len(result["attempts"]) < TURNS
    assert calls == [SEED, *[ASK, VERIFY] * proofs, CLOSE]
    assert "does not hold" in result["transcript"][2]["content"]
    few = life()
    given_up = (await ended(await few.run(few.task(SETUP, 1)))).json()
    assert (given_up["reward"], len(given_up["attempts"]), len(few.model.asked)) == (0.0, 1, 1)


@pytest.mark.behaviour("P332")
@pytest.mark.parametrize("at", ["before the call", "reply on the way", "reply while closed"])
async def test_a_crash_at_each_outside_call_continues_at_that_call(at: str) -> None:
    """With the same proofs and the same result; a proof that was delivered is never generated again."""
    result, calls, proofs = await twin()
    for number, name in enumerate(calls[:-1]):
        first = life()
        hold = first.peers.hold(name, calls[: number + 1].count(name), after=at != "before the call")
        run = await first.run(first.task(SETUP, TURNS))
        await hold.wait()
        await first.close()
        if at == "reply while closed":
            hold.go.set()
            await spin(20)
        records = await first.taken()
        (record,) = records["agent"]
        assert (record.decode("session"), "boundary" in record.payloads) == ({}, False)
        second = life()
        await second.restore(records)
        assert (await ended(await second.run(second.task(SETUP, TURNS), R1))).json() == result
        assert second.peers.made[1:] == calls[number + (at == "reply while closed") :]
        repeated = 1 if at == "reply on the way" and name == ASK else 0
        assert len(first.model.asked) + len(second.model.asked) == proofs + repeated
        assert second.idle()
        await first.bury(run, hold)


@pytest.mark.behaviour("P332")
async def test_a_crash_at_return_makes_no_call_but_the_resources_close() -> None:
    result, calls, _ = await twin()
    first = life()
    hold = first.peers.hold(VERIFY, calls.count(VERIFY), after=True)
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    await first.close()
    hold.go.set()
    await spin(20)
    records = await first.taken()
    assert records["agent"][0].decode("protocol_boundary")["next"] == "return"
    second = life()
    await second.restore(records)
    assert (await ended(await second.run(second.task(SETUP, TURNS), R1))).json() == result
    assert (second.peers.made[1:], second.model.asked) == ([CLOSE], [])
    await first.bury(run)


@pytest.mark.behaviour("P332")
async def test_a_verification_that_may_not_run_twice_is_waited_for() -> None:
    """In the mode that the seed's reply said."""
    first = life(verify=VerifyMode.WAIT)
    hold = first.peers.hold(VERIFY)
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    owner = first.owners["agent"]
    await close(owner)
    assert [(each.reason, each.place) for each in owner.report(9).blockers] == [(BlockerReason.WAIT_STEP, "verify")]
    hold.go.set()
    await spin(20)
    (record,) = await exported(owner)
    boundary = record.decode("protocol_boundary")
    assert (boundary["next"], boundary["verify"], len(boundary["attempts"])) == ("model", "wait", 1)
    await reopen(owner)
    assert (await ended(run)).json() == (await twin())[0]


@pytest.mark.behaviour("P333")
async def test_over_a_restart_only_resources_server_it_is_a_restart() -> None:
    """It neither blocks nor parks nor is exported, and keeps going."""
    first = life(resources=RestartChecker)
    hold = first.peers.hold(ASK)
    run = await first.run(first.task(SETUP, TURNS))
    await hold.wait()
    await first.close()
    for owner in first.owners.values():
        assert await listed(owner, EpisodeListKind.RESTART) == [R]
        assert await exported(owner) == []  # and it is ready
    hold.go.set()
    assert (await ended(run)).json() == (await twin())[0]


async def test_its_sessions_are_empty_and_anything_else_is_refused() -> None:
    agent = life().agent
    assert await agent.export_sessions(["run:r"]) == {"run:r": {}}
    await agent.restore_sessions([RestoredSession("run:r-a1", R1, {})])
    with pytest.raises(InvalidState) as caught:
        await agent.restore_sessions([RestoredSession("run:r-a1", R1, {"proof": 1})])
    assert caught.value.episode == R1
    await agent.retire_session("run:r")


async def test_it_has_no_native_sessions() -> None:
    first = life()
    assert (await ended(call(first.apps["agent"], "/rollout/r/seed_session", {}))).status == 404


async def test_the_checker_refuses_what_is_no_difficulty_and_has_no_tools() -> None:
    first = life()
    for bad in ({"difficulty": 0}, {"difficulty": True}, {}):
        answer = await ended(
            call(first.apps["resources"], "/rollout/r/seed_session", bad, headers={"cookie": "session=k"})
        )
        assert answer.status == 400
    assert (await ended(call(first.apps["resources"], "/prove", {}))).status == 400
