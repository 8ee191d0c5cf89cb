"""MCP calls: the session comes from a signed token, and the gate treats them as any other call."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import pytest

from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.participants import (
    DataPlaneNames,
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
    SessionTokens,
)
from gym_ckpt_grpc.protocol import UsageError
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.fakes import App, Call, FakePort, R, S, call, close, exported, reopen, retire, spin

KEY = b"a key of the test that is long enough"
NAMES = DataPlaneNames()


class McpRig:
    """A stateful server whose tools are called by `/mcp`; `seen`: the session ids that its handler read."""

    def __init__(self, names: DataPlaneNames = NAMES) -> None:
        self.tokens = SessionTokens(KEY)
        self.names = names
        self.counts: dict[str, int] = {}
        self.seen: list[str | None] = []
        self.go = asyncio.Event()
        self.go.set()
        settings = ResourcesSettings(mode=ResourcesMode.EXPORTED, tokens=self.tokens)
        self.owner = ResourcesOwner(self, settings, names=names)
        self.port = FakePort(ParticipantKind.RESOURCES)
        self.owner.attach(self.port)
        self.app = App({"/seed_session": self.seed_session, **dict.fromkeys(("/mcp", "/mcp/", "/mcp/x"), self.mcp)})
        self.served = CheckpointMiddleware(self.app, self.owner.gate())

    async def seed_session(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        session = dict(scope["headers"])[b"cookie"].decode().partition("=")[2]
        self.counts[session] = 0
        return 200, {}, self.tokens.issue(session)

    async def mcp(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        await self.go.wait()
        header = dict(scope["headers"]).get(self.names.session_header.encode(), b"")
        self.seen.append(session := self.tokens.read(header.decode()))
        if session not in self.counts:
            return 404, {}, "no such session"
        self.counts[session] += 1
        return 200, {}, self.counts[session]

    async def export_sessions(self, session_ids: Any) -> Any:
        return {each: self.counts[each] for each in session_ids}

    async def restore_sessions(self, sessions: Any) -> None:
        self.counts |= {each.session_id: each.state for each in sessions}

    async def retire_session(self, session_id: str) -> None:
        self.counts.pop(session_id, None)

    async def seed(self, session: str = "k", episode: Any = R) -> str:
        headers = {"cookie": f"session={session}"}
        token: str = (await call(self.served, f"/rollout/{episode}/seed_session", headers=headers).end()).json()
        return token

    def ask(self, token: str | None, path: str = "/mcp") -> Call:
        headers = {} if token is None else {self.names.session_header: token}
        return call(self.served, path, {"method": "tools/call"}, headers=headers)


@pytest.fixture
def rig() -> McpRig:
    return McpRig()


@pytest.mark.behaviour("P216")
async def test_an_mcp_call_is_held_while_closed_and_runs_once_after_resume(rig: McpRig) -> None:
    token = await rig.seed()
    await close(rig.owner)
    held = rig.ask(token)
    await spin()
    assert (held.answer.status, rig.seen, rig.owner.is_ready()) == (0, [], True)
    assert [each.decode("state") for each in await exported(rig.owner)] == [0]
    await reopen(rig.owner)
    assert ((await held.end()).json(), rig.seen) == (1, ["k"])


@pytest.mark.behaviour("P216")
@pytest.mark.parametrize("path", ["/mcp", "/mcp/", "/mcp/x"])
async def test_an_mcp_call_in_flight_blocks_under_its_session(rig: McpRig, path: str) -> None:
    """Frameworks serve the route with a slash behind it, and whatever stands below it, as well."""
    token = await rig.seed()
    rig.go.clear()
    running = rig.ask(token, path)
    await spin()
    await close(rig.owner)
    (blocker,) = rig.owner.report(9).blockers
    place = f"{path} session k"
    assert (blocker.reason, blocker.episode, blocker.place) == (BlockerReason.IN_FLIGHT_REQUEST, R, place)
    rig.go.set()
    await running.end()
    assert rig.owner.is_ready()


@pytest.mark.behaviour("P216")
async def test_an_mcp_call_of_a_retired_session_is_stale_and_another_session_goes_on(rig: McpRig) -> None:
    first, second = await rig.seed(), await rig.seed("m", S)
    await retire(rig.owner, rig.port, R)
    late = await rig.ask(first).end()
    assert (late.status, late.code, rig.seen) == (409, "STALE_ATTEMPT", [])
    assert (await rig.ask(second).end()).json() == 1


def forged(tokens: SessionTokens) -> dict[str, Any]:
    good = tokens.issue("k")
    text, _, signature = good.partition(".")
    other = base64.urlsafe_b64encode(b'{"session":"m"}').decode().rstrip("=")
    return {
        "none": None,
        "empty": "",
        "unsigned": text,
        "an empty signature": f"{text}.",
        "another's signature": f"{other}.{signature}",
        "of another server": SessionTokens(b"another key that is long enough").issue("k"),
        "a plain id": "k",
        "half": good[:-1],
        "undecodable text, signed": f"%%%.{tokens._signature('%%%')}",
        "no JSON, signed": f"YWJj.{tokens._signature('YWJj')}",
        "no ASCII": "k\u00e9y.\u00e9",
        "too long": "x" * 5000,
        "a list": tokens.sign(["k"]),
        "a text": tokens.sign("k"),
        "null": tokens.sign(None),
        "an object without a session": tokens.sign({"rollout": "k"}),
        "a session that is no text": tokens.sign({"session": 7}),
        "an empty session": tokens.sign({"session": ""}),
    }


@pytest.mark.behaviour("P216")
@pytest.mark.parametrize("fault", forged(SessionTokens(KEY)))
async def test_a_token_that_is_not_good_gives_no_session(rig: McpRig, fault: str) -> None:
    """Neither to the server nor to the gate: a live session is not blocked on it, nor claimed, nor refused for it."""
    await rig.seed()
    token = forged(rig.tokens)[fault]
    assert rig.tokens.read(token) is None
    if token is not None and not token.isascii():
        return  # no such header can be sent
    rig.go.clear()
    running = rig.ask(token)
    await spin()
    await close(rig.owner)
    (blocker,) = rig.owner.report(9).blockers
    assert (blocker.episode, blocker.place) == (None, "/mcp")
    rig.go.set()
    assert ((await running.end()).status, rig.seen, rig.counts) == (404, [None], {"k": 0})
    await reopen(rig.owner)
    await retire(rig.owner, rig.port, R)
    assert (await rig.ask(token).end()).status == 404


@pytest.mark.behaviour("P216")
def test_one_serializer_serves_the_server(rig: McpRig) -> None:
    """What the gate reads with is the very object that the server issues with."""
    assert rig.owner.settings.tokens is rig.tokens


@pytest.mark.behaviour("P216")
async def test_a_cookie_gives_an_mcp_call_no_session_and_a_token_no_other_call(rig: McpRig) -> None:
    token = await rig.seed()
    await retire(rig.owner, rig.port, R)
    by_cookie = call(rig.served, "/mcp", headers={"cookie": "session=k"})
    assert (await by_cookie.end()).status == 404
    by_token = call(rig.served, "/seed_session", headers={NAMES.session_header: token, "cookie": "session=m"})
    assert (await by_token.end()).code == "ROLLOUT_ID_REQUIRED"


async def test_the_header_can_have_another_name() -> None:
    rig = McpRig(DataPlaneNames(session_header="x-mcp-session"))
    token = await rig.seed()
    assert (await rig.ask(token).end()).json() == 1
    await retire(rig.owner, rig.port, R)
    assert (await rig.ask(token).end()).code == "STALE_ATTEMPT"


def test_tokens_of_a_configured_key_outlive_the_server_and_others_do_not() -> None:
    token = SessionTokens(KEY).issue("k")
    assert SessionTokens(KEY).read(token) == "k"
    assert SessionTokens().read(SessionTokens().issue("k")) is None
    own = SessionTokens()
    assert own.read(own.issue("s\u00e9ssion/1")) == "s\u00e9ssion/1"
    with pytest.raises(UsageError, match="15 bytes"):
        SessionTokens(b"x" * 15)
