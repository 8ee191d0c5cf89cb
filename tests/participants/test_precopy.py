"""Encoding ahead: what is used at a cut is what the session is at the cut, and only what changed is asked for."""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import UTC, datetime
from typing import Any

import pytest

from gym_ckpt_grpc.control import HookFailed
from gym_ckpt_grpc.participants import AgentOwner, ResourcesMode, ResourcesOwner, ResourcesSettings
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.storage import Record
from tests.participants.agent_rig import AgentRig
from tests.participants.fakes import FakePort, budget, close, exported, reopen, retire, spin
from tests.participants.precopy_rig import HandPace, PrecopyRig, RevisedServer, settled, states


@pytest.fixture
async def rig() -> PrecopyRig:
    return PrecopyRig()


async def test_what_stands_still_is_encoded_ahead_and_a_cut_asks_for_nothing(rig: PrecopyRig) -> None:
    """Digests too; a second cut finds them as well, and a pass that finds nothing new asks for nothing."""
    rig.begin("a", "b", "c")
    assert await rig.passes(1) == ["changing"]
    assert rig.server.asked == []
    assert await rig.passes(1) == ["quiet"]
    assert rig.ahead() == 3
    assert len(rig.pace.digested) == 3
    rig.server.asked.clear()
    assert await rig.passes(3) == ["quiet"] * 3
    for _ in range(2):
        records = await rig.checkpoint()
        assert states(records) == rig.server.sessions
        assert all(record.payloads["state"].known_digest for record in records)
    assert rig.server.asked == []


async def test_only_what_changed_since_is_asked_for_at_the_cut_and_is_kept_then(rig: PrecopyRig) -> None:
    rig.begin("a", "b", "c")
    await rig.passes()
    rig.server.change("b", n=1)
    rig.begin("d")
    assert await rig.asked_at_the_cut() == ["b", "d"]
    assert await rig.asked_at_the_cut() == []
    assert states(await rig.checkpoint()) == rig.server.sessions


async def test_records_have_the_revision_of_their_state(rig: PrecopyRig) -> None:
    """Encoded ahead or at the cut; none where it moved while the author gave the state."""
    rig.begin("a", "b", "c")
    await rig.passes()
    rig.server.change("b", n=1)
    rig.server.change("c", n=1)

    async def moved(place: str) -> None:
        rig.server.change("c", n=2)

    rig.server.at = moved
    now = dict(rig.server.session_revisions())
    records = {record.fields["session_id"]: record for record in await rig.checkpoint()}
    assert {key: record.revision for key, record in records.items()} == {"a": now["a"], "b": now["b"], "c": None}
    rig.server.at = None
    assert await rig.asked_at_the_cut() == ["c"]


async def test_a_session_that_changes_between_every_two_passes_is_left_to_the_cut(rig: PrecopyRig) -> None:
    rig.begin("hot", "cold")
    for n in range(10):
        assert await rig.passes(1) == ["changing"]
        rig.server.change("hot", n=n)
    assert [key for call in rig.server.asked for key in call] == ["cold"]
    await rig.passes(2)
    assert rig.ahead() == 2


@pytest.mark.parametrize("place", ["hook", "digest", "rest"])
async def test_a_change_at_any_await_of_a_pass_is_seen_at_the_cut(rig: PrecopyRig, place: str) -> None:
    """Also one that the export hook had read already when it came."""
    rig.begin("a", n=0)
    await rig.passes(1)

    async def change(at: str) -> None:
        if at == place:
            rig.server.change("a", n=rig.server.sessions["a"]["n"] + 1)

    rig.server.at = rig.pace.at = change
    await rig.passes(1)
    rig.server.at = None
    rig.pace.at = HandPace().at
    assert states(await rig.checkpoint()) == rig.server.sessions == {"a": {"key": "a", "n": 1}}


