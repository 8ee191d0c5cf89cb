"""What a Restore puts into a policy model server, and what retire and delete take out again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.capture.ledger_files import LocalLedgerFiles
from gym_ckpt_grpc.control import InvalidState
from gym_ckpt_grpc.participants import PolicyModelRecord
from gym_ckpt_grpc.protocol.errors import InvalidPhase, OutOfTime, StaleAttempt, StateUnwritable
from gym_ckpt_grpc.protocol.ids import EpisodeId, RestoreScope
from gym_ckpt_grpc.storage import Record, encode
from tests.participants.fakes import R1, R2, R, S, close, restore, retire, spin
from tests.participants.policy_rig import FakeBackend, PolicyServer
from tests.participants.test_policy_records import CUT
from tests.participants.test_policy_records_export import ids, read

S1 = EpisodeId("s", 1)


class Lives:
    """Server processes one after another on one disk, and one inference worker that outlives them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.worker = FakeBackend()
        self.lives: list[PolicyServer] = []

    def start(self, *, disk: str = "disk", **options: Any) -> PolicyServer:
        self.lives.append(PolicyServer(self.directory / disk, self.worker, **options))
        return self.lives[-1]


@pytest.fixture
async def lives(tmp_path: Path) -> Any:
    made = Lives(tmp_path)
    yield made
    for server in made.lives:
        await server.end()


def ledger_of(server: PolicyServer) -> CaptureLedger:
    assert server.ledger is not None
    return server.ledger


def calls_of(server: PolicyServer, episode: EpisodeId) -> list[str]:
    return [each["call_id"] for each in ledger_of(server).manifest(episode)["calls"]]


async def taken(lives: Lives, *episodes: EpisodeId, turns: int = 1) -> list[Record]:
    """Records of a server that made these turns and crashed; its worker and its disk are there still."""
    server = lives.start()
    for episode in episodes:
        await server.turns(episode, turns)
    return await server.checkpoint(*episodes)


@pytest.mark.behaviour("P106")
async def test_restored_rows_resolve_the_parent_with_the_source_attempts_chain(lives: Lives) -> None:
    first = lives.start()
    conversation = await first.turns(R, 2)
    records = await first.checkpoint(R)
    second = lives.start(disk="other")
    await second.restore(records)
    admission = ledger_of(second).admit(R1, "next", conversation)
    assert admission is not None
    assert (admission.mode, admission.parent_id) == ("token_in", first.call_ids[1])
    assert list(admission.staging_chain) == [f"r/{call_id}" for call_id in first.call_ids]


@pytest.mark.behaviour("P109")
async def test_carried_calls_keep_the_stamp_of_who_staged_them_over_a_chain_of_restores(lives: Lives) -> None:
    """Each first stamp stays; failure rows have none."""
    first = lives.start(disk="0")
    conversation = await first.turns(R, 1)
    first.fail = True
    await first.turns(S, 1)
    records = await first.checkpoint(R, S)
    second = lives.start(disk="1")
    await second.restore(records)
    second.go.set()
    reply = (await second.call(R1, messages=conversation).end()).json()
    records = await second.checkpoint(R1, S1)
    third = lives.start(disk="2")
    await third.restore(records)
    manifest = ledger_of(third).manifest(R2)
    assert [(each["capture_key"], each["staging_key"].split("/")[0]) for each in manifest["calls"]] == [
        ("r", "r"),
        ("r-a1", "r-a1"),
    ]
    assert ledger_of(third).admit(R2, "x", [*conversation, reply]) is not None
    failures = ledger_of(third).export([EpisodeId("s", 2)])[EpisodeId("s", 2)]
    assert [(row["kind"], "capture_key" in row) for row in failures] == [("failure", False)]


