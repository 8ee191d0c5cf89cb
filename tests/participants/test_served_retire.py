"""What the control plane does with a real owner of each kind: pending state, retiring, what comes after it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import ControlSettings, EpisodeListKind, wire
from gym_ckpt_grpc.protocol.errors import (
    InternalError,
    InvalidPhase,
    OutOfTime,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.testing import Gate
from gymckpt.v1 import participant_pb2 as pb
from tests.participants.fakes import R1, R, S, budget, spin
from tests.participants.kinds import KINDS, AgentKind, ResourcesKind
from tests.participants.served_kinds import ALL, S1, WITH_RECORDS, restored, served, started, written

# ---- pending state at a commit -------------------------------------------------------------------------------


@pytest.mark.behaviour("P22")
@pytest.mark.parametrize("name", WITH_RECORDS)
@pytest.mark.parametrize(("scope", "left"), [(None, {R1, S1}), ([R1], {R1}), ([], set())], ids=["all", "list", "none"])
async def test_a_commit_deletes_pending_state_outside_a_list(
    name: str, scope: list[EpisodeId] | None, left: set[EpisodeId], tmp_path: Path
) -> None:
    await written(name, tmp_path, R, S)
    async with served(name, tmp_path) as kind:
        await restored(kind, R, S)
        await kind.p.client.prepare("c")
        await kind.p.client.commit("c", scope)
        assert await kind.pending() == left
        await kind.p.client.resume("c")
        assert await kind.pending() == left


@pytest.mark.behaviour("P21")
@pytest.mark.parametrize("name", WITH_RECORDS)
async def test_a_deletion_that_fails_leaves_it_pending_and_the_retry_deletes_it_once(name: str, tmp_path: Path) -> None:
    await written(name, tmp_path, R)
    async with served(name, tmp_path) as kind:
        await restored(kind, R)
        deletes, delete = Gate(), kind.owner.delete_restored

        async def failing(episode: EpisodeId) -> None:
            await deletes.step()
            await delete(episode)

        kind.owner.delete_restored = failing
        deletes.fail(RuntimeError("its hook"))
        await kind.p.client.prepare("c")
        with pytest.raises(InternalError):
            await kind.p.client.commit("c", [])
        assert (await kind.pending(), (tmp_path / "checkpoints" / "c").is_dir()) == ({R1}, True)
        deletes.fail(None)
        reply = await kind.p.client.commit("c", [])
        assert (await kind.pending(), deletes.count, reply.record_count) == (set(), 2, 0)
        assert (await kind.p.client.commit("c", [])).replayed
        assert deletes.count == 2


@pytest.mark.behaviour("P23")
@pytest.mark.parametrize("name", WITH_RECORDS)
async def test_a_kept_write_deletes_only_what_is_still_unstarted(name: str, tmp_path: Path) -> None:
    await written(name, tmp_path, R, S)
    async with served(name, tmp_path) as kind:
        await restored(kind, R, S)
        await kind.p.client.prepare("c")
        await kind.p.client.capture("c", [])
        await kind.p.client.resume("c", keep_write=True)
        await kind.rig.begin(R1)  # a call of the restored episode: it has started
        if isinstance(kind.rig, AgentKind | ResourcesKind):
            await kind.rig.rig.seed("key-r", R1)
        assert await kind.pending() == {S1}
        await kind.p.client.commit("c", [])
        assert await kind.pending() == set()
        live = kind.owner.report(9).counts
        assert live.get("sessions", live.get("episodes")) >= 1
        assert R1 in await kind.p.client.listed(EpisodeListKind.BLOCKING)


@pytest.mark.behaviour("P335")
@pytest.mark.parametrize("name", ["agent", "resources"])
async def test_a_deletion_that_waits_for_another_gate_holds_up_neither_the_reply_nor_admits_calls(
    name: str, tmp_path: Path
) -> None:
    """Its hook waits for a server that only Resume opens. Requests for the episode wait until it has ended."""
    await written(name, tmp_path, R)
    async with served(name, tmp_path, settings=ControlSettings(deletion_wait=0.1)) as kind:
        assert isinstance(kind.rig, AgentKind | ResourcesKind)
        await restored(kind, R)
        other = kind.rig.rig.retire_gate = asyncio.Event()
        await kind.p.client.prepare("c")
        reply = await kind.p.client.commit("c", [], timeout=5)
        assert (reply.deleting, await kind.pending()) == (1, {R1})
        resume = asyncio.create_task(kind.p.client.resume("c"))
        seed = asyncio.create_task(kind.rig.rig.seed("key-r", R1))
        done, _ = await asyncio.wait({seed}, timeout=0.2)
        assert not done
        other.set()
        await resume
        await seed
        assert await kind.pending() == set()
        hooks = [each for each in kind.rig.rig.hooks if each[0] == "retire"]
        assert hooks == [("retire", ["key-r"])]


@pytest.mark.behaviour("P24")
@pytest.mark.parametrize("name", WITH_RECORDS)
async def test_stop_releases_exactly_what_was_exported_and_its_failure_fails_nothing(name: str, tmp_path: Path) -> None:
    await written(name, tmp_path, R, S)
    async with served(name, tmp_path) as kind:
        await restored(kind, R, S)
        released: list[tuple[list[EpisodeId], bool]] = []

        async def release(episodes: Sequence[EpisodeId]) -> None:
            durable = bool(list((tmp_path / "checkpoints" / "c").rglob("manifest.json")))
            released.append((list(episodes), durable))
            raise RuntimeError("a sandbox did not stop")

        kind.owner.release_exported = release
        await kind.p.client.prepare("c")
        reply = await kind.p.client.commit("c", [R1], stop=True)
        assert (released, reply.record_count) == ([([R1], True)], 1)
        assert reply.release_problem
        assert "did not stop" not in reply.release_problem
        assert (await kind.p.client.commit("c", [R1], stop=True)).replayed
        assert len(released) == 1


# ---- retire ------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P25", "P29")
@pytest.mark.parametrize("name", ALL)
async def test_a_batch_with_one_failing_and_one_hanging_frees_the_others(name: str, tmp_path: Path) -> None:
    async with served(name, tmp_path) as kind:
        failing, hanging = EpisodeId("f"), EpisodeId("h")
        await kind.rig.begin(hanging)
        await started(kind, failing, R, S)
        retire = kind.owner.retire

        async def one_fails(episode: EpisodeId, left: Any) -> None:
            if episode == failing:
                raise RuntimeError("its hook")
            await retire(episode, left)

        kind.owner.retire = one_fails
        reply = await kind.p.client.retire([failing, hanging, R, S], timeout=0.5)
        states = {wire.episode_from(each.episode): each.state for each in reply.outcomes}
        assert states == {
            failing: pb.RETIRE_STATE_INCOMPLETE,
            hanging: pb.RETIRE_STATE_INCOMPLETE,
            R: pb.RETIRE_STATE_RETIRED,
            S: pb.RETIRE_STATE_RETIRED,
        }
        assert set(await kind.p.client.listed(EpisodeListKind.RETIRED)) == {failing, hanging, R, S}
        kind.rig.go.set()
        kind.owner.retire = retire
        reply = await kind.p.client.retire([failing, hanging, R1])
        assert {each.state for each in reply.outcomes} == {pb.RETIRE_STATE_RETIRED}
        marks = await kind.p.client.listed(EpisodeListKind.RETIRED)
        assert sorted(marks) == sorted([failing, hanging, R1, S])  # one mark a rollout, the highest
        await kind.p.client.forget({each.rollout_id: 1 for each in marks})
        assert await kind.p.client.listed(EpisodeListKind.RETIRED) == []


@pytest.mark.behaviour("P38")
@pytest.mark.parametrize("name", ALL)
async def test_no_step_begins_after_the_budget_is_spent(name: str) -> None:
    """The author's hook is not called, nothing is forgotten, and the retry does it all."""
    rig = KINDS[name]()
    if isinstance(rig, AgentKind | ResourcesKind):
        await rig.rig.seed("key-r", R)
    else:
        await rig.begin(R)
    rig.port.marks.raise_to(R)
    spent = budget(0.0)
    with pytest.raises(OutOfTime):
        await rig.owner.retire(R, spent)
    if isinstance(rig, AgentKind | ResourcesKind):
        assert [each for each in rig.rig.hooks if each[0] == "retire"] == []
    assert not rig.owner.is_ready()
    rig.go.set()
    await rig.owner.retire(R, budget())
    assert rig.owner.is_ready()
    await rig.end()


