"""How much work checkpoints saved: each piece once, and what a restore brings back is no new work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.participants import EnvironmentOwner, EpisodeContext
from gym_ckpt_grpc.participants.admission import Admission
from gym_ckpt_grpc.participants.work_counts import WorkCounts
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from gym_ckpt_grpc.telemetry.catalogue import WORK_TOTAL
from gym_ckpt_grpc.testing import serve
from tests.participants.agent_rig import AgentRig
from tests.participants.fakes import R1, FakePort, R, S, close, exported, reopen, restore, retire, spin
from tests.participants.legacy_rig import LegacyRig
from tests.participants.policy_rig import TOKENS, PolicyServer
from tests.participants.test_policy_records_install import Lives
from tests.telemetry.kept import Kept

CUT_TOKENS = 3
"""Of each cut that the rig's worker makes."""


def work(kept: Kept, kind: str = "") -> dict[str, float]:
    """Work by its fate."""
    found = {
        str(labels["fate"]): value
        for labels, value in kept.points(WORK_TOTAL)
        if not kind or labels["participant_kind"] == kind
    }
    kept.check_declared()
    return found


# ---- the counting ----------------------------------------------------------------------------------------------


class Book:
    """Counts of a server that does what a test says."""

    def __init__(self) -> None:
        self.kept = Kept()
        admission = Admission()
        admission.attach(FakePort(telemetry=self.kept.telemetry))
        self.counts = WorkCounts(admission, "turns")

    def freeze(self, id: str, **amounts: int) -> None:
        """Close and freeze, perhaps anew."""
        self.counts.closed(id)
        self.counts.begin_export()
        for what, amount in amounts.items():
            self.counts.take(what, amount)

    def checkpoint(self, id: str, *, durable: bool = True, **amounts: int) -> None:
        self.freeze(id, **amounts)
        self.counts.write_ended(id, durable)

    @property
    def protected(self) -> float:
        return work(self.kept).get("protected", 0)


def test_what_an_earlier_checkpoint_has_is_not_protected_again() -> None:
    book = Book()
    book.checkpoint("1", a=3, b=1)
    book.checkpoint("2", a=3, b=4)
    assert book.protected == 7
    book.checkpoint("3", a=2)
    assert book.protected == 7


def test_a_write_that_failed_protects_nothing_and_the_next_one_all() -> None:
    book = Book()
    book.checkpoint("1", a=3, durable=False)
    assert book.protected == 0
    book.checkpoint("2", a=4)
    assert book.protected == 4


def test_the_end_of_a_write_counts_once_and_an_export_that_failed_not_at_all() -> None:
    book = Book()
    book.freeze("1", a=9, b=9)
    book.freeze("1", a=3)
    for _ in range(3):
        book.counts.write_ended("1", True)
    assert book.protected == 3


def test_writes_that_end_out_of_order_count_each_piece_once() -> None:
    """With `keep_write` one is written while the next checkpoint is open."""
    book = Book()
    book.freeze("1", a=3, c=1)
    book.freeze("2", a=5, b=1)
    book.counts.write_ended("2", True)
    book.counts.write_ended("1", True)
    assert book.protected == 7
    book.checkpoint("3", a=5, b=1, c=1)
    assert book.protected == 7


def test_a_restore_that_is_dropped_before_the_opening_continues_nothing() -> None:
    book = Book()
    book.counts.closed("restore")
    book.counts.install(R1, "a", 4)
    book.counts.install(R1, "b", 1)
    book.counts.install(S, "c", 2)
    for episode in (R1, S):
        book.counts.redone(episode, 5)
    book.counts.drop(R1)
    assert work(book.kept) == {}
    book.counts.opened()
    book.counts.opened()
    assert work(book.kept) == {"continued": 2, "redone": 5}
    book.counts.redone(S, 1)
    assert work(book.kept) == {"continued": 2, "redone": 6}


def test_memory_is_that_of_the_newest_checkpoint() -> None:
    book = Book()
    for number in range(1000):
        book.freeze(str(number), **{f"e{number}": 1, "stays": number})
        book.counts.write_ended(str(number), True)
    assert book.protected == 1000 + 999
    assert (len(book.counts._durable), len(book.counts._taken)) == (2, 0)


# ---- environments ----------------------------------------------------------------------------------------------


