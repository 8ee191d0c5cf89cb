"""Generation is a pure function; replies can be cut anywhere and parse into tool calls."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from gym_ckpt_grpc.minigym import blackjack, counter
from gym_ckpt_grpc.minigym import generation as generation_module
from gym_ckpt_grpc.minigym.generation import (
    LONGEST_REPLY,
    MAX_SEED,
    SHORTEST_REPLY,
    Generation,
    Sampling,
    Token,
    assistant_message,
    chosen_call,
    next_token,
    offered_calls,
    reply_length,
    request_digest,
    seed_of_rollout,
    text_of,
)
from gym_ckpt_grpc.minigym.vocabulary import ACTION_IDS, STOP, VOCABULARY

_MESSAGES = [{"role": "user", "content": "play"}]


def _digest(seed: int, **changes: Any) -> bytes:
    asked = {"messages": _MESSAGES, "tools": list(counter.TOOLS), "model": "minigym", "seed": seed, **changes}
    return request_digest(asked["messages"], asked["tools"], model=asked["model"], seed=asked["seed"])


def _reply(seed: int, *, weight_version: int = 0) -> Generation:
    generation = Generation(_digest(seed), seed, limit=1000)
    while generation.finish_reason is None:
        generation.advance(weight_version)
    return generation


_CHILD = """
import json
from gym_ckpt_grpc.minigym.generation import next_token, request_digest
digest = request_digest([{"content": "play", "role": "user"}], ["step"], model="minigym", seed=7)
prefix, made = [], []
for _ in range(16):
    token = next_token(7, digest, prefix, 3)
    prefix.append(token.id)
    made.append([token.id, token.logprob.hex()])
print(json.dumps(made))
"""


@pytest.mark.behaviour("P318")
def test_two_processes_make_the_same_ids_and_logprobs() -> None:
    """Context, request, seed and weight version decide; not the process, nor its hash seed."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", _CHILD],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    here: dict[str, Any] = {}
    exec(_CHILD.replace("print(json.dumps(made))", ""), here)
    assert [json.loads(run.stdout) for run in runs] == [here["made"]] * 2


def test_every_part_of_the_context_counts() -> None:
    base = _reply(5).ids
    assert _reply(6).ids != base
    assert _digest(5) != _digest(5, model="other")
    assert _digest(5) != _digest(5, tools=[])
    assert _digest(5) != _digest(5, messages=[*_MESSAGES, {"role": "assistant", "content": ""}])
    digest = _digest(5)
    follow_ups = {next_token(5, digest, [*base[:4], token], 0).id for token in range(60, 90)}
    assert len(follow_ups) > 1  # the tokens so far count, not only their number


def test_new_weights_change_the_words_but_not_where_the_reply_ends() -> None:
    old, new = _reply(5), _reply(5, weight_version=1)
    assert old.ids != new.ids
    assert len(old.ids) == len(new.ids)
    assert (old.weight_version, new.weight_version) == (0, 1)


@pytest.mark.behaviour("P320")
@pytest.mark.parametrize("seed", [0, 11, MAX_SEED])
def test_cut_anywhere_and_continued_a_reply_is_the_same(seed: int) -> None:
    """For every cut position from none to all tokens: ids, text, log-probabilities and finish reason."""
    whole = _reply(seed)
    tokens = [Token(*pair) for pair in zip(whole.ids, whole.logprobs, strict=True)]
    for cut in range(len(tokens) + 1):
        rest = Generation(whole.digest, seed, limit=1000, prefix=tokens[:cut], weight_version=0 if cut else None)
        while rest.finish_reason is None:
            rest.advance(0)
        assert (rest.ids, rest.logprobs, rest.finish_reason) == (whole.ids, whole.logprobs, "stop")
        assert text_of(whole.ids[:cut]) + text_of(whole.ids[cut:]) == text_of(whole.ids)


def test_a_continued_reply_is_stamped_with_its_oldest_weights() -> None:
    generation = Generation(_digest(1), 1, limit=20, prefix=[Token(70, -1.0)], weight_version=2)
    generation.advance(4)
    assert generation.weight_version == 2


@pytest.mark.parametrize("seed", range(40))
def test_a_reply_is_words_an_action_and_stop(seed: int) -> None:
    reply = _reply(seed)
    assert SHORTEST_REPLY <= len(reply.ids) == reply_length(reply.digest) <= LONGEST_REPLY
    *words, action, last = reply.ids
    actions = range(ACTION_IDS.first, ACTION_IDS.first + ACTION_IDS.size)
    assert last == STOP
    assert action in actions
    assert not set(words) & {STOP, *actions}
    assert all(-20 < logprob <= 0 for logprob in reply.logprobs)
    with pytest.raises(ValueError, match="finished"):
        reply.advance(0)
    with pytest.raises(ValueError, match="has all its"):
        next_token(seed, reply.digest, reply.ids, 0)


