"""Token staging of one call: what is refused, and what a cut holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gym_ckpt_grpc.capture import (
    AsyncTokenStore,
    CaptureAdmission,
    Fetched,
    StagedCall,
    fetch,
    finished_cut,
    tokens_digest,
)
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateNotFound, UsageError
from tests.capture.staging_rig import (
    LIMIT,
    PROMPT,
    MemoryTokenStore,
    again,
    begin,
    child,
    continuation,
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


def fields(caught: pytest.ExceptionInfo[InvalidArgument]) -> list[str]:
    """The fields that a refusal names, without the name of the object."""
    return [violation.field.removeprefix("admission.") for violation in caught.value.violations]


# ---- begin


Lacking = Callable[[CaptureAdmission], CaptureAdmission]
LACKS: list[tuple[str, Lacking]] = [
    ("parent_id", lambda a: replace(a, parent_id="")),
    ("parent_chain_hash", lambda a: replace(a, parent_chain_hash="")),
    ("staging_chain", lambda a: replace(a, staging_chain=())),
    ("previous_length", lambda a: replace(a, previous_length=0)),
]
EXTRAS: list[tuple[str, Lacking]] = [
    ("parent_id", lambda a: replace(a, parent_id="c0")),
    ("parent_chain_hash", lambda a: replace(a, parent_chain_hash="0" * 64)),
    ("staging_chain", lambda a: replace(a, staging_chain=("r1/c0",))),
    ("previous_length", lambda a: replace(a, previous_length=1)),
    ("prefix_ids", lambda a: replace(a, prefix_ids=())),
]


@pytest.mark.behaviour("P258")
@pytest.mark.parametrize(("field", "without"), LACKS)
async def test_token_in_needs_its_parent(tokens: AsyncTokenStore, field: str, without: Lacking) -> None:
    parent = await whole(root(), tokens, 4)
    admission = child(parent)
    fetched = await fetch(admission, tokens)
    prompt = (*fetched.prefix, 9)
    StagedCall.begin(admission, tokens, prompt, fetched=fetched, weight_version=1, output_limit=5)
    with pytest.raises(InvalidArgument) as caught:
        StagedCall.begin(without(admission), tokens, prompt, fetched=fetched, weight_version=1, output_limit=5)
    assert fields(caught) == [field]
    with pytest.raises(InvalidArgument) as caught:
        await fetch(without(admission), tokens)
    assert fields(caught) == [field]


@pytest.mark.behaviour("P258")
@pytest.mark.parametrize(("field", "given"), EXTRAS)
async def test_text_has_no_parent(tokens: AsyncTokenStore, field: str, given: Lacking) -> None:
    with pytest.raises(InvalidArgument) as caught:
        StagedCall.begin(given(root()), tokens, PROMPT, fetched=Fetched(), weight_version=1, output_limit=5)
    assert fields(caught) == [field]


@pytest.mark.behaviour("P258")
async def test_begin_names_bad_numbers_together(tokens: AsyncTokenStore) -> None:
    with pytest.raises(InvalidArgument) as caught:
        StagedCall.begin(root(), tokens, [1, -1], fetched=Fetched(), weight_version=-1, output_limit=0)
    assert fields(caught) == ["weight_version", "output_limit", "prompt_ids"]


@pytest.mark.behaviour("P259")
async def test_a_prefix_is_as_declared(tokens: AsyncTokenStore) -> None:
    """Length, chain hash, inline ids and the prompt agree with what the staging chain holds."""
    parent = await whole(root(), tokens, 4)
    grand = child(await whole(child(parent), tokens, 2, suffix=(8,)), "c3")
    prefix = (*PROMPT, *ids(4), 8, *ids(2))
    assert (await fetch(grand, tokens)).prefix == prefix
    assert (await fetch(replace(grand, prefix_ids=prefix), tokens)).prefix == prefix
    assert (await fetch(replace(grand, prefix_ids=prefix, staging_chain=()), tokens)).prefix == prefix
    other = (*prefix[:-1], 7)
    breaches: list[tuple[str, dict[str, Any]]] = [
        ("previous_length", {"previous_length": 9}),
        ("parent_chain_hash", {"parent_chain_hash": "1" * 64}),
        ("prefix_ids", {"prefix_ids": other}),
        ("prefix_ids", {"prefix_ids": prefix[:-1]}),
        ("previous_length", {"staging_chain": grand.staging_chain[:1]}),
        ("staging_chain[0]", {"staging_chain": grand.staging_chain[1:]}),
    ]
    for field, changes in breaches:
        with pytest.raises(InvalidArgument) as caught:
            await fetch(replace(grand, **changes), tokens)
        assert fields(caught) == [field], changes


@pytest.mark.behaviour("P259")
async def test_begin_checks_the_prefix_that_it_is_given(tokens: AsyncTokenStore) -> None:
    parent = await whole(root(), tokens, 4)
    admission = child(parent)
    prefix = (await fetch(admission, tokens)).prefix

    def refused(admission: CaptureAdmission, prefix: tuple[int, ...], prompt: Sequence[int]) -> list[str]:
        with pytest.raises(InvalidArgument) as caught:
            StagedCall.begin(admission, tokens, prompt, fetched=Fetched(prefix), weight_version=1, output_limit=LIMIT)
        return fields(caught)

    assert refused(admission, prefix[:-1], (*prefix, 9)) == ["previous_length"]
    assert refused(admission, prefix, (*prefix[:-1], 1, 9)) == ["prefix_ids"]
    assert refused(admission, prefix, prefix[:-1]) == ["prefix_ids"]
    assert refused(replace(admission, prefix_ids=(*prefix[:-1], 1)), prefix, (*prefix, 9)) == ["prefix_ids"]


async def test_a_chain_whose_key_is_gone_is_not_found(tokens: AsyncTokenStore, store: MemoryTokenStore) -> None:
    parent = await whole(root(), tokens, 4)
    store.delete([parent.staging_key])
    with pytest.raises(StateNotFound, match="r1/c1"):
        await fetch(child(parent), tokens)


# ---- continuations


async def cut_call(
    tokens: AsyncTokenStore, admission: CaptureAdmission, count: int = 4, *, weights: int = 1
) -> CaptureAdmission:
    """Cut a call after so many tokens; the admission that continues it."""
    call = await begin(admission, tokens, weights=weights)
    generate(call, count, weights=weights)
    return again(admission, await call.cut())


@pytest.mark.behaviour("P260")
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("continuation.source_capture_key", {"source_capture_key": "r2"}),
        ("continuation.source_call_id", {"source_call_id": "c9"}),
        ("continuation.prefix_tokens", {"prefix_tokens": 3}),
        ("continuation.prefix_digest", {"prefix_digest": "0" * 64}),
        ("continuation.weight_version", {"weight_version": 0}),
        ("continuation.output_limit", {"output_limit": 19}),
        ("continuation.finish_reason", {"finish_reason": "stop"}),
    ],
)
async def test_a_continuation_agrees_with_its_cut(
    tokens: AsyncTokenStore, store: MemoryTokenStore, field: str, change: dict[str, Any]
) -> None:
    """One refusal, of the caller: nothing is staged, and the same call can begin afterwards as it should have."""
    admission = await cut_call(tokens, root())
    assert admission.continuation is not None
    staged = dict(store.records)
    with pytest.raises(InvalidArgument) as caught:
        await begin(replace(admission, continuation=replace(admission.continuation, **change)), tokens)
    assert fields(caught) == [field]
    assert store.records == staged
    call = await begin(admission, tokens)
    generate(call, 1)
    assert (await call.complete("stop")).capture_failed == ""


@pytest.mark.behaviour("P260")
async def test_a_continuation_agrees_with_its_admission(tokens: AsyncTokenStore) -> None:
    """Parent, previous length and mode are those of the call that was cut; the limit is the cut's."""
    parent = await whole(root(), tokens, 4)
    admission = await cut_call(tokens, child(parent))
    fetched = await fetch(admission, tokens)
    assert fetched.snapshot is not None
    other = await whole(root("c7"), tokens, 3)
    wrong_parent = replace(
        admission, parent_id="c7", previous_length=other.total_length, parent_chain_hash=other.chain_hash
    )
    as_text = replace(root("c8"), continuation=admission.continuation)
    for wrong, prefix, expected in (
        (wrong_parent, (*PROMPT, *ids(3)), ["parent_id", "previous_length"]),
        (as_text, (), ["parent_id", "previous_length", "mode"]),
    ):
        with pytest.raises(InvalidArgument) as caught:
            StagedCall.begin(
                wrong,
                tokens,
                (*prefix, *fetched.snapshot.ids),
                fetched=Fetched(prefix, fetched.snapshot),
                weight_version=1,
                output_limit=LIMIT,
            )
        assert fields(caught) == expected
    with pytest.raises(InvalidArgument) as caught:
        await begin(admission, tokens, limit=LIMIT + 1)
    assert fields(caught) == ["output_limit"]


