"""Released agents in this process: legacy runs, recorded and replayed."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator
from dataclasses import replace as replace_agent
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeGuard, cast

import pytest
from msgspec.structs import replace
from responses_api_agents.non_executing_simple_agent.app import NonExecutingSimpleAgent
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_agents.speed_bench_agent.app import SpeedBenchAgent
from responses_api_agents.tool_simulation_agent.app import ToolSimulationAgent
from starlette.responses import JSONResponse

from gym_ckpt_grpc.control import EpisodeListKind
from gym_ckpt_grpc.integrations.asgi import STATE_KEY
from gym_ckpt_grpc.integrations.nemo_gym import Options, agent_table, checkpointed
from gym_ckpt_grpc.integrations.nemo_gym.agent import AgentMixin
from gym_ckpt_grpc.integrations.nemo_gym.agent_driver import AgentDriver
from gym_ckpt_grpc.integrations.nemo_gym.agent_table import AGENTS, agent_of, changed_source
from gym_ckpt_grpc.integrations.nemo_gym.participant import found
from gym_ckpt_grpc.participants import RestartOnlyOwner
from gym_ckpt_grpc.protocol.errors import ERRORS, AdmissionClosed, ControlError, StaleAttempt, StateNotFound
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.storage import Record, encode
from tests.nemo_gym.agent_rig import Rig, TwoCalls, episodes, heard, refused
from tests.nemo_gym.servers import build
from tests.participants.fakes import R1, R, close, exported, listed, restore, retire

OPTIONS = Options(instance="agent", kind="agent", root="/nowhere", control="127.0.0.1:0")
POLICY = {"type": "responses_api_models", "name": "policy_model"}
RESULT = ['{"count":1}', '{"count":3}', "3"]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        yield rig


async def test_every_call_of_a_run_carries_its_rollout(rig: Rig) -> None:
    life = await rig.life()
    status, result = await life.run(2)
    assert (status, heard(result), result["reward"]) == (200, RESULT, 3.0)
    assert rig.world.paths() == ["/seed_session", "/add", "/add", "/verify"]
    assert {each[0] for each in rig.world.calls} == episodes(rig.model.asked) == {"r-a2"}
    assert (life.owner.report(9).counts["sessions"], life.owner.report(9).restart_count) == (0, 0)
    row = {"_ng_rollout_id": "r", "_ng_attempt_index": 2}  # for a client of the agent's own, of which a harness is told
    assert life.server.base_url_for_run("http://model", row) == "http://model/ng-rollout/r-a2"


CALLS = ["/seed_session", "/add", "/add", "/verify"]
AT = {
    ("/seed_session", 1): (CALLS, 3),
    ("model", 1): (CALLS[1:], 3),
    ("/add", 1): (CALLS[2:], 2),
    ("model", 2): (CALLS[2:], 2),
    ("/add", 2): (CALLS[3:], 1),
    ("model", 3): (CALLS[3:], 1),
    ("/verify", 1): (CALLS[3:], 0),
    ("/verify", 1, "wait"): ([], 0),
}
"""Which call a checkpoint finds under way -> what is called after a restore: of the world, and how often the model."""


@pytest.mark.parametrize("at", AT, ids=str)
async def test_a_run_goes_on_wherever_the_checkpoint_found_it(rig: Rig, at: tuple[Any, ...]) -> None:
    """As the twin does that was never killed; what had its reply is not called again."""
    call, number, *wait = at
    rig.world.verify = "wait" if wait else "replay"
    held = rig.model if call == "model" else rig.world
    held.hold(call, number)
    life = await rig.life()
    running = life.run()
    await held.at(call, number)
    await close(life.owner)
    blocking = (
        {"/add": BlockerReason.RUNNING, "/verify": BlockerReason.WAIT_STEP}[call] if call == "/add" or wait else None
    )
    assert [each.reason for each in life.owner.report(9).blockers] == ([blocking] if blocking else [])
    if blocking:
        held.release()
        await life.port.until(life.owner.is_ready)
    records = await exported(life.owner)
    picture = rig.picture()
    await life.resume()
    held.release()
    status, twin = await running
    assert (status, heard(twin), twin["reward"]) == (200, RESULT, 3.0)

    rig.set_back(picture)
    called, asked = len(rig.world.calls), len(rig.model.asked)
    after = await rig.life()
    await after.restore(records)
    status, restored = await after.run(1)
    assert (status, heard(restored), restored["reward"]) == (200, RESULT, 3.0)
    assert (rig.world.paths(called), len(rig.model.asked) - asked) == AT[at]
    assert {each[0] for each in rig.world.calls[called:]} | episodes(rig.model.asked[asked:]) <= {"r-a1"}
    assert after.owner.restored_pending() == frozenset()


async def test_a_checkpoint_takes_a_run_between_two_tool_calls_of_one_turn() -> None:
    async with Rig(model=TwoCalls()) as rig:
        rig.world.hold("/first")
        life = await rig.life()
        running = life.run()
        await rig.world.at("/first")
        await close(life.owner)
        rig.world.release()
        await life.port.until(life.owner.is_ready)
        records, picture = await exported(life.owner), rig.picture()
        assert rig.world.paths() == ["/seed_session", "/first"]
        await life.resume()
        status, twin = await running
        assert (status, twin["reward"]) == (200, 3.0)
        rig.set_back(picture)
        called, asked = len(rig.world.calls), len(rig.model.asked)
        after = await rig.life()
        await after.restore(records)
        status, restored = await after.run(1)
        assert (status, heard(restored), restored["reward"]) == (200, heard(twin), 3.0)
        assert (rig.world.paths(called), len(rig.model.asked) - asked) == (["/second", "/verify"], 1)


async def test_a_restored_run_is_captured_again_before_anything_claims_it_and_while_it_goes_on(rig: Rig) -> None:
    rig.model.hold("model", 2)
    life = await rig.life()
    running = life.run()
    await rig.model.at("model", 2)
    records = await life.checkpoint()
    picture = rig.picture()
    running.cancel()
    unclaimed = await rig.life()
    await restore(unclaimed.owner, records)
    records = await exported(unclaimed.owner)
    assert [each.episode for each in records] == [R1]

    rig.set_back(picture)
    rig.model.hold("model", 4)
    third = await rig.life()
    await third.restore(records)
    running = third.run(2)
    await rig.model.at("model", 4)  # the third turn: the second was asked for again
    records = await third.checkpoint()
    picture = rig.picture()
    running.cancel()

    rig.set_back(picture)
    called, asked = len(rig.world.calls), len(rig.model.asked)
    fourth = await rig.life()
    await fourth.restore(records)
    status, result = await fourth.run(3)
    assert (status, heard(result), result["reward"]) == (200, RESULT, 3.0)
    assert (rig.world.paths(called), len(rig.model.asked) - asked) == (["/verify"], 1)


async def test_a_policy_reply_that_arrives_while_closed_is_not_asked_for_again(rig: Rig) -> None:
    rig.model.hold("model", 2)
    life = await rig.life()
    running = life.run()
    await rig.model.at("model", 2)
    await close(life.owner)
    rig.model.release()
    session = life.owner._sessions.get("run:r")
    assert session is not None
    await life.port.until(lambda: session.kept)
    records = await exported(life.owner)
    running.cancel()
    after = await rig.life()
    await after.restore(records)
    asked = len(rig.model.asked)
    status, result = await after.run(1)
    assert (status, heard(result)) == (200, RESULT)
    assert len(rig.model.asked) - asked == 1


async def test_records_are_plain_and_a_boundary_is_the_list_of_replies(rig: Rig) -> None:
    rig.model.hold("model", 2)
    life = await rig.life()
    running = life.run()
    await rig.model.at("model", 2)
    (record,) = await life.checkpoint()
    protocol, loop = record.decode("protocol_boundary")["calls"], record.decode("boundary")["calls"]
    assert [each["key"].rpartition(" ")[0] for each in protocol + loop] == [
        "POST world/seed_session",
        "POST policy_model/v1/responses",
        "POST world/add",
    ]
    assert loop[1] == {
        "status": 200,
        "type": "application/json",
        "cookies": [],
        "body": '{"count":1}',
        "key": loop[1]["key"],
    }
    assert protocol[0]["cookies"] == [["world", "s-0", "s-0", {"path": "/", "samesite": "lax"}]]
    await life.resume()
    rig.model.release()
    await running


@pytest.mark.parametrize(
    ("cls", "turns"), [(NonExecutingSimpleAgent, 1), (ToolSimulationAgent, 1), (SpeedBenchAgent, 2)]
)
async def test_the_other_audited_agents_go_on_as_well(cls: type, turns: int) -> None:
    """In the middle of their last generation."""
    async with Rig(cls, plan=["hello"]) as rig:
        task: dict[str, Any] = {"responses_create_params": {"input": [{"role": "user", "content": "Hi."}] * turns}}
        rig.model.hold("model", turns)
        life = await rig.life()
        running = life.run(**task)
        await rig.model.at("model", turns)
        records = await life.checkpoint()
        await life.resume()
        rig.model.release()
        status, twin = await running
        assert (status, heard(twin)) == (200, ["hello"] * turns)
        called, asked = len(rig.world.calls), len(rig.model.asked)
        after = await rig.life()
        await after.restore(records)
        status, restored = await after.run(1, **task)
        assert (status, restored["response"]["output"]) == (200, twin["response"]["output"])
        assert (rig.world.paths(called), len(rig.model.asked) - asked) == (["/verify"], 1)


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StaleAttempt("gone"), AdmissionClosed("full"), StateNotFound("no session")])
@pytest.mark.parametrize("path", ["/seed_session", "/add", "/verify", "model"])
@pytest.mark.parametrize("mode", [None, "restart_only"])
async def test_a_refusal_goes_through_and_the_model_never_hears_of_it(
    rig: Rig, path: str, error: ControlError, mode: str | None
) -> None:
    if path == "model":
        rig.model.answers = [refused(error)]
    else:
        rig.world.answers[path] = [refused(error)]
    life = await rig.life(mode)
    status, answer = await life.run()
    assert (status, answer["error"]["code"]) == (ERRORS[error.code].http_status, error.code.name)
    assert len(rig.model.asked) == {"/seed_session": 0, "model": 1, "/add": 1, "/verify": 3}[path]
    assert not any(error.message in str(asked) for _, asked in rig.model.asked)
    assert not any(life.owner.report(9).counts.values())


@pytest.mark.parametrize("mode", [None, "restart_only"])
async def test_an_error_that_is_no_refusal_is_the_tools_output(rig: Rig, mode: str | None) -> None:
    rig.world.answers["/add"] = [JSONResponse({"error": "no such number"}, 500)]
    life = await rig.life(mode)
    status, result = await life.run()
    assert (status, heard(result)[0], result["reward"]) == (200, '{"error":"no such number"}', 2.0)


async def test_a_retired_run_stops_and_hears_so(rig: Rig) -> None:
    rig.world.hold("/add")
    life = await rig.life()
    running = life.run()
    await rig.world.at("/add")
    await retire(life.owner, life.port, R)
    status, answer = await running
    assert (status, answer["error"]["code"]) == (409, "STALE_ATTEMPT")
    status, answer = await life.run()
    assert (status, answer["error"]["code"]) == (409, "STALE_ATTEMPT")
    assert rig.world.paths() == ["/seed_session"]  # the call that waits had not been counted yet
    assert (await life.run(1))[0] == 200


async def test_a_seed_that_cannot_be_captured_makes_the_run_a_restart(rig: Rig) -> None:
    rig.world.restart = True
    rig.world.hold("/add")
    life = await rig.life()
    running = life.run()
    await rig.world.at("/add")
    await close(life.owner)
    assert life.owner.is_ready()
    assert await listed(life.owner, EpisodeListKind.RESTART) == [R]
    assert await exported(life.owner) == []
    rig.world.release()
    assert (await running)[0] == 200


async def test_a_run_that_names_no_rollout_is_refused(rig: Rig) -> None:
    life = await rig.life()
    status, answer = await life.post("/run", {"responses_create_params": {"input": []}})
    assert (status, answer["error"]["code"], rig.world.calls) == (400, "ROLLOUT_ID_REQUIRED", [])


async def test_a_call_of_the_loop_without_a_run_is_refused_and_one_of_nobody_passes(rig: Rig) -> None:
    life = await rig.life()
    status, answer = await life.post("/ng-rollout/r/v1/responses", {"input": []})
    assert (status, answer["error"]["code"], rig.model.asked) == (404, "STATE_NOT_FOUND", [])
    rig.model.plan = ["hello"]
    status, answer = await life.post("/v1/responses", {"input": "hi"})
    assert (status, answer["output"][0]["content"][0]["text"], episodes(rig.model.asked)) == (200, "hello", {None})


async def test_a_long_conversation_is_no_reason_to_refuse() -> None:
    """Images in it, for instance: the framework's agents have no limit."""
    sizes: list[int] = []

    class Work:
        async def activation(self, episode: Any, key: str, index: str | None, handle: Any) -> Any:
            return await handle()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sizes.append(len((await receive())["body"]))
        await JSONResponse({})(scope, receive, send)

    chunks = [{"type": "http.request", "body": bytes(1 << 20), "more_body": left > 0} for left in reversed(range(65))]
    scope = {"type": "http", "method": "POST", "path": "/ng-rollout/r/v1/responses", "headers": []}
    sent: list[Any] = []

    async def receive() -> Any:
        return chunks.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await AgentDriver(app, cast(Any, Work()))({**scope, "state": {STATE_KEY: R}}, receive, send)
    assert (sent[0]["status"], sizes) == (200, [65 << 20])


