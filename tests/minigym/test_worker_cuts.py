"""Cut anywhere and continued, a captured generation is the uncut one; a cut changes nothing of what goes on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.capture import CaptureAdmission
from gym_ckpt_grpc.control import CallIdentity, CutDisposition
from gym_ckpt_grpc.minigym.inference_worker import InferenceWorker
from gym_ckpt_grpc.minigym.token_context import following_ids
from gym_ckpt_grpc.minigym.worker_calls import WorkerCall
from gym_ckpt_grpc.protocol import EpisodeId
from tests.minigym.workers import (
    MESSAGES,
    ROLLOUT,
    child,
    continuing,
    cut,
    generate,
    go_on_until,
    request,
    root,
    run_until,
    running_worker,
    staged_record,
    told,
)


class _Rounds:
    """Calls of one worker that end in the middle, and others that go on from there."""

    def __init__(self, worker: InferenceWorker, directory: Path) -> None:
        self.worker = worker
        self._directory = directory
        self._numbers = iter(range(10_000))

    async def cut_at(self, admission: CaptureAdmission, tokens: int, **changes: Any) -> WorkerCall:
        """A call that was cut once it had so many tokens, and then was lost."""
        call = await self.worker.begin(request(admission, **changes))
        running = await run_until(self.worker, call, tokens)
        evidence = await cut(self.worker, call)
        running.cancel()
        self.worker.controls.release(None)
        assert evidence.prefix_tokens == tokens
        self.last_cut = continuing(call, evidence)
        return call

    async def finish(self, **changes: Any) -> tuple[WorkerCall, dict[str, Any]]:
        """The call that continues the last cut, in the next attempt."""
        admission = root(f"next-{next(self._numbers)}", attempt=1, continuation=self.last_cut)
        call = await generate(self.worker, admission, **changes)
        return call, told(call, self._directory)


@asynccontextmanager
async def _rounds(directory: Path) -> AsyncIterator[_Rounds]:
    async with running_worker(directory) as worker:
        yield _Rounds(worker, directory)


@pytest.mark.behaviour("P320")
@pytest.mark.parametrize(
    "changes",
    [{}, {"max_tokens": 13}, {"temperature": 0.4, "top_p": 0.8}, {"stop": ["the"]}, {"seed": None}],
    ids=["plain", "limit", "sampling", "stop text", "seed of the rollout"],
)
async def test_for_every_position_cut_and_continued_equals_uncut(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Ids, text, masks, log-probabilities, finish reason; and what is staged of them, hashes included."""
    async with _rounds(tmp_path) as rounds:
        whole = told(await generate(rounds.worker, root("whole"), **changes), tmp_path)
        last = len(whole["ids"])
        for position in range(last):
            await rounds.cut_at(root(f"c{position}"), position, **changes)
            call, found = await rounds.finish(**changes)
            assert found == whole, position
            assert (call.reused, call.made) == (position, last - position)


@pytest.mark.behaviour("P320", "P146")
async def test_behind_the_last_token_the_finished_reply_is_given_again_and_nothing_is_made(tmp_path: Path) -> None:
    async with _rounds(tmp_path) as rounds:
        whole = await generate(rounds.worker, root("whole"))
        evidence = await cut(rounds.worker, whole)
        assert (evidence.finish_reason, evidence.prefix_tokens) == ("stop", len(whole.generations[0].ids))
        rounds.last_cut = continuing(whole, evidence)
        rounds.worker.engine.decode_once = _never  # type: ignore[method-assign]
        call, found = await rounds.finish()
    assert found == told(whole, tmp_path)
    assert (call.made, call.reused) == (0, evidence.prefix_tokens)


def _never() -> bool:
    raise AssertionError("a finished cut is answered without a tick of the engine")


