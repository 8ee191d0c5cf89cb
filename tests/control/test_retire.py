"""Retire and Forget."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import HookFailed
from gym_ckpt_grpc.protocol.errors import CheckpointConflict, InvalidPhase, RetireIncomplete, StaleCheckpoint
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import Clock, Participant, ScriptedOwner, running

RETIRED, INCOMPLETE = pb.RETIRE_STATE_RETIRED, pb.RETIRE_STATE_INCOMPLETE


class HoldingOwner(ScriptedOwner):
    """Holds up, or fails, the retire of single episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, asyncio.Event] = {}
        self.failing: set[str] = set()
        self.began: list[str] = []
        self.refused_first: list[bool] = []
        self.beginning = asyncio.Event()

    async def reached(self, count: int) -> None:
        """Wait until so many stops have begun."""
        async with asyncio.timeout(10):
            while len(self.began) < count:
                self.beginning.clear()
                await self.beginning.wait()

    async def retire(self, episode: EpisodeId, budget: object) -> None:
        assert self.port is not None
        self.began.append(str(episode))
        self.beginning.set()
        self.refused_first.append(self.port.marks.refuses(episode) and self.port.marks.being_retired(episode))
        if episode.rollout_id in self.failing:
            raise HookFailed("secret of the hook")
        if episode.rollout_id in self.held:
            await self.held[episode.rollout_id].wait()
        await super().retire(episode, budget)  # type: ignore[arg-type]


@pytest.mark.behaviour("C59", "C63", "C64", "C72")
async def test_a_straggler_is_retired_while_preparing(tmp_path: Path) -> None:
    """The same checkpoint then becomes prepared; other rollouts are left alone."""
    async with Participant(tmp_path) as p:
        a, b = p.add("a", "b", running=True)
        p.owner.running.discard(b)
        async with running(p.prepare(within=4)) as call:
            await p.until("PREPARING")
            reply = await p.retire([a], "c1")
            assert [o.state for o in reply.outcomes] == [RETIRED]
            assert (await call).phase == pb.PHASE_PREPARED
        assert p.owner.live == {b: {"name": "b"}}
        assert (await p.status()).marks_held == 1
        assert not p.is_open()
        assert (await p.commit()).record_count == 1


@pytest.mark.behaviour("C60", "C71")
@pytest.mark.parametrize("name", ["parked", "unknown"])
async def test_a_retire_in_prepared(tmp_path: Path, name: str) -> None:
    """Of any episode; until it has ended the phase is PREPARING and a Commit is refused naming it."""
    owner = HoldingOwner()
    owner.held[name] = asyncio.Event()
    async with Participant(tmp_path, owner=owner) as p:
        p.add("parked", "other")
        await p.prepare()
        async with running(p.retire([EpisodeId(name)], "c1")) as call:
            status = await p.until("PREPARING")
            assert status.report.blockers[0].reason == pb.BLOCKER_REASON_RETIRING
            assert status.report.blocker_count == 1
            for attempt in (p.commit(), p.capture()):
                with pytest.raises(InvalidPhase) as caught:
                    await attempt
                assert caught.value.episodes == (EpisodeId(name),)
                assert caught.value.phase == "PREPARING"
            owner.held[name].set()
            reply = await call
        assert (reply.outcomes[0].state, reply.phase) == (RETIRED, pb.PHASE_PREPARED)
        assert owner.refused_first == [True]
        assert (await p.status()).extra == {}
        assert (await p.commit()).record_count == (1 if name == "parked" else 2)


async def test_a_retire_cut_short_is_followed_to_its_end(tmp_path: Path) -> None:
    """Its call has ended; PREPARED comes back by itself once the episode is freed, whether or not the owner tells."""
    owner = HoldingOwner()
    owner.changed = lambda: None  # type: ignore[method-assign]
    owner.held["a"] = asyncio.Event()
    async with Participant(tmp_path, owner=owner) as p:
        (a,) = p.add("a")
        await p.prepare()
        reply = await p.retire([a], "c1", timeout=0.8)
        assert (reply.outcomes[0].state, reply.phase) == (INCOMPLETE, pb.PHASE_PREPARING)
        async with running(p.prepare(within=4)) as call:
            owner.held["a"].set()
            assert (await call).phase == pb.PHASE_PREPARED
        assert (await p.status()).extra == {}