# ---- divergence ------------------------------------------------------------------------------------------------


async def held_in_turn_two(rig: Rig) -> list[Record]:
    """A checkpoint of a run in its second turn; the run itself is gone."""
    rig.model.hold("model", 2)
    life = await rig.life()
    running = life.run()
    await rig.model.at("model", 2)
    records = await life.checkpoint()
    running.cancel()
    return records


@pytest.mark.parametrize("part", ["protocol_boundary", "boundary"])
async def test_a_replay_that_calls_something_else_never_gives_a_result(rig: Rig, part: str) -> None:
    """A fault seeded in what was recorded: the rollout is refused, again and again, until its next attempt."""
    (record,) = await held_in_turn_two(rig)
    state = record.decode(part)
    state["calls"][-1]["key"] += "?"
    record = replace(record, payloads={**record.payloads, part: encode(state)})
    called, asked = len(rig.world.calls), len(rig.model.asked)
    after = await rig.life()
    await after.restore([record])
    for _ in range(2):
        status, answer = await after.run(1)
        assert (status, answer["error"]["code"]) == (409, "STATE_CORRUPT")
        assert "the replay of r-a1 diverged" in answer["error"]["detail"]
    assert (rig.world.calls[called:], rig.model.asked[asked:]) == ([], [])
    rig.model.release()
    await retire(after.owner, after.port, R1)
    status, result = await after.run(2)
    assert (status, heard(result), result["reward"]) == (200, RESULT, 3.0)