@pytest.mark.behaviour("P110")
async def test_records_without_a_ledger_are_refused(lives: Lives) -> None:
    records = await taken(lives, R)
    bare = PolicyServer(None)
    await close(bare.owner)
    with pytest.raises(InvalidPhase) as caught:
        await bare.owner.stage(records, RestoreScope.plan([R]))
    assert caught.value.episodes == (R,)
    await bare.owner.activate(await bare.owner.stage([], RestoreScope.plan([R])))
    assert bare.owner.restored_pending() == {R1}


@pytest.mark.behaviour("P122", "P14")
async def test_a_record_that_is_not_right_is_refused_and_nothing_is_installed(lives: Lives) -> None:
    """Two cuts of one request, wrong rows, two records, one outside the scope: each names its episode."""
    good = (await taken(lives, R))[0]
    twice = PolicyModelRecord(R, [], [CUT, replace(CUT, cut_id="more")]).to_record()
    wrong = structs.replace(good, payloads={**good.payloads, "rows": encode([{"kind": "staged"}])})
    outside = PolicyModelRecord(S, [], [CUT]).to_record()
    server = lives.start(disk="other")
    await close(server.owner)
    for bad in ([twice], [wrong], [good, good], [outside]):
        with pytest.raises(InvalidState) as caught:
            await server.owner.stage(bad, RestoreScope.plan([R]))
        assert caught.value.episode == bad[0].episode
    assert (server.owner.restored_pending(), server.counts("restored_cuts")) == (frozenset(), (0,))
    assert ledger_of(server).export([R1])[R1] == []


class CountedFiles(LocalLedgerFiles):
    """Counts syncs of directories."""

    def __init__(self) -> None:
        super().__init__()
        self.directory_syncs = 0

    def sync_dir(self, path: str) -> None:
        self.directory_syncs += 1
        super().sync_dir(path)


@pytest.mark.behaviour("P113")
async def test_a_restore_is_one_batch_whatever_the_number_of_rollouts(lives: Lives) -> None:
    episodes = [EpisodeId(f"r{number}") for number in range(100)]
    records = await taken(lives, *episodes)
    syncs = []
    for count in (1, 100):
        files = CountedFiles()
        server = lives.start(disk=f"of-{count}", files=files)
        before = files.directory_syncs
        await restore(server.owner, records[:count])
        syncs.append(files.directory_syncs - before)
        assert len(server.owner.restored_pending()) == count
    assert syncs[0] == syncs[1] > 0


@pytest.mark.behaviour("P115", "P239")
async def test_restoring_again_after_the_replacement_wrote_rows_gives_the_checkpoints_rows(lives: Lives) -> None:
    """On the same disk, in the next process; also rows of later attempts are gone."""
    first = lives.start()
    conversation = await first.turns(R, 2)
    records = await first.checkpoint(R)
    for _ in range(2):
        server = lives.start()
        await server.restore(records)
        server.go.set()
        await server.call(R1, messages=conversation).end()
        await server.turns(R2, 1)
        assert (len(calls_of(server, R1)), len(calls_of(server, R2))) == (3, 1)
    last = lives.start()
    await last.restore(records)
    assert (calls_of(last, R1), calls_of(last, R2)) == (first.call_ids, [])
    admission = ledger_of(last).admit(R1, "again", conversation)
    assert admission is not None
    assert admission.parent_id == first.call_ids[1]


@pytest.mark.behaviour("P116")
async def test_a_scoped_episode_without_a_record_starts_clean(lives: Lives) -> None:
    dead = lives.start()
    await dead.turns(S1, 2)
    server = lives.start()
    await server.restore([], S)
    assert ledger_of(server).export([S1])[S1] == []
    assert server.owner.restored_pending() == {S1}


@pytest.mark.behaviour("P117")
async def test_a_restore_fences_the_attempts_it_continues(lives: Lives) -> None:
    """Durably: in the next process too. The attempt it installs, and other rollouts, are not fenced."""
    records = await taken(lives, R)
    await lives.start().restore(records)
    later = ledger_of(lives.start())
    with pytest.raises(StaleAttempt):
        later.manifest(R)
    assert later.admit(R, "late", []) is None
    assert later.manifest(R1)["calls"]
    assert later.admit(S, "other", []) is not None