async def test_a_hook_that_read_the_state_before_it_changed_and_answers_after_it(rig: PrecopyRig) -> None:
    """What it gives is of neither revision for sure: it is never used."""
    rig.begin("a", n=0)
    await rig.passes(1)
    old = dict(rig.server.sessions["a"])

    async def export(session_ids: Any) -> dict[str, Any]:
        rig.server.change("a", n=1)
        await asyncio.sleep(0)
        return {"a": old}

    rig.server.export_sessions = export  # type: ignore[method-assign]
    await rig.passes(1)
    del rig.server.export_sessions
    assert states(await rig.checkpoint()) == {"a": {"key": "a", "n": 1}}


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("place", ["hook", "digest", "rest"])
async def test_a_pass_cancelled_at_any_await_loses_and_breaks_nothing(rig: PrecopyRig, place: str, cut: bool) -> None:
    """A cut right after it has the live state; with one or without, later passes encode the rest."""
    rig.begin(*"abcdef", n=0)
    await rig.passes(1)
    stands, go = asyncio.Event(), asyncio.Event()

    async def stand(at: str) -> None:
        if at == place:
            stands.set()
            await go.wait()

    rig.server.at = rig.pace.at = stand
    task = asyncio.create_task(rig.passes(1))
    await stands.wait()
    task.cancel()
    await settled(task)
    rig.server.at, rig.pace = None, HandPace()
    if cut:
        rig.server.change("a", n=1)
        assert states(await rig.checkpoint()) == rig.server.sessions
        rig.server.change("b", n=1)
    await rig.passes(2)
    assert rig.ahead() == 6
    assert await rig.asked_at_the_cut() == []


@pytest.mark.parametrize("place", ["hook", "digest"])
@pytest.mark.parametrize("how", ["ended", "begun anew", "seeded again", "retired"])
async def test_a_session_that_turns_during_a_pass_is_not_kept(rig: PrecopyRig, place: str, how: str) -> None:
    """Even if its author gives the new one the number of the old one, against the contract."""
    rig.begin("a", n=0)
    await rig.passes(1)
    number = rig.server.session_revisions()["a"]

    async def turn(at: str) -> None:
        if at != place or rig.server.sessions.get("a", {}).get("n") != 0:
            return
        if how == "retired":
            await retire(rig.owner, rig.port, EpisodeId("r-a"))
        elif how == "seeded again":
            rig.begin("a", n=1)
        else:
            rig.end("a")
            if how == "begun anew":
                rig.begin("a", n=1)
        if "a" in rig.server.sessions:
            rig.server.numbers._current["a"] = number

    rig.server.at = rig.pace.at = turn
    await rig.passes(1)
    rig.server.at = None
    assert rig.ahead() == 0
    assert states(await rig.checkpoint()) == rig.server.sessions


@pytest.mark.parametrize("how", ["ended", "retired", "seeded again"])
async def test_what_is_kept_goes_with_its_session(rig: PrecopyRig, how: str) -> None:
    rig.begin("a", "b")
    await rig.passes()
    both = rig.held_bytes()
    if how == "ended":
        rig.end("a")
    elif how == "retired":
        await retire(rig.owner, rig.port, EpisodeId("r-a"))
    else:
        rig.begin("a")
    assert (rig.ahead(), 2 * rig.held_bytes()) == (1, both)
    rig.end("b")
    assert (rig.ahead(), rig.held_bytes()) == (0, 0)


async def test_a_restored_session_is_encoded_ahead_before_anything_starts_it() -> None:
    first = PrecopyRig()
    first.begin("a", n=3)
    await first.passes()
    records = await first.checkpoint()
    second = PrecopyRig()
    await close(second.owner)
    scope = RestoreScope.plan([EpisodeId("r-a")])
    await second.owner.activate(await second.owner.stage(records, scope))
    await reopen(second.owner)
    await second.passes()
    assert await second.asked_at_the_cut() == []
    [record] = await second.checkpoint()
    assert (record.episode, record.decode("state")) == (EpisodeId("r-a", 1), {"key": "a", "n": 3})


async def test_what_does_not_fit_is_encoded_at_the_cut(rig: PrecopyRig) -> None:
    """And is not encoded again and again meanwhile."""
    rig.begin(*"abcd", text="x" * 1000)
    rig.pace.max_bytes = 2500
    await rig.passes(6)
    assert rig.ahead() == 2
    assert rig.held_bytes() <= 2500
    assert sorted(key for call in rig.server.asked for key in call) == list("abcd")
    assert len(await rig.asked_at_the_cut()) == 2
    assert states(await rig.checkpoint()) == rig.server.sessions
    assert rig.held_bytes() <= 2500


async def test_without_a_pass_nothing_is_kept(rig: PrecopyRig) -> None:
    """Where encoding ahead is switched off, a cut leaves nothing behind."""
    rig.begin("a", "b")
    await rig.checkpoint()
    rig.end("a")
    assert (rig.ahead(), rig.held_bytes()) == (0, 0)
    assert await rig.asked_at_the_cut() == ["b"]


async def test_a_pass_stops_when_it_is_over_and_the_next_goes_on(rig: PrecopyRig) -> None:
    rig.begin(*(f"s{n}" for n in range(40)))
    await rig.passes(1)
    rig.pace.left = 2
    assert await rig.passes(1) == ["more"]
    assert 0 < rig.ahead() < 40
    rig.pace.left = None
    assert await rig.passes(1) == ["quiet"]
    assert rig.ahead() == 40


