"""Resources servers whose protocol is another: tools over MCP, and Gymnasium-style ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from resources_servers.blackjack.app import BlackjackEnv
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer

from gym_ckpt_grpc.integrations.nemo_gym.participant import Embedding
from gym_ckpt_grpc.integrations.nemo_gym.resources import ResourcesMixin
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.nemo_gym.servers import Participant, Slow, build, client_of, held, options, response, rows, text
from tests.participants.fakes import close, exported, reopen, restore, retire

# ---- tools over MCP ------------------------------------------------------------------------------------------

SEED = {**rows("example_session_state_mgmt")[0], "_ng_task_index": 7, "_ng_rollout_index": 0}
TOKEN = "x-nemo-gym-session-token"


@asynccontextmanager
async def _served(participant: Participant) -> AsyncIterator[Any]:
    """A client of a server whose lifespan runs, but for the control server."""

    @asynccontextmanager
    async def nothing(self: Embedding) -> AsyncIterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedding, "served", nothing)
        async with participant.app.router.lifespan_context(participant.app), client_of(participant.app) as client:
            yield client


async def _token(client: Any) -> str:
    """Seed the session; its MCP token is all that is left of it."""
    seed = await client.post("/seed_session", json=SEED)
    client.cookies.clear()
    headers = seed.json()["mcp"]["headers"]
    return str(next(value for name, value in headers.items() if name.lower() == TOKEN))


def _tool(client: Any, token: str, name: str, *, path: str = "/mcp", **arguments: Any) -> Any:
    """Begin a call of a tool."""
    headers = {"accept": "application/json, text/event-stream", TOKEN: token}
    params = {"name": name, "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    return asyncio.ensure_future(client.post(path, json=body, headers=headers))


def _result(reply: Any) -> Any:
    return reply.json()["result"]["structuredContent"]


@pytest.mark.parametrize("path", ["/mcp", "/mcp/"])
async def test_a_tool_called_over_mcp_is_held_while_closed_and_then_does_what_it_would_have_done(path: str) -> None:
    """The framework refuses to serve tools over MCP behind foreign middlewares; ours are no hindrance."""
    counter = Participant(StatefulCounterResourcesServer, mcp=True)
    async with _served(counter) as client:
        token = await _token(client)
        assert _result(await _tool(client, token, "increment_counter", path=path, count=2)) == {"success": True}
        await close(counter.owner)
        waits = _tool(client, token, "increment_counter", path=path, count=1)
        await held(counter)
        assert (counter.owner.is_ready(), list(counter.server.session_id_to_counter.values())) == (True, [5])
        async with asyncio.timeout(30):
            assert (await client.delete(path, headers={TOKEN: token})).status_code < 500  # not held
        await reopen(counter.owner)
        assert _result(await waits) == {"success": True}
        assert _result(await _tool(client, token, "get_counter_value", path=path)) == {"count": 6}


async def test_a_tool_called_over_mcp_counts_for_the_session_of_its_token() -> None:
    slow = Slow(mcp=True)
    async with _served(slow) as client:
        token = await _token(client)
        running = _tool(client, token, "increment_counter", count=1)
        await asyncio.wait_for(slow.begun.wait(), 30)
        await close(slow.owner)
        (blocker,) = slow.owner.report(9).blockers
        assert (blocker.reason, blocker.episode) == (BlockerReason.IN_FLIGHT_REQUEST, EpisodeId("7-0"))
        slow.go.set()
        await running
        await reopen(slow.owner)
        await retire(slow.owner, slow.port, EpisodeId("7-0"))
        late = await _tool(client, token, "get_counter_value")
        assert (late.status_code, late.json()["error"]["code"]) == (409, "STALE_ATTEMPT")


# ---- Gymnasium-style ------------------------------------------------------------------------------------------

ROW = {**rows("blackjack")[0], "_ng_task_index": 3, "_ng_rollout_index": 1}


def _action(name: str) -> dict[str, Any]:
    return {**ROW, "response": response(text(f"<action>{name}</action>"))}


async def test_a_reset_begins_a_session_and_the_last_step_ends_it() -> None:
    game = Participant(BlackjackEnv)
    async with client_of(game.app) as client:
        reset = await client.post("/reset", json=ROW)
        assert (reset.status_code, reset.headers["x-gymckpt-verify"]) == (200, "wait")
        assert list(game.sessions().values()) == ["3-1"]
        assert (await client.post("/step", json=_action("stand"))).json()["terminated"]
    assert (game.sessions(), game.server.session_state) == ({}, {})


async def test_a_game_goes_on_after_a_restore_with_the_cards_that_were_to_come() -> None:
    """As it does where nothing was restored: the same replies to the end, and not those of a new game."""
    game, after = Participant(BlackjackEnv), Participant(BlackjackEnv)
    async with client_of(game.app) as client:
        await client.post("/reset", json=ROW)
        records = await exported(game.owner)
        await restore(after.owner, records)
        await reopen(after.owner)
        async with client_of(after.app, client.cookies) as goes_on:
            assert await _to_the_end(goes_on) == await _to_the_end(client)
    assert (after.sessions(), after.server.session_state) == ({}, {})


async def _to_the_end(client: Any) -> list[Any]:
    replies = []
    for name in ("hit", "hit", "stand"):
        replies.append((await client.post("/step", json=_action(name))).json())
        if replies[-1]["terminated"]:
            break
    return replies


async def test_the_mixin_of_other_servers_is_refused_for_one() -> None:
    """It would not see the end of a session."""

    class Game(ResourcesMixin, BlackjackEnv):  # type: ignore[misc]
        checkpoint: ClassVar = options()

    with pytest.raises(UsageError, match="GymnasiumMixin"):
        build(Game).setup_webserver()
