"""`ResourcesMixin` in front of released resources servers, in this process: admission, sessions, roots."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer

from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.nemo_gym.servers import Participant, Slow, build, client_of, held, options, response, rows, text
from tests.participants.fakes import call, close, exported, reopen, restore, retire, spin

ROW = rows("example_session_state_mgmt")[0]
"""From 3 to 6."""
SEED = {**ROW, "_ng_task_index": 7, "_ng_rollout_index": 0}
EPISODE = EpisodeId("7-0")
VERIFY = {**ROW, "response": response(text("6"))}


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def counter() -> Participant:
    return Participant(StatefulCounterResourcesServer)


@pytest.fixture
async def client(counter: Participant) -> AsyncIterator[Any]:
    async with client_of(counter.app) as client:
        yield client


# ---- whose a request is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "named", "episode"),
    [
        ("/ng-rollout/step3.7-a2/seed_session", {}, "step3.7-a2"),
        ("/seed_session", {"_ng_task_index": 7, "_ng_rollout_index": 1}, "7-1"),
        ("/seed_session", {"_ng_task_index": 7, "_ng_rollout_index": 1, "_ng_attempt_index": 3}, "7-1-a3"),
        ("/seed_session", {"_ng_rollout_id": "step3.7", "_ng_attempt_index": 1}, "step3.7-a1"),
        ("/seed_session", {"episode_id": {"rollout_id": "r", "attempt": 4}, "_ng_rollout_id": "other"}, "r-a4"),
        ("/ng-rollout/r/seed_session", {"_ng_rollout_id": "other"}, "r"),
    ],
)
async def test_a_seed_maps_its_session_to_the_rollout_of_path_or_body(
    counter: Participant, client: Any, path: str, named: dict[str, Any], episode: str
) -> None:
    reply = await client.post(path, json={**ROW, **named})
    assert (reply.status_code, list(counter.sessions().values())) == (200, [episode])
    assert (reply.headers["x-gymckpt-verify"], "x-gymckpt-restart" in reply.headers) == ("wait", False)
    assert sorted(counter.server.session_id_to_counter) == sorted(counter.sessions())


async def test_a_seed_with_a_number_that_is_none_names_its_rollout(counter: Participant, client: Any) -> None:
    """JSON has no NaN; many write it all the same, and the server reads it."""
    body = json.dumps({**ROW, "_ng_rollout_id": "r", "score": float("nan")})
    reply = await client.post("/seed_session", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, list(counter.sessions().values())) == (200, ["r"])


async def test_a_seed_that_names_no_rollout_is_refused_and_the_server_hears_nothing_of_it(
    counter: Participant, client: Any
) -> None:
    reply = await client.post("/seed_session", json=ROW)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "ROLLOUT_ID_REQUIRED")
    assert (counter.sessions(), counter.server.session_id_to_counter) == ({}, {})


@pytest.mark.parametrize(
    ("path", "named", "field"),
    [
        ("/ng-rollout/-bad/seed_session", {}, "path"),
        ("/seed_session", {"_ng_rollout_id": "-bad"}, "_ng_rollout_id"),
        ("/seed_session", {"episode_id": {"rollout_id": 7}}, "episode_id.rollout_id"),
    ],
)
async def test_an_illegal_rollout_is_refused_by_its_field(
    counter: Participant, client: Any, path: str, named: dict[str, Any], field: str
) -> None:
    reply = await client.post(path, json={**SEED, **named})
    assert reply.status_code == 400
    assert [each["field"] for each in reply.json()["error"]["violations"]] == [field]
    assert counter.sessions() == {}


async def test_a_seed_that_failed_starts_no_session(counter: Participant, client: Any) -> None:
    """The server wants an initial count, and says so as it does without us."""
    reply = await client.post("/ng-rollout/r/seed_session", json={"responses_create_params": {"input": "x"}})
    assert (reply.status_code, counter.sessions()) == (422, {})


async def test_a_tool_call_has_nothing_but_its_cookie_and_counts_for_the_sessions_rollout(slow: Slow) -> None:
    async with client_of(slow.app) as client:
        await client.post("/seed_session", json=SEED)
        (session,) = slow.sessions()
        running = await slow.begin(client)
        await close(slow.owner)
        (blocker,) = slow.owner.report(9).blockers
        place = f"/increment_counter session {session}"
        assert (blocker.reason, blocker.episode, blocker.place) == (BlockerReason.IN_FLIGHT_REQUEST, EPISODE, place)
        slow.go.set()
        assert (await running).json() == {"success": True}
        assert slow.owner.is_ready()


# ---- admission ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["seed", "tool", "verify"])
async def test_what_arrives_while_closed_waits_and_has_the_answer_it_would_have_had(
    counter: Participant, client: Any, kind: str
) -> None:
    """Nothing is refused: the rollout ends in the reward of the same rollout on the bare server."""
    async with client_of(build(StatefulCounterResourcesServer).setup_webserver()) as bare:
        expected = await _rollout(bare)
    assert expected[-1][1]["reward"] == 1.0
    assert await _rollout(client, counter, kind) == expected


async def _rollout(client: Any, counter: Participant | None = None, waits: str = "") -> list[tuple[int, Any]]:
    calls = [("seed", "/seed_session", SEED)]
    calls += [("tool", "/increment_counter", {"count": 1}), ("tool", "/increment_counter", {"count": 2})]
    calls += [("get", "/get_counter_value", {}), ("verify", "/verify", VERIFY)]
    answers = []
    for kind, path, body in calls:
        sent = asyncio.ensure_future(client.post(path, json=body))
        if kind == waits and counter is not None:
            sent.cancel()
            await close(counter.owner)
            before = dict(counter.server.session_id_to_counter)
            sent = asyncio.ensure_future(client.post(path, json=body))
            await held(counter)
            assert (counter.owner.is_ready(), counter.server.session_id_to_counter) == (True, before)
            await reopen(counter.owner)
        answer = await sent
        answers.append((answer.status_code, answer.json()))
    return answers


@pytest.mark.parametrize(
    "path", ["/", "/health", "/readyz", "/stats", "/reverify_mode", "/openapi.json", "/docs", "/redoc", "/mcp"]
)
async def test_what_belongs_to_no_rollout_is_answered_while_closed(
    counter: Participant, client: Any, path: str
) -> None:
    counter.server.setup_liveness(counter.app)
    await close(counter.owner)
    async with asyncio.timeout(30):
        assert (await client.get(path)).status_code in (200, 404)


async def test_a_client_that_leaves_while_its_call_is_held_never_runs(counter: Participant) -> None:
    """Through all that the framework puts around an application."""
    counter.server.setup_exception_middleware(counter.app)
    counter.server.setup_cancellation_middleware(counter.app)
    await close(counter.owner)
    left = call(counter.app, "/ng-rollout/r/seed_session", ROW, headers={"content-type": "application/json"})
    await held(counter)
    left.leave()
    async with asyncio.timeout(30):
        while counter.owner.admission.waiting:
            await spin(1)
    await reopen(counter.owner)
    await left.end()
    assert (counter.sessions(), counter.server.session_id_to_counter) == ({}, {})


# ---- the end of a session -------------------------------------------------------------------------------------


async def test_a_retired_session_is_refused_and_its_cleanup_is_not(slow: Slow) -> None:
    async with client_of(slow.app) as client:
        await client.post("/seed_session", json=SEED)
        running = await slow.begin(client)
        await retire(slow.owner, slow.port, EPISODE)
        refused = [await running, await client.post("/get_counter_value", json={})]
        refused.append(await client.post("/seed_session", json=SEED))
        assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [(409, "STALE_ATTEMPT")] * 3
        assert [each.json()["error"]["episodes"] for each in refused] == [["7-0"]] * 3
        closing = {"resources_session_id": "s", "episode_id": {"rollout_id": "7-0", "attempt": 0}}
        assert (await client.post("/close_session", json=closing)).status_code == 200
        assert slow.server.session_id_to_counter == {}


@pytest.mark.parametrize("ends", [True, False])
async def test_a_verify_ends_the_session_unless_its_options_say_otherwise(ends: bool) -> None:
    counter = Participant(StatefulCounterResourcesServer, given=options(ends_on_verify=ends))
    async with client_of(counter.app) as client:
        await client.post("/seed_session", json=SEED)
        assert (await client.post("/verify", json=VERIFY)).status_code == 200
    assert len(counter.sessions()) == (0 if ends else 1)


async def test_a_restored_session_goes_on_under_its_old_cookie_as_the_next_attempt(
    counter: Participant, client: Any
) -> None:
    await client.post("/seed_session", json=SEED)
    await client.post("/increment_counter", json={"count": 2})
    records = await exported(counter.owner)
    after = Participant(StatefulCounterResourcesServer)
    await restore(after.owner, records)
    await reopen(after.owner)
    assert list(after.sessions().values()) == ["7-0-a1"]
    async with client_of(after.app, client.cookies) as goes_on:
        assert (await goes_on.post("/increment_counter", json={"count": 1})).json() == {"success": True}
        assert (await goes_on.post("/get_counter_value", json={})).json() == {"count": 6}
        assert (await goes_on.post("/verify", json=VERIFY)).json()["reward"] == 1.0
    async with client_of(build(StatefulCounterResourcesServer).setup_webserver(), client.cookies) as lost:
        assert (await lost.post("/verify", json=VERIFY)).json()["reward"] == 0.0
