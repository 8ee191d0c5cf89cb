"""Token staging of one call: chunks of it, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gym_ckpt_grpc.capture import (
    AsyncTokenStore,
    TokenRecord,
    cut_evidence,
    finished_cut,
    staging,
)
from gym_ckpt_grpc.capture.token_records import build
from gym_ckpt_grpc.protocol.errors import StateUnwritable, UsageError
from tests.capture.staging_rig import (
    PROMPT,
    MemoryTokenStore,
    again,
    begin,
    child,
    generate,
    ids,
    root,
    token,
    whole,
)


@pytest.fixture
def store() -> MemoryTokenStore:
    return MemoryTokenStore()


@pytest.fixture
async def tokens(store: MemoryTokenStore) -> AsyncIterator[AsyncTokenStore]:
    tokens = AsyncTokenStore(store)
    yield tokens
    await tokens.close()


# ---- chunks


@pytest.mark.behaviour("P263")
async def test_a_chunk_needs_tokens_and_as_many_log_probabilities(tokens: AsyncTokenStore) -> None:
    call = await begin(root(), tokens)
    first = call.prefix_record("p1")
    with pytest.raises(ValueError, match="at least one token"):
        call.chunk_record("k1", [], [], weight_version=1, after=[first])
    for logprobs in ([], [-1.0], [-1.0] * 3):
        with pytest.raises(ValueError, match="2 tokens and"):
            call.chunk_record("k1", [1, 2], logprobs, weight_version=1, after=[first])
    with pytest.raises(UsageError, match="follows"):
        call.chunk_record("k1", [1], [-1.0], weight_version=1)


@pytest.mark.behaviour("P263")
async def test_chunks_join_to_what_one_record_would_hold(tokens: AsyncTokenStore) -> None:
    """Masks of 1, hashes over all that came before; a cut of chunks is continued like any other."""
    call = await begin(root(), tokens)
    records = [call.prefix_record("p0")]
    for name in ("k1", "k2"):
        new = [token(len(call.generated_ids) + i) for i in range(2)]
        chunk = call.chunk_record(name, [t for t, _ in new], [p for _, p in new], weight_version=1, after=records)
        generate(call, 2)
        assert (chunk.masks, chunk.previous_length) == ((1, 1), len(PROMPT) + len(call.generated_ids) - 2)
        records.append(chunk)
    joined = call.prefix_record("all")
    assert records[-1].cumulative_hash == joined.cumulative_hash
    evidence = cut_evidence(records)
    assert (evidence.cut_id, evidence.prefix_tokens) == ("k2", 4)
    assert evidence.prefix_digest == cut_evidence([joined]).prefix_digest
    await tokens.put(records)
    continued = await begin(again(root(), evidence), tokens)
    assert continued.generated_ids == ids(4)
    chunk = continued.chunk_record("k3", [104], [-1.0], weight_version=1)
    assert chunk.previous_length == len(PROMPT) + 4


# ---- the end


async def test_a_cut_is_stored_while_others_are_built(
    store: MemoryTokenStore, tokens: AsyncTokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a sweep whose time is too short for all of them has the first ones."""
    stored, real = threading.Event(), store.put
    others: list[bool] = []

    def put(records: Sequence[TokenRecord]) -> None:
        real(records)
        stored.set()

    def slow(**fields: Any) -> TokenRecord:
        if fields["call_id"] != "c0":
            others.append(stored.wait(5))
        return build(**fields)

    monkeypatch.setattr(store, "put", put)
    monkeypatch.setattr(staging, "build", slow)
    calls = [await begin(root(f"c{number}"), tokens) for number in range(4)]
    await asyncio.gather(*(call.cut() for call in calls))
    assert others == [True] * 3


