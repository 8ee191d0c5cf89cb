"""Which backends still have the cuts that a restore brought back: asked at the Restore, and until all have answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import Budget, CutEvidence, CutPresence
from gym_ckpt_grpc.participants import backend_looks
from gym_ckpt_grpc.protocol.errors import OutOfTime, StateUnwritable
from gym_ckpt_grpc.protocol.ids import EpisodeId, RestoreScope
from tests.participants.fakes import R1, R, close, restore, spin
from tests.participants.policy_rig import FakeBackend, PolicyServer
from tests.participants.test_policy_records_export import read
from tests.participants.test_policy_records_install import Lives
from tests.participants.test_restored_cuts import BODY, answered, taken


@pytest.fixture
async def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lives]:
    """As usual, with early retries."""
    monkeypatch.setattr(backend_looks, "FIRST_BACKOFF", 0.001)
    made = Lives(tmp_path)
    yield made
    for server in made.lives:
        await server.end()


@pytest.mark.behaviour("P151")
@pytest.mark.parametrize("how", ["gone", "changed"])
async def test_a_cut_that_the_backend_has_no_more_is_dropped_and_counted(lives: Lives, how: str) -> None:
    """Its call is generated anew; cuts that are there stay."""
    records = await taken(lives, BODY, BODY | {"seed": 1})
    lost = next(iter(lives.worker.cuts))
    if how == "gone":
        del lives.worker.cuts[lost]
    else:
        lives.worker.changed.add(lost)
    server = lives.start()
    server.go.set()
    await restore(server.owner, records)
    assert server.counts("restored_cuts", "cuts_missing") == (1, 1)
    await server.open()
    assert [await answered(server), await answered(server, seed=1) is None] == [None, False]


async def test_a_stage_that_is_discarded_counts_nothing_missing(lives: Lives) -> None:
    records = await taken(lives)
    lives.worker.cuts.clear()
    server = lives.start()
    await close(server.owner)
    await server.owner.discard(await server.owner.stage(records, RestoreScope.plan([R])))
    assert server.counts("cuts_missing") == (0,)


async def test_only_a_backend_that_has_the_cut_is_offered_it(lives: Lives) -> None:
    records = await taken(lives)
    other = FakeBackend("inference-1")
    server = PolicyServer(lives.directory / "disk", lives.worker, other)
    lives.lives.append(server)
    server.go.set()
    await server.restore(records)
    assert server.counts("restored_cuts", "cuts_missing") == (1, 0)
    server.backend = "inference-1"
    assert await answered(server) is None
    server.backend = "inference-0"
    assert await answered(server) is not None


async def test_a_cut_of_a_backend_that_is_known_no_more_goes_on_where_its_tokens_are(lives: Lives) -> None:
    """Backends that share a token store, under new names."""
    records = await taken(lives)
    moved = FakeBackend("inference-9")
    moved.cuts = lives.worker.cuts
    server = PolicyServer(lives.directory / "disk", moved)
    lives.lives.append(server)
    server.go.set()
    server.backend = "inference-9"
    await server.restore(records)
    assert await answered(server) is not None


@pytest.mark.parametrize("still_there", [True, False])
async def test_a_backend_that_cannot_be_asked_is_asked_again_in_the_background(lives: Lives, still_there: bool) -> None:
    """Until then the cut is neither offered nor dropped, and the restore does not fail."""
    records = await taken(lives)
    lives.worker.error["check"] = StateUnwritable("down")
    server = lives.start()
    server.go.set()
    await server.restore(records)
    assert await answered(server, seed=1) is None
    assert server.counts("restored_cuts", "cuts_missing") == (1, 0)
    assert await answered(server) is None
    if not still_there:
        lives.worker.cuts.clear()
    lives.worker.error.clear()
    asked = len(lives.worker.asked)
    await lives.worker.asked_again(asked + 2)
    await spin()
    assert server.counts("restored_cuts", "cuts_missing") == ((1, 0) if still_there else (0, 1))
    assert (await answered(server) is not None) == still_there


async def test_what_a_slow_backend_has_said_is_not_asked_again(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the tokens of all cuts it is asked about, so that many at once could never be told in time."""
    episodes = [EpisodeId(f"e{number}") for number in range(2 * backend_looks.BATCH + 1)]
    server = lives.start()
    for episode in episodes:
        await server.begin(episode)
    records = await server.checkpoint(*episodes)
    restored, asked, told = lives.start(disk="other"), list[int](), asyncio.Event()

    async def check(cuts: Sequence[CutEvidence], budget: Budget) -> list[CutPresence]:
        asked.append(len(cuts))
        if len(asked) in (2, 4):
            raise OutOfTime("it reads slowly")
        if len(asked) == 5:
            told.set()
        return [CutPresence.PRESENT for _ in cuts]

    monkeypatch.setattr(lives.worker, "check", check)
    await restored.restore(records)
    async with asyncio.timeout(10):
        await told.wait()
    assert asked == [256, 256, 256, 1, 1]


async def test_a_look_goes_on_while_its_backend_gets_on_and_begins_with_its_own_cuts(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls go back to the backend that made their cuts, so what others have can be learned later."""
    monkeypatch.setattr(backend_looks, "BATCH", 1)
    monkeypatch.setattr(backend_looks, "CALL_LIMIT", 0.5)
    other = FakeBackend("inference-1")
    first = PolicyServer(lives.directory / "disk", lives.worker, other)
    lives.lives.append(first)
    episodes = [EpisodeId(f"e{number}") for number in range(6)]
    for number, episode in enumerate(episodes):
        first.backend = f"inference-{number % 2}"
        await first.begin(episode)
    records = await first.checkpoint(*episodes)
    server = lives.start(disk="later")
    asked: list[str] = []

    async def check(cuts: Sequence[CutEvidence], budget: Budget) -> list[CutPresence]:
        await asyncio.sleep(0.15)  # less than one question may take, and all of them more
        asked.extend(cut.cut_id for cut in cuts)
        return [CutPresence.PRESENT for _ in cuts]

    monkeypatch.setattr(lives.worker, "check", check)
    await restore(server.owner, records)
    assert asked == [f"{call_id}-1" for call_id in (*first.call_ids[::2], *first.call_ids[1::2])]


async def test_a_hung_backend_holds_up_neither_restore_nor_resume_for_long(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = await taken(lives)
    monkeypatch.setattr(backend_looks, "OPENING_LIMIT", 0.01)
    lives.worker.hold["describe"] = asyncio.Event()
    server = lives.start()
    server.go.set()
    monkeypatch.setattr(backend_looks, "LOOK_SHARE", 0.01)
    await restore(server.owner, records)
    await server.open()
    assert server.owner.restored_pending() == {R1}
    assert await answered(server) is None
    lives.worker.hold["describe"].set()
    await spin()
    assert server.counts("restored_cuts") == (1,)


async def test_without_cuts_to_offer_no_backend_is_asked(lives: Lives) -> None:
    server = lives.start()
    await server.restore([], R)
    assert lives.worker.asked == []
    server.go.set()
    assert await answered(server) is None
    await server.close(2)
    await server.open()
    assert lives.worker.asked == []


async def test_without_backends_a_cut_waits_for_a_server_that_has_some(lives: Lives) -> None:
    """Generation cuts were switched off; the next checkpoint still carries it."""
    records = await taken(lives)
    server = PolicyServer(lives.directory / "disk")
    lives.lives.append(server)
    server.go.set()
    await server.restore(records)
    assert await answered(server) is None
    assert server.counts("restored_cuts", "cuts_missing") == (1, 0)
    assert len(read((await server.checkpoint(R1, number=2))[0]).cuts) == 1
