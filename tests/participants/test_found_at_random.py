"""Faults that random sequences (tests/random) found, each as the shortest story that shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import CallIdentity, Closing, CutAck, CutDisposition
from gym_ckpt_grpc.protocol.errors import StaleAttempt, WorkerUnavailable
from tests.participants.cuts_rig import CutsRig, virtual
from tests.participants.cuts_rig import FakeBackend as ScriptedBackend
from tests.participants.fakes import R, S, budget, retire, spin
from tests.participants.policy_rig import FakeBackend, PolicyServer


@virtual
async def test_a_call_begun_anew_when_all_was_ready_is_told_at_once() -> None:
    """It blocks until it is cut again. Nobody was told, and the participant stayed PREPARED without a safe cut."""
    rig = CutsRig(ScriptedBackend("b"))
    running = await rig.running(R)
    rig.close()
    await rig.until_ready()
    rig.port.told.clear()
    assert running.ticket is not None
    again = rig.gate.begin_generation(running.ticket, {"messages": []}, backend="b", model="m")
    assert not rig.ready
    await rig.port.told.wait()  # a deadlock, were it not told
    again.registered()
    assert 0 < await rig.until_ready() <= 0.25
    assert rig.cuts() == (1, 1, 0, 0)
    await rig.finish([running])


async def test_a_scope_that_names_a_retired_attempt_captures_all_others(tmp_path: Path) -> None:
    """As with every other kind. It was refused STALE_ATTEMPT, and one straggler cost the whole checkpoint."""
    server = PolicyServer(tmp_path / "ledger", FakeBackend())
    await server.turns(R, 1)
    await server.turns(S, 1)
    await server.close()
    await retire(server.owner, server.port, R)
    assert [record.episode for record in await server.export(R, S)] == [S]
    await server.end()


async def test_a_scope_that_names_a_fenced_attempt_nobody_retired_here_is_refused(tmp_path: Path) -> None:
    """Another process fenced it, or its mark was forgotten: nobody knows which rows it would have."""
    before = PolicyServer(tmp_path / "ledger", FakeBackend())
    await before.turns(R, 1)
    await retire(before.owner, before.port, R)
    await before.end()
    server = PolicyServer(tmp_path / "ledger", FakeBackend())
    await server.close()
    with pytest.raises(StaleAttempt) as caught:
        await server.export(R, S)
    assert list(caught.value.episodes) == [R]
    await server.end()


class Repeating(FakeBackend):
    """Gives a call the cut that it has of it already."""

    def _ack(self, call: CallIdentity) -> CutAck:
        known = [cut for cut_id, cut in self.cuts.items() if cut_id.startswith(call.model_call_id)]
        return CutAck(call, CutDisposition.CUT, evidence=known[0]) if known else super()._ack(call)


async def test_a_cut_given_again_while_it_is_given_up_does_not_stand(tmp_path: Path) -> None:
    """It was accepted, and gone a moment later. Asked once more, the backend makes another."""
    backend = Repeating()
    server = PolicyServer(tmp_path / "ledger", backend)
    running = await server.begin(R)
    await server.close()
    (first,) = backend.cuts
    release = backend.hold["release"] = asyncio.Event()
    await server.open()
    await spin()
    await server.owner.close_admission(Closing("ckpt-2", 2, budget(), ready_within=5.0))
    await spin(20)
    assert server.counts("cut", "held") == (0, 1)
    release.set()
    await server.ready()
    assert server.counts("cut", "held") == (1, 1)
    assert len(backend.cuts) == 1
    assert first not in backend.cuts
    await server.end()
    await running.end()


async def test_a_cut_given_again_that_could_not_be_given_up_yet_is_kept(tmp_path: Path) -> None:
    """The next try to give it up took it from the checkpoint that had come to name it."""
    backend = Repeating()
    server = PolicyServer(tmp_path / "ledger", backend)
    running = await server.begin(R)
    await server.close()
    (first,) = backend.cuts
    backend.error["release"] = WorkerUnavailable("on purpose")
    await server.open()
    await backend.asked_again(len(backend.asked) + 1)
    assert backend.asked[-1] == "release"
    assert server.counts("cuts_unreleased") == (1,)
    (record,) = await server.checkpoint(R, number=2)
    assert first in record.decode("cuts")[0]["cut_id"]
    del backend.error["release"]
    await server.open()
    server.go.set()
    await running.end()
    await asyncio.gather(*server.owner._state._releaser._tasks._tasks)
    assert set(backend.cuts) == {first}
    assert not backend.released
    assert server.counts("cuts_unreleased") == (0,)
    await server.end()