async def test_records_are_built_beside_the_event_loop(
    tokens: AsyncTokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing a long context takes milliseconds, and a sweep cuts every call of a worker at one moment."""
    built: list[bool] = []

    def watched(**fields: Any) -> TokenRecord:
        built.append(threading.current_thread() is threading.main_thread())
        return build(**fields)

    monkeypatch.setattr(staging, "build", watched)
    call = await begin(root(), tokens)
    generate(call, 2)
    cutting = asyncio.create_task(call.cut())
    await asyncio.sleep(0)
    generate(call, 3)
    assert (await cutting).prefix_tokens == 2
    assert (await call.complete("stop")).prefix_tokens == 5
    assert built == [False, False]


@pytest.mark.behaviour("P264")
async def test_a_call_ends_once(tokens: AsyncTokenStore) -> None:
    """Also when two ends are asked for side by side."""
    call = await begin(root(), tokens)
    generate(call, 1)
    answers = await asyncio.gather(call.complete("stop"), call.complete("length"), return_exceptions=True)
    assert [type(answer).__name__ for answer in answers] == ["Coordinates", "UsageError"]
    assert call.coordinates is answers[0]
    for late in (call.complete("stop"), asyncio.to_thread(call.fail, "late"), asyncio.to_thread(generate, call, 1)):
        with pytest.raises(UsageError, match="completed"):
            await late
    failed = await begin(root(), tokens)
    failed.fail("the engine lost it")
    with pytest.raises(UsageError, match="failed"):
        await failed.complete("stop")


@pytest.mark.behaviour("P264")
@pytest.mark.parametrize("error", [StateUnwritable("the disk is full"), RuntimeError("secret text")])
async def test_a_completion_that_cannot_be_stored_is_delivered(
    tokens: AsyncTokenStore, store: MemoryTokenStore, error: Exception
) -> None:
    """Its coordinates say why and have an empty delta; there is nothing left to cut."""
    parent = await whole(root(), tokens, 4)
    call = await begin(child(parent), tokens)
    generate(call, 3)
    store.broken = error
    ended = await call.complete("stop")
    assert ended.capture_failed == (
        "the disk is full" if isinstance(error, StateUnwritable) else "unexpected RuntimeError"
    )
    assert (ended.staging_key, ended.staging_chain, ended.added_length) == ("", (), 0)
    assert (ended.previous_length, ended.total_length, ended.finish_reason) == (7, 7, "stop")
    with pytest.raises(UsageError, match="not captured"):
        await call.cut()
    with pytest.raises(ValueError, match="not captured"):
        finished_cut(ended)


@pytest.mark.behaviour("P264")
async def test_a_completion_that_cannot_be_built_is_delivered(tokens: AsyncTokenStore) -> None:
    call = await begin(root(), tokens)
    generate(call, 3)
    ended = await call.complete("abort")
    assert "abort" in ended.capture_failed
    assert (ended.added_length, ended.prefix_tokens) == (0, 0)


@pytest.mark.behaviour("P264")
async def test_a_failed_call_says_why(tokens: AsyncTokenStore, store: MemoryTokenStore) -> None:
    call = await begin(root(), tokens)
    generate(call, 3)
    ended = call.fail("the engine lost it")
    assert (ended.capture_failed, ended.staging_key, ended.added_length) == ("the engine lost it", "", 0)
    assert store.records == {}


class SlowStore(MemoryTokenStore):
    """A store whose puts wait, in their thread, until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go = threading.Event()

    def put(self, records: Sequence[TokenRecord]) -> None:
        self.entered.set()
        assert self.go.wait(10)
        super().put(records)


@pytest.mark.behaviour("P265", "P158")
@pytest.mark.parametrize("cut", [False, True])
async def test_nothing_is_said_before_it_is_durable(cut: bool) -> None:
    store = SlowStore()
    tokens = AsyncTokenStore(store)
    call = await begin(root(), tokens)
    generate(call, 3)
    answer: asyncio.Task[Any] = asyncio.create_task(call.cut() if cut else call.complete("stop"))
    await asyncio.to_thread(store.entered.wait, 10)
    assert not answer.done()
    assert call.coordinates is None
    store.go.set()
    await answer
    assert len(store.records) == 1
    await tokens.close()


@pytest.mark.behaviour("P157")
async def test_a_cut_while_a_call_completes_is_its_completion() -> None:
    """It waits for it: a prefix that has the last token but no finish reason would be continued for nothing."""
    store = SlowStore()
    tokens = AsyncTokenStore(store)
    call = await begin(root(), tokens)
    generate(call, 3)
    completion = asyncio.create_task(call.complete("stop"))
    await asyncio.to_thread(store.entered.wait, 10)
    cut = asyncio.create_task(call.cut())
    await asyncio.sleep(0)
    assert not cut.done()
    store.go.set()
    assert await cut == finished_cut(await completion)
    assert list(store.records) == ["r1/c1"]
    await tokens.close()


async def test_a_cancelled_cut_leaves_no_record() -> None:
    """Nobody was told of it, so nobody would ever give it up."""
    store = SlowStore()
    tokens = AsyncTokenStore(store)
    call = await begin(root(), tokens)
    answer = asyncio.create_task(call.cut())
    await asyncio.to_thread(store.entered.wait, 10)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    store.go.set()
    await tokens.close()
    assert (len(store.puts), store.records) == (1, {})


async def test_a_cut_has_the_tokens_of_the_moment_it_was_asked_for(
    tokens: AsyncTokenStore, store: MemoryTokenStore
) -> None:
    """Its record is built in a thread, beside a generation that goes on."""
    call = await begin(root(), tokens)
    generate(call, 3)
    go = threading.Event()

    def slow() -> TokenRecord:
        assert go.wait(10)
        return call.prefix_record("other")

    busy = asyncio.create_task(tokens.build(slow))
    await asyncio.sleep(0)
    cut = asyncio.create_task(call.cut())
    await asyncio.sleep(0)
    generate(call, 2)
    go.set()
    evidence = await cut
    assert (await busy).generated_ids == ids(5)
    assert evidence.prefix_tokens == 3
    assert store.records[evidence.staging_keys[0]].ids == (*PROMPT, *ids(3))
    assert call.generated_ids == ids(5)