@pytest.mark.behaviour("P260")
async def test_a_continuation_and_its_keys(tokens: AsyncTokenStore) -> None:
    """The fetched cut is there exactly if the admission has one, and its records are those named."""
    admission = await cut_call(tokens, root())
    fetched = await fetch(admission, tokens)
    assert fetched.snapshot is not None
    prompt = fetched.snapshot.ids
    assert admission.continuation is not None
    elsewhere = replace(admission.continuation, staging_keys=("cuts/r1/c1/gone",))
    for wrong, given, expected in (
        (admission, Fetched(), "continuation"),
        (admission.fresh(), fetched, "continuation"),
        (replace(admission, continuation=elsewhere), fetched, "continuation.staging_keys"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            StagedCall.begin(wrong, tokens, prompt, fetched=given, weight_version=1, output_limit=LIMIT)
        assert fields(caught) == [expected]
    with pytest.raises(InvalidArgument) as caught:
        StagedCall.begin(admission, tokens, prompt[:-1], fetched=fetched, weight_version=1, output_limit=LIMIT)
    assert fields(caught) == ["continuation"]


@pytest.mark.behaviour("P260")
async def test_a_cut_of_newer_weights_is_not_continued(tokens: AsyncTokenStore) -> None:
    admission = await cut_call(tokens, root(), weights=5)
    with pytest.raises(InvalidArgument) as caught:
        await begin(admission, tokens, weights=4)
    assert fields(caught) == ["continuation.weight_version"]
    assert (await begin(admission, tokens, weights=5)).weight_version == 5


async def test_a_cut_that_is_gone_can_be_generated_anew(tokens: AsyncTokenStore, store: MemoryTokenStore) -> None:
    admission = await cut_call(tokens, root())
    assert admission.continuation is not None
    store.delete(admission.continuation.staging_keys)
    assert (await fetch(admission, tokens)).snapshot is None
    with pytest.raises(InvalidArgument):
        await begin(admission, tokens)
    assert (await begin(admission.fresh(), tokens)).reused == 0


async def test_records_that_do_not_join_are_corrupt(tokens: AsyncTokenStore, store: MemoryTokenStore) -> None:
    """Two cuts of one call are no chunks of one another."""
    call = await begin(root(), tokens)
    generate(call, 2)
    first, second = await call.cut(), await call.cut()
    keys = (*first.staging_keys, *second.staging_keys)
    admission = replace(root("c2"), continuation=continuation(root(), first, staging_keys=keys))
    with pytest.raises(StateCorrupt, match=second.cut_id):
        await fetch(admission, tokens)


# ---- cuts


@pytest.mark.behaviour("P261", "P159")
@pytest.mark.parametrize("parent", [False, True])
async def test_a_call_that_was_cut_completes_as_if_it_never_had_been(tokens: AsyncTokenStore, parent: bool) -> None:
    admission = root()
    if parent:
        admission = child(await whole(root("c0"), tokens, 3))
    uncut = await begin(admission, tokens, suffix=(21, 22))
    generate(uncut, 6)
    expected = await uncut.complete("length", "limit")
    call = await begin(admission, tokens, suffix=(21, 22))
    for count in range(6):
        evidence = await call.cut()
        assert evidence.prefix_tokens == count
        generate(call, 1)
    assert call.prefix_record("late").ids == (21, 22, *ids(6))
    assert await call.complete("length", "limit") == expected


@pytest.mark.behaviour("P261")
async def test_what_a_cut_holds(tokens: AsyncTokenStore, store: MemoryTokenStore) -> None:
    """The delta from the previous length: prompt and generated tokens, with their masks and log-probabilities."""
    parent = await whole(root(), tokens, 4)
    call = await begin(child(parent), tokens, suffix=(21, 22), weights=7)
    generate(call, 2, weights=7)
    evidence = await call.cut()
    (key,) = evidence.staging_keys
    assert key == f"cuts/r1/c2/{evidence.cut_id}"
    record = store.records[key]
    assert (record.previous_length, record.ids, record.masks) == (7, (21, 22, 100, 101), (0, 0, 1, 1))
    assert record.logprobs == (0.0, 0.0, token(0)[1], token(1)[1])
    assert record.cumulative_hash == tokens_digest((*PROMPT, *ids(4), 21, 22, 100, 101))
    assert (evidence.prefix_tokens, evidence.prefix_digest) == (2, tokens_digest((100, 101)))
    assert (evidence.weight_version, evidence.output_limit, evidence.finish_reason) == (7, LIMIT, "")


@pytest.mark.behaviour("P262", "P160")
@pytest.mark.parametrize("first", [0, 1, 5])
async def test_a_cut_of_a_continued_call_is_cumulative(tokens: AsyncTokenStore, first: int) -> None:
    """It holds the tokens of the first cut and the new ones, is stamped with the older weights, and continues."""
    parent = await whole(root("c0"), tokens, 3)
    original = child(parent, "c1")
    uncut = await begin(original, tokens)
    generate(uncut, 9)
    expected = await uncut.complete("stop")

    one = await cut_call(tokens, original, first, weights=1)
    call = await begin(one, tokens, weights=2)
    assert (call.reused, call.generated_ids) == (first, ids(first))
    generate(call, 2, weights=2)
    evidence = await call.cut()
    assert (evidence.prefix_tokens, evidence.prefix_digest) == (first + 2, tokens_digest(ids(first + 2)))
    assert evidence.weight_version == 1

    two = replace(again(one, evidence), capture_key="r1-a2")
    call = await begin(two, tokens, weights=3)
    generate(call, 9 - first - 2, weights=3)
    ended = await call.complete("stop")
    same = ("staging_digest", "chain_hash", "cumulative_hash", "added_length", "total_length", "prefix_digest")
    assert [getattr(ended, name) for name in same] == [getattr(expected, name) for name in same]
    assert (ended.weight_version, ended.staging_key) == (1, "r1-a2/c1xx")
    (whole_record, cut_record) = (await tokens.get([expected.staging_key, ended.staging_key])).values()
    assert (whole_record.logprobs, whole_record.masks) == (cut_record.logprobs, cut_record.masks)


async def test_a_finished_cut_is_completed_without_a_token(tokens: AsyncTokenStore) -> None:
    done = await whole(root(), tokens, 5)
    call = await begin(again(root(), finished_cut(done)), tokens, weights=4)
    assert call.generated_ids == ids(5)
    ended = await call.complete("stop")
    assert (ended.chain_hash, ended.prefix_tokens, ended.weight_version) == (done.chain_hash, 5, 1)


async def test_the_tokens_stay_within_the_output_limit(tokens: AsyncTokenStore) -> None:
    call = await begin(root(), tokens, limit=2)
    generate(call, 2)
    with pytest.raises(UsageError, match="all its 2 tokens"):
        call.add(1, -1.0, 1)
    for wrong in ((-1, -1.0, 1), (2**32, -1.0, 1), (1, float("nan"), 1), (1, -1.0, -1)):
        with pytest.raises(ValueError, match="log-probability"):
            (await begin(root(), tokens)).add(*wrong)
