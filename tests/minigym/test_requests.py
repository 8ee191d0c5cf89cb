"""Requests of the model, their prompts as tokens, and the controls of a worker that was started for tests."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gym_ckpt_grpc.minigym.chat_request import ChatRequest
from gym_ckpt_grpc.minigym.counter import TOOLS
from gym_ckpt_grpc.minigym.event_stream import data_of
from gym_ckpt_grpc.minigym.generation import Sampling, seed_of_rollout
from gym_ckpt_grpc.minigym.inference_worker import InferenceWorker, WorkerConfig
from gym_ckpt_grpc.minigym.token_context import following_ids, prompt_ids
from gym_ckpt_grpc.minigym.vocabulary import BYTE_IDS, END_OF_MESSAGE, ROLE_IDS, VOCABULARY
from gym_ckpt_grpc.minigym.worker_controls import CallName, HoldBody, WorkerControls
from gym_ckpt_grpc.participants.request_digest import request_digest
from tests.minigym.workers import generate, request, running_worker
from tests.participants.fakes import call, spin

USER = {"role": "user", "content": "é"}
CALL: dict[str, Any] = {"role": "assistant", "content": "x", "tool_calls": [{"id": "c", "type": "function"}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "1"}


def _request(**fields: Any) -> ChatRequest:
    return ChatRequest(**{"messages": [USER], **fields})


def test_the_effective_request_has_every_default_and_its_seed_from_the_rollout() -> None:
    """Two ways to say the same are one request; how the reply travels is no part of it."""
    plain = _request().with_defaults("3-1")
    said = _request(temperature=1.0, max_tokens=256, n=1, seed=seed_of_rollout("3-1"), stream=True, user="u")
    assert request_digest(plain) == request_digest(said.with_defaults("3-1"))
    assert plain["seed"] == seed_of_rollout("3-1") != _request().with_defaults("3-2")["seed"]
    for other in ({"temperature": 0.5}, {"top_p": 0.5}, {"max_tokens": 9}, {"stop": ["x"]}, {"tools": ["t"]}):
        assert request_digest(_request(**other).with_defaults("3-1")) != request_digest(plain)
    assert _request(temperature=0.5, top_p=0.25).sampling == Sampling(0.5, 0.25)


@pytest.mark.parametrize(
    "bad",
    [
        {"colour": 1},
        {"n": 9},
        {"temperature": -0.1},
        {"top_p": 0},
        {"stop": [""]},
        {"max_tokens": 0},
        {"seed": "1"},
        {"tool_choice": "sometimes"},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_what_the_model_does_not_understand_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        _request(**bad)


def test_tool_choice_decides_what_can_be_called() -> None:
    names = [tool["function"]["name"] for tool in TOOLS]
    tools = list(TOOLS)
    assert _request(tools=tools).callable_tools() == tools
    assert _request(tools=tools, tool_choice="required").callable_tools() == tools
    assert _request(tools=tools, tool_choice="none").callable_tools() == []
    one = _request(tools=tools, tool_choice={"type": "function", "function": {"name": names[1]}})
    assert one.callable_tools() == [TOOLS[1]]
    with pytest.raises(ValueError, match="not among the tools"):
        _request(tools=tools, tool_choice={"type": "function", "function": {"name": "fly"}}).callable_tools()


def test_prompts_are_bytes_between_the_heads_and_ends_of_messages() -> None:
    first, second = (BYTE_IDS.first + byte for byte in "é".encode())
    user = [ROLE_IDS["user"], first, second, END_OF_MESSAGE]
    assert prompt_ids([USER]) == [*user, ROLE_IDS["assistant"]]
    assert prompt_ids([USER, RESULT])[:4] == user
    assert prompt_ids([CALL]) != prompt_ids([{**CALL, "tool_calls": []}])
    with pytest.raises(ValueError, match="role 'robot'"):
        prompt_ids([{"role": "robot", "content": ""}])
    ids = {*range(len(VOCABULARY)), *range(BYTE_IDS.first, BYTE_IDS.first + 256), END_OF_MESSAGE, *ROLE_IDS.values()}
    assert len(ids) == len(VOCABULARY) + 256 + 1 + len(ROLE_IDS)


def test_what_follows_the_last_reply_is_all_that_a_later_turn_encodes() -> None:
    rest = [END_OF_MESSAGE, *prompt_ids([RESULT])]
    assert following_ids([USER, CALL, RESULT]) == rest
    assert following_ids([USER, CALL, RESULT, CALL, RESULT]) == rest
    assert following_ids([USER, CALL]) == [END_OF_MESSAGE, ROLE_IDS["assistant"]]


async def test_choices_have_seeds_of_their_own_and_the_first_is_that_of_a_single_call(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as worker:
        one = await generate(worker, None)
        three = await generate(worker, None, n=3)
        second = await generate(worker, None, seed=12)
    ids = [generation.ids for generation in three.generations]
    assert ids[:2] == [one.generations[0].ids, second.generations[0].ids]
    assert len({tuple(each) for each in ids}) == 3
    assert three.made == sum(map(len, ids))


async def test_a_call_without_capture_stages_nothing_and_its_stream_is_the_same(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as worker:
        plain = call(worker.app, "/v1/chat/completions", request(None).model_dump(exclude_none=True))
        whole = (await plain.end()).json()
        asked = request(None, stream=True).model_dump(exclude_none=True)
        streamed = await call(worker.app, "/v1/chat/completions", asked).end()
    assert "capture" not in whole
    *pieces, last, done = [piece for piece in streamed.pieces if piece]
    assert done == b"data: [DONE]\n\n"
    assert len(pieces) == len(whole["token_ids"])
    assert b'"finish_reason":"tool_calls"' in last


async def test_a_slow_reader_gets_every_token_although_the_generation_ended_between_two_events(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as worker:
        made = await worker.begin(request(None, stream=True))
        texts = []
        async with aclosing(worker.events(made)) as events:
            async for each in events:
                texts.append(data_of(each))
                while made.state == "running" and len(texts) == 3:  # noqa: ASYNC110 - turns of the decode loop
                    await asyncio.sleep(0)
    *chunks, last, done = texts
    assert done is None
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == last["message"]["content"]
    assert len(chunks) == len(last["token_ids"])


# ---- controls


async def test_the_routes_are_not_there_unless_the_worker_was_started_for_tests(tmp_path: Path) -> None:
    for controls, status in ((True, 200), (False, 404)):
        worker = InferenceWorker(WorkerConfig(log=tmp_path / "log", controls=controls))
        answer = await call(
            worker.app, "/control/hold", {"after": 1}, headers={"content-type": "application/json"}
        ).end()
        assert answer.status == status
        assert (await call(worker.app, "/control/calls", method="GET").end()).status == status


def test_a_hold_matches_what_it_names_from_its_token_on() -> None:
    controls = WorkerControls()
    mine, other = CallName("r", 1, 0), CallName("s", 0, 2)
    assert not controls.holds(mine, 0)
    first = controls.hold(HoldBody(after=3, rollout_id="r", attempt=1))
    controls.hold(HoldBody(after=0, turn=2))
    assert [controls.holds(mine, tokens) for tokens in (2, 3, 4)] == [False, True, True]
    assert controls.holds(other, 0)
    controls.release(first)
    assert (controls.holds(mine, 9), controls.holds(other, 0)) == (False, True)
    controls.release(None)
    assert not controls.holds(other, 0)


async def test_cuts_fail_or_hang_as_often_as_asked() -> None:
    controls = WorkerControls()
    await controls.before_cut()
    controls.break_cuts("fail", 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="asked for"):
            await controls.before_cut()
    await controls.before_cut()
    controls.break_cuts("hang", 1)
    hung = asyncio.create_task(controls.before_cut())
    await spin()
    assert not hung.done()
    await controls.before_cut()  # only one was to hang
    controls.release(None)
    await hung


def test_a_worker_without_a_token_store_cannot_serve_cuts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cut nothing"):
        WorkerConfig(log=tmp_path / "log", control_address="127.0.0.1:1")