@pytest.mark.behaviour("P118", "P238")
async def test_a_started_replacement_is_never_deleted(lives: Lives) -> None:
    """Its ledger stays as it is, and is not fenced."""
    records = await taken(lives, R, S)
    server = lives.start()
    await server.restore(records)
    running = await server.begin(R1)
    before = ledger_of(server).export([R1])
    for target in (R1, S1):
        await server.owner.delete_restored(target)
    assert ledger_of(server).export([R1]) == before
    assert before[R1]
    assert ledger_of(server).admit(R1, "more", []) is not None
    server.go.set()
    assert (await running.end()).status == 200


@pytest.mark.behaviour("P118", "P19")
async def test_an_unstarted_attempt_is_deleted_with_rows_and_cuts_and_without_a_fence(lives: Lives) -> None:
    first = lives.start()
    await first.turns(R, 1)
    await first.begin(R, messages=[])
    records = await first.checkpoint(R)
    server = lives.start()
    await server.restore(records)
    assert server.counts("restored_cuts") == (1,)
    await server.owner.delete_restored(R1)
    assert (server.owner.restored_pending(), server.counts("restored_cuts")) == (frozenset(), (0,))
    assert ledger_of(server).export([R1])[R1] == []
    await server.turns(R1, 1)
    assert calls_of(server, R1) == server.call_ids
    assert server.backends["inference-0"].released == []


@pytest.mark.behaviour("P21")
async def test_a_failing_deletion_leaves_the_episode_pending_and_holds_its_calls_meanwhile(lives: Lives) -> None:
    server = lives.start()
    await server.restore(await taken(lives, R), R)
    ledger = ledger_of(server)
    go = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fails_late(episodes: Any) -> None:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(5)
        raise StateUnwritable("full")

    ledger.discard = fails_late  # type: ignore[method-assign]
    server.go.set()
    deleting = asyncio.create_task(server.owner.delete_restored(R1))
    await spin()
    early = server.call(R1)
    await spin()
    assert (server.counts("waiting"), server.call_ids) == ((1,), [])
    await server.owner.delete_restored(R1)  # joins nothing and breaks nothing
    go.set()
    with pytest.raises(StateUnwritable):
        await deleting
    assert (await early.end()).status == 200
    assert server.owner.restored_pending() == frozenset()


async def test_a_deletion_that_failed_is_done_by_the_next_one(lives: Lives) -> None:
    server = lives.start()
    await server.restore(await taken(lives, R), R)
    with failing(ledger_of(server), "discard"), pytest.raises(StateUnwritable):
        await server.owner.delete_restored(R1)
    assert server.owner.restored_pending() == {R1}
    assert len(calls_of(server, R1)) == 1
    await server.owner.delete_restored(R1)
    assert (server.owner.restored_pending(), calls_of(server, R1)) == (frozenset(), [])


@contextlib.contextmanager
def failing(ledger: CaptureLedger, name: str) -> Iterator[None]:
    """A ledger whose disk refuses one method."""
    works = getattr(ledger, name)

    def fails(*args: Any) -> None:
        raise StateUnwritable("full")

    setattr(ledger, name, fails)
    yield
    setattr(ledger, name, works)


@pytest.mark.behaviour("P119")
async def test_a_started_target_is_not_pending_again(lives: Lives) -> None:
    """Not after its call ended, nor after a checkpoint: the owner remembers, not the call."""
    server = lives.start()
    await server.restore(await taken(lives, R), R)
    assert server.owner.restored_pending() == {R1}
    server.go.set()
    await server.call(R1).end()
    assert server.owner.restored_pending() == frozenset()
    await server.checkpoint(R1)
    await server.open()
    await server.owner.delete_restored(R1)
    assert len(calls_of(server, R1)) == 2


