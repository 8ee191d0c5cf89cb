"""What an uninterrupted rollout does, computed without any server: the twin of every scenario.

The model and the tools are pure functions of what came before, so the whole play follows from the task.
`test_scenarios_native.py` shows that a real run equals it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from gym_ckpt_grpc.minigym.blackjack_server import BlackjackServer
from gym_ckpt_grpc.minigym.counter_server import CounterServer
from gym_ckpt_grpc.minigym.generation import Generation, assistant_message, request_digest
from gym_ckpt_grpc.minigym.inbox_server import InboxServer
from gym_ckpt_grpc.minigym.inference_log import ids_digest
from gym_ckpt_grpc.minigym.office_server import OfficeServer
from gym_ckpt_grpc.minigym.proof_checker import ProofChecker
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer
from gym_ckpt_grpc.minigym.tally_server import TallyServer
from gym_ckpt_grpc.minigym.tasks import Task
from gym_ckpt_grpc.minigym.trainer import Result
from gym_ckpt_grpc.minigym.weather_server import WeatherServer

SERVERS: Mapping[str, type[ResourcesServer]] = {
    server.name: server
    for server in (CounterServer, BlackjackServer, WeatherServer, OfficeServer, InboxServer, TallyServer)
}
SESSION = "session"
LIMIT_OF_TOKENS = 256


@dataclass(frozen=True)
class Play:
    """The result, and per model call the ids of its tokens."""

    result: Result
    ids: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> list[int]:
        """Number of tokens of each call."""
        return [len(ids) for ids in self.ids]

    @property
    def digests(self) -> list[str]:
        """Of each call's ids, as the inference log has them."""
        return [ids_digest(ids) for ids in self.ids]


def play(task: Task) -> Play:
    """The whole rollout."""
    server = _server(task.kind)
    server.open(SESSION, task.setup)
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    done, calls = False, list[tuple[int, ...]]()
    while True:
        tools = [] if done or len(calls) >= task.turns else list(server.tools)
        generation = _generated(task.seed, messages, tools)
        calls.append(tuple(generation.ids))
        message = assistant_message(generation.digest, generation.ids, tools)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            function = call["function"]
            output = server.call(SESSION, function["name"], orjson.loads(function["arguments"]))
            done = bool(output.get("done"))
            content = orjson.dumps(output, option=orjson.OPT_SORT_KEYS).decode()
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    reward, state = server.judge(SESSION, {**task.setup, "messages": messages})
    return Play(Result(reward, tuple(messages), dict(state)), tuple(calls))


def answer(prompt: str, *, seed: int = 1) -> tuple[int, ...]:
    """The tokens of one call without tools, as `Rig.ask` makes it."""
    return tuple(_generated(seed, [{"role": "user", "content": prompt}], []).ids)


def _generated(seed: int, messages: list[dict[str, Any]], tools: list[Any]) -> Generation:
    digest = request_digest(messages, tools, model="minigym", seed=seed)
    generation = Generation(digest, seed, limit=LIMIT_OF_TOKENS)
    while generation.finish_reason is None:
        generation.advance(0)
    return generation


def _server(kind: str) -> ResourcesServer:
    return SERVERS[kind]()


def counting(rollout_id: str, *, turns: int = 1, kind: Literal["counter", "tally"] = "counter") -> Task:
    """A counting rollout of turns + 1 model calls whose reward is 1.0, and less if a single increment is lost."""
    for number in range(1000):
        task = Task(rollout_id, kind, number, f"Rollout {rollout_id}: count.", turns, {"target": 1})
        state = play(task).result.state
        if state["increments"] == turns:
            return replace(task, setup={"target": state["count"]})
    raise AssertionError("no such play")


def proving(rollout_id: str, tries: int) -> tuple[Task, Play]:
    """A proof refinement rollout whose last try of so many is the first that holds, and its play."""
    for number in range(1000):
        task = Task(rollout_id, "proofs", number, f"Rollout {rollout_id}: prove it.", tries + 1, {"difficulty": 3})
        played = prove(task)
        if len(played.ids) == tries and played.result.reward == 1.0:
            return task, played
    raise AssertionError("no such play")


def prove(task: Task) -> Play:
    """The whole rollout of the proof refinement agent."""
    server = ProofChecker()
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    calls: list[tuple[int, ...]] = []
    while True:
        generation = _generated(task.seed, messages, [])
        calls.append(tuple(generation.ids))
        messages.append(assistant_message(generation.digest, generation.ids, []))
        reward, state = server.judge(SESSION, {**task.setup, "messages": messages})
        if reward == 1.0 or len(calls) == task.turns:
            return Play(Result(reward, tuple(messages), dict(state)), tuple(calls))
        feedback = f"The proof does not hold: {dict(state)}. Mend it."
        messages.append({"role": "user", "content": feedback})
