"""Sweeps under a control plane: what a Prepare waits for, and what a checkpoint then has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_ckpt_grpc.control.generation import Capability, CutDisposition
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.participants.cuts_rig import READY, FakeBackend, PreparedRig, answers, hang, loop, settle, virtual
from tests.participants.fakes import R, S, exported


@pytest.mark.behaviour("P126")
@virtual
async def test_prepare_replies_prepared_only_after_a_late_call_was_cut(tmp_path: Path) -> None:
    backend = FakeBackend("b")
    rig = PreparedRig(tmp_path, backend)
    early, late = await rig.running(R), rig.arrive(S)
    await settle()
    preparing = asyncio.create_task(rig.prepare())
    await asyncio.sleep(1)
    assert (preparing.done(), backend.asked()) == (False, [[early.id]])
    (blocker,) = rig.owner.report(9).blockers
    assert (blocker.reason, blocker.place, blocker.episode) == (BlockerReason.RUNNING, "generation_cut", S)
    assert blocker.age == pytest.approx(1)
    late.begin.set()
    late.send.set()
    await settle()
    reply = await preparing
    assert (reply.phase, backend.asked()[1:], rig.cuts()) == (Phase.PREPARED, [[late.id]], (2, 2, 0, 0))
    assert {name: reply.report.counts[name] for name in ("held", "cut")} == {"held": 2, "cut": 2}
    await rig.resume()
    assert await rig.ends([early, late]) == [200, 200]
    await rig.end()


@pytest.mark.behaviour("P132")
@pytest.mark.parametrize("trouble", ["unreachable", "failing", "hung", "incapable"])
@virtual
async def test_a_backend_in_trouble_leaves_prepare_ready_and_its_calls_without_a_cut(
    tmp_path: Path, trouble: str
) -> None:
    """The deadline of the call is far away: what counts is the time in which the participant is to be ready."""
    good, bad = FakeBackend("b"), FakeBackend("c")
    if trouble == "unreachable":
        bad.unreachable = ConnectionRefusedError("nobody listens")
    elif trouble == "failing":
        bad.script = answers(CutDisposition.FAILED)
    elif trouble == "hung":
        bad.script = hang
    else:
        bad.capabilities = frozenset({Capability.CONTINUE})
    rig = PreparedRig(tmp_path, good, bad)
    calls = [await rig.running(R), await rig.running(S, backend="c")]
    began = loop().time()
    reply = await rig.prepare()
    assert (reply.phase, loop().time() - began <= READY / 2) == (Phase.PREPARED, True)
    assert {name: reply.report.counts[name] for name in ("held", "cut", "cut_failed", "cut_skipped")} == {
        "held": 2,
        "cut": 1,
        "cut_failed": 1,
        "cut_skipped": 0,
    }
    records = await exported(rig.owner, EpisodeScope.of([R, S]))
    assert [record.episode for record in records] == [R]
    await rig.resume()
    assert await rig.ends(calls) == [200, 200]
    await rig.end()


@pytest.mark.behaviour("P137", "P4")
@virtual
async def test_prepare_and_status_of_50_cut_calls_compute_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = PreparedRig(tmp_path, FakeBackend("b"))
    calls = [await rig.running(EpisodeId(f"r{number}")) for number in range(50)]
    computed: list[object] = []
    monkeypatch.setattr("hashlib.sha256", lambda *given: computed.append(given))
    reply = await rig.prepare()
    for _ in range(50):
        assert rig.owner.is_ready()
        rig.plane.status()
    monkeypatch.undo()
    assert (reply.phase, reply.report.counts["cut"], computed) == (Phase.PREPARED, 50, [])
    await rig.resume()
    assert await rig.ends(calls) == [200] * 50
    await rig.end()


@pytest.mark.behaviour("P142")
@virtual
async def test_resume_drops_cuts_and_the_calls_are_delivered_once(tmp_path: Path) -> None:
    """The cuts that no durable checkpoint names are released by the owner."""
    backend = FakeBackend("b")
    rig = PreparedRig(tmp_path, backend)
    calls = [await rig.running(R), await rig.running(S)]
    assert (await rig.prepare()).phase is Phase.PREPARED
    made = rig.cut_ids()
    assert (len(made), rig.cuts()) == (2, (2, 2, 0, 0))
    await rig.resume()
    await settle()
    assert (rig.cut_ids(), rig.cuts(), sorted(backend.released)) == ([], (0, 0, 0, 0), sorted(made))
    assert await rig.ends(calls) == [200, 200]
    assert [each.client.answer.body for each in calls if each.client] == [b'"ok"', b'"ok"']
    await rig.end()
