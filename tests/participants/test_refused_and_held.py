"""What the data plane counts: refusals where they become answers, and how long requests were held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.middleware.base import BaseHTTPMiddleware

from gym_ckpt_grpc.integrations import CheckpointMiddleware, answer_refusal
from gym_ckpt_grpc.integrations.body_identity import BodyIdentity
from gym_ckpt_grpc.participants import EnvironmentOwner, EnvironmentSettings
from gym_ckpt_grpc.protocol.errors import AdmissionClosed, ControlError, StaleAttempt
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry import Recorder
from gym_ckpt_grpc.telemetry.catalogue import ADMISSION_HELD, ADMISSION_REFUSED, CONTROL_ERRORS
from gym_ckpt_grpc.testing import serve
from tests.participants.fakes import R1, App, Call, FakeClock, FakePort, R, S, call, close, reopen, retire, spin
from tests.participants.kinds import KINDS
from tests.participants.resources_rig import ResourcesRig
from tests.participants.test_mcp import McpRig
from tests.telemetry.kept import Kept

Scope = MutableMapping[str, Any]
PATHS = {"environment": "/run", "agent": "/seed_session", "policy_model": "/v1/responses", "resources": "/seed_session"}
"""By kind, a route that is held while closed."""


async def ok(scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
    return 200, {}, None


class Door:
    """A gate in front of an application, whose refusals and holds are kept."""

    def __init__(self, owner: Any = None, kind: ParticipantKind = ParticipantKind.ENVIRONMENT) -> None:
        self.kept = Kept()
        self.clock = FakeClock()
        self.owner = owner or EnvironmentOwner(EnvironmentSettings(max_waiting=2), clock=self.clock)
        self.port = FakePort(kind, telemetry=self.kept.telemetry)
        self.owner.attach(self.port)
        self.app = App({"/run": ok, "/v1/responses": ok, "/seed_session": ok})
        self.served = CheckpointMiddleware(self.app, self.owner.gate())

    def call(self, path: str = "/run", episode: EpisodeId = R) -> Call:
        return call(self.served, f"/rollout/{episode}{path}", {})

    @property
    def refused(self) -> dict[str, float]:
        """Counted refusals by code."""
        return {str(labels["error_code"]): value for labels, value in self.kept.points(ADMISSION_REFUSED)}

    def held(self) -> tuple[float, float]:
        """Requests that were held, and their milliseconds together."""
        return self.kept.value(ADMISSION_HELD), self.kept.total(ADMISSION_HELD)


@pytest.fixture
def door() -> Door:
    return Door()


# ---- refused ---------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("C300")
@pytest.mark.parametrize("name", list(KINDS))
async def test_a_late_call_of_a_retired_attempt_is_one_refusal_and_no_control_error(tmp_path: Path, name: str) -> None:
    """Over HTTP and gRPC, each kind; the same call again is refused again."""
    kept, rig = Kept(), KINDS[name]()
    rig.owner.admission._port = None  # here the control plane gives one
    served = CheckpointMiddleware(App({PATHS[name]: ok}), rig.owner.gate())
    async with serve(rig.owner, roots=[tmp_path], telemetry=kept.telemetry) as p:
        await p.client.retire([R1])
        for times in (1, 2):
            answer = await call(served, f"/rollout/{R1}{PATHS[name]}", {}).end()
            assert (answer.status, answer.code) == (409, "STALE_ATTEMPT")
            assert kept.points(ADMISSION_REFUSED) == [
                ({"participant_kind": name, "error_code": "STALE_ATTEMPT"}, times)
            ]
        assert kept.points(CONTROL_ERRORS) == []
        with pytest.raises(ControlError):
            await p.client.commit("none", [R])
    assert kept.value(CONTROL_ERRORS) == 1
    assert kept.value(ADMISSION_REFUSED) == 2
    kept.check_declared()


async def test_an_error_that_is_made_and_not_answered_is_no_refusal(door: Door) -> None:
    """A handler may ask the owner, be refused, and answer something else."""

    async def never(ctx: Any) -> None:
        raise AssertionError("ran")

    async def tries(scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        try:
            await door.owner.run(R, {}, never)
        except StaleAttempt:
            return 200, {}, None
        raise AssertionError("was not refused")

    door.app.routes["/extra"] = tries
    served = CheckpointMiddleware(door.app, door.owner.gate())
    door.port.marks.raise_to(R)
    assert (await call(served, "/extra").end()).status == 200
    assert door.refused == {}


def framework(owner: Any) -> Any:
    """A FastAPI application whose handler raises what the gate has not seen, behind a middleware of its own."""
    app = FastAPI()
    app.add_exception_handler(ControlError, answer_refusal)

    @app.post("/run")
    async def run() -> None:
        raise AdmissionClosed("full", retry_after=1)

    async def passes(request: Request, call_next: Callable[[Request], Any]) -> Any:
        return await call_next(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=passes)
    return CheckpointMiddleware(app, owner.gate())


@pytest.mark.parametrize("answers", ["the framework", "the middleware"])
async def test_a_refusal_of_a_handler_counts_once_whoever_answers_it(door: Door, answers: str) -> None:
    async def raises(scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        raise AdmissionClosed("full")

    door.app.routes["/run"] = raises
    served = framework(door.owner) if answers == "the framework" else door.served
    answer = await call(served, "/rollout/r/run", {}).end()
    assert (answer.status, answer.code, door.refused) == (503, "ADMISSION_CLOSED", {"ADMISSION_CLOSED": 1})


async def test_a_retire_under_way_is_one_refusal_and_none_where_the_reply_has_begun() -> None:
    rig, kept = ResourcesRig(), Kept()
    rig.port.telemetry = kept.telemetry
    begun = asyncio.Event()

    async def streams(scope: Scope, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"1"
            begun.set()
            await asyncio.Event().wait()

        return 200, {}, pieces()

    for name, route in (("k", "/add"), ("m", "/stream")):
        await rig.seed(name, R)
        rig.gates["/add"], rig.app.routes["/stream"] = asyncio.Event(), streams
        running = rig.call(route, name)
        await spin()
        assert begun.is_set() is (route == "/stream")
        await retire(rig.owner, rig.port, R)
        answer = await running.end()
        assert answer.status == (409 if route == "/add" else 200)
        assert kept.value(ADMISSION_REFUSED, error_code="STALE_ATTEMPT") == 1
        rig.port.marks = type(rig.port.marks)()


async def test_calls_over_mcp_are_refused_and_held_like_any_other() -> None:
    rig, kept = McpRig(), Kept()
    rig.port.telemetry = kept.telemetry
    token = await rig.seed()
    await close(rig.owner)
    held = rig.ask(token)
    await spin()
    await reopen(rig.owner)
    assert (await held.end()).status == 200
    await retire(rig.owner, rig.port, R)
    assert (await rig.ask(token).end()).code == "STALE_ATTEMPT"
    assert (kept.value(ADMISSION_HELD, participant_kind="resources"), kept.value(ADMISSION_REFUSED)) == (1, 1)


async def test_a_refusal_of_what_stands_outside_the_gate_counts_as_well(door: Door) -> None:
    served = BodyIdentity(door.served, door.owner.names)
    answer = await call(served, "/run", {"rollout_id": "r", "attempt": "x"}).end()
    assert (answer.code, door.refused) == ("INVALID_ARGUMENT", {"INVALID_ARGUMENT": 1})
    answer = await call(door.served, "/rollout/no id/run").end()
    assert (answer.code, door.refused) == ("INVALID_ARGUMENT", {"INVALID_ARGUMENT": 2})


@pytest.mark.parametrize("trouble", [RuntimeError, AttributeError])
async def test_a_gate_that_cannot_count_answers_all_the_same(
    door: Door, trouble: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(error: ControlError) -> None:
        raise trouble

    monkeypatch.setattr(door.owner.admission, "refused", fails)
    door.port.marks.raise_to(R)
    assert (await door.call().end()).code == "STALE_ATTEMPT"


# ---- held ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["continued", "refused", "left", "cancelled"])
async def test_a_held_request_counts_once_with_its_time_whatever_becomes_of_it(door: Door, fate: str) -> None:
    await close(door.owner)
    held = door.call()
    await spin()
    door.clock.now += 3.5
    assert door.held() == (0, 0)
    if fate == "refused":
        await retire(door.owner, door.port, R)
    elif fate == "left":
        held.leave()
    elif fate == "cancelled":
        held.task.cancel()
    else:
        await reopen(door.owner)
    await asyncio.wait({held.task})
    assert door.held() == (1, 3500)
    assert door.refused == ({"STALE_ATTEMPT": 1} if fate == "refused" else {})


async def test_one_that_another_close_overtakes_was_held_once(door: Door) -> None:
    """The opening wakes it, and it finds the gate closed again."""
    await close(door.owner, 1)
    held = door.call()
    await spin()
    door.clock.now += 1
    door.owner.admission.open()
    await close(door.owner, 2)
    await spin()
    door.clock.now += 1
    await reopen(door.owner)
    await held.end()
    assert door.held() == (1, 2000)


async def test_one_refused_at_a_full_gate_was_not_held(door: Door) -> None:
    await close(door.owner)
    held = [door.call(), door.call(episode=S)]
    await spin()
    assert (await door.call().end()).code == "ADMISSION_CLOSED"
    assert (door.held()[0], door.refused) == (0, {"ADMISSION_CLOSED": 1})
    await reopen(door.owner)
    for each in held:
        await each.end()
    assert door.held()[0] == 2


# ---- cost ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(KINDS))
async def test_a_request_that_is_neither_held_nor_refused_costs_nothing(name: str) -> None:
    """It never even looks for where it would be counted."""

    class NoRecorder(FakePort):
        @property
        def recorder(self) -> Recorder:
            raise AssertionError("somebody counts")

    rig = KINDS[name]()
    rig.owner.admission._port = None
    rig.owner.attach(NoRecorder(ParticipantKind(name)))
    served = CheckpointMiddleware(App({PATHS[name]: ok}), rig.owner.gate())
    assert (await call(served, f"/rollout/{R}{PATHS[name]}", {}).end()).status == 200


@pytest.mark.behaviour("C310")
async def test_thousands_of_rollouts_make_no_new_series() -> None:
    """Each is held, each is refused later: labels have no ids (field case 147)."""
    door = Door(EnvironmentOwner())
    seen = set()
    for start in range(0, 3000, 300):
        episodes = [EpisodeId(f"rollout-{number}", number % 7) for number in range(start, start + 300)]
        await close(door.owner)
        held = [door.call(episode=episode) for episode in episodes]
        await spin(30)
        await reopen(door.owner)
        for each, episode in zip(held, episodes, strict=True):
            await each.end()
            await retire(door.owner, door.port, episode)
            assert (await door.call(episode=episode).end()).code == "STALE_ATTEMPT"
        seen.add(len(door.kept.points(ADMISSION_HELD)) + len(door.kept.points(ADMISSION_REFUSED)))
    assert seen == {2}
    assert (door.held()[0], door.refused) == (3000, {"STALE_ATTEMPT": 3000})
    door.kept.check_declared()