@pytest.mark.behaviour("P320")
async def test_a_later_turn_is_continued_behind_the_tokens_of_its_parent(tmp_path: Path) -> None:
    """Mode token_in: the prompt begins with exactly the parent's sequence, cut and continued or not."""
    async with _rounds(tmp_path) as rounds:
        first = await generate(rounds.worker, root("first"))
        assert first.coordinates is not None
        messages = [*MESSAGES, first.message(0), {"role": "tool", "tool_call_id": "c", "content": "1"}]
        whole = await generate(rounds.worker, child("whole", first.coordinates), messages=messages)
        expected = told(whole, tmp_path)
        assert whole.coordinates is not None
        assert whole.coordinates.previous_length == first.coordinates.total_length
        suffix = following_ids(messages)
        assert expected["staged"][0] == (*suffix, *expected["ids"])
        assert expected["staged"][1] == (0,) * len(suffix) + (1,) * len(expected["ids"])
        assert whole.coordinates.staging_chain == (*first.coordinates.staging_chain, whole.coordinates.staging_key)
        for position in (0, 1, 7, len(expected["ids"]) - 1):
            await rounds.cut_at(child(f"c{position}", first.coordinates), position, messages=messages)
            admission = replace(child(f"next-{position}", first.coordinates), continuation=rounds.last_cut)
            call = await generate(rounds.worker, admission, messages=messages)
            assert told(call, tmp_path) == expected
            assert call.reused == position


@pytest.mark.behaviour("P319")
async def test_the_next_attempt_makes_the_tokens_that_this_one_would_have(tmp_path: Path) -> None:
    """Without a seed of its own, a request has the rollout's: nothing of the attempt is in it."""
    async with running_worker(tmp_path) as worker:
        replies = [
            (await generate(worker, root(f"a{attempt}", attempt=attempt), seed=None)).generations[0].ids
            for attempt in range(3)
        ]
        other = await generate(worker, None, seed=None, rollout_id="6-0")
    assert replies[0] == replies[1] == replies[2] != other.generations[0].ids


@pytest.mark.behaviour("P321")
async def test_a_cut_of_a_continued_generation_continued_again_equals_the_uncut_one(tmp_path: Path) -> None:
    async with _rounds(tmp_path) as rounds:
        whole = told(await generate(rounds.worker, root("whole")), tmp_path)
        last = len(whole["ids"]) - 1
        for first, second, third in ((0, 0, 1), (3, 3, 3), (1, 8, last), (5, last, last)):
            await rounds.cut_at(root(f"a{first}.{second}"), first)
            for attempt, position in ((1, second), (2, third)):
                admission = root(f"b{first}.{attempt}.{position}", attempt=attempt, continuation=rounds.last_cut)
                await rounds.cut_at(admission, position)
            call, found = await rounds.finish()
            assert found == whole, (first, second, third)
            assert call.reused == third


@pytest.mark.behaviour("P322")
async def test_new_weights_change_what_follows_and_the_record_has_the_oldest(tmp_path: Path) -> None:
    async with _rounds(tmp_path) as rounds:
        rounds.worker.weight_version = 3
        old = told(await generate(rounds.worker, root("old")), tmp_path)
        await rounds.cut_at(root("cut"), 9)
        rounds.worker.weight_version = 5
        call, found = await rounds.finish()
        new = told(await generate(rounds.worker, root("new")), tmp_path)
    assert found["ids"][:9] == old["ids"][:9]
    assert found["ids"][9:] not in (old["ids"][9:], new["ids"][9:])
    assert new["ids"] != old["ids"]
    assert call.coordinates is not None
    assert call.coordinates.weight_version == call.generations[0].weight_version == 3
    assert staged_record(tmp_path, call.coordinates.staging_key).weight_version == 3


@pytest.mark.behaviour("P159")
async def test_a_cut_changes_nothing_of_the_running_generation(tmp_path: Path) -> None:
    """Cut at every token on its way, a call ends as one that never was, and each cut could be continued."""
    async with running_worker(tmp_path) as worker:
        whole = told(await generate(worker, root("whole")), tmp_path)
        call = await worker.begin(request(root("often")))
        running = await run_until(worker, call, 0)
        found = []
        for position in range(len(whole["ids"])):
            await go_on_until(worker, call, position)
            found.append((await cut(worker, call)).prefix_tokens)
        worker.controls.release(None)
        await running
    assert found == list(range(len(whole["ids"])))
    assert told(call, tmp_path) == whole


