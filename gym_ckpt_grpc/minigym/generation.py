"""Text generation as a pure function: the small language model of minigym.

`next_token` depends on the request, the seed, the tokens so far and the weight version, and on nothing else:
no clock, no process, no attempt. So a call that is made again gives the tokens it gave before, and a
generation cut at any token and continued from that prefix ends as the uncut one would have. Every reply is a
run of readable words, one action token, one STOP. The action token alone decides which of the offered tool
calls the reply makes.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gym_ckpt_grpc.minigym.vocabulary import ACTION_IDS, SENTENCE, STOP, VOCABULARY

SHORTEST_REPLY, LONGEST_REPLY = 16, 64
"""Tokens of a reply, with its action and STOP, both ends included."""

MAX_SEED = 2**63 - 1

_CANDIDATES = 8
_NOISE = struct.Struct(f">{_CANDIDATES}H{_CANDIDATES}BQ")
"""What one hash gives: candidates, their weights less one, and the mark that chooses among them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen. temperature: >= 0, 0 takes the likeliest. top_p: > 0 to 1, share of the likeliest kept."""

    temperature: float = 1.0
    top_p: float = 1.0


PLAIN = Sampling()
"""Sampling of a request that says nothing about it."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token: its id in the vocabulary and the natural logarithm of its probability (<= 0)."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call a reply makes, or could make: the tool's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


def request_digest(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, model: str, seed: int) -> bytes:
    """SHA-256 of the canonical JSON of what the model is asked: 32 bytes.

    The rollout's attempt is not part of it, nor is the output limit: it cuts a reply, and changes none.
    """
    body = {"messages": messages, "model": model, "seed": seed, "tools": tools}
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).digest()


def seed_of_rollout(rollout_id: str) -> int:
    """The sampling seed (0..MAX_SEED) of a request that gives none: from the rollout, never its attempt."""
    return int.from_bytes(hashlib.sha256(b"rollout " + rollout_id.encode()).digest()[:8], "big") & MAX_SEED


def reply_length(digest: bytes) -> int:
    """Number of tokens of the whole reply, SHORTEST_REPLY..LONGEST_REPLY.

    Comes from the request alone, so that neither a cut nor new weights move the end of a reply.
    """
    return SHORTEST_REPLY + int.from_bytes(digest[:4], "big") % (LONGEST_REPLY - SHORTEST_REPLY + 1)


def next_token(
    seed: int, digest: bytes, prefix: Sequence[int], weight_version: int, sampling: Sampling = PLAIN
) -> Token:
    """The token that follows `prefix`: a pure function, equal in every process.

    seed: 0..MAX_SEED. digest: of `request_digest`. prefix: ids of the reply so far, whose number is the
    position. weight_version: >= 0. Raises ValueError if the reply is complete already.
    """
    position, length = len(prefix), reply_length(digest)
    if position >= length:
        raise ValueError(f"the reply has all its {length} tokens")
    if position == length - 1:
        return Token(STOP, 0.0)
    first, size = ACTION_IDS if position == length - 2 else SENTENCE[position % len(SENTENCE)]
    context = struct.pack(f">QQ{position}H", seed, weight_version, *prefix)
    noise = _NOISE.unpack(hashlib.sha256(digest + context).digest())
    weights: dict[int, float] = {}
    for value, weight in zip(noise[:_CANDIDATES], noise[_CANDIDATES:-1], strict=True):
        candidate = first + value % size
        weights[candidate] = weights.get(candidate, 0.0) + weight + 1
    return _choose(_shape(weights, sampling), noise[-1] / 2.0**64)


def _shape(weights: Mapping[int, float], sampling: Sampling) -> dict[int, float]:
    """The candidates that sampling leaves, likeliest first, with their weights."""
    likeliest = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
    if sampling.temperature == 0:
        return dict(likeliest[:1])
    top = likeliest[0][1]
    shaped = [(candidate, (weight / top) ** (1 / sampling.temperature)) for candidate, weight in likeliest]
    enough = sampling.top_p * sum(weight for _, weight in shaped)
    kept: dict[int, float] = {}
    for candidate, weight in shaped:
        if kept and sum(kept.values()) >= enough:
            break
        kept[candidate] = weight
    return kept


def _choose(weights: Mapping[int, float], mark: float) -> Token:
    """The candidate at a mark of 0 to 1 along the weights."""
    total = sum(weights.values())
    candidates = list(weights)
    bounds = list(itertools.accumulate(weights.values()))
    place = min(bisect.bisect_right(bounds, mark * total), len(candidates) - 1)
    chosen = candidates[place]
    return Token(chosen, min(0.0, math.log(weights[chosen] / total)))