async def test_another_reply_in_the_record_is_another_rollout(rig: Rig) -> None:
    """The model's second turn was recorded with what the first tool said: a changed reply makes another call of it."""
    rig.model.hold("model", 3)
    life = await rig.life()
    running = life.run()
    await rig.model.at("model", 3)
    (record,) = await life.checkpoint()
    running.cancel()
    state = record.decode("boundary")
    assert state["calls"][1]["body"] == '{"count":1}'
    state["calls"][1]["body"] = '{"count":7}'
    after = await rig.life()
    await after.restore([replace(record, payloads={**record.payloads, "boundary": encode(state)})])
    status, answer = await after.run(1)
    assert (status, answer["error"]["code"]) == (409, "STATE_CORRUPT")


async def test_another_task_under_a_restored_attempt_is_refused(rig: Rig) -> None:
    records = await held_in_turn_two(rig)
    after = await rig.life()
    await after.restore(records)
    status, answer = await after.run(1, note="another task")
    assert (status, answer["error"]["code"]) == (409, "STATE_CORRUPT")


# ---- which agents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", AGENTS)
def test_the_installed_sources_are_the_audited_ones(place: str) -> None:
    assert changed_source(AGENTS[place].sources) is None


IMPORTS = (
    "collections.abc",
    "dataclasses",
    "fastapi",
    "json",
    "logging",
    "nemo_gym",
    "pydantic",
    "time",
    "typing",
    "uuid",
)
AWAITED = {
    "self.server_client.post",
    "raise_for_status",
    "get_response_json",
    "_call_model",
    "super().aggregate_metrics",
}