class Environment:
    """One process of an environment whose protocol goes on turn by turn when told to."""

    def __init__(self, kept: Kept) -> None:
        self.owner = EnvironmentOwner()
        self.port = FakePort(telemetry=kept.telemetry)
        self.owner.attach(self.port)
        self.turns: asyncio.Queue[None] = asyncio.Queue()

    async def protocol(self, context: EpisodeContext) -> None:
        """Records each boundary anew when it begins, as protocols do."""
        at = context.restored or {"turn": 0}
        while True:
            await context.boundary(at)
            async with context.step("turn", mode="replay"):
                await self.turns.get()
            at = {"turn": at["turn"] + 1}

    async def run(self, episode: EpisodeId, turns: int) -> asyncio.Task[None]:
        running = asyncio.create_task(self.owner.run(episode, {}, self.protocol))
        await self.go_on(turns)
        return running

    async def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.turns.put_nowait(None)
            await spin()
        await spin()

    async def checkpoint(self, number: int) -> list[Record]:
        await close(self.owner, number)
        records = await exported(self.owner)
        self.owner.write_ended(f"ckpt-{number}", True)
        await reopen(self.owner)
        return records


async def test_turns_of_an_environment_are_those_between_boundaries_and_restored_ones_are_not_new() -> None:
    kept, later = Kept(), Kept()
    first = Environment(kept)
    running = await first.run(R, 3)
    await first.checkpoint(1)
    await first.checkpoint(2)
    await first.go_on(2)
    records = await first.checkpoint(3)
    assert work(kept, "environment") == {"protected": 5}
    assert records[0].decode("boundary") == {"turn": 5}
    running.cancel()
    second = Environment(later)
    await restore(second.owner, records)
    await reopen(second.owner)
    running = await second.run(R1, 0)
    await second.checkpoint(1)
    assert work(later) == {}
    await second.go_on(1)
    await second.checkpoint(2)
    assert work(later) == {"protected": 1}
    running.cancel()


# ---- agents ----------------------------------------------------------------------------------------------------


async def activation(rig: AgentRig, index: int) -> None:
    running = rig.invoke(index=str(index))
    await spin()
    await rig.answer()
    await running


async def test_turns_of_an_agent_are_its_activations_protected_once_and_continued_by_a_restore() -> None:
    kept, later = Kept(), Kept()
    first, second = AgentRig(), AgentRig()
    first.port.telemetry, second.port.telemetry = kept.telemetry, later.telemetry
    await first.seed()
    records: list[Record] = []
    for index in (1, 2):
        await activation(first, index)
        records = await first.checkpoint()
        first.owner.write_ended("ckpt-1", True)
    assert work(kept, "agent") == {"protected": 2}
    await restore(second.owner, records)
    assert work(later) == {}
    await reopen(second.owner)
    assert work(later, "agent") == {"continued": 2}
    for times in (1, 2):
        await second.checkpoint()
        second.owner.write_ended("ckpt-1", True)
        assert work(later) == {"continued": 2}, times


async def test_restored_sessions_that_are_retired_behind_the_closed_gate_continue_nothing() -> None:
    """An earlier attempt's retire touches none of it."""
    first = AgentRig()
    await first.seed()
    await activation(first, 1)
    records = await first.checkpoint()
    for retired, continued in ((R1, {}), (R, {"continued": 1})):
        second, kept = AgentRig(), Kept()
        second.port.telemetry = kept.telemetry
        await restore(second.owner, records)
        await retire(second.owner, second.port, retired)
        await reopen(second.owner)
        assert work(kept) == continued


async def test_a_run_that_nobody_has_claimed_stays_old_work() -> None:
    """Also when it is claimed after checkpoints that had it unclaimed."""
    kept, later = Kept(), Kept()
    first, second = LegacyRig(verify="replay"), LegacyRig(verify="replay")
    first.port.telemetry, second.port.telemetry = kept.telemetry, later.telemetry
    first.hold("verify")
    first.run()
    await spin()
    await first.answer()
    records = await first.checkpoint()
    first.owner.write_ended("ckpt-1", True)
    assert work(kept) == {"protected": 1}
    await restore(second.owner, records)
    await reopen(second.owner)
    second.hold("verify")
    for claimed in (False, False, True):
        if claimed:
            second.run(R1)
            await spin()
        assert bool(second.log) is claimed
        await second.checkpoint()
        second.owner.write_ended("ckpt-1", True)
    assert work(later) == {"continued": 1}


