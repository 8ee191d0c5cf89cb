"""An OpenAI-compatible model that plays a script: python -m tests.nemo_gym.scripted_model PORT

It follows the ground truth of the released servers' own example tasks. An answer is made from the conversation alone,
so whoever asks the same gets the same: a twin, a restored rollout, a second process. A test may hold it: `PUT /holds`
says at which step of which rollout (`metadata.rollout` of the request) the answer has to wait, and `GET /held` waits
until something about that has changed. So a checkpoint lands where a test wants it, without a clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

Items = Sequence[Mapping[str, Any]]
Call = tuple[str, dict[str, Any]]

COUNT = re.compile(r"add (\d+) then add (\d+) then get the count")
HAND = re.compile(r"= (\d+)$", re.MULTILINE)
HIT_BELOW = 17


def example_rows(server: str) -> list[dict[str, Any]]:
    """The example tasks of a released resources server. Imports nothing of the framework."""
    spec = find_spec("resources_servers")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], server, "data", "example.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plan_of(prompt: str) -> list[Call] | None:
    """The tool calls of a task, by the text of its user; None for a game, whose moves depend on what was dealt."""
    if prompt == "Deal me in.":
        return None
    if match := COUNT.search(prompt):
        added = [("increment_counter", {"count": int(number)}) for number in match.groups()]
        return [*added, ("get_counter_value", {})]
    if (truth := _workplace_truth().get(prompt)) is not None:
        return [*truth, _look_at(*truth[0])]
    return [("get_weather", {"city": city}) for city in ("San Francisco", "Oakland")]


def _look_at(name: str, arguments: Mapping[str, str]) -> Call:
    """What is read after a task's ground truth: the result tells what all calls before it did to the tables."""
    if name == "email_reply_email":
        return "email_search_emails", {"query": arguments["body"]}
    if name == "calendar_update_event":
        return "calendar_search_events", {"query": arguments["new_value"]}
    if name == "customer_relationship_manager_update_customer":
        sought = {arguments["field"]: arguments["new_value"]}
    else:
        sought = {"status": "Won", "product_interest": "Services"}
    return "customer_relationship_manager_search_customers", {**sought, "page_size": 50}


@cache
def _workplace_truth() -> dict[str, list[Call]]:
    rows = example_rows("workplace_assistant")
    return {
        row["responses_create_params"]["input"][-1]["content"]: [
            (call["name"], json.loads(call["arguments"])) for call in row["ground_truth"]
        ]
        for row in rows
    }


def step_of(conversation: Items) -> int:
    """Which turn of the model the next one is; the first is 1."""
    own = [item for item in conversation if item.get("type") == "function_call" or item.get("role") == "assistant"]
    return len(own) + 1


def output_of(conversation: Items) -> dict[str, Any]:
    """The next turn: an output item of the Responses API."""
    said = hashlib.sha256(json.dumps(conversation, sort_keys=True).encode()).hexdigest()[:24]
    users = [str(item["content"]) for item in conversation if item.get("role") == "user"]
    plan, step = plan_of(users[0]), step_of(conversation)
    if plan is None:
        hand = int(HAND.findall(users[-1])[-1])
        text = f"I have {hand}. <action>{'hit' if hand < HIT_BELOW else 'stand'}</action>"
    elif step <= len(plan):
        name, arguments = plan[step - 1]
        call = {"id": f"fc_{said}", "call_id": f"call_{said}", "name": name, "arguments": json.dumps(arguments)}
        return {"type": "function_call", "status": "completed", **call}
    else:
        text = f"Done, after {len(plan)} calls."
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{said}", "role": "assistant", "status": "completed", "content": content}


class Holds:
    """Which answers wait. rules: rollout -> step from which on it gets no answer. held: where each one stands."""

    def __init__(self) -> None:
        self.rules: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.asked: list[tuple[str, int]] = []
        self.version = 0
        self._changed = asyncio.Condition()

    async def change(self, rules: Mapping[str, int]) -> None:
        """Other rules; who is not held by them goes on."""
        self.rules = dict(rules)
        await self._tell()

    async def passed(self, rollout: str, step: int) -> None:
        """Wait as the rules say."""
        self.asked.append((rollout, step))
        if not self._holds(rollout, step):
            return
        self.held[rollout] = step
        await self._tell()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._holds(rollout, step))
        self.held.pop(rollout, None)
        await self._tell()

    async def newer(self, version: int) -> dict[str, Any]:
        """What is so, once there is something newer than a version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version > version)
        return {"version": self.version, "held": self.held, "asked": self.asked}

    def _holds(self, rollout: str, step: int) -> bool:
        return step >= self.rules.get(rollout, sys.maxsize)

    async def _tell(self) -> None:
        async with self._changed:
            self.version += 1
            self._changed.notify_all()


def application() -> Starlette:
    """The model's routes, and those of the test that holds it."""
    holds = Holds()

    async def responses(request: Request) -> JSONResponse:
        asked = await request.json()
        conversation = asked["input"]
        await holds.passed((asked.get("metadata") or {}).get("rollout", ""), step_of(conversation))
        output = output_of(conversation)
        fixed = {"object": "response", "created_at": 1, "status": "completed", "parallel_tool_calls": True}
        told = {"model": asked["model"], "tools": asked.get("tools") or [], "tool_choice": "auto"}
        return JSONResponse({"id": f"resp_{output['id']}", "output": [output], **fixed, **told})

    async def put_holds(request: Request) -> JSONResponse:
        await holds.change(await request.json())
        return JSONResponse({})

    async def held(request: Request) -> JSONResponse:
        return JSONResponse(await holds.newer(int(request.query_params["after"])))

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({})

    return Starlette(
        routes=[
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/holds", put_holds, methods=["PUT"]),
            Route("/held", held),
            Route("/health", health),
        ]
    )


if __name__ == "__main__":
    uvicorn.run(application(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