def text_of(ids: Iterable[int]) -> str:
    """Text of token ids. `text_of(a) + text_of(b) == text_of(a + b)`."""
    return "".join(VOCABULARY[token] for token in ids)


def offered_calls(tools: Iterable[Any]) -> list[ToolCall]:
    """Every call that the offered tools allow, in a fixed order.

    A tool is a name (no arguments), or an OpenAI function tool whose parameters are enumerated by `enum`.
    Raises ValueError for a required parameter without one: this model can only choose, not invent.
    """
    return [call for tool in tools for call in _calls_of(tool)]


def _calls_of(tool: Any) -> Iterable[ToolCall]:
    if isinstance(tool, str):
        return [ToolCall(tool, {})]
    function = tool.get("function", tool)
    name, schema = function["name"], function.get("parameters", {})
    properties = schema.get("properties", {})
    for required in schema.get("required", ()):
        if "enum" not in properties.get(required, {}):
            raise ValueError(f"tool {name}: parameter {required} has no enum to choose from")
    names = sorted(key for key, value in properties.items() if "enum" in value)
    values = itertools.product(*(properties[key]["enum"] for key in names))
    return [ToolCall(name, dict(zip(names, chosen, strict=True))) for chosen in values]


def chosen_call(ids: Sequence[int], tools: Sequence[Any]) -> ToolCall | None:
    """The call that a complete reply makes; None without tools, or if the reply was cut before its end."""
    calls = offered_calls(tools)
    if not calls or len(ids) < 2 or ids[-1] != STOP:
        return None
    return calls[(ids[-2] - ACTION_IDS.first) % len(calls)]


def assistant_message(digest: bytes, ids: Sequence[int], tools: Sequence[Any]) -> dict[str, Any]:
    """The reply as an OpenAI assistant message. The tool call's id follows from request and tokens alone."""
    message: dict[str, Any] = {"role": "assistant", "content": text_of(ids)}
    if call := chosen_call(ids, tools):
        call_id = hashlib.sha256(digest + struct.pack(f">{len(ids)}H", *ids)).hexdigest()[:16]
        arguments = orjson.dumps(call.arguments, option=orjson.OPT_SORT_KEYS).decode()
        function = {"name": call.name, "arguments": arguments}
        message["tool_calls"] = [{"id": f"call_{call_id}", "type": "function", "function": function}]
    return message


class Generation:
    """One reply being made: request, tokens so far, and whether it is done.

    digest, seed, sampling: as for `next_token`. limit: most tokens of the reply, prefix included, >= 1. stop: texts
    that end the reply; it keeps the one it met. prefix: tokens made before, when a cut generation is continued.
    weight_version: the oldest that made one of the tokens, None before the first. Raises ValueError for a prefix
    longer than the limit or the reply.
    """

    __slots__ = ("_stop", "_text", "digest", "ids", "limit", "logprobs", "sampling", "seed", "weight_version")

    def __init__(
        self,
        digest: bytes,
        seed: int,
        *,
        limit: int,
        sampling: Sampling = PLAIN,
        stop: Sequence[str] = (),
        prefix: Sequence[Token] = (),
        weight_version: int | None = None,
    ) -> None:
        if limit < 1 or len(prefix) > min(limit, reply_length(digest)):
            raise ValueError(f"a prefix of {len(prefix)} tokens does not fit a limit of {limit}")
        if bool(prefix) != (weight_version is not None):
            raise ValueError("a prefix comes with the weight version that made it, and only a prefix does")
        self.digest, self.seed, self.limit, self.sampling = digest, seed, limit, sampling
        self.ids = [token.id for token in prefix]
        self.logprobs = [token.logprob for token in prefix]
        self.weight_version = weight_version
        self._stop = tuple(stop)
        self._text = text_of(self.ids)

    @property
    def finish_reason(self) -> str | None:
        """`stop` after the STOP token or a stop text, `length` at the limit, None while there is more to make."""
        if self.ids and (self.ids[-1] == STOP or self.stop_reason):
            return "stop"
        return "length" if len(self.ids) >= self.limit else None

    @property
    def stop_reason(self) -> str:
        """The stop text that the reply has met, empty if none."""
        return next((text for text in self._stop if text in self._text), "")

    def advance(self, weight_version: int) -> Token:
        """Make one more token. Raises ValueError if the reply is finished."""
        if reason := self.finish_reason:
            raise ValueError(f"the generation has finished ({reason})")
        token = next_token(self.seed, self.digest, self.ids, weight_version, self.sampling)
        self.ids.append(token.id)
        self.logprobs.append(token.logprob)
        self._text += VOCABULARY[token.id]
        oldest = weight_version if self.weight_version is None else self.weight_version
        self.weight_version = min(weight_version, oldest)
        return token
