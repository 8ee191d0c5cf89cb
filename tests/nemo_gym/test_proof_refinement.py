"""The released proof refinement agent: several activations and several verifications in one run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from responses_api_agents.proof_refinement_agent.app import ProofRefinementAgent
from starlette.responses import JSONResponse, Response

from tests.nemo_gym.agent_rig import Model, Rig, World
from tests.nemo_gym.servers import text
from tests.participants.fakes import close, exported, restore

CALLS = ["/seed_session", "/verify", "/verify", "/verify"]


class Checker(World):
    """Accepts the third proof, and says what is wrong with those before. The agent drops the cookie of its session."""

    def _verdict(self, session: str | None, body: Any) -> Response:
        found = body["turn_index"] + 1
        said = {"reward": float(found == 3), "proof_status": "ok" if found == 3 else "failed"}
        if found < 3:
            said |= {"needs_correction": True, "correction_prompt": f"{found}: {heard(body)} is wrong"}
        return JSONResponse({**body, **said})


def heard(result: Any) -> str:
    found: str = result["response"]["output"][0]["content"][0]["text"]
    return found


class Prover(Model):
    """Proves what it is asked."""

    def items(self, conversation: Any, done: int) -> list[Mapping[str, Any]]:
        return [text(f"proof of <{conversation[0]['content']}>")]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig(ProofRefinementAgent, world=Checker(), model=Prover(()), max_correction_turns=4) as rig:
        yield rig


def attempts(result: Any) -> list[tuple[Any, ...]]:
    return [(each["generation"], each["reward"], each["correction_prompt"]) for each in result["all_attempts"]]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("call", ["model", "/verify"])
async def test_a_run_goes_on_in_whichever_turn_the_checkpoint_found_it(rig: Rig, call: str, number: int) -> None:
    """As the twin does; turns that were answered are not asked for again, nor are their verdicts."""
    rig.world.verify = "wait"
    held = rig.model if call == "model" else rig.world
    held.hold(call, number)
    life = await rig.life()
    running = life.run()
    await held.at(call, number)
    await close(life.owner)
    assert life.owner.is_ready() == (call == "model")
    if call == "/verify":
        held.release()
    await life.port.until(life.owner.is_ready)
    records = await exported(life.owner)
    await life.resume()
    held.release()
    status, twin = await running
    assert (status, twin["total_turns"], twin["reward"], len(twin["all_attempts"])) == (200, 3, 1.0, 3)

    called, asked = len(rig.world.calls), len(rig.model.asked)
    after = await rig.life()
    await after.restore(records)
    status, restored = await after.run(1)
    assert (status, attempts(restored), restored["total_turns"]) == (200, attempts(twin), 3)
    done = number - (call == "model")
    assert (rig.world.paths(called), len(rig.model.asked) - asked) == (CALLS[1 + done :], 3 - done)
    assert {each[0] for each in rig.world.calls[called:]} <= {"r-a1"}


async def test_activations_are_counted_over_a_restore(rig: Rig) -> None:
    rig.model.hold("model", 2)
    life = await rig.life()
    running = life.run()
    await rig.model.at("model", 2)
    records = await life.checkpoint()
    await life.resume()
    running.cancel()
    unclaimed = await rig.life()
    await restore(unclaimed.owner, records)
    (record,) = await exported(unclaimed.owner)
    assert record.fields["activations"] == 1
    after = await rig.life()
    await after.restore(records)
    rig.model.hold("model", 3)
    running = after.run(1)
    await rig.model.at("model", 3)  # its second turn, again
    session = after.owner._sessions.get("run:r-a1")
    assert (session.index.completed, session.index.running) == (1, 2)
    rig.model.release()
    assert (await running)[1]["total_turns"] == 3
