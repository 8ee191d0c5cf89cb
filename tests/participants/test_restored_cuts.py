"""Cuts that a restore brought back: to which call they are offered, and when they are used up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import Capability, Closing, Continuation
from gym_ckpt_grpc.participants import PolicyModelRecord
from gym_ckpt_grpc.participants.request_digest import request_digest
from gym_ckpt_grpc.protocol.ids import RestoreScope
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import R1, R2, R, budget, close, retire, spin
from tests.participants.policy_rig import USER, PolicyServer
from tests.participants.test_policy_records import CUT
from tests.participants.test_policy_records_export import read
from tests.participants.test_policy_records_install import Lives, ledger_of

BODY: dict[str, Any] = {
    "messages": [USER],
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "instructions": "be brief",
    "temperature": 0.5,
    "max_tokens": 64,
    "stop": ["END"],
}


@pytest.fixture
async def lives(tmp_path: Path) -> AsyncIterator[Lives]:
    made = Lives(tmp_path)
    yield made
    for server in made.lives:
        await server.end()


async def taken(lives: Lives, *requests: dict[str, Any]) -> list[Record]:
    """A checkpoint of attempt 0 with a call under way for each request; the server crashes then."""
    first = lives.start()
    for request in requests or (BODY,):
        await first.begin(R, **request)
    return await first.checkpoint(R)


async def restored(lives: Lives, *requests: dict[str, Any], **options: Any) -> PolicyServer:
    records = await taken(lives, *requests)
    server = lives.start(**options)
    await server.restore(records)
    server.go.set()
    return server


async def answered(server: PolicyServer, **changes: Any) -> Continuation | None:
    """Make a call of attempt 1 to its end; gives the continuation it got."""
    body = {name: value for name, value in (BODY | changes).items() if value is not None}
    assert (await server.call(R1, **body).end()).status == 200
    return server.given[-1]


# ---- offered ---------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P143")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_the_equal_request_of_its_episode_gets_the_cut(lives: Lives, path: str) -> None:
    """On every path, and a stream as well as a plain call: named are source call and keys."""
    server = await restored(lives)
    source = lives.lives[0].call_ids[0]
    assert (await server.call(R1, path, stream=path.endswith("responses"), **BODY).end()).status == 200
    given = server.given[0]
    assert given is not None
    assert (given.source_capture_key, given.source_call_id) == ("r", source)
    assert given.staging_keys == (f"cuts/r/{source}/{source}-1",)
    evidence = lives.worker.cuts[f"{source}-1"]
    for name in ("prefix_tokens", "prefix_digest", "output_limit", "weight_version", "finish_reason", "stop_reason"):
        assert getattr(given, name) == getattr(evidence, name)


@pytest.mark.behaviour("P143")
async def test_it_rides_in_the_capture_admission_and_that_is_unchanged_without_one(lives: Lives) -> None:
    server = await restored(lives)
    ledger, admissions = ledger_of(server), []
    admit = ledger.admit

    def noted(*args: Any) -> Any:
        admissions.append(admit(*args))
        return admissions[-1]

    setattr(ledger, "admit", noted)  # noqa: B010
    await answered(server)
    await answered(server, temperature=0.25)
    assert [each and each.continuation for each in admissions] == [server.given[0], None]
    assert server.given[0] is not None


@pytest.mark.behaviour("P144")
@pytest.mark.parametrize(
    "change",
    [
        {"messages": [USER, USER]},
        {"tools": None},
        {"tools": []},
        {"instructions": "be long"},
        {"temperature": 0.6},
        {"top_p": 0.9},
        {"max_tokens": 65},
        {"stop": None},
        {"seed": 3},
    ],
)
async def test_another_request_does_not_take_the_cut(lives: Lives, change: dict[str, Any]) -> None:
    server = await restored(lives)
    assert await answered(server, **change) is None
    assert server.counts("restored_cuts") == (1,)
    assert await answered(server) is not None


@pytest.mark.behaviour("P144")
@pytest.mark.parametrize(
    "change", [{"metadata": {"a": 1}}, {"stream": True, "stream_options": {}}, {"user": "me"}, {"request_id": "x"}]
)
async def test_a_request_that_differs_in_what_changes_no_answer_takes_it(lives: Lives, change: dict[str, Any]) -> None:
    assert await answered(await restored(lives), **change) is not None


async def test_another_attempt_or_rollout_is_not_offered_it(lives: Lives) -> None:
    server = await restored(lives)
    for other in (R2, None):
        assert (await server.call(other, **BODY).end()).status == 200
    assert server.given == [None, None]
    assert await answered(server) is not None


@pytest.mark.behaviour("P145")
async def test_another_model_is_not_offered_the_cut_which_stays(lives: Lives) -> None:
    server = await restored(lives)
    server.model = "bigger"
    assert await answered(server) is None
    server.model = "minigym"
    assert await answered(server) is not None


@pytest.mark.behaviour("P145")
async def test_another_service_is_not_offered_the_cut_which_stays(lives: Lives) -> None:
    server = await restored(lives, service="other")
    assert await answered(server) is None
    assert server.counts("restored_cuts") == (1,)
    assert len(read((await server.checkpoint(R1, number=2))[0]).cuts) == 1


@pytest.mark.behaviour("P145")
async def test_a_constrained_call_never_takes_a_cut_which_stays(lives: Lives) -> None:
    """Even one whose digest is that of the cut."""
    body = BODY | {"tool_choice": "required"}
    cut = replace(CUT, request_digest=request_digest(body))
    lives.worker.cuts[cut.cut_id] = cut.evidence
    lives.worker.weights = cut.weight_version
    server = lives.start()
    await server.restore([PolicyModelRecord(R, [], [cut]).to_record()])
    server.go.set()
    assert await answered(server, **body) is None
    assert server.counts("restored_cuts") == (1,)


@pytest.mark.behaviour("P145")
async def test_a_backend_with_older_weights_is_not_offered_the_cut_until_it_has_newer_ones(lives: Lives) -> None:
    """Also ones it got between Restore and Resume."""
    lives.worker.weights = 4
    records = await taken(lives)
    lives.worker.weights = 3
    server = lives.start()
    server.go.set()
    await server.restore(records)
    assert await answered(server) is None
    assert server.counts("restored_cuts") == (1,)
    await close(server.owner, 2)
    lives.worker.weights = 5
    await server.open()
    assert await answered(server) is not None


async def test_weights_that_come_later_are_noticed_after_the_first_refusal(lives: Lives) -> None:
    lives.worker.weights = 4
    records = await taken(lives)
    lives.worker.weights = 3
    server = lives.start()
    server.go.set()
    await server.restore(records)
    lives.worker.weights = 4
    asked = len(lives.worker.asked)
    assert await answered(server) is None
    await spin()
    assert lives.worker.asked[asked:] == ["describe"]
    assert await answered(server) is not None


@pytest.mark.parametrize("lacking", [Capability.CONTINUE, Capability.FINISHED])
async def test_a_backend_that_cannot_go_on_is_not_offered_the_cut(lives: Lives, lacking: Capability) -> None:
    """An unfinished one needs CONTINUE, a finished one FINISHED."""
    first = lives.start()
    await first.begin(R, **BODY)
    first.go.set()
    if lacking is Capability.FINISHED:
        await first.owner.close_admission(Closing("ckpt-1", 1, budget(), ready_within=5.0))
        await spin(20)
        records = await first.export(R)
        assert read(records[0]).cuts[0].finish_reason == "stop"
    else:
        first.go.clear()
        await first.begin(R, **BODY)
        records = await first.checkpoint(R)
    lives.worker.capabilities -= {lacking}
    server = lives.start()
    server.go.set()
    await server.restore(records)
    assert await answered(server) is None
    assert server.counts("restored_cuts") == (1,)


# ---- leased, settled, returned -----------------------------------------------------------------------------------


@pytest.mark.behaviour("P147")
async def test_a_delivered_reply_uses_the_cut_up(lives: Lives) -> None:
    """It is offered no more and exported no more."""
    server = await restored(lives)
    assert await answered(server) is not None
    assert await answered(server) is None
    assert server.counts("restored_cuts") == (0,)
    record = read((await server.checkpoint(R1, number=2))[0])
    assert (len(record.rows), record.cuts) == (2, [])


async def test_of_two_equal_calls_at_once_one_goes_on_and_one_regenerates(lives: Lives) -> None:
    """And different requests have cuts of their own."""
    server = await restored(lives, BODY, BODY | {"seed": 1})
    server.go.clear()
    calls = [await server.begin(R1, **BODY), await server.begin(R1, **BODY), await server.begin(R1, **BODY, seed=1)]
    first, second, third = server.given
    assert (first is None, second, third is None) == (False, None, False)
    assert first != third
    server.go.set()
    await asyncio.gather(*(each.end() for each in calls))
    assert server.counts("restored_cuts") == (0,)


@pytest.mark.behaviour("P148")
async def test_an_undelivered_continued_call_without_a_cut_of_its_own_keeps_the_old_one(lives: Lives) -> None:
    records = await taken(lives)
    old = read(records[0]).cuts
    server = lives.start()
    await server.restore(records)
    server.go.clear()
    running = await server.begin(R1, **BODY)
    lives.worker.silent.add(server.call_ids[-1])
    record = read((await server.checkpoint(R1, number=2, durable=False))[0])
    assert (record.rows, record.cuts) == ([], old)
    await server.open()
    lives.worker.silent.clear()
    newer = read((await server.checkpoint(R1, number=3))[0]).cuts
    assert [cut.source_call_id for cut in newer] == server.call_ids
    await server.open()
    server.go.set()
    await running.end()
    assert server.counts("restored_cuts") == (0,)


@pytest.mark.behaviour("P149")
@pytest.mark.parametrize("end", ["failed", "cancelled", "refused"])
async def test_the_lease_of_a_call_that_was_not_delivered_is_offered_again(lives: Lives, end: str) -> None:
    """The backend failed, the client left, or the handler raised."""
    server = await restored(lives)
    server.go.clear()
    if end == "refused":
        server.ledger, ledger = None, server.ledger
        server.app.routes["/v1/messages"] = raising(server)
        with pytest.raises(RuntimeError):
            await server.call(R1, "/v1/messages", **BODY).end()
        server.ledger = ledger
    else:
        running = await server.begin(R1, **BODY)
        server.fail = True
        if end == "failed":
            server.go.set()
            assert (await running.end()).status == 500
        else:
            running.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running.task
    first = server.given[-1]
    assert first is not None
    assert server.counts("restored_cuts") == (1,)
    server.fail = False
    server.go.set()
    assert await answered(server) == first


def raising(server: PolicyServer) -> Any:
    async def handler(scope: Any, body: bytes) -> Any:
        server.go.set()
        await server.answer(scope, body)
        raise RuntimeError("no")

    return handler


async def test_a_call_that_begins_again_takes_its_own_cut_along(lives: Lives) -> None:
    """Its first backend failed; the lease is returned and taken anew under the new call id."""
    server = await restored(lives)

    async def twice(scope: Any, body: bytes) -> Any:
        server.fail = True
        await server.answer(scope, body)
        server.fail = False
        return await server.answer(scope, body)

    server.app.routes["/v1/chat/completions"] = twice
    assert await answered(server) is not None
    assert server.given[0] == server.given[1]
    assert server.counts("restored_cuts") == (0,)


@pytest.mark.behaviour("P150")
async def test_an_unused_cut_survives_the_next_checkpoint_and_restore(lives: Lives) -> None:
    """Under the next attempt, also when other calls of the attempt were made meanwhile."""
    records = await taken(lives)
    server = lives.start()
    server.go.set()
    await server.restore(records)
    other = [{"role": "user", "content": "other"}]
    assert await answered(server, messages=other) is None
    again = await server.checkpoint(R1, number=2)
    assert read(again[0]).cuts == read(records[0]).cuts
    third = lives.start()
    third.go.set()
    await third.restore(again)
    assert (await third.call(R2, **BODY).end()).status == 200
    assert third.given[0] is not None
    assert third.given[0].source_capture_key == "r"


async def test_a_second_restore_of_the_rollout_takes_the_place_of_what_was_offered(lives: Lives) -> None:
    """In one process: the first replacement ended without asking for its cut."""
    records = await taken(lives)
    server = lives.start()
    server.go.set()
    await server.restore(records)
    assert await answered(server, seed=9) is None
    await close(server.owner, 2)
    await server.owner.activate(await server.owner.stage(records, RestoreScope.plan([R], [2])))
    await server.open()
    assert server.counts("restored_cuts") == (1,)
    assert (await server.call(R2, **BODY).end()).status == 200
    assert server.given[-1] is not None


@pytest.mark.behaviour("P152")
async def test_a_retire_drops_the_cuts_and_refuses_a_claim(lives: Lives) -> None:
    """Also a claim of a call that was admitted before the mark and is still being cancelled."""
    server = await restored(lives)
    go = asyncio.Event()

    async def late(scope: Any, body: bytes) -> Any:
        try:
            await go.wait()
        except asyncio.CancelledError:
            return await server.answer(scope, body)

    server.app.routes["/v1/messages"] = late
    admitted = server.call(R1, "/v1/messages", **BODY)
    await spin()
    await retire(server.owner, server.port, R1)
    await admitted.end()
    assert server.given == [None]
    assert server.counts("restored_cuts") == (0,)
    assert (await server.call(R1, **BODY).end()).code == "STALE_ATTEMPT"


async def test_the_cuts_of_a_finished_rollout_go_at_its_forget(lives: Lives) -> None:
    """Its calls may all have asked for something else; a server lives through many restores."""
    server = await restored(lives)
    await answered(server, seed=1)
    server.owner.forget("r", 0)
    server.owner.forget("s", 1)
    assert server.counts("restored_cuts") == (1,)
    server.owner.forget("r", 1)
    assert server.counts("restored_cuts") == (0,)


async def test_a_retire_of_an_earlier_attempt_leaves_the_cuts(lives: Lives) -> None:
    server = await restored(lives)
    await retire(server.owner, server.port, R)
    assert await answered(server) is not None
