"""The middleware on its own: prefix, bypass, holding a body, clients that leave, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any

import pytest

from gym_ckpt_grpc.integrations import CheckpointMiddleware, answer_refusal, episode_of
from gym_ckpt_grpc.integrations.asgi import STATE_KEY, WATCHED_BODY, RolloutPrefix
from gym_ckpt_grpc.participants import (
    DataPlaneNames,
    EnvironmentOwner,
    GateRequest,
    Reply,
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
    Visit,
)
from gym_ckpt_grpc.participants.gates import RouteGate
from gym_ckpt_grpc.protocol.errors import AdmissionClosed, ControlError, InvalidPhase, RolloutIdRequired
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from tests.participants.fakes import R1, App, Call, FakePort, R, call, close, reopen, retire, spin

Scope = MutableMapping[str, Any]


class Rig:
    """An environment's gate in front of an application that tells what it got."""

    def __init__(self) -> None:
        self.owner = EnvironmentOwner()
        self.port = FakePort()
        self.owner.attach(self.port)
        self.bodies: list[bytes] = []
        self.scopes: list[Scope] = []
        self.app = App(dict.fromkeys(("/run", "/health", "/metrics", "/extra", "/x"), self.echo))
        self.served = CheckpointMiddleware(self.app, self.owner.gate(), bypass=("/extra",))

    async def echo(self, scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        self.bodies.append(body)
        self.scopes.append(scope)
        return 200, {}, len(body)

    def call(self, path: str, body: Any = None, **options: Any) -> Call:
        return call(self.served, path, body, **options)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_the_prefix_is_taken_off_and_the_episode_is_in_the_state(rig: Rig) -> None:
    await rig.call("/rollout/r-a3/run").end()
    (scope,) = rig.scopes
    assert (scope["path"], scope["raw_path"], str(episode_of(scope))) == ("/run", b"/run", "r-a3")
    await rig.call("/run").end()
    with pytest.raises(RolloutIdRequired):
        episode_of(rig.scopes[1])


@pytest.mark.parametrize("prefix", ["/rollout", "/ng/rollout"])
async def test_an_escaped_path_keeps_its_escapes_behind_the_prefix(prefix: str) -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        seen.append((scope["path"], scope["raw_path"]))

    served = RolloutPrefix(app, DataPlaneNames(rollout_prefix=prefix))
    scope = {"type": "http", "path": f"{prefix}/r/files/a b", "raw_path": f"{prefix}/r/files/a%20b".encode()}
    await served(scope, _unused, _unused)
    assert seen == [("/files/a b", b"/files/a%20b")]


async def _unused(*_: Any) -> Any:
    raise AssertionError("nothing is received or sent")


@pytest.mark.behaviour("P45")
@pytest.mark.parametrize("parts", [1, 7])
async def test_a_held_request_runs_once_after_resume_with_its_body_intact(rig: Rig, parts: int) -> None:
    """Smaller and larger than what is read ahead; and a mark raised meanwhile refuses it."""
    bodies = ["x" * 10, "y" * (3 * WATCHED_BODY)]
    await close(rig.owner)
    held = [rig.call("/rollout/s/run", body, parts=parts) for body in bodies]
    stale = rig.call("/rollout/r/run", parts=parts)
    await spin(30)
    assert (rig.bodies, rig.owner.admission.waiting) == ([], 3)
    rig.port.marks.raise_to(R)
    await reopen(rig.owner)
    assert [(await each.end()).json() for each in held] == [len(body) + 2 for body in bodies]
    assert (await stale.end()).code == "STALE_ATTEMPT"
    assert (len(rig.bodies), rig.owner.admission.waiting) == (2, 0)


@pytest.mark.behaviour("P46")
async def test_a_held_request_whose_client_disconnects_never_runs(rig: Rig) -> None:
    """Also if it leaves in the turn in which the gate opens."""
    await close(rig.owner)
    early, late = rig.call("/rollout/r/run", parts=3), rig.call("/rollout/s/run")
    await spin()
    early.leave()
    await early.end()
    assert rig.owner.admission.waiting == 1
    late.leave()
    await asyncio.sleep(0)
    await reopen(rig.owner)
    await late.end()
    assert (rig.app.seen, rig.owner.admission.waiting, late.answer.status) == ([], 0, 0)


@pytest.mark.behaviour("P46")
async def test_a_request_held_in_its_handler_notices_too(rig: Rig) -> None:
    """An owner that holds after the body was read hears of the client all the same."""

    async def run(scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        await close(rig.owner)

        async def never(ctx: Any) -> None:
            raise AssertionError("ran")

        return 200, {}, await rig.owner.run(R, {}, never)

    rig.app.routes["/run"] = run
    running = rig.call("/rollout/r/run")
    await spin()
    assert rig.owner.admission.waiting == 1
    running.leave()
    await running.end()
    assert (rig.owner.admission.waiting, running.answer.status) == (0, 0)


@pytest.mark.behaviour("P49")
@pytest.mark.parametrize("path", ["/health", "/metrics", "/extra", "/rollout/r/health"])
async def test_liveness_metrics_and_declared_routes_answer_while_closed(rig: Rig, path: str) -> None:
    await close(rig.owner)
    assert (await rig.call(path, method="GET").end()).status == 200


@pytest.mark.behaviour("P49")
async def test_an_undeclared_get_is_held(rig: Rig) -> None:
    await close(rig.owner)
    held = rig.call("/x", method="GET")
    await spin()
    assert held.answer.status == 0
    await reopen(rig.owner)
    assert (await held.end()).status == 200


async def test_a_held_request_is_woken_by_the_retire_of_its_attempt(rig: Rig) -> None:
    await close(rig.owner)
    held = rig.call("/rollout/r/run")
    await spin()
    await retire(rig.owner, rig.port, R)
    answer = await held.end()
    assert (answer.status, answer.code) == (409, "STALE_ATTEMPT")


@pytest.mark.behaviour("P36")
async def test_installing_the_middleware_twice_changes_nothing(rig: Rig) -> None:
    gate = CountingGate(rig)
    twice = CheckpointMiddleware(CheckpointMiddleware(rig.app, gate), gate)
    await call(twice, "/rollout/r/run").end()
    assert (gate.entered, rig.app.seen) == (1, ["/run"])
    other = CheckpointMiddleware(CheckpointMiddleware(rig.app, gate), CountingGate(rig))
    await call(other, "/x").end()
    assert gate.entered == 2


class CountingGate(RouteGate):
    """Counts visits, adds a header to each reply, and tells when one has left."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.owner.admission, rig.owner.names)
        self.entered = 0
        self.left = 0

    async def enter(self, request: GateRequest) -> Visit:
        self.entered += 1
        gate = self

        class Counted(Visit):
            async def starting(self, reply: Reply) -> None:
                reply.add["x-added"] = str(reply.status)

            def leave(self) -> None:
                gate.left += 1

        return Counted()


async def test_a_visit_is_left_however_the_application_ends(rig: Rig) -> None:
    gate = CountingGate(rig)

    async def fails(scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        raise RuntimeError("broken")

    async def hangs(scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        await asyncio.Event().wait()
        raise AssertionError

    rig.app.routes |= {"/fails": fails, "/hangs": hangs}
    served = CheckpointMiddleware(rig.app, gate)
    assert (await call(served, "/x").end()).headers["x-added"] == "200"
    with pytest.raises(RuntimeError):
        await call(served, "/fails").end()
    hanging = call(served, "/hangs")
    await spin()
    hanging.task.cancel()
    await asyncio.wait({hanging.task})
    assert (gate.entered, gate.left, hanging.task.cancelled()) == (3, 3, True)


async def test_a_refusal_raised_by_a_handler_is_answered(rig: Rig) -> None:
    async def refuses(scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        raise AdmissionClosed("full", retry_after=2.5)

    rig.app.routes["/x"] = refuses
    answer = await rig.call("/x").end()
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "ADMISSION_CLOSED", "3")


async def test_the_exception_handler_answers_control_errors_and_nothing_else() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await (await answer_refusal(None, InvalidPhase("no")))({}, None, send)
    assert (sent[0]["status"], b"INVALID_PHASE" in sent[1]["body"]) == (409, True)
    with pytest.raises(KeyError):
        await answer_refusal(None, KeyError("x"))


async def test_other_protocols_pass(rig: Rig) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    await close(rig.owner)
    await CheckpointMiddleware(app, rig.owner.gate())({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


# ---- in front of a framework that knows the prefix itself -------------------------------------------------


class KeptPath:
    """A gate that notes what it was asked, in front of an application that sees each path as it was sent."""

    def __init__(self) -> None:
        self.owner = EnvironmentOwner()
        self.port = FakePort()
        self.owner.attach(self.port)
        self.scopes: list[Scope] = []
        self.asked: list[GateRequest] = []
        self.gate = self.owner.gate()
        gate = NotedGate(self.gate, self.asked)
        self.served = CheckpointMiddleware(
            self.app, gate, keep_path=True, bypass=("/docs/*", "/stats"), post_only=("/mcp",)
        )

    async def app(self, scope: Scope, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class NotedGate:
    def __init__(self, gate: RouteGate, asked: list[GateRequest]) -> None:
        self.gate = gate
        self.asked = asked
        self.names = gate.names

    async def enter(self, request: GateRequest) -> Visit:
        self.asked.append(request)
        return await self.gate.enter(request)

    def reply_headers(self) -> Mapping[str, str]:
        return {}

    def refused(self, error: ControlError) -> None:
        self.gate.refused(error)


async def test_a_kept_path_reaches_the_application_and_the_gate_sees_the_rest_of_it() -> None:
    rig = KeptPath()
    await call(rig.served, "/rollout/r-a3/run").end()
    (scope,), (asked,) = rig.scopes, rig.asked
    assert (scope["path"], scope["raw_path"]) == ("/rollout/r-a3/run", b"/rollout/r-a3/run")
    assert (asked.path, str(asked.episode), str(episode_of(scope))) == ("/run", "r-a3", "r-a3")


@pytest.mark.parametrize("keep_path", [False, True])
async def test_an_episode_that_was_found_outside_goes_before_the_paths(keep_path: bool) -> None:
    """Even none: a request may be declared nobody's, whatever its path says."""
    found: list[Any] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        found.append(scope["state"][STATE_KEY])

    asked: list[GateRequest] = []
    gate = NotedGate(EnvironmentOwner().gate(), asked)
    served = CheckpointMiddleware(app, gate, keep_path=keep_path)
    scope: Scope = {"type": "http", "method": "POST", "path": "/run", "headers": []}
    for state in ({STATE_KEY: R1}, {}):
        await served({**scope, "state": state}, _unused, _unused)
    await CheckpointMiddleware(app, gate, keep_path=True)(
        {**scope, "path": "/rollout/r/run", "state": {STATE_KEY: None}}, _unused, _unused
    )
    assert [each.episode for each in asked] == [R1, None, None]
    assert found == [R1, None, None]


@pytest.mark.behaviour("P49")
async def test_routes_below_a_bypass_answer_while_closed_and_its_neighbours_wait() -> None:
    rig = KeptPath()
    await close(rig.owner)
    for path in ("/stats", "/docs/", "/docs/oauth2-redirect", "/rollout/r/docs/x", "/health"):
        assert (await call(rig.served, path, method="GET").end()).status == 200
    held = [call(rig.served, path, method="GET") for path in ("/docs", "/docsx", "/stats/x")]
    await spin()
    assert [each.answer.status for each in held] == [0, 0, 0]
    await reopen(rig.owner)
    assert [(await each.end()).status for each in held] == [200, 200, 200]


async def test_at_a_post_only_path_other_methods_are_never_held() -> None:
    """A GET there is a stream of events without end, and changes nothing."""
    rig = KeptPath()
    await close(rig.owner)
    for method, path in (("GET", "/mcp"), ("DELETE", "/mcp/"), ("GET", "/rollout/r/mcp/messages")):
        assert (await call(rig.served, path, method=method).end()).status == 200
    others = (("POST", "/mcp"), ("POST", "/mcp/"), ("GET", "/mcpx"))
    held = [call(rig.served, path, method=method) for method, path in others]
    await spin()
    assert [each.answer.status for each in held] == [0, 0, 0]
    await reopen(rig.owner)
    assert [(await each.end()).status for each in held] == [200, 200, 200]


async def test_the_refusal_of_a_retire_names_the_attempt_of_the_session_where_the_path_has_none() -> None:
    """A tool call's path says nothing: whose it is, the session does."""
    owner = ResourcesOwner(settings=ResourcesSettings(mode=ResourcesMode.STATELESS))
    port = FakePort(ParticipantKind.RESOURCES)
    owner.attach(port)
    owner.session_started("s1", R1)
    begun = asyncio.Event()

    async def slow(scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError("went on")

    running = call(CheckpointMiddleware(App({"/tool": slow}), owner.gate()), "/tool", headers={"cookie": "session=s1"})
    await begun.wait()
    await retire(owner, port, R1)
    answer = await running.end()
    assert (answer.status, answer.code) == (409, "STALE_ATTEMPT")
    assert "r-a1" in answer.json()["error"]["detail"]
    assert answer.json()["error"]["episodes"] == ["r-a1"]
