"""Cuts of a policy model owner over a real GenerationService and a token store on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from gym_ckpt_grpc.capture import CutReference, FileTokenStore, StagedCall, finished_cut
from gym_ckpt_grpc.control import CutPresence
from gym_ckpt_grpc.integrations import visit_of
from gym_ckpt_grpc.participants.tickets import Ticket
from gym_ckpt_grpc.storage import Record
from tests.capture.scripted_engine import Worker, worker
from tests.capture.staging_rig import begin, generate
from tests.control.scripted import eventually
from tests.participants.fakes import R1, R
from tests.participants.policy_rig import PolicyServer, answer_to
from tests.participants.test_policy_records_export import ids, read

CUT_AFTER, ALL = 2, 5
"""Tokens of a call that is held, and of a whole one."""


class Server(PolicyServer):
    """A policy model server whose calls are staged by a real worker. staged: its calls, by call id."""

    def __init__(self, directory: Path, at: Worker) -> None:
        super().__init__(directory, at.backend)  # type: ignore[arg-type]
        self.worker = at
        self.staged: dict[str, StagedCall] = {}
        self.begun = asyncio.Semaphore(0)
        self.ended = asyncio.Semaphore(0)
        self.app.routes = dict.fromkeys(self.app.routes, self.generate)

    async def generate(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        visit, request = visit_of(scope), orjson.loads(body)
        assert isinstance(visit, Ticket)
        assert self.ledger is not None
        call = self.owner.begin_generation(visit, request, backend="inference-0", model="minigym")
        admission = self.ledger.admit(visit.episode, call.call_id, request["messages"], call.continuation)
        assert admission is not None
        staged = await begin(admission, self.worker.engine.tokens)
        self.staged[call.call_id] = self.worker.engine.calls[call.call_id] = staged
        generate(staged, max(0, CUT_AFTER - len(staged.generated_ids)))
        self.call_ids.append(call.call_id)
        call.registered()
        self.begun.release()
        await self.go.wait()
        generate(staged, ALL - len(staged.generated_ids))
        coordinates = await staged.complete("stop")
        self.ledger.append_staged(admission, coordinates, f"chatcmpl-{call.call_id}", answer_to(request["messages"]))
        call.finished(finished_cut(coordinates))
        self.ended.release()
        return 200, {}, answer_to(request["messages"])

    def last(self) -> StagedCall:
        return self.staged[self.call_ids[-1]]


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[Worker]:
    async with worker(tmp_path / "tokens") as made:
        yield made


def stored(directory: Path) -> list[str]:
    """Keys that another process finds in the token store."""
    store = FileTokenStore(directory / "tokens")
    try:
        return store.keys()
    finally:
        store.close()


async def taken(server: Server, *, finish: bool = False, durable: bool = True) -> tuple[Any, list[Record]]:
    """A checkpoint with one call under way, which may finish while closed; admission stays closed."""
    running = server.call(R)
    await server.begun.acquire()
    await server.close()
    if finish:
        server.go.set()
        await server.ended.acquire()
    records = await server.export(R)
    server.owner.write_ended("ckpt-1", durable)
    return running, records


@pytest.mark.behaviour("P140", "P153")
async def test_the_tokens_of_a_call_that_finished_while_closed_survive_an_abort(real: Worker, tmp_path: Path) -> None:
    """Its prefix cut is gone from the store; what its own coordinates name is not."""
    server = Server(tmp_path / "ledger", real)
    running, records = await taken(server, finish=True, durable=False)
    cut = read(records[0]).cuts[0]
    own = f"r/{server.call_ids[0]}"
    assert (cut.finish_reason, cut.prefix_tokens, cut.staging_keys) == ("stop", ALL, (own,))
    await server.open()
    await running.end()
    await real.engine.until(lambda: len(real.engine.released) == 1)
    assert stored(tmp_path) == [own]
    await server.end()


@pytest.mark.behaviour("P143", "P154", "P147")
async def test_a_restored_cut_is_continued_to_the_uncut_generation_and_stays(real: Worker, tmp_path: Path) -> None:
    """Ids and log-probabilities are those of a run nobody disturbed; only the rest is generated."""
    first = Server(tmp_path / "first", real)
    running, records = await taken(first)
    second = Server(tmp_path / "second", real)
    await second.restore(records)
    second.go.set()
    assert (await second.call(R1).end()).status == 200
    continued = second.last()
    assert continued.reused == CUT_AFTER
    await first.open()
    first.go.set()
    await running.end()
    assert continued.generated_ids == first.last().generated_ids
    assert continued.generated_logprobs == first.last().generated_logprobs
    assert second.counts("restored_cuts", "cuts_missing") == (0, 0)
    cut = read(records[0]).cuts[0]
    assert set(cut.staging_keys) <= set(stored(tmp_path))
    assert real.engine.released == []
    assert ids((await second.checkpoint(R1, number=2))[0]) == second.call_ids
    for server in (first, second):
        await server.end()


@pytest.mark.behaviour("P143")
async def test_a_finished_cut_is_continued_without_a_token(real: Worker, tmp_path: Path) -> None:
    """The backend finds it by the call's own key."""
    first = Server(tmp_path / "first", real)
    running, records = await taken(first, finish=True)
    second = Server(tmp_path / "second", real)
    await second.restore(records)
    assert second.counts("restored_cuts", "cuts_missing") == (1, 0)
    second.go.set()
    assert (await second.call(R1).end()).status == 200
    assert (second.last().reused, len(second.last().generated_ids)) == (ALL, ALL)
    await first.end()
    await running.end()
    await second.end()


@pytest.mark.behaviour("P151")
async def test_a_cut_whose_tokens_are_gone_is_dropped_and_its_call_generated_anew(real: Worker, tmp_path: Path) -> None:
    first = Server(tmp_path / "first", real)
    running, records = await taken(first)
    await real.engine.tokens.delete(list(read(records[0]).cuts[0].staging_keys))
    second = Server(tmp_path / "second", real)
    await second.restore(records)
    assert second.counts("restored_cuts", "cuts_missing") == (0, 1)
    second.go.set()
    assert (await second.call(R1).end()).status == 200
    assert (second.last().reused, len(second.last().generated_ids)) == (0, ALL)
    await first.end()
    await running.end()
    await second.end()


@pytest.mark.behaviour("P156")
async def test_a_worker_that_was_away_at_resume_releases_the_cut_when_it_is_back(real: Worker, tmp_path: Path) -> None:
    """Resume does not wait for it."""
    server = Server(tmp_path / "ledger", real)
    running, records = await taken(server, durable=False)
    cut = read(records[0]).cuts[0]
    address = real.server.address
    await real.server.stop(0)
    await server.open()
    server.go.set()
    assert (await running.end()).status == 200
    assert (server.owner.admission.closed, server.counts("cuts_unreleased")) == (False, (1,))
    assert set(cut.staging_keys) <= set(stored(tmp_path))
    async with worker(tmp_path / "tokens", address=address) as back:
        await back.engine.until(lambda: back.engine.released == [cut.cut_id])
        gone = CutReference(cut.cut_id, cut.staging_keys, cut.prefix_tokens, cut.prefix_digest)
        assert await back.engine.check([gone]) == [CutPresence.MISSING]
        await eventually(lambda: server.counts("cuts_unreleased") == (0,))
        await server.end()