@pytest.mark.behaviour("P121", "P29")
async def test_a_retire_fences_its_attempt_and_earlier_ones_and_no_later_one(lives: Lives) -> None:
    """Reading a fenced one is STALE_ATTEMPT, and Forget does not lift the fence."""
    server = lives.start()
    for episode in (R, R1, R2):
        await server.turns(episode, 1)
    running = await server.begin(R1)
    await retire(server.owner, server.port, R1)
    assert (await running.end()).code == "STALE_ATTEMPT"
    server.owner.check_forget("r", 1)
    server.owner.forget("r", 1)
    for ledger in (ledger_of(server), ledger_of(lives.start())):
        for episode in (R, R1):
            with pytest.raises(StaleAttempt):
                ledger.manifest(episode)
            assert ledger.admit(episode, f"late-{episode}", []) is None
        assert len(ledger.manifest(R2)["calls"]) == 1


async def test_retires_that_come_while_the_ledger_is_at_work_are_one_batch(lives: Lives) -> None:
    """Each is fenced when it returns."""
    server = lives.start()
    ledger, loop, go = ledger_of(server), asyncio.get_running_loop(), asyncio.Event()
    batches: list[int] = []
    fence, read_ledger = ledger.retire, ledger.export

    def counted(episodes: Any) -> Any:
        batches.append(len(episodes))
        return fence(episodes)

    def slow(episodes: Any) -> Any:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(5)
        return read_ledger(episodes)

    async def one(episode: EpisodeId) -> None:
        await retire(server.owner, server.port, episode)
        assert ledger.admit(episode, f"late-{episode}", []) is None

    ledger.retire, ledger.export = counted, slow  # type: ignore[method-assign]
    await server.close()
    work: list[asyncio.Task[Any]] = [asyncio.create_task(server.export(S))]
    for number in range(100):
        await spin(2)
        work.append(asyncio.create_task(one(EpisodeId(f"r{number}"))))
    await spin()
    go.set()
    await asyncio.gather(*work)
    assert batches == [100]


async def test_a_fence_that_does_not_come_in_time_is_out_of_time_and_a_retry_waits_for_it(lives: Lives) -> None:
    server = lives.start()
    ledger, loop, go = ledger_of(server), asyncio.get_running_loop(), asyncio.Event()
    fence = ledger.retire

    def slow(episodes: Any) -> Any:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(5)
        return fence(episodes)

    ledger.retire = slow  # type: ignore[method-assign]
    with pytest.raises(OutOfTime, match="fencing"):
        await retire(server.owner, server.port, R, seconds=0.1)
    go.set()
    await retire(server.owner, server.port, R)
    assert ledger.admit(R, "late", []) is None


@pytest.mark.behaviour("P237", "P150")
async def test_what_nobody_claimed_is_in_the_next_checkpoint_under_the_next_attempt(lives: Lives) -> None:
    """Rows and cuts; and goes on as N+2. Outside the scope it is in no record."""
    first = lives.start()
    await first.turns(R, 2)
    await first.begin(R, messages=[])
    records = await first.checkpoint(R)
    second = lives.start(disk="other")
    await second.restore(records)
    again = await second.checkpoint(R1)
    assert [record.episode for record in again] == [R1]
    assert (ids(again[0]), read(again[0]).cuts) == (ids(records[0]), read(records[0]).cuts)
    assert await second.export(S) == []
    third = lives.start(disk="third")
    await third.restore(again)
    assert third.owner.restored_pending() == {R2}
    assert calls_of(third, R2) == first.call_ids[:2]
    assert third.counts("restored_cuts") == (1,)


@pytest.mark.behaviour("P239")
async def test_one_checkpoint_restored_twice_continues_from_it_both_times(lives: Lives) -> None:
    """The cut is offered both times, although the first replacement has used it."""
    first = lives.start()
    await first.turns(R, 1)
    await first.begin(R, messages=[])
    records = await first.checkpoint(R)
    for _ in range(2):
        server = lives.start()
        await server.restore(records)
        server.go.set()
        await server.call(R1, messages=[]).end()
        assert [each and each.source_call_id for each in server.given] == [first.call_ids[1]]
        assert calls_of(server, R1) == [first.call_ids[0], server.call_ids[0]]