async def test_a_straggler_being_retired_blocks_once(tmp_path: Path) -> None:
    """The owner lists it as running, the control plane as retiring: one blocker."""
    owner = HoldingOwner()
    owner.held["a"] = asyncio.Event()
    async with Participant(tmp_path, owner=owner) as p:
        (a,) = p.add("a", running=True)
        await p.prepare(within=0)
        await p.retire([a], "c1", timeout=0.8)
        report = (await p.status()).report
        assert (report.blocker_count, len(report.blockers)) == (1, 1)
        owner.held["a"].set()


@pytest.mark.behaviour("C61", "C67")
async def test_not_once_records_are_frozen(tmp_path: Path) -> None:
    """Retire and Forget are refused in CAPTURED, COMMITTING, COMMITTED and RESUMING, and work after the Resume."""
    async with Participant(tmp_path) as p:
        a, b = p.add("a", "b")
        await p.retire([b])
        await p.prepare()

        async def refused(phase: str) -> None:
            assert await p.phase() == phase
            for call in (p.retire([a], "c1"), p.forget({"b": 0}, "c1")):
                with pytest.raises(InvalidPhase):
                    await call
            assert (await p.status()).marks_held == 1

        p.owner.exports.hold()
        async with running(p.capture()) as call:
            await p.owner.exports.entered.wait()
            with pytest.raises(InvalidPhase):
                await p.retire([a], "c1")
            p.owner.exports.open.set()
            await call
        await refused("CAPTURED")
        p.files.hold("create")
        async with running(p.commit()) as commit:
            await p.files.wait_entered()
            await refused("COMMITTING")
            p.files.release()
            await commit
        await refused("COMMITTED")
        p.owner.opens.hold()
        async with running(p.resume()) as resume:
            await p.owner.opens.entered.wait()
            await refused("RESUMING")
            p.owner.opens.open.set()
            await resume
        assert (await p.retire([a])).outcomes[0].state == RETIRED
        assert list((await p.forget({"b": 0})).rollout_ids) == ["b"]


@pytest.mark.behaviour("C62")
async def test_resume_retire_prepare(tmp_path: Path) -> None:
    """After the straggler is gone a checkpoint with a new id prepares at once."""
    async with Participant(tmp_path) as p:
        (a,) = p.add("a", running=True)
        await p.prepare(within=0)
        await p.resume()
        await p.retire([a])
        assert (await p.prepare("c2", within=0)).phase == pb.PHASE_PREPARED