async def test_commit_and_restore_sent_three_times_count_once(tmp_path: Path) -> None:
    """With one id each, over gRPC (field case 64); a second restore of the same work is told apart from new work."""
    kept, later = Kept(), Kept()
    first, second = AgentRig(), AgentRig()
    for rig in (first, second):
        rig.owner.admission._port = None  # here the control plane gives one
    async with serve(first.owner, roots=[tmp_path], telemetry=kept.telemetry) as p:
        await first.seed()
        await activation(first, 1)
        await p.client.prepare("one")
        for _ in range(3):
            await p.client.commit("one", [R])
        await p.client.resume("one")
    async with serve(second.owner, roots=[tmp_path], telemetry=later.telemetry) as p:
        for _ in range(3):
            await p.client.restore("back", [R], source="one")
        await p.client.resume("back")
        await p.client.resume("back")
    assert (work(kept), work(later)) == ({"protected": 1}, {"continued": 1})


# ---- policy models ---------------------------------------------------------------------------------------------


@pytest.fixture
async def lives(tmp_path: Path) -> AsyncIterator[Lives]:
    made = Lives(tmp_path)
    yield made
    for server in made.lives:
        await server.end()


def start(lives: Lives, **options: Any) -> tuple[PolicyServer, Kept]:
    kept = Kept()
    server = lives.start(**options)
    server.port.telemetry = kept.telemetry
    return server, kept


async def checkpoint(server: PolicyServer, number: int, *episodes: EpisodeId) -> list[Record]:
    records = await server.checkpoint(*episodes, number=number)
    await server.open()
    return records


async def test_tokens_of_rows_and_cuts_are_protected_by_the_first_durable_checkpoint_that_has_them(
    lives: Lives,
) -> None:
    server, kept = start(lives)
    await server.turns(R, 2)
    running = await server.begin(S)
    await server.checkpoint(R, S, number=1, durable=False)
    await server.open()
    assert work(kept) == {}
    for number in (2, 3):
        await checkpoint(server, number, R, S)
        assert work(kept, "policy_model") == {"protected": 2 * TOKENS + CUT_TOKENS}
    server.go.set()
    await running.end()
    await checkpoint(server, 4, R, S)
    assert work(kept) == {"protected": 3 * TOKENS}


async def test_restored_tokens_are_continued_and_a_cut_when_its_call_has_gone_on_from_it(lives: Lives) -> None:
    first, _ = start(lives)
    await first.turns(R, 2)
    await first.begin(R, temperature=0.5)
    records = await first.checkpoint(R)
    second, kept = start(lives)
    await second.restore(records)
    assert work(kept) == {"continued": 2 * TOKENS}
    await checkpoint(second, 1, R1)
    assert work(kept) == {"continued": 2 * TOKENS}
    second.go.set()
    for _ in range(2):
        assert (await second.call(R1, temperature=0.5).end()).status == 200
    assert [each is not None for each in second.given] == [True, False]
    assert work(kept) == {"continued": 2 * TOKENS + CUT_TOKENS}
    await checkpoint(second, 2, R1)
    assert work(kept)["protected"] == 2 * TOKENS - CUT_TOKENS


@pytest.mark.parametrize("why", ["gone", "unfit"])
async def test_a_cut_that_cannot_be_continued_is_redone_once(lives: Lives, why: str) -> None:
    """Gone from all backends; or its call goes to a model that is not its own, as often as that is called."""
    first, _ = start(lives)
    await first.begin(R)
    records = await first.checkpoint(R)
    if why == "gone":
        lives.worker.cuts.clear()
    second, kept = start(lives)
    await second.restore(records)
    if why == "unfit":
        second.model = "another"
        second.fail = True
        second.go.set()
        assert (await second.call(R1).end()).status == 500
        assert work(kept) == {}
        second.fail = False
    second.go.set()
    for _ in range(2):
        assert (await second.call(R1).end()).status == 200
    assert second.given[-1] is None
    assert work(kept) == {"redone": CUT_TOKENS}


async def test_rows_whose_tokens_cannot_be_counted_are_kept_and_restored_all_the_same(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger of an author may be wrong about a number, or older than the counting: no state is lost for that."""
    first, kept = start(lives)
    monkeypatch.delattr(CaptureLedger, "tokens")
    await first.turns(R, 2)
    records = await first.checkpoint(R)
    second, later = start(lives)
    await second.restore(records)
    assert len((await checkpoint(second, 2, R1))[0].decode("rows")) == 2
    assert (work(kept), work(later)) == ({}, {})


async def test_a_restored_attempt_that_is_retired_or_deleted_behind_the_closed_gate_continues_nothing(
    lives: Lives,
) -> None:
    first, _ = start(lives)
    for episode in (R, S):
        await first.turns(episode, 1)
    records = await first.checkpoint(R, S)
    second, kept = start(lives)
    await restore(second.owner, records)
    await retire(second.owner, second.port, R1)
    await second.owner.delete_restored(EpisodeId("s", 1))
    await second.open()
    assert work(kept) == {}
