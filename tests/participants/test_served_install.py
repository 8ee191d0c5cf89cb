"""What the control plane does with a real owner of each kind: closing, freezing, installing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import ControlSettings, InvalidState, wire
from gym_ckpt_grpc.protocol.errors import (
    InstallFailed,
    InternalError,
    StateCorrupt,
    StateUnwritable,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.storage import LocalFiles, Record
from gym_ckpt_grpc.testing import Gate
from gymckpt.v1 import participant_pb2 as pb
from tests.participants.fakes import R1, R, S, spin
from tests.participants.kinds import KINDS, AgentKind, PolicyKind, ResourcesKind
from tests.participants.served_kinds import ALL, WITH_RECORDS, export_these, restored, served, started, written

# ---- closing and readiness ---------------------------------------------------------------------------------


@pytest.mark.behaviour("P2")
@pytest.mark.parametrize("name", ALL)
async def test_a_close_that_raises_leaves_admission_open_and_the_id_usable(name: str, tmp_path: Path) -> None:
    async with served(name, tmp_path) as kind:
        close_admission = kind.owner.close_admission

        async def half_way(closing: Any) -> None:
            await close_admission(closing)
            raise RuntimeError("secret detail")

        kind.owner.close_admission = half_way
        with pytest.raises(InternalError) as caught:
            await kind.p.client.prepare("c")
        assert "secret" not in str(caught.value)
        assert (await kind.p.client.phase(), kind.owner.admission.closed) == (Phase.IDLE, False)
        assert await kind.rig.fresh(R)
        kind.owner.close_admission = close_admission
        assert (await kind.p.client.prepare("c")).phase == pb.PHASE_PREPARED


@pytest.mark.behaviour("P5")
@pytest.mark.parametrize("name", ALL)
async def test_a_prepare_that_is_not_ready_in_time_tells_its_blockers_and_stays_closed(
    name: str, tmp_path: Path
) -> None:
    async with served(name, tmp_path) as kind:
        await kind.rig.begin(R)
        reply = await kind.p.client.prepare("c", within=0.05)
        assert reply.phase == pb.PHASE_PREPARING
        assert [wire.episode_from(each.episode) for each in reply.report.blockers] == [R]
        assert kind.owner.admission.closed
        kind.rig.go.set()
        assert (await kind.p.client.prepare("c", within=5)).phase == pb.PHASE_PREPARED


@pytest.mark.behaviour("P6")
async def test_a_prepare_asks_for_the_report_at_most_twice_while_20_episodes_park(tmp_path: Path) -> None:
    async with served("environment", tmp_path) as kind:
        gates = [asyncio.Event() for _ in range(20)]

        async def run(number: int) -> None:
            async def protocol(ctx: Any) -> None:
                await gates[number].wait()
                await ctx.boundary({"at": number})

            await kind.owner.run(EpisodeId(f"r{number}"), {}, protocol)

        tasks = [asyncio.create_task(run(number)) for number in range(20)]
        await spin()
        reports: list[int] = []
        report = kind.owner.report

        def counted(limit: int) -> Any:
            reports.append(limit)
            return report(limit)

        kind.owner.report = counted
        closes, close_admission = Gate(), kind.owner.close_admission

        async def closing(closing: Any) -> None:
            await close_admission(closing)
            await closes.step()

        kind.owner.close_admission = closing
        prepare = asyncio.create_task(kind.p.client.prepare("c", within=8))
        await closes.reached()
        await spin()
        for number, gate in enumerate(gates):
            assert not prepare.done()
            gate.set()
            await spin()
            assert report(100).blocker_count == 19 - number
        assert (await prepare).phase == pb.PHASE_PREPARED
        assert len(reports) <= 2
        await kind.p.client.resume("c")
        await asyncio.gather(*tasks)


@pytest.mark.behaviour("P10")
@pytest.mark.parametrize("name", ALL)
async def test_a_change_that_nobody_told_is_seen_all_the_same_and_counted(name: str, tmp_path: Path) -> None:
    async with served(name, tmp_path, settings=ControlSettings(watch_interval=0.05)) as kind:
        await kind.rig.begin(R)
        await kind.p.client.prepare("c", within=0.01)
        kind.owner.admission.changed = lambda: None
        kind.rig.go.set()
        status = await kind.p.client.until(Phase.PREPARED)
        assert status.extra["unnotified_changes"] == "1"
        await kind.p.client.resume("c")


# ---- what is frozen ----------------------------------------------------------------------------------------


class FailingFiles(LocalFiles):
    """Files that refuse to be created while `broken`."""

    broken = False

    def create(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            raise StateUnwritable("the disk is full")
        return super().create(*args, **kwargs)


@pytest.mark.behaviour("P12")
@pytest.mark.parametrize("name", ["agent", "resources"])
async def test_a_retried_commit_stores_what_the_first_export_saw(name: str, tmp_path: Path) -> None:
    files = FailingFiles()
    async with served(name, tmp_path, files=files) as kind:
        assert isinstance(kind.rig, AgentKind | ResourcesKind)
        await started(kind, R)
        await kind.p.client.prepare("c")
        files.broken = True
        with pytest.raises(StateUnwritable):
            await kind.p.client.commit("c", [R])
        if isinstance(kind.rig, AgentKind):
            kind.rig.rig.states["key-r"]["of"] = "changed"
        else:
            kind.rig.rig.counters["key-r"] = 99
        files.broken = False
        await kind.p.client.commit("c", [R])
        await kind.p.client.resume("c")
    async with served(name, tmp_path) as other:
        assert isinstance(other.rig, AgentKind | ResourcesKind)
        await other.p.client.restore("restore", [R], source="c")
        if isinstance(other.rig, AgentKind):
            assert other.rig.rig.states["key-r"] == {"of": "key-r"}
        else:
            assert other.rig.rig.counters["key-r"] == 0


# ---- installing --------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P14", "P15")
@pytest.mark.parametrize("name", WITH_RECORDS)
async def test_a_record_that_is_rejected_is_corrupt_and_names_its_episode(name: str, tmp_path: Path) -> None:
    """And nothing of the others is live: the episodes before it in the batch included."""
    records = await KINDS[name]().records(R, S)
    bad = [each if each.episode == R else Record(S, each.schema, each.schema_version, fields={}) for each in records]
    async with served(name, tmp_path) as kind:
        export_these(kind.owner, bad)
        await kind.commit("source", R, S)
    async with served(name, tmp_path) as kind:
        before = kind.owner.report(9).counts
        with pytest.raises(StateCorrupt) as caught:
            await kind.p.client.restore("restore", [R, S], source="source")
        assert S in caught.value.episodes
        assert R not in caught.value.episodes
        assert (await kind.p.client.phase(), await kind.pending()) == (Phase.IDLE, set())
        assert kind.owner.report(9).counts == before


@pytest.mark.behaviour("P14")
@pytest.mark.parametrize("name", ["agent", "resources"])
async def test_state_that_an_authors_hook_rejects_is_named_by_the_attempt_of_its_record(
    name: str, tmp_path: Path
) -> None:
    """The hook knows only the attempt to come."""
    await written(name, tmp_path, R, S)
    async with served(name, tmp_path) as kind:
        assert isinstance(kind.rig, AgentKind | ResourcesKind)

        async def reject(sessions: Sequence[Any]) -> None:
            [bad] = [each.episode for each in sessions if each.episode.rollout_id == "s"]
            raise InvalidState("a field is missing", bad)

        kind.rig.rig.restore_sessions = reject  # type: ignore[method-assign]
        with pytest.raises(StateCorrupt, match="a field is missing") as caught:
            await kind.p.client.restore("restore", [R, S], source="source")
        assert caught.value.episodes == (S,)


@pytest.mark.behaviour("P14", "P15")
@pytest.mark.parametrize("name", WITH_RECORDS)
@pytest.mark.parametrize("hook", ["stage", "activate"])
async def test_any_other_exception_is_a_failed_install_that_leaves_nothing(
    name: str, hook: str, tmp_path: Path
) -> None:
    await written(name, tmp_path, R)
    async with served(name, tmp_path) as kind:
        before = kind.owner.report(9).counts
        original = getattr(kind.owner, hook)

        async def fail(*args: Any) -> Any:
            raise RuntimeError("the author's hook")

        setattr(kind.owner, hook, fail)
        with pytest.raises(InstallFailed):
            await kind.p.client.restore("restore", [R], source="source")
        assert (await kind.p.client.phase(), await kind.pending()) == (Phase.IDLE, set())
        assert kind.owner.report(9).counts == before
        setattr(kind.owner, hook, original)
        await restored(kind, R)
        assert await kind.pending() == {R1}


@pytest.mark.behaviour("P26")
@pytest.mark.parametrize("name", WITH_RECORDS)
async def test_a_retire_waits_for_an_install_and_leaves_nothing_of_it(name: str, tmp_path: Path) -> None:
    await written(name, tmp_path, R)
    async with served(name, tmp_path) as kind:
        before = kind.owner.report(9).counts
        activates, activate = Gate(), kind.owner.activate

        async def held(staged: Any) -> None:
            await activates.step()
            await activate(staged)

        kind.owner.activate = held
        activates.hold()
        restore = asyncio.create_task(kind.p.client.restore("restore", [R], source="source"))
        await activates.reached()
        retire = asyncio.create_task(kind.p.client.retire([R1], id="restore"))
        done, _ = await asyncio.wait({retire}, timeout=0.1)
        assert not done
        activates.release()
        (outcome,) = (await retire).outcomes
        assert outcome.state == pb.RETIRE_STATE_RETIRED
        with contextlib.suppress(Exception):
            await restore
        await kind.p.client.resume("restore")
        assert (await kind.pending(), kind.owner.report(9).counts) == (set(), before)


def test_the_kinds_that_have_no_records_here_are_known() -> None:
    """Whoever gives the policy model of these tests a ledger adds it to WITH_RECORDS."""
    assert set(ALL) - set(WITH_RECORDS) == {"policy_model"}
    assert isinstance(KINDS["policy_model"](), PolicyKind)