async def test_a_restore_that_fails_half_way_leaves_nothing_of_it(lives: Lives) -> None:
    """`activate` fails in the ledger; `discard` follows it, as the control plane does."""
    records = await taken(lives, R)
    server = lives.start(disk="other")
    ledger = ledger_of(server)
    await close(server.owner)
    staged = await server.owner.stage(records, RestoreScope.plan([R]))
    with failing(ledger, "activate"), pytest.raises(StateUnwritable):
        await server.owner.activate(staged)
    await server.owner.discard(staged)
    assert (server.owner.restored_pending(), ledger.export([R1])[R1]) == (frozenset(), [])
    await server.restore(records)
    assert len(calls_of(server, R1)) == 1


async def test_a_discard_takes_back_what_was_live_already(lives: Lives) -> None:
    first = lives.start()
    await first.turns(R, 1)
    await first.begin(R, messages=[])
    records = await first.checkpoint(R)
    server = lives.start(disk="other")
    await close(server.owner)
    staged = await server.owner.stage(records, RestoreScope.plan([R]))
    await server.owner.activate(staged)
    await server.owner.discard(staged)
    assert (server.owner.restored_pending(), server.counts("restored_cuts")) == (frozenset(), (0,))
    assert ledger_of(server).export([R1])[R1] == []


@pytest.mark.behaviour("P16")
async def test_stage_writes_only_aside_and_discard_removes_it(lives: Lives, tmp_path: Path) -> None:
    """Nothing but the place of imports differs on the disk, and after a discard nothing at all."""
    records = await taken(lives, R)
    server = lives.start(disk="other")
    await server.turns(R1, 1)
    await close(server.owner)
    shutil.copytree(tmp_path / "other", tmp_path / "before")
    staged = await server.owner.stage(records, RestoreScope.plan([R]))
    assert tree(tmp_path / "other", "imports") == tree(tmp_path / "before", "imports")
    await server.owner.discard(staged)
    assert tree(tmp_path / "other") == tree(tmp_path / "before")
    assert calls_of(server, R1) == server.call_ids


def tree(directory: Path, *without: str) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    named = {str(path.relative_to(directory)): path.read_bytes() for path in files}
    return {name: data for name, data in named.items() if name.split("/")[0] not in without}


async def test_a_stage_that_is_cancelled_leaves_no_import_behind(lives: Lives, tmp_path: Path) -> None:
    records = await taken(lives, R)
    server = lives.start(disk="other")
    ledger, loop, go, begun = ledger_of(server), asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    stage = ledger.stage

    def slow(rows: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(5)
        return stage(rows)

    ledger.stage = slow  # type: ignore[method-assign]
    await close(server.owner)
    staging = asyncio.create_task(server.owner.stage(records, RestoreScope.plan([R])))
    await begun.wait()
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staging
    go.set()
    await retire(server.owner, server.port, S)  # the ledger's thread has ended what came before
    assert [name for name in tree(tmp_path / "other") if name.startswith("imports")] == []


async def test_deletions_that_come_together_are_one_batch(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch costs syncs, and a Commit or a dead controller's lease may delete thousands."""
    episodes = [EpisodeId(f"e{number}") for number in range(50)]
    server = lives.start()
    await server.restore([], *episodes)
    real, discarded = ledger_of(server).discard, list[int]()

    def discard(batch: Sequence[EpisodeId]) -> None:
        discarded.append(len(batch))
        real(batch)

    monkeypatch.setattr(ledger_of(server), "discard", discard)
    await asyncio.gather(*map(server.owner.delete_restored, server.owner.restored_pending()))
    assert (server.owner.restored_pending(), discarded) == (frozenset(), [50])
