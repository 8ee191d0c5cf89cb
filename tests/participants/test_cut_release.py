"""Which cuts are given up when, and that giving up is tried until it works."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import Closing
from gym_ckpt_grpc.participants import PolicyModelSettings, cut_release
from gym_ckpt_grpc.participants.cut_release import BATCH, LAST_BACKOFF, MadeCuts, Releaser
from gym_ckpt_grpc.protocol.errors import StateUnwritable, UsageError
from tests.participants.fakes import R1, FakeClock, R, S, budget, retire, spin
from tests.participants.policy_rig import FakeBackend, PolicyServer
from tests.participants.test_policy_records_export import read

NAME = "inference-0"

# ---- which -------------------------------------------------------------------------------------------------------


class Book(MadeCuts):
    """A book that tells what it gives up."""

    def __init__(self) -> None:
        self.given_up: list[str] = []
        super().__init__(lambda backend, cut_ids: self.given_up.extend(f"{backend}:{cut_id}" for cut_id in cut_ids))

    def make(self, *cut_ids: str) -> None:
        for cut_id in cut_ids:
            self.made(("b", cut_id))

    def freeze(self, *cut_ids: str) -> None:
        self.begin_export()
        for cut_id in cut_ids:
            self.name(("b", cut_id))

    def taken(self) -> list[str]:
        given_up, self.given_up = sorted(self.given_up), []
        return given_up


@pytest.fixture
def book() -> Book:
    made = Book()
    made.begin("c1")
    return made


@pytest.mark.behaviour("P153")
def test_without_an_export_all_is_given_up_at_the_opening(book: Book) -> None:
    book.make("x", "y")
    book.ended("c1", False)
    assert book.taken() == []
    book.opened()
    assert book.taken() == ["b:x", "b:y"]
    book.opened()
    book.ended("c1", True)
    assert (book.taken(), book._made) == ([], {})


@pytest.mark.behaviour("P153", "P154")
@pytest.mark.parametrize("order", ["fate first", "opening first"])
@pytest.mark.parametrize("durable", [True, False])
def test_what_records_name_shares_their_fate_and_the_rest_goes_at_the_opening(
    book: Book, durable: bool, order: str
) -> None:
    book.make("named", "outside")
    book.freeze("named")
    if order == "opening first":
        book.opened()
        assert book.taken() == ["b:outside"]
    book.ended("c1", durable)
    assert book.taken() == ([] if durable else ["b:named"])
    if order == "fate first":
        book.opened()
        assert book.taken() == ["b:outside"]
    book.opened()
    book.ended("c1", not durable)
    assert (book.taken(), book._made) == ([], {})


@pytest.mark.behaviour("P153")
def test_a_replaced_cut_goes_at_once_unless_frozen_records_name_it(book: Book) -> None:
    book.make("old", "new", "frozen")
    book.replaced("b", ["old"])
    assert book.taken() == ["b:old"]
    book.freeze("frozen")
    book.replaced("b", ["frozen", "late"])
    assert book.taken() == ["b:late"]
    book.ended("c1", True)
    book.replaced("b", ["frozen"])
    book.opened()
    assert book.taken() == ["b:new"]


def test_what_a_failed_export_named_is_named_no_more(book: Book) -> None:
    """A cut of it that was replaced meanwhile goes, one that is still its call's stays."""
    book.make("replaced", "kept", "newer")
    book.freeze("replaced", "kept")
    book.replaced("b", ["replaced"])
    assert book.taken() == []
    book.freeze("kept", "newer")
    assert book.taken() == ["b:replaced"]
    book.ended("c1", True)
    book.opened()
    assert book.taken() == []


@pytest.mark.behaviour("P154")
def test_a_cut_of_two_checkpoints_goes_when_neither_has_a_use_for_it(book: Book) -> None:
    book.make("x", "y")
    book.freeze("x", "y")
    book.opened()
    book.begin("c2")
    book.make("x", "y")
    book.freeze("x")
    book.replaced("b", ["y"])
    book.ended("c2", False)
    book.opened()
    assert book.taken() == []
    book.ended("c1", False)
    assert book.taken() == ["b:x", "b:y"]


