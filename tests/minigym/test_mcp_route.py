"""Tools of a resources server by MCP: JSON-RPC on one route, the session in a signed token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.minigym.counter_server import CounterServer
from gym_ckpt_grpc.participants import DataPlaneNames, SessionTokens
from tests.minigym.gated import Gated, life
from tests.participants.fakes import R1, Answer, R

KEY = b"a key of the test that is long enough"
HEADER = DataPlaneNames().session_header


def server() -> CounterServer:
    made = CounterServer()
    made.tokens = SessionTokens(KEY)
    return made


async def rpc(gated: Gated, method: str, params: Any = None, *, token: str | None = None, number: Any = 1) -> Answer:
    body = {"jsonrpc": "2.0", "method": method, "params": params, **({"id": number} if number is not None else {})}
    return await gated.post("/mcp", body, headers={HEADER: token} if token else {})


def increment(by: Any) -> dict[str, Any]:
    return {"name": "increment", "arguments": {"by": by}}


async def seeded(gated: Gated) -> str:
    token: str = (await gated.seed({"target": 10})).json()["mcp_token"]
    return token


@pytest.mark.behaviour("P216")
async def test_a_session_goes_on_by_its_token_after_a_restore(tmp_path: Path) -> None:
    """Every life of the server has the same key; the restored attempt is claimed by the call."""
    async with life(server(), tmp_path) as (gated, client):
        token = await seeded(gated)
        await rpc(gated, "tools/call", increment(3), token=token)
        await client.prepare("c")
        await client.commit("c", [R])
    async with life(server(), tmp_path) as (gated, client):
        await client.restore("r", [R], source="c")
        await client.resume("r")
        assert gated.owner.restored_pending() == {R1}
        answer = await rpc(gated, "tools/call", increment(2), token=token)
        assert answer.json()["result"]["structuredContent"] == {"count": 5}
        assert gated.owner.restored_pending() == frozenset()


@pytest.mark.behaviour("P216")
@pytest.mark.parametrize("token", [None, "s", "eyJzZXNzaW9uIjoiayJ9.x"])
async def test_a_call_without_a_good_token_reaches_no_session(token: str | None) -> None:
    gated = Gated(server())
    await seeded(gated)
    answer = await rpc(gated, "tools/call", increment(1), token=token)
    assert (answer.status, answer.json()["error"]["code"]) == (404, -32001)
    assert (await gated.post("/get_count")).json() == {"count": 0}


async def test_tools_are_listed_and_called_and_say_what_is_wrong() -> None:
    gated = Gated(server())
    token = await seeded(gated)
    assert (await rpc(gated, "initialize")).json()["result"]["serverInfo"]["name"] == "counter"
    listed = (await rpc(gated, "tools/list")).json()["result"]["tools"]
    assert [(each["name"], each["inputSchema"]["type"]) for each in listed] == [
        ("increment", "object"),
        ("get_count", "object"),
    ]
    bad = (await rpc(gated, "tools/call", increment(99), token=token)).json()["result"]
    assert (bad["isError"], "by is 99" in bad["content"][0]["text"]) == (True, True)
    good = (await rpc(gated, "tools/call", increment(4), token=token)).json()
    assert (good["id"], good["result"]["isError"], good["result"]["content"][0]["text"]) == (1, False, '{"count":4}')


async def test_what_is_no_request_is_told_so() -> None:
    gated = Gated(server())
    token = await seeded(gated)
    assert (await rpc(gated, "notifications/initialized", number=None)).status == 202
    assert (await rpc(gated, "nothing")).json()["error"]["code"] == -32601
    assert (await rpc(gated, "tools/call", ["x"], token=token)).json()["error"]["code"] == -32602
    assert (await gated.post("/mcp", [1], headers={})).json()["error"]["code"] == -32600


async def test_without_tokens_there_is_no_route() -> None:
    gated = Gated(CounterServer())
    assert "mcp_token" not in (await gated.seed({"target": 1})).json()
    assert (await rpc(gated, "tools/list")).json() == {
        "error": "no tool 'mcp' with arguments ['id', 'jsonrpc', 'method', 'params']"
    }
