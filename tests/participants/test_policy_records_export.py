"""What a policy model server exports: rows and cuts of a scope, as they stood at the cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import HookFailed
from gym_ckpt_grpc.integrations import CheckpointMiddleware, visit_of
from gym_ckpt_grpc.participants import PolicyModelRecord
from gym_ckpt_grpc.protocol.errors import InvalidArgument
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import R1, R, S, exported, reopen, retire, spin
from tests.participants.policy_rig import USER, FakeBackend, PolicyServer, answer_to, coordinates_of

OTHER = [{"role": "user", "content": "another request"}]


def read(record: Record) -> PolicyModelRecord:
    return PolicyModelRecord.from_record(record)


def ids(record: Record) -> list[str]:
    """Call ids of its rows."""
    return [row["call_id"] for row in read(record).rows]


@pytest.fixture
async def server(tmp_path: Path) -> Any:
    made = PolicyServer(tmp_path / "ledger", FakeBackend())
    yield made
    await made.end()


async def test_a_record_has_the_rows_of_its_attempt_only(server: PolicyServer) -> None:
    """In the order they were appended; nothing outside the scope, nothing for an attempt without rows or cuts."""
    await server.turns(R, 2)
    await server.turns(S, 1)
    records = await server.checkpoint(R, R1)
    assert [record.episode for record in records] == [R]
    assert ids(records[0]) == server.call_ids[:2]
    assert [record.episode for record in await server.export(S, R1)] == [S]


@pytest.mark.behaviour("P110")
async def test_scope_all_is_refused_naming_the_scope(server: PolicyServer) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await exported(server.owner, EpisodeScope.all())
    assert caught.value.violations[0].field == "scope"


@pytest.mark.behaviour("P11", "P107")
async def test_a_row_written_after_the_cut_is_in_no_record_of_it(server: PolicyServer, tmp_path: Path) -> None:
    """Records are frozen: what the live ledger gets afterwards does not come back with a restore."""
    conversation = await server.turns(R, 1)
    records = await server.checkpoint(R)
    await server.open()
    server.go.set()
    await server.call(R, messages=conversation).end()
    assert ids(records[0]) == server.call_ids[:1]
    twin = PolicyServer(tmp_path / "twin")
    await twin.restore(records)
    assert twin.ledger is not None
    assert [each["call_id"] for each in twin.ledger.manifest(R1)["calls"]] == server.call_ids[:1]
    await twin.end()


@pytest.mark.behaviour("P108", "P123")
@pytest.mark.parametrize("stream", [False, True])
async def test_rows_of_undelivered_calls_are_left_out_although_the_ledger_has_them(
    server: PolicyServer, stream: bool
) -> None:
    """A held reply, or a stream that is paused before its last event."""
    conversation = await server.turns(R, 1)
    held = await server.begin(R, messages=conversation, stream=stream)
    await server.close()
    server.go.set()
    await spin(20)
    assert server.counts("held", "paused") == (1, int(stream))
    assert server.ledger is not None
    assert len(server.ledger.export([R])[R]) == 2
    records = await server.export(R)
    assert ids(records[0]) == server.call_ids[:1]
    await server.open()
    assert (await held.end()).status == 200
    assert ids((await server.checkpoint(R, number=2))[0]) == server.call_ids


async def test_rows_of_undelivered_calls_whose_ids_the_server_makes_are_left_out_too(
    server: PolicyServer,
) -> None:
    """A framework that begins no generations here, and says which id a call has before its row is there."""
    assert server.ledger is not None
    conversation = await server.turns(R, 1)
    ledger = server.ledger

    async def answer(scope: Any, body: bytes) -> tuple[int, dict[str, str], Any]:
        server.owner.call_named(visit_of(scope), "its-own")
        admission = ledger.admit(R, "its-own", conversation)
        assert admission is not None
        ledger.append_staged(admission, coordinates_of(admission), "resp", answer_to(conversation))
        return 200, {}, None

    server.app.routes["/v1/responses"], begun = _when_closed(answer)
    held = server.call(R, "/v1/responses")
    await spin()
    await server.close()
    begun.set()
    await spin(20)
    assert [row["call_id"] for row in ledger.export([R])[R]] == [*server.call_ids, "its-own"]
    assert ids((await server.export(R))[0]) == server.call_ids
    await server.open()
    assert (await held.end()).status == 200
    assert ids((await server.checkpoint(R, number=2))[0]) == [*server.call_ids, "its-own"]


def _when_closed(answer: Any) -> tuple[Any, asyncio.Event]:
    """The handler, once it is let go."""
    go = asyncio.Event()

    async def wait(scope: Any, body: bytes) -> Any:
        await go.wait()
        return await answer(scope, body)

    return wait, go


async def test_rows_of_a_call_that_begins_while_the_ledger_is_read_are_left_out(server: PolicyServer) -> None:
    """It was admitted before the close and reaches its ledger in the middle of the export."""
    await server.turns(R, 1)
    begin = asyncio.Event()
    answer = server.app.routes["/v1/responses"]

    async def late(scope: Any, body: bytes) -> Any:
        await begin.wait()
        return await answer(scope, body)

    server.app.routes["/v1/responses"] = late
    held = server.call(R, "/v1/responses", messages=OTHER)
    await spin()
    await server.close(within=0.02)
    assert server.ledger is not None
    read_ledger, loop, rows_read = server.ledger.export, asyncio.get_running_loop(), threading.Event()

    def slow(episodes: Iterable[EpisodeId]) -> Any:
        loop.call_soon_threadsafe(begin.set)
        assert rows_read.wait(5)
        return read_ledger(episodes)

    server.ledger.export = slow  # type: ignore[method-assign]
    server.go.set()
    exporting = asyncio.create_task(server.export(R))
    await begin.wait()
    await spin(20)
    rows_read.set()
    records = await exporting
    assert len(read_ledger([R])[R]) == 2
    assert ids(records[0]) == server.call_ids[:1]
    await server.open()
    await held.end()


async def test_rows_of_a_call_that_is_given_up_while_the_ledger_is_read_are_left_out(server: PolicyServer) -> None:
    """Its row is there and its reply was held, when its client left in the middle of the export."""
    held = await server.begin(R)
    await server.close()
    server.go.set()
    await spin(20)
    assert server.ledger is not None
    read_ledger, loop = server.ledger.export, asyncio.get_running_loop()

    def slow(episodes: Iterable[EpisodeId]) -> Any:
        left = threading.Event()
        held.task.add_done_callback(lambda task: left.set())
        loop.call_soon_threadsafe(held.task.cancel)
        assert left.wait(5)
        return read_ledger(episodes)

    server.ledger.export = slow  # type: ignore[method-assign]
    assert await server.export(R) == []
    assert len(read_ledger([R])[R]) == 1


async def test_rows_of_the_first_try_of_an_undelivered_call_are_left_out_too(server: PolicyServer) -> None:
    """A handler whose backend failed begins again under a new call id, and its failure is in the ledger."""
    answer = server.app.routes["/v1/chat/completions"]
    first = asyncio.Event()

    async def twice(scope: Any, body: bytes) -> Any:
        server.fail = True
        server.go.set()
        await answer(scope, body)
        server.fail = False
        server.go.clear()
        first.set()
        return await answer(scope, body)

    server.app.routes["/v1/chat/completions"] = twice
    held = await server.begin(R)
    await first.wait()
    await server.close()
    server.go.set()
    await spin(20)
    assert server.ledger is not None
    assert len(server.ledger.export([R])[R]) == 2
    records = await server.export(R)
    assert [(read(record).rows, len(read(record).cuts)) for record in records] == [([], 1)]
    await server.open()
    await held.end()
    assert ids((await server.checkpoint(R, number=2))[0]) == server.call_ids


@pytest.mark.behaviour("P139")
async def test_the_record_of_a_cut_names_all_that_continues_it(server: PolicyServer) -> None:
    running = await server.begin(R, max_tokens=64)
    cut = read((await server.checkpoint(R))[0]).cuts[0]
    evidence = server.backends["inference-0"].cuts[cut.cut_id]
    assert cut.evidence == evidence
    assert (cut.backend, cut.incarnation_id, cut.snapshot_id) == ("inference-0", "inference-0-life", "snapshot-1-1")
    assert (cut.source_capture_key, cut.source_call_id) == ("r", server.call_ids[0])
    assert (cut.service, cut.model, len(cut.request_digest)) == ("policy", "minigym", 64)
    await server.end()
    await running.end()


@pytest.mark.behaviour("P138")
async def test_the_latest_admitted_call_of_a_request_gives_its_cut(server: PolicyServer) -> None:
    """Different requests keep one each; a latest call without a cut leaves that of the one before."""
    calls = [await server.begin(R), await server.begin(R, messages=OTHER), await server.begin(R)]
    server.backends["inference-0"].silent.add(server.call_ids[2])
    records = await server.checkpoint(R, durable=False)
    assert {cut.source_call_id for cut in read(records[0]).cuts} == set(server.call_ids[:2])
    await server.open()
    server.backends["inference-0"].silent.clear()
    records = await server.checkpoint(R, number=2)
    assert {cut.source_call_id for cut in read(records[0]).cuts} == set(server.call_ids[1:])
    await server.end()
    await asyncio.gather(*(each.end() for each in calls))


async def test_cuts_of_other_attempts_and_of_retired_calls_are_in_no_record(server: PolicyServer) -> None:
    calls = [await server.begin(R), await server.begin(R1), await server.begin(S)]
    await server.close()
    await retire(server.owner, server.port, R)
    assert [record.episode for record in await server.export(R1)] == [R1]
    assert read((await server.export(R1))[0]).cuts[0].source_capture_key == "r-a1"
    assert await server.export(R) == []
    await server.end()
    await asyncio.gather(*(each.end() for each in calls))


async def test_attempts_side_by_side_have_their_own_rows_and_cuts(server: PolicyServer) -> None:
    """Also with equal requests."""
    calls = [await server.begin(R), await server.begin(R1)]
    records = await server.checkpoint(R, R1)
    cuts = {record.episode: [cut.source_call_id for cut in read(record).cuts] for record in records}
    assert cuts == {R: server.call_ids[:1], R1: server.call_ids[1:]}
    await server.end()
    await asyncio.gather(*(each.end() for each in calls))


@pytest.mark.behaviour("P108")
async def test_rows_of_a_delivered_call_whose_handler_goes_on_are_exported(server: PolicyServer) -> None:
    """The last event of its stream was sent; what the handler does after that concerns nobody."""
    over = asyncio.Event()

    async def lingering(scope: Any, receive: Any, send: Any) -> None:
        await server.app(scope, receive, send)
        await over.wait()

    server.served = CheckpointMiddleware(lingering, server.owner.gate())
    running = await server.begin(R, stream=True)
    server.go.set()
    await spin(20)
    await server.close()
    assert server.counts("inflight", "held") == (1, 0)
    assert ids((await server.export(R))[0]) == server.call_ids
    over.set()
    await running.end()


@pytest.mark.behaviour("P114")
async def test_the_ledger_is_read_and_written_off_the_loop(server: PolicyServer, tmp_path: Path) -> None:
    """While it hangs at export, stage, activate, retire or discard, the loop goes on serving."""
    await server.turns(R, 1)
    records = await server.checkpoint(R)
    await server.open()
    target = PolicyServer(tmp_path / "target")
    for made in (server, target):
        assert made.ledger is not None
        for name in ("export", "stage", "activate", "drop", "retire", "discard", "check_rows", "staging_keys"):
            setattr(made.ledger, name, off_loop(getattr(made.ledger, name)))
    again = await served_meanwhile(server, server.checkpoint(R, number=2))
    assert ids(again[0]) == ids(records[0])
    await served_meanwhile(target, target.restore(records))
    await target.owner.delete_restored(R1)
    await served_meanwhile(target, retire(target.owner, target.port, R1))
    await target.end()


def off_loop(work: Any) -> Any:
    """The same, which fails on the loop's thread and, off it, waits until the loop has turned."""
    loop = asyncio.get_running_loop()

    def waiting(*args: Any, **kwargs: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        turned = threading.Event()
        loop.call_soon_threadsafe(loop.call_soon, turned.set)
        assert turned.wait(5), "the loop stood still"
        return work(*args, **kwargs)

    return waiting


async def served_meanwhile(server: PolicyServer, work: Any) -> Any:
    """What `work` gives, while an untagged call is served."""
    task = asyncio.create_task(work)
    await spin(2)
    server.go.set()
    assert (await server.call(None).end()).status == 200
    server.go.clear()
    return await task


async def test_a_row_that_cannot_be_kept_fails_the_export_and_a_retry_can_succeed(server: PolicyServer) -> None:
    await server.turns(R, 1)
    running = await server.begin(R, messages=OTHER)
    await server.close()
    assert server.ledger is not None
    read_ledger = server.ledger.export
    server.ledger.export = lambda episodes: {R: [{"call_id": "x", "bad": object()}]}  # type: ignore[method-assign]
    with pytest.raises(HookFailed) as caught:
        await server.export(R)
    assert caught.value.episode == R
    server.ledger.export = read_ledger  # type: ignore[method-assign]
    records = await server.export(R)
    assert (ids(records[0]), len(read(records[0]).cuts)) == (server.call_ids[:1], 1)
    await reopen(server.owner)
    server.go.set()
    await running.end()


async def test_large_scopes_come_in_batches(server: PolicyServer) -> None:
    episodes = [EpisodeId(f"r{number}") for number in range(300)]
    server.go.set()
    await asyncio.gather(*(server.call(each, messages=[USER]).end() for each in episodes))
    await server.close()
    batches = [batch async for batch in server.owner.export(EpisodeScope.of(episodes))]
    assert [len(batch.records) for batch in batches] == [256, 44]
    assert [record.episode for batch in batches for record in batch.records] == episodes