@pytest.mark.behaviour("P154")
@pytest.mark.parametrize("first", ["c1", "c2"])
def test_a_cut_that_one_of_two_checkpoints_has_made_durable_stays(book: Book, first: str) -> None:
    """Whichever is decided first, and however late the backend gives it once more."""
    book.make("x")
    book.freeze("x")
    book.opened()
    book.begin("c2")
    book.make("x")
    book.freeze("x")
    book.opened()
    for id in ("c1", "c2") if first == "c1" else ("c2", "c1"):
        book.ended(id, id == "c1")
    book.replaced("b", ["x", "late"])
    assert book.taken() == ["b:late"]


def test_only_so_many_cuts_of_durable_records_are_remembered(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_release, "MAX_KEPT", 2)
    for number in range(5):
        book.begin(f"c{number}")
        book.make(f"x{number}")
        book.freeze(f"x{number}")
        book.ended(f"c{number}", True)
        book.opened()
    assert list(book._kept) == [("b", "x3"), ("b", "x4")]


@pytest.mark.behaviour("P154")
def test_cuts_from_elsewhere_are_not_in_the_book(book: Book) -> None:
    """Restored ones, and those of a call's own coordinates, whatever becomes of the records."""
    book.freeze("restored")
    book.ended("c1", False)
    book.opened()
    assert book.taken() == []


@pytest.mark.behaviour("P155")
def test_a_kept_write_decides_while_the_next_checkpoint_is_open(book: Book) -> None:
    book.make("first")
    book.freeze("first")
    book.opened()
    book.begin("c2")
    book.make("second")
    book.freeze("second")
    book.ended("c1", False)
    assert book.taken() == ["b:first"]
    book.ended("c2", True)
    book.opened()
    assert (book.taken(), book._made) == ([], {})


def test_a_failed_close_leaves_its_id_usable(book: Book) -> None:
    book.make("x")
    book.opened()
    book.begin("c1")
    book.make("y")
    book.opened()
    assert book.taken() == ["b:x", "b:y"]


# ---- how ---------------------------------------------------------------------------------------------------------


class Rig:
    """A releaser whose clock moves by its own pauses."""

    def __init__(self, *backends: FakeBackend, retry_for: float = 600.0) -> None:
        self.clock = FakeClock()
        self.pauses: list[float] = []
        named = {each.name: each for each in backends}
        self.releaser = Releaser(named, retry_for, clock=self.clock, sleep=self.sleep)
        self.on_pause: Callable[[], None] = lambda: None

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.now += seconds
        self.on_pause()
        await asyncio.sleep(0)

    async def release(self, name: str, cut_ids: Iterable[str]) -> None:
        self.releaser.release(name, cut_ids)
        await self.done()

    async def done(self) -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*self.releaser._tasks._tasks)


@pytest.mark.behaviour("P156")
async def test_releasing_twice_and_what_is_unknown_succeeds() -> None:
    backend = FakeBackend(NAME)
    rig = Rig(backend)
    for _ in range(2):
        await rig.release(NAME, ["a", "b"])
    assert (backend.released, rig.releaser.unreleased, rig.pauses) == (["a", "b", "a", "b"], 0, [])


@pytest.mark.behaviour("P156")
async def test_an_unreachable_backend_is_tried_again_with_back_off_until_it_answers() -> None:
    """What comes meanwhile goes with it; another backend is not held up."""
    down, well = FakeBackend(NAME), FakeBackend("inference-1")
    down.error["release"] = StateUnwritable("down")
    rig = Rig(down, well)
    rig.releaser.release(NAME, ["a"])
    rig.releaser.release("inference-1", ["c"])

    def on_pause() -> None:
        if len(rig.pauses) == 5:
            rig.releaser.release(NAME, ["b"])
        if len(rig.pauses) == 12:
            assert (well.released, rig.releaser.unreleased) == (["c"], 2)
            down.error.clear()

    rig.on_pause = on_pause
    await rig.done()
    assert (down.released, rig.releaser.unreleased) == (["a", "b"], 0)
    assert rig.pauses[0] < 0.2
    growth = [later / earlier for earlier, later in itertools.pairwise(rig.pauses[:8])]
    assert all(2 * 0.8 / 1.2 <= each <= 2 * 1.2 / 0.8 for each in growth)
    assert max(rig.pauses) <= 1.2 * LAST_BACKOFF