@pytest.mark.behaviour("C66", "C41", "C77")
async def test_marks_are_shown_and_forgotten(tmp_path: Path) -> None:
    """Counted, with the oldest one's age; listed; Forget replies sorted ids, and erases no newer mark."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        assert not (await p.status()).HasField("oldest_mark_age")
        await p.retire([EpisodeId("b", 3)])
        clock.now += 7
        await p.retire([EpisodeId("a")])
        status = await p.status()
        assert (status.marks_held, status.oldest_mark_age.seconds) == (2, 7)
        assert await p.listed(pb.EPISODE_LIST_KIND_RETIRED) == [EpisodeId("a"), EpisodeId("b", 3)]
        reply = await p.forget({"b": 2, "a": 0, "never": 9})
        assert list(reply.rollout_ids) == ["a", "b", "never"]
        assert reply.rollout_count == 3
        assert await p.listed(pb.EPISODE_LIST_KIND_RETIRED) == [EpisodeId("b", 3)]
        await p.forget({"b": 3})
        status = await p.status()
        assert status.marks_held == 0
        assert not status.HasField("oldest_mark_age")


@pytest.mark.behaviour("C68", "C69", "C70")
async def test_a_batch_that_fails_in_part(tmp_path: Path) -> None:
    """All marks first; one outcome each; a retry stops what was left and cancels nothing twice."""
    owner = HoldingOwner()
    owner.failing.add("bad")
    owner.held["slow"] = asyncio.Event()
    async with Participant(tmp_path, owner=owner) as p:
        episodes = p.add("bad", "good", "slow")
        reply = await p.retire(episodes, timeout=0.6)
        assert [o.episode.rollout_id for o in reply.outcomes] == ["bad", "good", "slow"]
        assert [o.state for o in reply.outcomes] == [INCOMPLETE, RETIRED, INCOMPLETE]
        assert "incident" in reply.outcomes[0].message
        assert "secret" not in reply.outcomes[0].message
        assert "still being stopped" in reply.outcomes[2].message
        assert (await p.status()).marks_held == 3
        assert owner.refused_first == [True] * 3
        owner.failing.clear()
        async with running(p.retire(episodes)) as call:
            await owner.reached(5)
            owner.held["slow"].set()
            reply = await call
        assert [o.state for o in reply.outcomes] == [RETIRED] * 3
        assert owner.began.count("slow") == 1
        assert (await p.status()).marks_held == 3
        assert owner.live == {}


@pytest.mark.behaviour("C73", "C325")
async def test_a_batch_is_stopped_side_by_side(tmp_path: Path) -> None:
    """50 episodes are all being stopped at once, and one that hangs delays neither the others nor the answer."""
    owner = HoldingOwner()
    release = asyncio.Event()
    owner.held = {f"r{i}": release for i in range(49)}
    owner.held["hangs"] = asyncio.Event()
    async with Participant(tmp_path, owner=owner) as p:
        episodes = p.add(*owner.held)
        async with running(p.retire(episodes, timeout=1.0)) as call:
            await owner.reached(50)
            release.set()
            reply = await call
        assert [o.state for o in reply.outcomes] == [RETIRED] * 49 + [INCOMPLETE]
        owner.held["hangs"].set()


@pytest.mark.behaviour("C75")
async def test_forget_before_everything_is_freed(tmp_path: Path) -> None:
    """RETIRE_INCOMPLETE, by what the control plane knows and by the owner's own veto; the marks stay."""
    owner = HoldingOwner()
    owner.held["a"] = asyncio.Event()
    async with Participant(tmp_path, owner=owner) as p:
        a, b = p.add("a", "b")
        await p.retire([a, b], timeout=0.8)
        with pytest.raises(RetireIncomplete) as caught:
            await p.forget({"b": 0, "a": 0})
        assert caught.value.episodes == (a,)
        assert (await p.status()).marks_held == 2
        owner.held["a"].set()
        await p.retire([a])
        veto = RetireIncomplete("the owner's", episodes=[b])

        def check(rollout_id: str, through_attempt: int) -> None:
            if rollout_id == "b":
                raise veto

        owner.check_forget = check  # type: ignore[method-assign]
        with pytest.raises(RetireIncomplete):
            await p.forget({"a": 0, "b": 0})
        assert (await p.status()).marks_held == 2


@pytest.mark.behaviour("C22")
async def test_a_refused_forget_extends_no_lease_and_is_not_obeyed(tmp_path: Path) -> None:
    """In RESTORED, where Forget is legal; refused for what is not freed."""
    clock = Clock()
    async with Participant(tmp_path, clock=clock) as p:
        (a,) = p.add("a")
        await p.prepare()
        await p.commit()
        await p.resume()
        p.owner.live.clear()
        await p.restore([a], ttl=30)
        p.owner.retires.error = HookFailed("no")
        await p.retire([EpisodeId("z")], "r1")
        clock.now += 10
        with pytest.raises(RetireIncomplete):
            await p.forget({"z": 0}, "r1", epoch=9)
        status = await p.status()
        assert (status.lease_remaining.seconds, status.highest_epoch) == (20, 1)


async def test_without_an_id_while_one_is_open(tmp_path: Path) -> None:
    """Retire and Forget outside a checkpoint conflict with it; with a resumed id they are stale."""
    async with Participant(tmp_path) as p:
        await p.resume("old")
        await p.prepare()
        for call in (p.retire([EpisodeId("a")]), p.forget({"a": 0}), p.retire([EpisodeId("a")], "other")):
            with pytest.raises(CheckpointConflict):
                await call
        for call in (p.retire([EpisodeId("a")], "old"), p.forget({"a": 0}, "old")):
            with pytest.raises(StaleCheckpoint):
                await call
        assert (await p.status()).marks_held == 0


async def test_outcomes_of_a_thousand_stay_small(tmp_path: Path) -> None:
    """Long ids and long texts of hooks: a reply is under 1 MiB all the same."""
    owner = HoldingOwner()

    async def retire(episode: EpisodeId, budget: object) -> None:
        raise RetireIncomplete("x" * 5000)

    owner.retire = retire  # type: ignore[method-assign]
    async with Participant(tmp_path, owner=owner) as p:
        names = (f"{i:04}" + "x" * 252 for i in itertools.count())
        reply = await p.retire([EpisodeId(next(names)) for _ in range(1000)])
        assert len(reply.outcomes) == 1000
        assert reply.ByteSize() < 1 << 20
        assert await p.listed(pb.EPISODE_LIST_KIND_RETIRED)