def test_a_limit_cuts_a_reply_without_changing_it() -> None:
    whole = _reply(3)
    short = Generation(whole.digest, 3, limit=10)
    while short.finish_reason is None:
        short.advance(0)
    assert (short.ids, short.finish_reason) == (whole.ids[:10], "length")
    assert chosen_call(short.ids, counter.TOOLS) is None


def test_sampling_takes_the_likeliest_or_keeps_a_share_of_them() -> None:
    """Of many places: temperature 0 and a tiny top_p agree, and what they take is what plain sampling takes most."""
    digest, agreed, greedy_seen = _digest(5), 0, 0
    for seed in range(60):
        cold = next_token(seed, digest, [], 0, Sampling(temperature=0))
        assert cold.logprob == 0.0
        assert next_token(seed, digest, [], 0, Sampling(top_p=1e-9)) == cold
        plain = next_token(seed, digest, [], 0)
        agreed += plain.id == cold.id
        hot = next_token(seed, digest, [], 0, Sampling(temperature=2.0))
        cool = next_token(seed, digest, [], 0, Sampling(temperature=0.5))
        assert all(token.logprob <= 0 for token in (plain, hot, cool))
        if plain.id == hot.id == cool.id == cold.id:
            greedy_seen += 1
            assert hot.logprob <= plain.logprob <= cool.logprob
    assert 0 < agreed < 60
    assert greedy_seen


def test_the_probabilities_of_a_place_are_those_that_its_tokens_report() -> None:
    """Every candidate's own probability, found by moving the mark over the whole of it, sums up to one."""
    weights = {70: 5.0, 71: 2.0, 72: 1.0}
    marks = [step / 800 for step in range(800)]
    chosen = [generation_module._choose(weights, mark) for mark in marks]
    for candidate, weight in weights.items():
        share = [token for token in chosen if token.id == candidate]
        assert len(share) / 800 == weight / 8
        assert math.exp(share[0].logprob) == pytest.approx(weight / 8)
    assert generation_module._shape(weights, Sampling(top_p=0.7)) == {70: 1.0, 71: 0.4}


def test_a_reply_ends_with_the_stop_text_that_it_meets() -> None:
    whole = text_of(_reply(5).ids)
    word = whole.split()[3]
    generation = Generation(_digest(5), 5, limit=1000, stop=["never said", word])
    while generation.finish_reason is None:
        generation.advance(0)
    assert (generation.finish_reason, generation.stop_reason) == ("stop", word)
    text = text_of(generation.ids)
    assert whole.startswith(text)
    assert text.endswith(word)
    assert chosen_call(generation.ids, counter.TOOLS) is None


def test_impossible_prefixes_are_refused() -> None:
    token = Token(70, -1.0)
    with pytest.raises(ValueError, match="fit"):
        Generation(_digest(1), 1, limit=0)
    with pytest.raises(ValueError, match="fit"):
        Generation(_digest(1), 1, limit=1, prefix=[token, token], weight_version=0)
    with pytest.raises(ValueError, match="weight version"):
        Generation(_digest(1), 1, limit=5, prefix=[token])


def test_offered_calls_enumerate_what_the_schemas_allow() -> None:
    steps = [call.arguments for call in offered_calls(blackjack.TOOLS)]
    assert steps == [{"action": "hit"}, {"action": "stand"}]
    names = [call.name for call in offered_calls(counter.TOOLS)]
    assert names == ["increment"] * counter.MAX_BY + ["get_count"]
    assert [call.name for call in offered_calls(["look", "wait"])] == ["look", "wait"]
    free = {"name": "say", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}
    with pytest.raises(ValueError, match="say: parameter text"):
        offered_calls([free])


def test_every_offered_call_is_chosen_by_some_reply() -> None:
    replies = [_reply(seed).ids for seed in range(120)]
    for tools in (counter.TOOLS, blackjack.TOOLS):
        chosen = [chosen_call(ids, tools) for ids in replies]
        assert all(call in chosen for call in offered_calls(tools))


def test_the_message_has_the_call_and_an_id_made_from_its_tokens() -> None:
    reply = _reply(9)
    message = assistant_message(reply.digest, reply.ids, counter.TOOLS)
    again = assistant_message(reply.digest, reply.ids, counter.TOOLS)
    call = chosen_call(reply.ids, counter.TOOLS)
    assert call is not None
    assert message == again
    assert message["content"] == text_of(reply.ids)
    assert message["tool_calls"][0]["function"]["name"] == call.name
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == call.arguments
    assert "tool_calls" not in assistant_message(reply.digest, reply.ids, [])


def test_the_seed_of_a_rollout_is_stable_and_in_range() -> None:
    assert seed_of_rollout("3-1") == seed_of_rollout("3-1") != seed_of_rollout("3-2")
    assert all(0 <= seed_of_rollout(str(n)) <= MAX_SEED for n in range(50))


def test_the_vocabulary_has_no_double_texts_but_its_few_hundred_tokens_fit_two_bytes() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert 200 < len(VOCABULARY) < 1000