@pytest.mark.behaviour("P160")
async def test_a_repeated_sweep_gives_equal_or_later_cuts(tmp_path: Path) -> None:
    async with _rounds(tmp_path) as rounds:
        whole = told(await generate(rounds.worker, root("whole")), tmp_path)
        call = await rounds.worker.begin(request(root("swept")))
        running = await run_until(rounds.worker, call, 4)
        cuts = [await cut(rounds.worker, call) for _ in range(2)]
        rounds.worker.controls.release(None)
        await running
        cuts.append(await cut(rounds.worker, call))
        assert [each.prefix_tokens for each in cuts] == [4, 4, len(whole["ids"])]
        for each in cuts:
            rounds.last_cut = continuing(call, each)
            assert (await rounds.finish())[1] == whole


async def test_calls_that_cannot_be_cut_say_why(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as worker:
        plain = await worker.begin(request(None))
        captured = await worker.begin(request(root("mine")))
        here, elsewhere = EpisodeId(ROLLOUT, 0), EpisodeId("other", 0)

        async def ask(call_id: str, episode: EpisodeId) -> tuple[CutDisposition, str]:
            outcome = await worker.cuts.cut(CallIdentity("t", episode, call_id, "0" * 64), 0.0)
            return outcome.disposition, outcome.reason

        assert (await ask("unknown", here))[0] is CutDisposition.NOT_FOUND
        assert await ask(plain.id, here) == (CutDisposition.UNCUTTABLE, "the call is not captured")
        disposition, reason = await ask(captured.id, elsewhere)
        assert (disposition, captured.staged.admission.capture_key in reason) == (CutDisposition.UNCUTTABLE, True)  # type: ignore[union-attr]


async def test_a_call_whose_cut_is_gone_is_generated_anew(tmp_path: Path) -> None:
    async with _rounds(tmp_path) as rounds:
        whole = told(await generate(rounds.worker, root("whole")), tmp_path)
        await rounds.cut_at(root("cut"), 6)
        known = [each.outcome.evidence.cut_id for each in rounds.worker.cuts.asked if each.outcome.evidence]
        assert await rounds.worker.cuts.release(known) == [True]
        call, found = await rounds.finish()
    assert found == whole
    assert (call.reused, call.continued_from) == (0, "")


@pytest.mark.behaviour("P151")
@pytest.mark.parametrize("why", ["newer weights", "other tokens", "damaged", "another parent"])
async def test_a_cut_that_does_not_fit_any_more_costs_a_regeneration_and_no_error(tmp_path: Path, why: str) -> None:
    """What the policy model server last heard of the worker may be old: its weights, and what it has staged."""
    async with _rounds(tmp_path) as rounds:
        whole = told(await generate(rounds.worker, root("whole")), tmp_path)
        rounds.worker.weight_version = 3 if why == "newer weights" else 0
        await rounds.cut_at(root("cut"), 6)
        rounds.worker.weight_version = 0
        if why == "other tokens":
            rounds.last_cut = replace(rounds.last_cut, prefix_digest="0" * 64)
        if why == "another parent":
            rounds.last_cut = replace(rounds.last_cut, source_call_id="other")
        if why == "damaged":
            _damage(tmp_path, rounds.last_cut.staging_keys[0])
        call, found = await rounds.finish()
    assert found == whole
    assert (call.reused, call.continued_from) == (0, "")


def _damage(directory: Path, key: str) -> None:
    """Change the last byte of a staged record."""
    (path,) = (directory / "staged").glob("*.tokens")
    data = bytearray(path.read_bytes())
    end = data.find(b"GTK", data.rfind(key.encode()))
    data[end - 1] ^= 1
    path.write_bytes(data)


async def test_a_worker_that_is_not_tested_keeps_no_list_of_cuts(tmp_path: Path) -> None:
    """And of calls that have ended, only where their tokens stand."""
    async with running_worker(tmp_path, controls=False) as worker:
        call = await worker.begin(request(root("mine")))
        await worker.run(call)
        evidence = await cut(worker, call)
        assert await worker.cuts.release(["unknown"]) == [False]
        assert (evidence.finish_reason, worker.cuts.asked, worker.cuts.released) == ("stop", [], [])
        gone = weakref.ref(call)
        del call
        gc.collect()
        assert gone() is None