@pytest.mark.parametrize("backends", [[FakeBackend], []])
async def test_what_cannot_be_released_in_time_stays_counted(backends: list[Callable[[str], FakeBackend]]) -> None:
    """Also where the backend is not there any more; later cuts are tried again."""
    made = [each(NAME) for each in backends]
    for backend in made:
        backend.error["release"] = StateUnwritable("down")
    rig = Rig(*made)
    await rig.release(NAME, ["a", "b"])
    assert rig.releaser.unreleased == 2
    assert 600 <= sum(rig.pauses) <= 600 + 1.2 * LAST_BACKOFF
    for backend in made:
        backend.error.clear()
        await rig.release(NAME, ["c"])
        assert (backend.released, rig.releaser.unreleased) == (["c"], 2)


async def test_with_no_time_to_retry_there_is_one_try() -> None:
    backend = FakeBackend(NAME)
    backend.error["release"] = StateUnwritable("down")
    rig = Rig(backend, retry_for=0)
    await rig.release(NAME, ["a"])
    assert (len(backend.asked), rig.pauses, rig.releaser.unreleased) == (1, [], 1)


async def test_many_cuts_go_in_batches() -> None:
    backend = FakeBackend(NAME)
    rig = Rig(backend)
    await rig.release(NAME, [f"c{number}" for number in range(BATCH + 1)])
    assert (len(backend.asked), len(backend.released)) == (2, BATCH + 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"sweep_interval": 0},
        {"sweep_interval": float("nan")},
        {"sweep_interval": float("inf")},
        {"cut_tries": 0},
        {"cut_tries": 1.5},
        {"cut_share": -0.1},
        {"cut_share": 0.91},
        {"release_retry_for": -1},
        {"release_retry_for": float("inf")},
    ],
)
def test_bad_settings_are_refused_naming_the_option(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        PolicyModelSettings(**bad)
    PolicyModelSettings(sweep_interval=0.01, cut_tries=1, cut_share=0.9, release_retry_for=0)
    PolicyModelSettings(cut_share=0)


# ---- of a server ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PolicyServer]:
    made = PolicyServer(tmp_path / "ledger", FakeBackend(NAME))
    yield made
    await made.end()


@pytest.mark.behaviour("P153")
async def test_an_aborted_checkpoint_gives_up_its_cuts(server: PolicyServer) -> None:
    running = [await server.begin(R), await server.begin(S)]
    backend = server.backends[NAME]
    await server.checkpoint(R, S, durable=False)
    made = sorted(backend.cuts)
    assert len(made) == 2
    await server.open()
    assert (sorted(backend.released), backend.cuts) == (made, {})
    server.go.set()
    assert [(await each.end()).status for each in running] == [200, 200]


@pytest.mark.behaviour("P153", "P154")
async def test_a_committed_one_gives_up_only_what_is_outside_its_scope(server: PolicyServer) -> None:
    """Neither Resume nor the end of the calls releases what it names."""
    running = [await server.begin(R), await server.begin(S)]
    backend = server.backends[NAME]
    named = {cut.cut_id for record in await server.checkpoint(R) for cut in read(record).cuts}
    outside = set(backend.cuts) - named
    await server.open()
    server.go.set()
    await asyncio.gather(*(each.end() for each in running))
    assert (set(backend.released), set(backend.cuts)) == (outside, named)


@pytest.mark.behaviour("P154")
async def test_a_named_cut_survives_the_finish_of_its_call_while_closed(server: PolicyServer) -> None:
    """Its finished cut replaces it in the live server, not in the records."""
    running = await server.begin(R)
    backend = server.backends[NAME]
    named = read((await server.checkpoint(R))[0]).cuts[0].cut_id
    server.go.set()
    await spin(20)
    await server.open()
    await running.end()
    assert (backend.released, list(backend.cuts)) == ([], [named])


@pytest.mark.behaviour("P154")
@pytest.mark.parametrize("end", ["aborted", "finished", "bad", "of nobody"])
async def test_a_cut_that_a_backend_gives_again_for_a_later_checkpoint_is_not_given_up_with_that(
    server: PolicyServer, end: str
) -> None:
    """A backend may name a cut by what is in it, and a call that waits for its turn has the same at both."""
    running = [await server.begin(R), await server.begin(S)]
    backend = server.backends[NAME]
    await server.checkpoint(R)
    await server.open()
    named = f"{server.call_ids[0]}-1"
    assert list(backend.cuts) == [named]
    backend._made.clear()
    if end == "bad":
        backend.twice = True
    await server.close(2)
    assert server.counts("cut") == ((0,) if end == "bad" else (2,))
    if end == "finished":
        server.go.set()
        await spin(20)
    if end == "of nobody":
        running[0].task.cancel()
        await spin(20)
    await server.open()
    assert named not in backend.released
    assert list(backend.cuts) == [named]
    server.go.set()
    await asyncio.gather(*(each.end() for each in running if not each.task.cancelled()))
    assert list(backend.cuts) == [named]


@pytest.mark.behaviour("P154", "P147")
async def test_using_a_restored_cut_up_does_not_release_it(server: PolicyServer, tmp_path: Path) -> None:
    """Nor does a later checkpoint that names it and fails, nor a retire."""
    running = await server.begin(R)
    backend = server.backends[NAME]
    records = await server.checkpoint(R)
    later = PolicyServer(tmp_path / "later", backend)
    await later.restore(records)
    await later.checkpoint(R1, number=7, durable=False)
    await later.open()
    later.go.set()
    await later.call(R1).end()
    assert later.given[0] is not None
    await retire(later.owner, later.port, R1)
    assert backend.released == []
    await later.end()
    await server.end()
    await running.end()


@pytest.mark.behaviour("P140")
async def test_a_finished_cut_of_own_coordinates_is_never_released(server: PolicyServer) -> None:
    """The reply finished while closed: its prefix cut goes, its own keys do not, also after an abort."""
    running = await server.begin(R)
    await server.close()
    server.go.set()
    await spin(20)
    records = await server.export(R)
    cut = read(records[0]).cuts[0]
    assert (cut.finish_reason, cut.staging_keys) == ("stop", (f"r/{server.call_ids[0]}",))
    server.owner.write_ended("ckpt-1", False)
    await server.open()
    await running.end()
    assert server.backends[NAME].released == [f"{server.call_ids[0]}-1"]


async def test_the_cut_of_a_call_that_left_goes_at_the_opening(server: PolicyServer) -> None:
    running = await server.begin(R)
    await server.close()
    await retire(server.owner, server.port, R)
    await running.end()
    assert server.backends[NAME].released == []
    await server.open()
    assert server.backends[NAME].released == [f"{server.call_ids[0]}-1"]


@pytest.mark.behaviour("P156")
async def test_an_unreachable_backend_does_not_delay_resume(server: PolicyServer) -> None:
    """The doors are open and the calls go on while the release hangs; it is counted meanwhile."""
    running = await server.begin(R)
    backend = server.backends[NAME]
    backend.hold["release"] = asyncio.Event()
    await server.checkpoint(R, durable=False)
    await server.open()
    server.go.set()
    assert (await running.end()).status == 200
    assert (server.owner.admission.closed, server.counts("cuts_unreleased")) == (False, (1,))
    backend.hold["release"].set()
    await spin()
    assert server.counts("cuts_unreleased") == (0,)


async def test_without_a_ledger_nothing_is_cut(tmp_path: Path) -> None:
    backend = FakeBackend(NAME)
    server = PolicyServer(None, backend)
    running = await server.begin(R)
    await server.owner.close_admission(Closing("c", 1, budget(), ready_within=1.0))
    assert server.owner.is_ready()
    await spin()
    assert backend.asked == []
    await server.end()
    assert (await running.end()).status == 200