# ---- retire in an open checkpoint ------------------------------------------------------------------------------


@pytest.mark.behaviour("P231")
@pytest.mark.parametrize("name", ALL)
async def test_retiring_a_straggler_lets_the_same_checkpoint_go_on(name: str, tmp_path: Path) -> None:
    async with served(name, tmp_path) as kind:
        await kind.rig.begin(R)
        await started(kind, S)
        assert (await kind.p.client.prepare("c", within=0.05)).phase == pb.PHASE_PREPARING
        retire = asyncio.create_task(kind.p.client.retire([R], id="c"))
        kind.rig.go.set()
        assert [each.state for each in (await retire).outcomes] == [pb.RETIRE_STATE_RETIRED]
        assert (await kind.p.client.prepare("c", within=0.05)).phase == pb.PHASE_PREPARED
        reply = await kind.p.client.commit("c", [S])
        assert reply.record_count == (1 if isinstance(kind.rig, AgentKind | ResourcesKind) else 0)


@pytest.mark.behaviour("P232", "P235")
async def test_retiring_a_parked_episode_in_prepared(tmp_path: Path) -> None:
    """A Commit meanwhile is refused; afterwards it has the other parked episode, which stayed parked."""
    async with served("environment", tmp_path) as kind:
        cleans = asyncio.Event()

        async def protocol(ctx: Any) -> None:
            ctx.on_cleanup(cleans.wait)
            while True:
                await ctx.boundary({"at": 1})
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(kind.owner.run(each, {}, protocol)) for each in (R, S)]
        await spin()
        assert (await kind.p.client.prepare("c", within=5)).phase == pb.PHASE_PREPARED
        retire = asyncio.create_task(kind.p.client.retire([R], id="c"))
        await kind.p.client.until(Phase.PREPARING)
        with pytest.raises(InvalidPhase) as caught:
            await kind.p.client.commit("c", [S])
        assert caught.value.episodes == (R,)
        cleans.set()
        await retire
        reply = await kind.p.client.commit("c", [S])
        assert (reply.record_count, tasks[1].done()) == (1, False)
        await kind.p.client.resume("c")
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.behaviour("P236")
@pytest.mark.parametrize("name", ALL)
async def test_no_retire_once_records_are_frozen(name: str, tmp_path: Path) -> None:
    async with served(name, tmp_path) as kind:
        await started(kind, R)
        await kind.p.client.prepare("c")
        await kind.p.client.capture("c", [R])
        for step in (kind.p.client.phase, lambda: kind.p.client.commit("c", [R])):
            await step()
            with pytest.raises(InvalidPhase):
                await kind.p.client.retire([R], id="c")
        assert await kind.p.client.listed(EpisodeListKind.RETIRED) == []
        await kind.p.client.resume("c")
        assert [each.state for each in (await kind.p.client.retire([R])).outcomes] == [pb.RETIRE_STATE_RETIRED]


@pytest.mark.behaviour("P237")
@pytest.mark.parametrize("name", WITH_RECORDS)
async def test_restored_state_nobody_claimed_is_in_the_next_checkpoint(name: str, tmp_path: Path) -> None:
    """Under its next attempt, twice: the second crash before a replacement starts costs nothing."""
    await written(name, tmp_path, R)
    async with served(name, tmp_path) as kind:
        await restored(kind, R)
        await kind.commit("second", R1)
    async with served(name, tmp_path) as kind:
        await kind.p.client.restore("restore", [R1], source="second")
        assert await kind.pending() == {EpisodeId("r", 2)}
