"""Resources servers: what is held, counted, tracked and refused."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.participants import (
    ResourcesHooks,
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
    VerifyMode,
    declared_mode,
    declared_verify,
)
from gym_ckpt_grpc.participants.resource_sessions import SeenSessions
from gym_ckpt_grpc.protocol import UsageError
from gym_ckpt_grpc.protocol.errors import InvalidPhase
from gym_ckpt_grpc.protocol.ids import EpisodeId, RestoreScope
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.fakes import R1, R, S, close, exported, reopen, restore, retire, spin
from tests.participants.resources_rig import ResourcesRig


@pytest.fixture
def rig() -> ResourcesRig:
    return ResourcesRig()


@pytest.mark.behaviour("P203", "P204")
async def test_state_is_restored_and_continued_with_the_old_cookie_after_resume_only(rig: ResourcesRig) -> None:
    await rig.seed()
    assert await rig.add() == 1
    records = await rig.checkpoint()
    other = ResourcesRig()
    await restore(other.owner, records)
    held = other.call("/add")
    await spin()
    assert (other.counters, other.app.seen) == ({"k": 1}, [])
    await reopen(other.owner)
    assert (await held.end()).json() == 2


@pytest.mark.behaviour("P205")
async def test_an_in_flight_request_blocks_naming_route_session_and_episode(rig: ResourcesRig) -> None:
    await rig.seed()
    go = rig.gates["/add"] = asyncio.Event()
    running = rig.call("/add")
    await spin()
    await close(rig.owner)
    rig.clock.now += 2
    (blocker,) = rig.owner.report(9).blockers
    assert (blocker.reason, blocker.episode, blocker.age) == (BlockerReason.IN_FLIGHT_REQUEST, R, 2.0)
    assert ("/add" in blocker.place, " k" in blocker.place) == (True, True)
    go.set()
    await running.end()
    await spin()
    assert (rig.owner.is_ready(), rig.port.changes) == (True, 1)


@pytest.mark.behaviour("P51")
async def test_a_tool_call_while_closed_is_held_and_its_result_is_that_of_an_undisturbed_run(rig: ResourcesRig) -> None:
    await rig.seed()
    await close(rig.owner)
    held = rig.call("/add")
    await spin()
    assert (held.answer.status, rig.owner.is_ready(), rig.owner.report(9).counts["inflight"]) == (0, True, 0)
    await reopen(rig.owner)
    answer = await held.end()
    assert (answer.status, answer.json()) == (200, 1)


@pytest.mark.behaviour("P206")
@pytest.mark.parametrize("path", ["/verify", "/close_session"])
async def test_a_2xx_verify_or_close_ends_the_session_and_a_failed_one_does_not(rig: ResourcesRig, path: str) -> None:
    await rig.seed()
    rig.status[path] = 500
    await rig.call(path).end()
    assert rig.sessions() == 1
    rig.status[path] = 204
    await rig.call(path).end()
    assert rig.sessions() == 0


async def test_a_session_that_is_verified_several_times_ends_at_its_close_only() -> None:
    """Agents that let the server check an attempt, and then try again in the same session."""
    rig = ResourcesRig(ends_on_verify=False)
    await rig.seed()
    for _ in range(2):
        assert (await rig.call("/verify").end()).status == 200
    assert [each.episode for each in await exported(rig.owner)] == [R]
    await rig.call("/close_session").end()
    assert rig.sessions() == 0


@pytest.mark.parametrize("path", ["/add", "/verify"])
async def test_a_server_that_was_started_anew_does_not_answer_for_a_session_of_before(path: str) -> None:
    """It would answer from an empty state, and the reward would be another."""
    rig = ResourcesRig(brought=True)
    answer = await rig.call(path).end()
    assert (answer.status, answer.json()["error"]["code"]) == (404, "STATE_NOT_FOUND")
    assert "session k is not known here" in answer.json()["error"]["detail"]
    assert (rig.app.seen, rig.counters) == ([], {})
    assert (await rig.call("/close_session").end()).status == 200
    await rig.seed()
    assert (await rig.call(path).end()).status == 200


async def test_such_a_call_that_a_restore_held_goes_on_in_its_restored_session() -> None:
    rig = ResourcesRig(brought=True)
    await rig.seed()
    assert await rig.add() == 1
    other = ResourcesRig(brought=True)
    await restore(other.owner, await rig.checkpoint())
    known, unknown = other.call("/add"), other.call("/add", "nobody")
    await spin()
    await reopen(other.owner)
    assert (await known.end()).json() == 2
    assert (await unknown.end()).status == 404


async def test_a_session_that_has_ended_or_was_never_seeded_is_none_of_before() -> None:
    rig = ResourcesRig(brought=True)
    await rig.seed()
    for _ in range(2):  # the second is a client's that has not seen the first one's reply
        assert (await rig.call("/verify").end()).status == 200
    assert (await rig.call("/add", "new", given=True).end()).json() == 1
    assert (await rig.call("/add", "new").end()).json() == 2


@pytest.mark.parametrize("mode", [ResourcesMode.STATELESS, ResourcesMode.RESTART_ONLY])
async def test_where_no_session_is_kept_none_can_be_lost(mode: ResourcesMode) -> None:
    rig = ResourcesRig(mode, brought=True)
    assert (await rig.call("/add").end()).status == 200


def test_only_the_last_sessions_are_remembered() -> None:
    seen = SeenSessions(limit=3)
    for key in "abcad":
        seen.add(key)
    assert [key for key in "abcd" if key in seen] == ["a", "c", "d"]


@pytest.mark.behaviour("P207")
async def test_a_replayable_verify_while_closed_is_admitted_and_ends_the_session_at_resume() -> None:
    rig = ResourcesRig(verify=VerifyMode.REPLAY)
    await rig.seed()
    go = rig.gates["/verify"] = asyncio.Event()
    await close(rig.owner)
    running = rig.call("/verify")
    await spin()
    assert rig.owner.is_ready()
    go.set()
    assert (await running.end()).status == 200
    assert [each.episode for each in await exported(rig.owner)] == [R]
    await reopen(rig.owner)
    assert rig.sessions() == 0


@pytest.mark.behaviour("P208")
@pytest.mark.parametrize("mode", [ResourcesMode.STATELESS, ResourcesMode.EXPORTED])
async def test_a_close_of_a_live_session_is_held_and_of_an_unknown_one_succeeds_at_once(mode: ResourcesMode) -> None:
    rig = ResourcesRig(mode)
    await rig.seed()
    await close(rig.owner)
    held, unknown = rig.call("/close_session"), rig.call("/close_session", "nobody")
    assert (await unknown.end()).status == 200
    assert (held.answer.status, rig.owner.is_ready(), rig.sessions()) == (0, True, 1)
    await reopen(rig.owner)
    assert ((await held.end()).status, rig.sessions()) == (200, 0)


@pytest.mark.behaviour("P209")
async def test_a_seed_while_closed_is_held_and_one_in_flight_blocks_and_is_exported(rig: ResourcesRig) -> None:
    go = rig.gates["/seed_session"] = asyncio.Event()
    running = rig.call("/seed_session", "k", R)
    await spin()
    await close(rig.owner)
    held = rig.call("/seed_session", "m", S)
    await spin()
    assert [each.episode for each in rig.owner.report(9).blockers] == [R]
    go.set()
    await running.end()
    assert [each.episode for each in await exported(rig.owner)] == [R]
    await reopen(rig.owner)
    await held.end()
    assert [each.episode for each in await rig.checkpoint()] == [R, S]


@pytest.mark.behaviour("P210")
async def test_a_seed_that_replaces_the_session_id_is_tracked_under_the_new_one(rig: ResourcesRig) -> None:
    rig.ids = ["new"]
    await rig.seed("old")
    (record,) = await rig.checkpoint()
    assert record.fields["session_id"] == "new"
    await rig.call("/close_session", "old").end()
    assert rig.sessions() == 1
    await rig.call("/close_session", "new").end()
    assert rig.sessions() == 0


@pytest.mark.behaviour("P211")
async def test_a_seed_of_a_restored_sessions_id_claims_it(rig: ResourcesRig) -> None:
    await rig.seed()
    records = await rig.checkpoint()
    other = ResourcesRig()
    await restore(other.owner, records)
    await reopen(other.owner)
    assert other.owner.restored_pending() == {R1}
    await other.seed("k", R1)
    assert (other.owner.restored_pending(), other.sessions()) == (frozenset(), 1)


@pytest.mark.behaviour("P212")
async def test_a_seed_without_identity_is_refused_or_counted_unattributed(rig: ResourcesRig) -> None:
    """Such a session is served, never exported, and every restore overlaps."""
    answer = await rig.call("/seed_session").end()
    assert (answer.status, answer.code) == (400, "ROLLOUT_ID_REQUIRED")
    free = ResourcesRig(require_identity=False)
    await free.seed("k", None)
    assert await free.add() == 1
    assert free.owner.report(9).counts["unattributed_sessions"] == 1
    assert await free.checkpoint() == []
    with pytest.raises(InvalidPhase):
        await free.owner.stage([], RestoreScope.plan([R]))
    await free.call("/close_session").end()
    assert free.owner.report(9).counts["unattributed_sessions"] == 0
    await free.owner.stage([], RestoreScope.plan([R]))


@pytest.mark.behaviour("P213")
async def test_seed_reply_and_status_name_the_verify_mode(rig: ResourcesRig) -> None:
    answer = await rig.call("/seed_session", "k", R).end()
    assert (answer.headers["x-gymckpt-verify"], answer.headers.get("x-gymckpt-restart")) == ("wait", None)
    restarts = ResourcesRig(ResourcesMode.RESTART_ONLY, VerifyMode.REPLAY)
    answer = await restarts.call("/seed_session", "k", R).end()
    assert (answer.headers["x-gymckpt-verify"], answer.headers["x-gymckpt-restart"]) == ("replay", "1")
    assert restarts.owner.status_extra() == {"mode": "restart_only", "verify": "replay", "retired_sessions": "0"}


@pytest.mark.behaviour("P214")
async def test_a_restart_only_session_is_a_restart_and_its_requests_run_while_closed() -> None:
    rig = ResourcesRig(ResourcesMode.RESTART_ONLY)
    await rig.seed()
    go = rig.gates["/add"] = asyncio.Event()
    running = rig.call("/add")
    await spin()
    await close(rig.owner)
    seed, more = rig.call("/seed_session", "m", S), rig.call("/add")
    await spin()
    assert (rig.owner.is_ready(), rig.owner.report(9).restarts) == (True, (R,))
    go.set()
    assert [(await each.end()).status for each in (running, more)] == [200, 200]
    assert (await exported(rig.owner), seed.answer.status) == ([], 0)
    await reopen(rig.owner)
    await seed.end()
    assert rig.owner.report(9).restarts == (R, S)


async def test_a_restart_only_server_refuses_records(rig: ResourcesRig) -> None:
    await rig.seed()
    records = await rig.checkpoint()
    other = ResourcesRig(ResourcesMode.RESTART_ONLY)
    with pytest.raises(InvalidState) as caught:
        await restore(other.owner, records)
    assert caught.value.episode == R


@pytest.mark.behaviour("P215")
async def test_explicit_start_and_end_hooks_export_only_the_live_session(rig: ResourcesRig) -> None:
    rig.counters = {"a": 1, "b": 2}
    rig.owner.session_started("a", R)
    rig.owner.session_started("b", S)
    rig.owner.session_ended("a")
    rig.owner.session_ended("never")
    assert [each.fields["session_id"] for each in await rig.checkpoint()] == ["b"]


@pytest.mark.behaviour("P217")
async def test_a_request_cancelled_at_any_await_is_no_longer_counted(rig: ResourcesRig) -> None:
    """Cancelled after 0, 1, 2, ... turns, while open and while held."""
    await rig.seed()
    rig.gates["/add"] = asyncio.Event()
    for turns in range(12):
        for closed in (False, True):
            if closed:
                await close(rig.owner)
            running = rig.call("/add")
            await spin(turns)
            running.task.cancel()
            await asyncio.wait({running.task})
            assert rig.owner.report(9).counts["inflight"] == 0, turns
            assert (rig.owner.is_ready(), rig.owner.admission.waiting) == (True, 0)
            await reopen(rig.owner)


@pytest.mark.behaviour("P218")
async def test_stateless_drains_exports_empty_state_and_restores_without_hooks() -> None:
    """And refuses a retired session by its session id alone."""
    rig = ResourcesRig(ResourcesMode.STATELESS)
    await rig.seed()
    go = rig.gates["/add"] = asyncio.Event()
    running = rig.call("/add")
    await spin()
    await close(rig.owner)
    assert not rig.owner.is_ready()
    go.set()
    await running.end()
    (record,) = await exported(rig.owner)
    assert (record.decode("state"), rig.hooks) == (None, [])
    other = ResourcesRig(ResourcesMode.STATELESS)
    await restore(other.owner, [record])
    await reopen(other.owner)
    assert (await other.call("/add").end()).status == 200
    await retire(other.owner, other.port, R1)
    assert (await other.call("/add").end()).code == "STALE_ATTEMPT"


@pytest.mark.behaviour("P219")
def test_an_exported_server_that_lacks_a_hook_fails_at_start() -> None:
    """Inherited hooks count, stubs do not."""

    class Parent:
        async def export_sessions(self, session_ids: Any) -> Any: ...

        async def restore_sessions(self, sessions: Any) -> None: ...

        async def retire_session(self, session_id: str) -> None: ...

    class Inherits(Parent):
        pass

    class Stub(ResourcesHooks):
        async def export_sessions(self, session_ids: Any) -> Any: ...

        async def restore_sessions(self, sessions: Any) -> None: ...

    settings = ResourcesSettings(mode=ResourcesMode.EXPORTED)
    ResourcesOwner(Inherits(), settings)
    with pytest.raises(UsageError, match="retire_session of its own"):
        ResourcesOwner(Stub(), settings)  # type: ignore[abstract]
    with pytest.raises(UsageError, match="export_sessions, restore_sessions, retire_session"):
        ResourcesOwner(None, settings)


@pytest.mark.behaviour("P35")
def test_a_subclass_that_does_not_restate_its_mode_is_restart_only(caplog: pytest.LogCaptureFixture) -> None:
    class Parent:
        checkpoint_mode = "exported"
        checkpoint_verify = "replay"

    class Child(Parent):
        pass

    class Restated(Parent):
        checkpoint_mode = "stateless"
        checkpoint_verify = "replay"

    with caplog.at_level(logging.WARNING):
        assert (declared_mode(Parent), declared_verify(Parent)) == (ResourcesMode.EXPORTED, VerifyMode.REPLAY)
        assert (declared_mode(Restated), declared_verify(Restated)) == (ResourcesMode.STATELESS, VerifyMode.REPLAY)
        assert caplog.messages == []
        assert (declared_mode(Child), declared_verify(Child)) == (ResourcesMode.RESTART_ONLY, VerifyMode.WAIT)
    assert ["'exported'" in caplog.messages[0], "'replay'" in caplog.messages[1]] == [True, True]


async def test_sessions_of_one_episode_are_all_exported_and_claimed_together(rig: ResourcesRig) -> None:
    await rig.seed("a", R)
    await rig.seed("b", R)
    records = await rig.checkpoint()
    other = ResourcesRig()
    await restore(other.owner, records)
    await reopen(other.owner)
    assert (other.sessions(), other.owner.restored_pending()) == (2, frozenset({R1}))
    await other.add("b")
    assert other.owner.restored_pending() == frozenset()


async def test_a_session_belongs_to_the_rollout_that_seeded_it_last(rig: ResourcesRig) -> None:
    await rig.seed("k", R)
    await rig.seed("k", EpisodeId("other"))
    (record,) = await rig.checkpoint()
    assert record.episode == EpisodeId("other")
