"""Environment servers as participants: what is done around an episode, with a protocol that does what a test says."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any
from uuid import uuid4

import anyio
import orjson
import pytest
from nemo_gym.base_environment_server import CleanupContext

from gym_ckpt_grpc.integrations.nemo_gym.diverged import DivergedAttempts
from gym_ckpt_grpc.participants import refusal_reply
from gym_ckpt_grpc.protocol.errors import StaleAttempt, StateCorrupt
from tests.nemo_gym.environment_rig import (
    R0,
    R1,
    Environment,
    Network,
    Scripted,
    Steps,
    cut_behind_a_tool_call,
    row,
    until,
)
from tests.nemo_gym.environment_rig import later as later
from tests.nemo_gym.environment_rig import network as network
from tests.participants.fakes import close, exported, reopen, restore, retire, spin

# ---- a run, a checkpoint, a restore ------------------------------------------------------------------------------


async def test_an_episode_without_a_checkpoint_is_what_it_was(network: Network) -> None:
    protocol = Steps()
    async with Environment(protocol).client() as client:
        response = await client.run(R0)
    assert response.status_code == 200
    assert response.json()["result"] == {"told": {}, "verified": {}}
    # The prefix tells the resources server whose call it is; the cleanup is made once, at the end.
    assert network.paths() == [
        f"/ng-rollout/7-0/{each}" for each in ("seed_session", "tool", "verify", "close_session")
    ]
    assert protocol.cleaned == 1


async def test_a_restored_episode_makes_no_recorded_call_again(network: Network) -> None:
    """It parks behind its tool call; in another process it goes on from there, to the same result as its twin."""
    protocol = Steps()
    network.replies["/tool"] = protocol.wait
    environment = Environment(protocol)
    async with environment.client() as client:
        running = client.start(R0)
        await protocol.inside.wait()
        await close(environment.owner)
        assert not environment.owner.is_ready()  # a tool call is waited for
        protocol.go.set()
        await until(environment.owner.is_ready)
        records = await exported(environment.owner)
        assert [each.episode for each in records] == [R0]
        assert network.paths()[-1] == "/ng-rollout/7-0/tool"
        await reopen(environment.owner)
        twin = (await running).json()

    network.seen.clear()
    again = Steps()
    environment = Environment(again)
    await restore(environment.owner, records)
    async with environment.client() as client:
        running = client.start(R1)
        await spin()
        assert network.seen == []  # held until the Resume that ends the restore
        await reopen(environment.owner)
        response = (await running).json()
    assert response["result"] == twin["result"] == {"told": {"n": 1}, "verified": {}}
    assert response["episode_id"] == {"rollout_id": "7-0", "attempt": 1}
    assert network.paths() == [f"/ng-rollout/7-0-a1/{each}" for each in ("verify", "close_session")]
    assert again.cleaned == 1


async def test_ids_that_the_server_makes_itself_stay_those_of_the_first_life(network: Network) -> None:
    """In its calls and in its cleanup: the other servers know no others."""

    async def protocol(server: Scripted, cleanup: CleanupContext) -> Any:
        mine = f"session-{uuid4().hex}"

        async def clean() -> None:
            await server.call("/close_session", session=mine)

        cleanup.register_cleanup("session", clean)
        assert (await server.call("/seed_session", session=mine))["session"] == mine
        await server.call("/tool", session=mine)
        await server.call("/verify", session=mine)
        return {}

    async def echo(body: Any) -> tuple[int, Any]:
        return 200, body

    network.replies["/seed_session"] = echo
    environment = Environment(protocol)
    stop = Steps()
    network.replies["/tool"] = stop.wait
    async with environment.client() as client:
        running = client.start(R0)
        await stop.inside.wait()
        await close(environment.owner)
        stop.go.set()
        await until(environment.owner.is_ready)
        records = await exported(environment.owner)
        await reopen(environment.owner)
        await running
    (first,) = {body["session"] for _, body in network.seen}

    network.seen.clear()
    environment = Environment(protocol)
    await restore(environment.owner, records)
    await reopen(environment.owner)
    async with environment.client() as client:
        assert (await client.run(R1)).status_code == 200
    assert [(path.rpartition("/")[2], body["session"]) for path, body in network.seen] == [
        ("verify", first),
        ("close_session", first),
    ]


async def test_a_replay_that_asks_for_something_else_is_refused_for_good(network: Network) -> None:
    records = await cut_behind_a_tool_call(network)

    async def other(server: Scripted, cleanup: CleanupContext) -> Any:
        try:
            return await server.call("/something_else")
        except Exception as error:  # as released protocols do
            return {"caught": str(error)}

    network.seen.clear()
    environment = Environment(other)
    await restore(environment.owner, records)
    await reopen(environment.owner)
    async with environment.client() as client:
        for _ in range(2):
            response = await client.run(R1)
            assert (response.status_code, response.json()["error"]["code"]) == (409, "STATE_CORRUPT")
        assert network.seen == []
        assert (await client.run(R1.next())).status_code == 200


def test_what_is_remembered_of_a_diverged_attempt_holds_on_to_nothing_of_its_episode() -> None:
    diverged = DivergedAttempts()
    episode = Network()
    gone = weakref.ref(episode)

    def fail(episode: Network) -> None:
        raise StateCorrupt("it diverged", episodes=[R1])

    with pytest.raises(StateCorrupt) as raised:
        fail(episode)
    diverged.add(R1, raised.value)
    del episode, raised
    gc.collect()
    assert gone() is None
    diverged.check(R1.next())
    for earlier in (R0, R1):
        with pytest.raises(StateCorrupt, match="it diverged"):
            diverged.check(earlier)


async def test_a_replacement_with_another_task_is_refused_and_the_record_stays(network: Network) -> None:
    records = await cut_behind_a_tool_call(network)
    environment = Environment(Steps())
    await restore(environment.owner, records)
    await reopen(environment.owner)
    async with environment.client() as client:
        assert (await client.run(R1, {"q": 2})).status_code == 400
        assert environment.owner.restored_pending() == {R1}
        assert (await client.run(R1)).status_code == 200


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exported", "restart_only"])
async def test_a_refusal_of_another_server_is_no_failed_row(network: Network, mode: str) -> None:
    """The protocol catches it, and would make a result of it: status 200, for the training data."""

    async def refuse(body: Any) -> tuple[int, Any]:
        status, _, content = refusal_reply(StaleAttempt("attempt 7-0 was retired"))
        return status, orjson.loads(content)

    network.replies["/tool"] = refuse
    made = Steps()

    async def protocol(server: Scripted, cleanup: CleanupContext) -> Any:
        try:
            return await made(server, cleanup)
        except Exception as error:
            return {"caught": repr(error)}

    async with Environment(protocol, mode=mode).client() as client:
        response = await client.run(R0)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "STALE_ATTEMPT")
    assert made.cleaned == 1


async def test_an_error_of_another_server_is_the_protocols_own_matter(network: Network) -> None:
    async def fail(body: Any) -> tuple[int, Any]:
        return 500, {"detail": "no"}

    network.replies["/tool"] = fail
    protocol = Steps()
    async with Environment(protocol).client() as client:
        response = await client.run(R0)
    assert response.status_code == 200
    assert "500" in response.json()["failure"]["failure_reason"]
    assert protocol.cleaned == 1


async def test_an_id_that_only_the_framework_takes_for_legal_is_refused(network: Network) -> None:
    async with Environment(Steps()).client() as client:
        response = await client.http.post("/run", json={"episode_id": {"rollout_id": "x" * 300, "attempt": 0}})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "INVALID_ARGUMENT")


async def test_a_run_that_arrives_while_closed_is_held(network: Network) -> None:
    protocol = Steps()
    environment = Environment(protocol)
    async with environment.client() as client:
        await close(environment.owner)
        running = client.start(R0)
        await spin()
        assert not running.done()
        assert (await client.http.post("/aggregate_metrics", json={"verify_responses": []})).status_code != 409
        await reopen(environment.owner)
        assert (await running).status_code == 200


# ---- retire and cleanup ------------------------------------------------------------------------------------------


async def test_a_retire_stops_the_protocol_and_cleans_up_once(network: Network) -> None:
    protocol = Steps()
    network.replies["/tool"] = protocol.wait
    environment = Environment(protocol)
    async with environment.client() as client:
        running = client.start(R0)
        await protocol.inside.wait()
        await retire(environment.owner, environment.port, R0)
        response = await running
        protocol.go.set()
    assert (response.status_code, response.json()["error"]["code"]) == (409, "STALE_ATTEMPT")
    assert protocol.cleaned == 1
    assert network.paths()[-1] == "/ng-rollout/7-0/close_session"


async def test_a_retire_waits_for_a_cleanup_under_way_and_does_not_break_into_it(network: Network) -> None:
    protocol = Steps()
    network.replies["/close_session"] = protocol.wait
    environment = Environment(protocol)
    async with environment.client() as client:
        running = client.start(R0)
        await protocol.inside.wait()
        retiring = asyncio.create_task(retire(environment.owner, environment.port, R0))
        await spin()
        assert not retiring.done()
        protocol.go.set()
        await retiring
        assert (await running).status_code == 409
    assert protocol.cleaned == 1
    assert network.paths().count("/ng-rollout/7-0/close_session") == 1


async def test_a_client_that_leaves_in_the_cleanup_keeps_nothing_busy(network: Network) -> None:
    """The framework's scope cancels again, in every turn of the loop, whatever does not end."""
    protocol = Steps()
    network.replies["/close_session"] = protocol.wait
    environment = Environment(protocol)
    request = environment.server.request_model.model_validate(row(R0))
    scope = anyio.CancelScope()

    async def serve() -> None:
        with scope:
            await environment.server.run_request(request)

    serving = asyncio.create_task(serve())
    await protocol.inside.wait()
    scope.cancel()
    await spin(100)
    assert (serving.cancelling() < 5, serving.done(), protocol.cleaned) == (True, False, 0)
    protocol.go.set()
    await serving
    assert (protocol.cleaned, environment.owner.report(9).counts["episodes"]) == (1, 0)


async def test_a_failed_protocol_cleans_up_once(network: Network) -> None:
    cleaned: list[str] = []

    async def protocol(server: Scripted, cleanup: CleanupContext) -> Any:
        async def clean(name: str) -> None:
            cleaned.append(name)

        cleanup.register_cleanup("outer", lambda: clean("outer"))
        closed = cleanup.register_cleanup("inner", lambda: clean("inner"))
        await closed.close()
        raise ValueError("broken")

    async with Environment(protocol).client() as client:
        response = await client.run(R0)
    assert "broken" in response.json()["failure"]["failure_reason"]
    assert cleaned == ["inner", "outer"]
