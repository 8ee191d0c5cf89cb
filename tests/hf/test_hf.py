"""A cut generation of a real transformer, continued from its staged tokens, equals the uncut one.

    make test-hf

Needs torch and transformers (the optional extra `hf`) and is never run by CI. The model is random: nothing is
downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gym_ckpt_grpc.capture import AsyncTokenStore, FileTokenStore, StagedCall, fetch
from gym_ckpt_grpc.capture.admission import CaptureAdmission, Coordinates
from gym_ckpt_grpc.control import Continuation, CutEvidence
from tests.hf.tiny_transformer import STOP, VOCABULARY, Decoder, TinyTransformer

LIMIT = 24


@dataclass(frozen=True)
class Reply:
    """What the trainer gets of one call."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    masks: tuple[int, ...]
    finish: str
    weight_version: int


@pytest.fixture(scope="module")
def model() -> TinyTransformer:
    return TinyTransformer()


class Calls:
    """The calls of one rollout over several lives of a worker, on one token store."""

    def __init__(self, directory: Path, seed: int, prompt: Sequence[int]) -> None:
        self.tokens = AsyncTokenStore(FileTokenStore(directory))
        self.seed, self.prompt = seed, tuple(prompt)

    async def begin(self, attempt: int, model: TinyTransformer, source: Continuation | None = None) -> StagedCall:
        key = f"r-a{attempt}" if attempt else "r"
        admission = CaptureAdmission(key, f"call-{attempt}", "text", 1, continuation=source)
        fetched = await fetch(admission, self.tokens)
        prompt = (*fetched.prefix, *fetched.snapshot.ids) if fetched.snapshot else self.prompt
        return StagedCall.begin(
            admission, self.tokens, prompt, fetched=fetched, weight_version=model.weight_version, output_limit=LIMIT
        )

    def decoder(self, call: StagedCall, model: TinyTransformer, *, at_once: bool = False) -> Decoder:
        return Decoder(model, self.seed, self.prompt, call.generated_ids, at_once=at_once)

    async def finish(self, call: StagedCall, decoder: Decoder, model: TinyTransformer) -> Reply:
        advance(call, decoder, model, LIMIT)
        finish = "stop" if call.generated_ids[-1] == STOP else "length"
        return await self.reply(await call.complete(finish))

    async def reply(self, coordinates: Coordinates) -> Reply:
        (record,) = (await self.tokens.get([coordinates.staging_key])).values()
        made = sum(record.masks)
        return Reply(
            tuple(record.ids[-made:]),
            tuple(record.logprobs[-made:]),
            tuple(record.masks),
            coordinates.finish_reason,
            coordinates.weight_version,
        )


def advance(call: StagedCall, decoder: Decoder, model: TinyTransformer, until: int) -> None:
    """Generate up to `until` tokens of the whole reply, or to its end."""
    while len(call.generated_ids) < until and not (call.generated_ids and call.generated_ids[-1] == STOP):
        token, logprob = decoder.next()
        call.add(token, logprob, model.weight_version)


def continuation(attempt: int, cut: CutEvidence) -> Continuation:
    key = f"r-a{attempt}" if attempt else "r"
    return Continuation(
        key,
        f"call-{attempt}",
        cut.staging_keys,
        cut.prefix_tokens,
        cut.prefix_digest,
        cut.output_limit,
        cut.weight_version,
        cut.finish_reason,
        cut.stop_reason,
    )


def prompts(seed: int) -> tuple[int, list[int]]:
    rng = random.Random(seed)
    return rng.randrange(2**32), [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(3, 40))]


async def uncut(directory: Path, model: TinyTransformer, seed: int) -> Reply:
    calls = Calls(directory, *prompts(seed))
    call = await calls.begin(0, model)
    return await calls.finish(call, calls.decoder(call, model), model)


@pytest.mark.parametrize("seed", range(3))
async def test_cut_at_every_token_it_equals_the_uncut_generation(
    model: TinyTransformer, seed: int, tmp_path: Path
) -> None:
    """Ids, masks, finish reason and log-probabilities, to the last bit, with a cache that is filled anew."""
    whole = await uncut(tmp_path / "uncut", model, seed)
    for position in range(len(whole.ids) + 1):
        calls = Calls(tmp_path / str(position), *prompts(seed))
        first = await calls.begin(0, model)
        advance(first, calls.decoder(first, model), model, position)
        cut = await first.cut()
        second = await calls.begin(1, model, continuation(0, cut))
        assert second.reused == position
        again = await calls.finish(second, calls.decoder(second, model), model)
        assert again == whole, position


async def test_a_cut_of_a_cut_equals_it_too(model: TinyTransformer, tmp_path: Path) -> None:
    whole = await uncut(tmp_path / "uncut", model, 7)
    calls = Calls(tmp_path / "cut", *prompts(7))
    source: Continuation | None = None
    for attempt, position in enumerate((4, 9, 17)):
        call = await calls.begin(attempt, model, source)
        advance(call, calls.decoder(call, model), model, position)
        source = continuation(attempt, await call.cut())
    last = await calls.begin(3, model, source)
    assert (last.reused, await calls.finish(last, calls.decoder(last, model), model)) == (17, whole)


async def test_a_cache_that_is_filled_in_one_pass_gives_the_same_tokens(model: TinyTransformer, tmp_path: Path) -> None:
    """Other shapes round differently: the log-probabilities agree to 1e-4, and the choice of every token."""
    whole = await uncut(tmp_path / "uncut", model, 11)
    calls = Calls(tmp_path / "cut", *prompts(11))
    first = await calls.begin(0, model)
    advance(first, calls.decoder(first, model), model, 8)
    second = await calls.begin(1, model, continuation(0, await first.cut()))
    again = await calls.finish(second, calls.decoder(second, model, at_once=True), model)
    assert (again.ids, again.masks, again.finish) == (whole.ids, whole.masks, whole.finish)
    assert again.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_new_weights_change_what_follows_and_the_oldest_is_stamped(tmp_path: Path) -> None:
    old, new = TinyTransformer(1), TinyTransformer(2)
    whole = await uncut(tmp_path / "uncut", old, 3)
    calls = Calls(tmp_path / "cut", *prompts(3))
    first = await calls.begin(0, old)
    advance(first, calls.decoder(first, old), old, 6)
    second = await calls.begin(1, new, continuation(0, await first.cut()))
    again = await calls.finish(second, calls.decoder(second, new), new)
    assert (again.ids[:6], again.ids != whole.ids, again.weight_version) == (whole.ids[:6], True, 1)


async def test_without_the_cut_everything_is_generated_again(model: TinyTransformer, tmp_path: Path) -> None:
    """What a cut is worth: the same reply, at the cost of every token."""
    whole = await uncut(tmp_path / "uncut", model, 5)
    calls = Calls(tmp_path / "again", *prompts(5))
    call = await calls.begin(1, model)
    assert (call.reused, await calls.finish(call, calls.decoder(call, model), model)) == (0, whole)
