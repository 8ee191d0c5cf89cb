"""The weather: one pure tool and a verification of the transcript, so there is nothing to checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import orjson

from gym_ckpt_grpc.minigym.resources_server import ResourcesServer, choice_tool
from gym_ckpt_grpc.participants import ResourcesMode, VerifyMode

CITIES = ("Bergen", "Cairo", "Lagos", "Lima", "Osaka", "Quito")
SKIES = ("clear", "cloudy", "fog", "rain", "snow", "storm")

TOOLS: tuple[dict[str, Any], ...] = (choice_tool("get_weather", "Today's weather in a city.", "city", CITIES),)
"""The tools as offered to the model."""


def weather_in(city: str) -> dict[str, Any]:
    """Sky and degrees (-20..39) in a city: always the same. Raises ValueError for an unknown city."""
    if city not in CITIES:
        raise ValueError(f"city is {city!r}, not one of {', '.join(CITIES)}")
    noise = hashlib.sha256(f"weather in {city}".encode()).digest()
    return {"city": city, "sky": SKIES[noise[0] % len(SKIES)], "degrees": noise[1] % 60 - 20}


def tool_results(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """The decoded contents of the tool messages of a transcript, in their order; what is no JSON is left out."""
    for message in messages:
        if message["role"] == "tool":
            try:
                yield orjson.loads(message["content"])
            except orjson.JSONDecodeError:
                continue


class Judge(Protocol):
    """Who is asked for a verdict."""

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> float:
        """How good a transcript is, 0 to 1; the same for the same one."""


class WeatherServer(ResourcesServer):
    """Tells the weather. Setup: number of `cities` to ask for, 1 to 6. Verify wants the transcript as `messages`.

    judge: gives the reward in place of the share of cities. Verify waits for it, and still is a function of its body.
    """

    checkpoint_mode = ResourcesMode.STATELESS
    checkpoint_verify = VerifyMode.REPLAY
    name = "weather"
    tools = TOOLS

    def __init__(self, judge: Judge | None = None) -> None:
        self._judge = judge

    def open(self, session_id: str, setup: Mapping[str, Any]) -> None:
        _wanted(setup)

    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if tool != "get_weather" or set(arguments) != {"city"}:
            raise ValueError(f"no tool {tool!r} with arguments {sorted(arguments)}")
        return weather_in(arguments["city"])

    async def verdict(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        share, state = self.judge(session_id, setup)
        return (share if self._judge is None else await self._judge.score(setup["messages"])), state

    def judge(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        """Share of the wanted cities whose weather was reported as it is: a pure function of `setup`."""
        wanted, reported = _wanted(setup), list(tool_results(setup["messages"]))
        found = [city for city in wanted if weather_in(city) in reported]
        return len(found) / len(wanted), {"found": found}

    def close(self, session_id: str) -> None:
        """There is nothing to forget."""


def _wanted(setup: Mapping[str, Any]) -> tuple[str, ...]:
    count = setup["cities"]
    if type(count) is not int or not 1 <= count <= len(CITIES):
        raise ValueError(f"cities is {count!r}, not an integer from 1 to {len(CITIES)}")
    return CITIES[:count]
