"""An agent whose state nobody can capture, behind the middleware, whoever built its application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi import FastAPI, Request

from gym_ckpt_grpc.control import EpisodeListKind
from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.integrations import BodyIdentity, CheckpointMiddleware
from gym_ckpt_grpc.participants import RestartOnlyOwner
from gym_ckpt_grpc.participants.records import AgentRecord
from gym_ckpt_grpc.protocol.errors import InvalidPhase, OutOfTime, RestartInScope, RetireIncomplete, StateCorrupt
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from gym_ckpt_grpc.testing import serve
from gymckpt.v1 import participant_pb2 as pb
from tests.participants.fakes import (
    R1,
    App,
    Call,
    FakePort,
    R,
    S,
    budget,
    call,
    close,
    exported,
    listed,
    reopen,
    retire,
    spin,
)
from tests.participants.served_kinds import written


class Rig:
    """Its `/run` and `/v1/responses` end when `go` is set, also when they are cancelled; its seeds at once."""

    def __init__(self) -> None:
        self.owner = RestartOnlyOwner()
        self.port = FakePort(ParticipantKind.AGENT)
        self.owner.attach(self.port)
        self.go = asyncio.Event()
        self.cancels: list[str] = []
        self.app = App({"/run": self.work, "/v1/responses": self.work, "/seed_session": self.ok, "/close": self.ok})
        self.served: Any = BodyIdentity(CheckpointMiddleware(self.app, self.owner.gate()), self.owner.names)

    async def ok(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        return 200, {}, "ok"

    async def work(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancels.append(scope["path"])
            await self.go.wait()
            raise
        return 200, {}, orjson.loads(body)

    async def started(self, path: str, body: Any = None) -> Call:
        asked = call(self.served, path, body, parts=3)
        await spin()
        return asked

    async def restarts(self) -> Any:
        return await listed(self.owner, EpisodeListKind.RESTART)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.go.set()  # after a test that failed half way: its work would outlive every cancel


@pytest.mark.behaviour("P197")
async def test_a_run_under_way_is_a_restart_and_keeps_going_through_the_checkpoint(rig: Rig) -> None:
    """One that starts while closed runs too, but is a restart only of the next checkpoint."""
    run = await rig.started("/rollout/r/run")
    inner = await rig.started("/rollout/r/v1/responses")
    await close(rig.owner)
    late = await rig.started("/rollout/s/run")
    report = rig.owner.report(9)
    assert (rig.owner.is_ready(), report.blockers, report.restarts) == (True, (), (R,))
    assert (await rig.restarts(), await exported(rig.owner), len(rig.app.seen)) == ([R], [], 3)
    rig.go.set()
    assert [(await each.end()).status for each in (run, inner, late)] == [200, 200, 200]
    assert await rig.restarts() == []
    rig.go.clear()
    again = await rig.started("/rollout/s/run")
    assert await rig.restarts() == []
    await close(rig.owner, 2)
    assert await rig.restarts() == [S]
    rig.go.set()
    await again.end()


@pytest.mark.behaviour("P198")
@pytest.mark.parametrize("path", ["/run", "/v1/responses", "/seed_session"])
@pytest.mark.parametrize("body", [None, {"prompt": "play"}, [1], {"rollout_id": 3}])
async def test_work_without_identity_is_refused(path: str, body: Any, rig: Rig) -> None:
    answer = await (await rig.started(path, body)).end()
    assert (answer.status, answer.code, rig.app.seen) == (400, "ROLLOUT_ID_REQUIRED", [])


@pytest.mark.behaviour("P198")
async def test_a_body_that_is_no_json_names_nobody_and_one_with_an_illegal_name_is_refused(rig: Rig) -> None:
    torn = Call(rig.served, "POST", "/run", {}, b"{", 1)
    assert (await torn.end()).code == "ROLLOUT_ID_REQUIRED"
    for bad in ({"rollout_id": "a/b"}, {"rollout_id": "r", "attempt": "1"}, {"rollout_id": "r", "attempt": -1}):
        assert (await (await rig.started("/run", bad)).end()).code == "INVALID_ARGUMENT"
    assert rig.app.seen == []


async def test_identity_comes_from_the_prefix_or_from_the_body_which_arrives_whole(rig: Rig) -> None:
    rig.go.set()
    for path, body in (("/rollout/r-a1/run", {"rollout_id": "other"}), ("/run", {"rollout_id": "r", "attempt": 1})):
        assert (await (await rig.started(path, body)).end()).json() == body
    assert rig.app.seen == ["/run", "/run"]
    rig.go.clear()
    run = await rig.started("/run", {"rollout_id": "r", "attempt": 1, "long": "x" * 1000})
    assert await rig.restarts() == [R1]
    rig.go.set()
    assert (await run.end()).json()["long"] == "x" * 1000


async def test_a_client_that_leaves_before_its_body_is_whole_runs_nothing(rig: Rig) -> None:
    messages: asyncio.Queue[Any] = asyncio.Queue()
    for each in ({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}):
        messages.put_nowait(each)
    scope = {"type": "http", "method": "POST", "path": "/run", "headers": []}
    await rig.served(scope, messages.get, lambda message: pytest.fail("nobody is there"))
    assert rig.app.seen == []


@pytest.mark.behaviour("P199")
async def test_a_scope_naming_its_rollout_is_refused_and_without_it_the_commit_succeeds(tmp_path: Path) -> None:
    """With no record."""
    rig = Rig()
    rig.owner.admission._port = None
    async with serve(rig.owner, roots=[tmp_path]) as p:
        run = await rig.started("/rollout/r/run")
        assert (await p.client.prepare("c")).phase == pb.PHASE_PREPARED
        with pytest.raises(RestartInScope) as caught:
            await p.client.capture("c", [R, S])
        assert caught.value.episodes == (R,)
        assert (await p.client.commit("c", [S])).record_count == 0
        await p.client.resume("c")
        rig.go.set()
        assert (await run.end()).status == 200


@pytest.mark.behaviour("P200")
async def test_its_seed_is_held_while_closed_and_the_reply_has_the_restart_header(rig: Rig) -> None:
    await close(rig.owner)
    seed = await rig.started("/rollout/r/seed_session")
    assert (rig.app.seen, rig.owner.report(9).counts["waiting"], await rig.restarts()) == ([], 1, [])
    other = await (await rig.started("/close")).end()
    assert (other.status, "x-gymckpt-restart" in other.headers) == (200, False)
    await reopen(rig.owner)
    answer = await seed.end()
    assert (answer.status, answer.headers["x-gymckpt-restart"]) == (200, "1")


@pytest.mark.behaviour("P201")
async def test_its_retire_replies_after_the_run_has_stopped(rig: Rig) -> None:
    """Each request is cancelled once, over a retry; meanwhile it blocks, and is no restart."""
    run, inner = await rig.started("/rollout/r/run"), await rig.started("/rollout/r/v1/responses")
    other = await rig.started("/rollout/s/run")
    await close(rig.owner)
    with pytest.raises(OutOfTime):
        await retire(rig.owner, rig.port, R, 0.02)
    assert [each.reason for each in rig.owner.report(9).blockers] == [BlockerReason.RETIRING] * 2
    assert await rig.restarts() == [S]
    with pytest.raises(RetireIncomplete):
        rig.owner.check_forget("r", 0)
    retry = asyncio.create_task(rig.owner.retire(R, budget()))
    await spin()
    assert not retry.done()
    rig.go.set()
    await retry
    assert [(await each.end()).code for each in (run, inner)] == ["STALE_ATTEMPT"] * 2
    assert sorted(rig.cancels) == ["/run", "/v1/responses"]
    assert ((await other.end()).status, rig.owner.is_ready()) == (200, True)
    rig.owner.check_forget("r", 0)
    for path in ("/rollout/r/run", "/rollout/r/seed_session"):
        assert (await (await rig.started(path)).end()).code == "STALE_ATTEMPT"


@pytest.mark.behaviour("P201")
async def test_a_held_seed_is_refused_by_the_mark_of_a_retire(rig: Rig) -> None:
    await close(rig.owner)
    seed = await rig.started("/rollout/r/seed_session")
    await retire(rig.owner, rig.port, R)
    assert (await seed.end()).code == "STALE_ATTEMPT"


@pytest.mark.behaviour("P201")
async def test_restoring_a_record_is_refused_and_without_one_there_is_nothing_to_do(rig: Rig) -> None:
    record = AgentRecord(R, "key", {}).to_record()
    await close(rig.owner)
    with pytest.raises(InvalidState) as caught:
        await rig.owner.stage([record], RestoreScope.plan([R]))
    assert caught.value.episode == R
    await rig.owner.stage([], RestoreScope.plan([R]))
    await rig.owner.activate(None)
    assert (rig.owner.restored_pending(), await exported(rig.owner, EpisodeScope.of([R1]))) == (frozenset(), [])
    run = await rig.started("/rollout/r/run")
    with pytest.raises(InvalidPhase) as overlaps:
        await rig.owner.stage([], RestoreScope.plan([R]))
    assert overlaps.value.episodes == (R,)
    rig.go.set()
    await run.end()


@pytest.mark.behaviour("P201")
async def test_restoring_a_checkpoint_with_its_record_is_state_corrupt(tmp_path: Path) -> None:
    """Written by an agent that could capture it."""
    await written("agent", tmp_path, R)
    rig = Rig()
    rig.owner.admission._port = None
    async with serve(rig.owner, roots=[tmp_path]) as p:
        with pytest.raises(StateCorrupt) as caught:
            await p.client.restore("restore", [R], source="source")
        assert caught.value.episodes == (R,)


@pytest.mark.behaviour("P202")
async def test_an_agent_that_builds_its_own_application_reports_restarts_and_is_retired(rig: Rig) -> None:
    """A FastAPI application of its own, which knows nothing of checkpoints; its body names the rollout."""
    app = FastAPI()

    @app.post("/run")
    async def run(request: Request) -> Any:
        task = await request.json()
        await rig.go.wait()
        return {"done": task["prompt"]}

    served = BodyIdentity(CheckpointMiddleware(app, rig.owner.gate()), rig.owner.names)
    kept = call(served, "/run", {"rollout_id": "s", "prompt": "win"}, parts=2)
    gone = call(served, "/run", {"rollout_id": "r", "prompt": "play"}, parts=2)
    await spin(50)
    await close(rig.owner)
    assert (rig.owner.is_ready(), await rig.restarts()) == (True, [S, R])
    await retire(rig.owner, rig.port, R)
    assert ((await gone.end()).code, await rig.restarts()) == ("STALE_ATTEMPT", [S])
    rig.go.set()
    assert (await kept.end()).json() == {"done": "win"}


async def test_an_agent_may_have_other_routes_that_seed() -> None:
    """They alone are held then, and their replies say that the session cannot be captured."""
    owner = RestartOnlyOwner(seed_paths=("/v1/sessions",))
    owner.attach(FakePort(ParticipantKind.AGENT))

    async def ok(scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        return 200, {}, "ok"

    app = App({"/v1/sessions": ok, "/v1/sessions/close": ok, "/seed_session": ok})
    served: Any = CheckpointMiddleware(app, owner.gate())
    await close(owner)
    held = call(served, "/rollout/r/v1/sessions")
    for path in ("/v1/sessions/close", "/seed_session"):
        assert (await call(served, path).end()).headers.get(owner.names.restart_header) is None
    await spin()
    assert (owner.report(9).counts["waiting"], app.seen) == (1, ["/v1/sessions/close", "/seed_session"])
    await reopen(owner)
    assert (await held.end()).headers[owner.names.restart_header] == "1"