async def test_pieces_are_small_and_fit_the_time_that_they_take(rig: PrecopyRig) -> None:
    """One session at first; more as they turn out to be quick, one again where they are slow."""
    rig.begin(*(f"s{n:03}" for n in range(200)))
    await rig.passes(1)
    slow = False

    async def take(place: str) -> None:
        if place == "digest":
            rig.pace.spent = len(rig.server.asked[-1]) * (0.01 if slow else 0.0001)

    rig.pace.at = take
    rig.pace.left = 6
    await rig.passes(1)
    sizes = [len(call) for call in rig.server.asked]
    assert sizes == [1, 2, 4, 8, 16, 32]
    slow, rig.pace.left = True, 3
    await rig.passes(1)
    assert [len(call) for call in rig.server.asked][6:8] == [32, 1]


@pytest.mark.behaviour("C164")
async def test_a_state_that_cannot_be_stored_hinders_only_the_cut(
    rig: PrecopyRig, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once; the others are encoded; the cut names episode and place; and it is not tried at each pass."""
    rig.begin("a", "b", "c")
    rig.server.change("b", when=datetime.now(UTC))
    with caplog.at_level(logging.WARNING):
        await rig.passes(8)
    assert (rig.ahead(), len(caplog.records)) == (2, 1)
    assert sum("b" in call for call in rig.server.asked) == 1
    await close(rig.owner)
    with pytest.raises(HookFailed, match=r"\$\.when is of type datetime") as caught:
        await exported(rig.owner)
    assert caught.value.episode == EpisodeId("r-b")
    await reopen(rig.owner)
    rig.server.change("b", when="now")
    assert states(await rig.checkpoint()) == rig.server.sessions


@pytest.mark.parametrize("failure", [RuntimeError("not in the middle of this"), asyncio.CancelledError()])
async def test_a_hook_that_fails_for_one_session_leaves_the_others(
    rig: PrecopyRig, caplog: pytest.LogCaptureFixture, failure: BaseException
) -> None:
    """Also by a cancellation of its own making, as of a task that it awaits."""
    rig.begin(*(f"s{n}" for n in range(40)))
    whole = rig.server.export_sessions

    async def picky(session_ids: Any) -> Any:
        if "s20" in session_ids:
            raise failure
        return await whole(session_ids)

    rig.server.export_sessions = picky  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        await rig.passes(6)
    assert (rig.ahead(), len(caplog.records)) == (39, 1)
    del rig.server.export_sessions
    assert await rig.asked_at_the_cut() == ["s20"]


@pytest.mark.parametrize(
    "revisions",
    [
        lambda: {"a": "one", "b": -1, "c": 2**64},
        lambda: {"a": None, "b": True, "c": 1.0},
        lambda: None,
        lambda: 3,
        lambda: 1 // 0,
        lambda: {"stranger": 1},
    ],
    ids=["no numbers", "nearly numbers", "nothing", "a number", "a failure", "strangers"],
)
async def test_revisions_that_are_none_hinder_nothing(
    rig: PrecopyRig, caplog: pytest.LogCaptureFixture, revisions: Any
) -> None:
    rig.begin("a", "b", "c")
    rig.server.session_revisions = revisions  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        await rig.passes(4)
        records = await rig.checkpoint()
    assert states(records) == rig.server.sessions
    assert [record.revision for record in records] == [None] * 3
    assert len(caplog.records) <= 1
    assert rig.ahead() == 0


async def test_a_server_without_revisions_is_never_asked(rig: PrecopyRig) -> None:
    class Plain:
        export_sessions = RevisedServer.export_sessions
        restore_sessions = RevisedServer.restore_sessions
        retire_session = RevisedServer.retire_session

    for hooks, mode in ((Plain(), ResourcesMode.EXPORTED), (RevisedServer(), ResourcesMode.STATELESS), (None, None)):
        settings = ResourcesSettings(mode=mode) if mode else ResourcesSettings()
        owner = ResourcesOwner(hooks, settings)
        assert (await owner.precopy(HandPace())).value == "never"


async def test_what_a_cut_exported_is_frozen(rig: PrecopyRig) -> None:
    """Sessions change, end and begin anew while the records are taken, and afterwards: the records stay."""
    rig.begin(*(f"s{n}" for n in range(30)), items=[1])
    await rig.passes()
    rig.server.change("s1", more=1)
    await close(rig.owner)
    want = {key: {**state, "items": [1]} for key, state in rig.server.sessions.items()}
    taken: list[Record] = []
    async for batch in rig.owner.export(EpisodeScope.all()):
        taken += batch.records
        for key in list(rig.server.sessions):
            rig.server.sessions[key]["items"].append(2)
            rig.server.numbers.changed(key)
    await reopen(rig.owner)
    await rig.passes(3)
    rig.end("s0")
    assert states(taken) == want


async def test_an_agents_sessions_are_encoded_ahead_like_any() -> None:
    """Only the author's state: boundary, activations and the rest are as of the cut."""
    rig = AgentRig()
    revisions = {"k": 1, "l": 1}
    rig.session_revisions = lambda: revisions  # type: ignore[attr-defined]
    rig = _attached(rig)
    await rig.seed("k", EpisodeId("r"))
    await rig.seed("l", EpisodeId("s"))
    for _ in range(2):
        await rig.owner.precopy(HandPace())
    assert rig.owner.status_extra()["precopied_sessions"] == "2"
    call = rig.invoke("k", EpisodeId("r"))
    await spin()
    rig.states["l"], revisions["l"] = {"of": "l", "n": 1}, 2
    rig.hooks.clear()
    records = {record.fields["session_key"]: record for record in await rig.checkpoint()}
    assert rig.hooks == [("export", ["l"])]
    assert {key: record.decode("session") for key, record in records.items()} == rig.states
    assert {key: record.revision for key, record in records.items()} == revisions
    assert records["k"].decode("boundary") == {"turn": 0}
    await rig.answer()
    await call
    await rig.owner.retire(EpisodeId("r"), budget())
    assert rig.owner.status_extra()["precopied_sessions"] == "1"


def _attached(rig: AgentRig) -> AgentRig:
    """The owner looks for the hook when it is made."""
    rig.owner = AgentOwner(rig, clock=rig.clock)
    rig.port = FakePort(ParticipantKind.AGENT)
    rig.owner.attach(rig.port)
    return rig


# ---- at random


class Play:
    """Sessions that begin, change, end and are retired while passes and checkpoints happen."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = PrecopyRig()
        self.server = self.rig.server
        self.number = 0
        self.open = True
        self.cuts = self.reused = 0
        self.passing: asyncio.Task[Any] | None = None
        self.server.at = self.rig.pace.at = self.meanwhile

    async def meanwhile(self, place: str) -> None:
        """At any await of a pass, and in the hook at a cut: a turn of the loop, in which something may happen."""
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)
        if self.open and self.random.random() < 0.5:
            self.step()

    def step(self) -> None:
        keys = list(self.server.sessions)
        choice = self.random.random()
        if choice < 0.12 or not keys:
            self.number += 1
            key = f"s{self.number % 40}"
            self.rig.begin(key, n=self.number, text="x" * self.random.randrange(60))
        elif choice < 0.18:
            self.rig.end(self.random.choice(keys))
        elif choice < 0.9:
            self.server.change(self.random.choice(keys), n=self.random.random())

    async def turn(self) -> None:
        self.step()
        choice = self.random.random()
        if choice < 0.3 and (self.passing is None or self.passing.done()):
            self.rig.pace.left = self.random.choice([None, 1, 3])
            self.rig.pace.max_bytes = self.random.choice([1 << 20, 1000])
            self.passing = asyncio.create_task(self.rig.owner.precopy(self.rig.pace))
        elif choice < 0.4:
            await self.cut()
        else:
            await asyncio.sleep(0)

    async def cut(self) -> None:
        if self.passing is not None and self.random.random() < 0.7:
            self.passing.cancel()  # as the control plane does at a close; without it, it is as if it were stuck
        self.open = False
        await close(self.rig.owner)
        live = {key: dict(state) for key, state in self.server.sessions.items()}
        self.server.asked.clear()
        records = await exported(self.rig.owner)
        assert states(records) == live
        assert all(record.revision == self.server.session_revisions()[_key(record)] for record in records)
        assert self.rig.held_bytes() <= 1 << 20
        self.cuts += 1
        self.reused += len(live) - sum(len(call) for call in self.server.asked)
        await reopen(self.rig.owner)
        self.open = True


def _key(record: Any) -> str:
    return str(record.fields["session_id"])


@pytest.mark.parametrize("seed", range(8))
async def test_at_random_a_cut_has_the_live_state_always(seed: int) -> None:
    """Seeded; sessions change at each await of the passes."""
    print(f"seed {seed}")
    play = Play(seed)
    for _ in range(2500):
        await play.turn()
    if play.passing is not None:
        await settled(play.passing)
    assert play.cuts > 50
    assert play.reused > play.cuts