@pytest.mark.parametrize("place", AGENTS)
def test_audited_agents_do_nothing_but_call_servers(place: str) -> None:
    """What they import, what they await, and that they keep nothing: as their sources say."""
    agent = AGENTS[place]
    spec = find_spec(place.partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    nodes = list(ast.walk(tree))
    imported = [alias.name for each in nodes if isinstance(each, ast.Import) for alias in each.names]
    imported += [each.module or "." for each in nodes if isinstance(each, ast.ImportFrom)]
    allowed = (*IMPORTS, "resources_servers.gymnasium") if "gymnasium" in place else IMPORTS
    assert [each for each in imported if not each.startswith(allowed)] == []
    assert ("uuid" in imported) == agent.fresh_ids
    awaits = [ast.unparse(each.value.func) for each in nodes if isinstance(each, ast.Await) and _is_call(each.value)]
    assert sum(isinstance(each, ast.Await) for each in nodes) == len(awaits)
    methods = {f"self.{each.name}" for each in nodes if isinstance(each, ast.AsyncFunctionDef)}
    called = {each for each in awaits if not each.endswith((".json", ".content.read"))}
    assert called - methods - AWAITED == set(agent.requests)
    stored = [ast.unparse(each) for each in nodes if isinstance(getattr(each, "ctx", None), ast.Store)]
    assert [each for each in stored if each.startswith("self.")] == []
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    assert names.isdisjoint({"open", "eval", "exec", "print", "input", "global", "globals", "asyncio"})


def _is_call(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call)


def test_a_changed_source_makes_an_agent_restart_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = "responses_api_agents.simple_agent.app:SimpleAgent"
    sources = {**AGENTS[place].sources, "responses_api_agents/simple_agent/app.py": "0" * 64}
    monkeypatch.setitem(agent_table.AGENTS, place, replace_agent(AGENTS[place], sources=sources))
    agent_table._warn.cache_clear()
    server = build(checkpointed(SimpleAgent, OPTIONS), name="agent", model_server=POLICY)
    server.setup_webserver()
    server.setup_webserver()
    assert isinstance(found(server).owner, RestartOnlyOwner)
    warned = [each.getMessage() for each in caplog.records if "restart_only" in each.getMessage()]
    assert len(warned) == 1
    assert "responses_api_agents/simple_agent/app.py is not the file that was audited" in warned[0]
    (tmp_path / "responses_api_agents").mkdir()
    assert changed_source(sources, tmp_path) == "responses_api_agents/simple_agent/app.py"


def test_a_mixin_and_options_change_nothing_and_another_method_does() -> None:
    class Mine(AgentMixin, SimpleAgent):  # type: ignore[misc]
        checkpoint: ClassVar[Options] = OPTIONS

    class Changed(Mine):
        async def run(self, request: Any, body: Any) -> Any:
            return None

    assert agent_of(Mine) is AGENTS["responses_api_agents.simple_agent.app:SimpleAgent"]
    assert agent_of(checkpointed(SimpleAgent, OPTIONS)) is agent_of(Mine)
    assert agent_of(Changed) is None


async def test_a_restart_only_agent_tags_its_calls_and_is_listed() -> None:
    async with Rig() as rig:
        rig.world.hold("/add")
        life = await rig.life(mode="restart_only")
        running = life.run(1)
        await rig.world.at("/add")
        await close(life.owner)
        assert (life.owner.is_ready(), await listed(life.owner, EpisodeListKind.RESTART)) == (True, [R1])
        rig.world.release()
        status, result = await running
        assert (status, heard(result)) == (200, RESULT)
        assert {each[0] for each in rig.world.calls} == {"r-a1"}
