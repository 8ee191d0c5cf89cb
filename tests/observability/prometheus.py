"""A real Prometheus on loopback, in a directory of its own, gone with the block."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import yaml

from gym_ckpt_grpc.minigym.ports import free_ports

T = TypeVar("T")
LIMIT = 40.0
"""Seconds for anything to show: a scrape, an evaluation, and what a busy machine adds."""
POLL = 0.1


@dataclass
class Prometheus:
    """What it has scraped and which alerts fire. began: when, on the wall clock."""

    url: str
    http: aiohttp.ClientSession
    began: float

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        async with self.http.get(f"{self.url}{path}", params=parameters) as answer:
            body = await answer.json()
            assert body["status"] == "success", body
            return body["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query: its series."""
        data = await self.get("/api/v1/query", query=expression)
        return list(data["result"])

    async def since_began(self, expression: str) -> list[dict[str, Any]]:
        """The same for every second since it was started."""
        times = {"start": str(self.began), "end": str(time.time()), "step": "1"}
        data = await self.get("/api/v1/query_range", query=expression, **times)
        return list(data["result"])

    async def firing(self) -> dict[str, str]:
        """Alerts that fire now -> the summary of one of them."""
        alerts = (await self.get("/api/v1/alerts"))["alerts"]
        return {a["labels"]["alertname"]: a["annotations"]["summary"] for a in alerts if a["state"] == "firing"}


async def eventually(ask: Callable[[], Awaitable[T]], good: Callable[[T], bool]) -> T:
    """Ask again and again until the answer is good; fails with the last answer."""
    ends = time.monotonic() + LIMIT
    while not good(answer := await ask()):
        assert time.monotonic() < ends, answer
        await asyncio.sleep(POLL)
    return answer


@asynccontextmanager
async def prometheus(directory: Path, rules: Mapping[str, Any], jobs: Mapping[str, Path]) -> AsyncIterator[Prometheus]:
    """Scrape and evaluate each second. jobs: name -> a file of targets."""
    _configure(directory, rules, jobs)
    [port] = free_ports(1)
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http:
            found = Prometheus(f"http://127.0.0.1:{port}", http, time.time())

            async def ready() -> bool:
                assert process.returncode is None, (directory / "log").read_text()
                try:
                    async with http.get(f"{found.url}/-/ready") as answer:
                        return answer.status == 200
                except aiohttp.ClientError:
                    return False

            await eventually(ready, bool)
            yield found
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _configure(directory: Path, rules: Mapping[str, Any], jobs: Mapping[str, Path]) -> None:
    directory.mkdir()
    (directory / "rules.yaml").write_text(yaml.safe_dump(dict(rules)))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {"job_name": name, "file_sd_configs": [{"files": [str(file)], "refresh_interval": "1s"}]}
            for name, file in jobs.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))


def write_targets(file: Path, *targets: str) -> None:
    """A file of targets."""
    file.write_text(json.dumps([{"targets": list(targets)}]))
