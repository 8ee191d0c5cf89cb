"""Native sessions of the released SimpleAgent: seeded, activated with direct tools, closed; captured and restored."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse

from gym_ckpt_grpc.control import EpisodeListKind, InvalidState
from gym_ckpt_grpc.integrations.nemo_gym import NAMES
from gym_ckpt_grpc.participants import RestoredSession
from gym_ckpt_grpc.protocol.errors import AdmissionClosed, StaleAttempt
from tests.nemo_gym.agent_rig import Life, Rig, episodes, refused
from tests.participants.fakes import R1, R, call, close, exported, listed, reopen, restore, retire, spin

RESULT = ['{"count":1}', '{"count":3}', "3"]
ACTIVATE = {"input": [{"role": "user", "content": "Count."}]}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        rig.world.counters["s-0"] = 0
        yield rig


def seed_of(rig: Rig, attempt: int = 0, **more: Any) -> dict[str, Any]:
    tools = {"kind": "direct_http", "name": "tools", "required": True, "base_url": rig.url("world")}
    return {
        **ids(attempt),
        "task_id": {"taskset": "t", "task_id": "1"},
        "tool_accesses": [{**tools, "cookies": {"world": "s-0"}}],
        **more,
    }


def ids(attempt: int = 0) -> dict[str, Any]:
    return {"agent_session_id": "a-1", "episode_id": {"rollout_id": "r", "attempt": attempt}}


async def seed(rig: Rig, life: Life, attempt: int = 0) -> None:
    assert await life.post("/v1/agent_sessions", seed_of(rig, attempt)) == (200, {"agent_session_id": "a-1"})


def activate(life: Life, attempt: int = 0, index: str | None = None) -> asyncio.Task[Any]:
    path = f"/ng-rollout/r{f'-a{attempt}' if attempt else ''}/v1/responses"
    headers = {} if index is None else {NAMES.activation_header: index}
    return asyncio.create_task(life.post(path, ACTIVATE, headers))


def heard(answer: tuple[int, Any]) -> list[str]:
    assert answer[0] == 200, answer
    output = answer[1]["output"]
    return [each.get("output") or each["content"][0]["text"] for each in output if each["type"] != "function_call"]


async def test_a_session_is_the_same_as_without_the_mixin(rig: Rig) -> None:
    life = await rig.life()
    await seed(rig, life)
    await seed(rig, life)
    assert heard(await activate(life)) == RESULT
    assert rig.world.paths() == ["/add", "/add"]
    assert {each[0] for each in rig.world.calls} | episodes(rig.model.asked) == {"r"}
    assert {each[2] for each in rig.world.calls} == {"s-0"}
    for _ in range(2):
        status, closed = await life.post("/v1/agent_sessions/close", ids())
        assert (status, closed["agent_session_id"], closed["resources_cookies"]) == (200, "a-1", {"world": "s-0"})
    assert (life.owner.report(9).counts["sessions"], (await activate(life))[0]) == (0, 404)
    assert (await life.post("/v1/agent_sessions", seed_of(rig)))[0] == 409


AT = {("/add", 1): (["/add"], 2), ("model", 2): (["/add"], 2), ("/add", 2): ([], 1), ("model", 3): ([], 1)}


@pytest.mark.parametrize("observed", [False, True], ids=["", "observed"])
@pytest.mark.parametrize("at", AT, ids=str)
async def test_an_activation_goes_on_wherever_the_checkpoint_found_it(
    rig: Rig, at: tuple[str, int], observed: bool
) -> None:
    """In a second activation: what the first one left is there, and this one is not counted twice."""
    rig.settings = {"observability_enabled": observed}
    life = await rig.life()
    await seed(rig, life)
    assert heard(await activate(life, index="1")) == RESULT
    rig.world.counters["s-0"] = 0
    path, number = at
    held, first = (rig.model, 3) if path == "model" else (rig.world, 2)
    held.hold(path, first + number)
    running = activate(life, index="2")
    await held.at(path, first + number)
    await close(life.owner)
    assert life.owner.is_ready() == (path == "model")
    if path == "/add":
        held.release()
        await life.port.until(life.owner.is_ready)
    records = await exported(life.owner)
    picture = rig.picture()
    await life.resume()
    held.release()
    assert heard(await running) == RESULT
    _, closed = await life.post("/v1/agent_sessions/close", ids())

    rig.set_back(picture)
    called, asked = len(rig.world.calls), len(rig.model.asked)
    after = await rig.life()
    await after.restore(records)
    assert await listed(after.owner, EpisodeListKind.RESTORED_PENDING) == [R1]
    await seed(rig, after, 1)
    assert heard(await activate(after, 1, index="2")) == RESULT
    assert (rig.world.paths(called), len(rig.model.asked) - asked) == AT[at]
    assert {each[0] for each in rig.world.calls[called:]} | episodes(rig.model.asked[asked:]) == {"r-a1"}
    again = len(rig.world.calls)
    assert heard(await activate(after, 1, index="2")) == RESULT  # the recorded reply
    assert rig.world.paths(again) == []
    assert after.server._session_records["a-1"].state.activations == 2
    status, restored = await after.post("/v1/agent_sessions/close", ids(1))
    assert (status, restored["resources_cookies"]) == (200, {"world": "s-0"})
    assert observations(restored) == observations(closed) == (["root", "activation-2"] if observed else [])


def observations(closed: Any) -> list[str]:
    return [each["invocation_id"] for each in (closed["agent_observations"] or {"records": []})["records"]]


async def test_a_restored_session_finds_its_tools_where_they_are_now(rig: Rig) -> None:
    rig.model.hold("model", 2)
    life = await rig.life()
    await seed(rig, life)
    running = activate(life)
    await rig.model.at("model", 2)
    records = await life.checkpoint()
    running.cancel()
    before, called = rig.url("world"), len(rig.world.calls)
    await rig.serve("world", rig.world.app)
    after = await rig.life()
    await after.restore(records)
    tools = after.server._session_records["a-1"].state.tool_access
    assert (str(tools.base_url).rstrip("/"), before != rig.url("world")) == (rig.url("world"), True)
    assert heard(await activate(after, 1)) == RESULT
    assert rig.world.paths(called) == ["/add"]


@pytest.mark.parametrize("error", [StaleAttempt("gone"), AdmissionClosed("full")])
async def test_a_refused_tool_goes_through_and_is_not_sent_again_for_ever(rig: Rig, error: Any) -> None:
    rig.world.answers["/add"] = [refused(error)]
    life = await rig.life()
    await seed(rig, life)
    status, answer = await activate(life)
    assert (status, answer["error"]["code"]) == (409 if isinstance(error, StaleAttempt) else 503, error.code.name)
    assert (rig.world.paths(), len(rig.model.asked)) == (["/add"], 1)


async def test_a_replay_that_calls_another_tool_never_gives_a_result(rig: Rig) -> None:
    """A fault seeded in what was recorded."""
    from msgspec.structs import replace

    from gym_ckpt_grpc.storage import encode

    rig.model.hold("model", 2)
    life = await rig.life()
    await seed(rig, life)
    running = activate(life)
    await rig.model.at("model", 2)
    (record,) = await life.checkpoint()
    running.cancel()
    state = record.decode("boundary")
    state["calls"][1]["key"] = state["calls"][1]["key"].replace("/add", "/take")
    after = await rig.life()
    await after.restore([replace(record, payloads={**record.payloads, "boundary": encode(state)})])
    called = len(rig.world.calls)
    rig.model.release()
    for _ in range(2):  # the second time too: from scratch it would count on from where the tools are
        status, answer = await activate(after, 1)
        assert (status, rig.world.paths(called)) == (409, [])
        assert answer["error"]["code"] == "STATE_CORRUPT"


async def test_a_seed_waits_while_closed_and_a_refused_one_leaves_nothing(rig: Rig) -> None:
    life = await rig.life()
    assert (await life.post("/v1/agent_sessions", seed_of(rig, tool_accesses="none")))[0] == 422
    assert life.owner.report(9).counts["sessions"] == 0
    await close(life.owner)
    waiting = call(life.app, "/v1/agent_sessions", seed_of(rig), headers={"content-type": "application/json"})
    await spin(50)
    assert (life.owner.report(9).counts["waiting"], await exported(life.owner)) == (1, [])
    await reopen(life.owner)
    assert (await waiting.end()).json() == {"agent_session_id": "a-1"}
    changed = seed_of(rig, task_id={"taskset": "t", "task_id": "2"})
    assert (await life.post("/v1/agent_sessions", changed))[0] == 409
    assert (await life.post("/v1/agent_sessions", {"agent_session_id": 7}))[0] == 422


async def test_a_call_of_a_session_needs_no_prefix_to_be_captured(rig: Rig) -> None:
    rig.model.hold("model")
    life = await rig.life()
    await seed(rig, life)
    running = asyncio.create_task(life.post("/v1/responses", ACTIVATE))
    await rig.model.at("model")
    (record,) = await life.checkpoint()
    assert record.decode("boundary") == {"calls": []}
    await life.resume()
    rig.model.release()
    assert heard(await running) == RESULT


async def test_a_retired_session_is_freed(rig: Rig) -> None:
    rig.world.hold("/add")
    life = await rig.life()
    await seed(rig, life)
    running = activate(life)
    await rig.world.at("/add")
    await retire(life.owner, life.port, R)
    status, answer = await running
    assert (status, answer["error"]["code"], life.server._session_records) == (409, "STALE_ATTEMPT", {})
    assert (await life.post("/v1/agent_sessions/close", ids()))[0] == 200


async def test_an_idle_session_is_captured_again_before_anything_touches_it(rig: Rig) -> None:
    life = await rig.life()
    await seed(rig, life)
    assert heard(await activate(life)) == RESULT
    records = await life.checkpoint()
    other = await rig.life()
    await restore(other.owner, records)
    records = await exported(other.owner)
    assert [each.episode for each in records] == [R1]
    third = await rig.life()
    await third.restore(records)
    assert third.server._session_records["a-1"].episode_id.attempt == 2
    assert heard(await activate(third, 2)) == ['{"count":4}', '{"count":6}', "3"]


@pytest.mark.parametrize(
    "change",
    [
        {"request": None},
        {"request": {"agent_session_id": "another"}},
        {"resources_cookies": []},
        {"observations": 1},
        {"more": 1},
        {"activations": "many"},
    ],
)
async def test_a_state_that_is_none_is_refused_and_nothing_is_installed(rig: Rig, change: dict[str, Any]) -> None:
    life = await rig.life()
    await seed(rig, life)
    state = (await found_state(life).export_sessions(["a-1", "run:x"]))["a-1"]
    other = found_state(await rig.life())
    good = RestoredSession("a-1", R1, state)
    with pytest.raises(InvalidState, match="session a-1"):
        await other.restore_sessions([good, RestoredSession("a-1", R1, {**state, **change})])
    with pytest.raises(InvalidState, match="run:x has a state"):
        await other.restore_sessions([good, RestoredSession("run:x", R1, {"a": 1})])
    assert other._server._session_records == {}
    await other.restore_sessions([good, RestoredSession("run:x", R1, {})])
    assert other.holds("a-1")
    for _ in range(2):
        await other.retire_session("a-1")
    assert not other.holds("a-1")
    await spin()


async def test_an_unusable_state_is_told_without_its_values(rig: Rig) -> None:
    life = await rig.life()
    await seed(rig, life)
    state = (await found_state(life).export_sessions(["a-1"]))["a-1"]
    state["request"]["tool_accesses"][0]["cookies"] = [{"session": "secret"}]
    with pytest.raises(InvalidState, match=r"session a-1 is unusable: tool_accesses.*cookies") as raised:
        await found_state(life).restore_sessions([RestoredSession("a-1", R1, state)])
    assert "secret" not in "".join(traceback.format_exception(raised.value))


def found_state(life: Life) -> Any:
    from gym_ckpt_grpc.integrations.nemo_gym.participant import found

    return found(life.server).state


async def test_a_tool_error_of_a_session_is_the_tools_output(rig: Rig) -> None:
    rig.world.answers["/add"] = [JSONResponse({"error": "broken"}, 500)]
    life = await rig.life()
    await seed(rig, life)
    assert heard(await activate(life))[0] == '{"error":"broken"}'
