"""The trainer's side of minigym: sends rollouts to the environment server and keeps what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from gym_ckpt_grpc.minigym.tasks import Task
from gym_ckpt_grpc.protocol.ids import EpisodeId

ROLLOUT_LIMIT = 300.0
"""Seconds a trainer waits for one rollout; longer is a failure with a name."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the environment replied: the whole of what two runs are compared by."""

    reward: float
    transcript: tuple[Mapping[str, Any], ...]
    state: Mapping[str, Any]

    @classmethod
    def from_reply(cls, reply: Mapping[str, Any]) -> Result:
        """Take the reply of `/run` apart; raises KeyError if it is none."""
        return cls(float(reply["reward"]), tuple(reply["transcript"]), reply["state"])


class Trainer:
    """Sends every rollout at once. results: by rollout id. failures: why a rollout has no result.

    A rollout whose connection broke has neither: nobody knows how it ended, so it may still be in flight.
    """

    def __init__(self, environment_url: str) -> None:
        self._url = environment_url
        self.results: dict[str, Result] = {}
        self.failures: dict[str, str] = {}
        self.in_flight: dict[str, EpisodeId] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=ROLLOUT_LIMIT)
        # No limit: a hundred rollouts must not wait for each other's connections unseen.
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def send(self, tasks: Iterable[Task], attempts: Mapping[str, int] | None = None) -> None:
        """Start rollouts, each at its attempt (0 where none is given)."""
        for task in tasks:
            episode = EpisodeId(task.rollout_id, (attempts or {}).get(task.rollout_id, 0))
            self.in_flight[task.rollout_id] = episode
            running = asyncio.create_task(self._run(episode, task), name=f"rollout {episode}")
            self._tasks.add(running)
            running.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait until every rollout sent has ended, one way or another."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _run(self, episode: EpisodeId, task: Task) -> None:
        url = f"{self._url}/rollout/{episode.capture_key}/run"
        try:
            async with self._session.post(url, data=orjson.dumps(task.as_row())) as answer:
                body = await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"HTTP {answer.status}: {body[:300].decode(errors='replace')}")
                self.results[task.rollout_id] = Result.from_reply(orjson.loads(body))
        except aiohttp.ClientConnectionError:
            return  # the server went away: still in flight, as far as anybody knows
        except (aiohttp.ClientError, TimeoutError, RuntimeError, ValueError, KeyError) as error:
            self.failures[task.rollout_id] = f"{type(error).__name__}: {error}"
        self.in_flight.pop(task.rollout_id, None)
