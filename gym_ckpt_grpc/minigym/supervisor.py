"""Starts, watches, crashes and stops the server processes of a minigym.

Every process has its own session and is tracked by pid. Whatever ends the `async with` block (an exception, a
cancellation, Ctrl-C) ends all of them; if this process itself is killed, the kernel ends them (tether.py).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from gym_ckpt_grpc.minigym.metrics_ports import MetricsPorts
from gym_ckpt_grpc.minigym.ports import LOOPBACK
from gym_ckpt_grpc.minigym.processes import ManagedProcess, ProcessSpec

HEALTH_POLL = 0.05
"""Seconds between two questions for a server's health."""

_KILL_WITHIN = 10.0


class Unhealthy(RuntimeError):
    """Servers that were not healthy in time. problems: by name, what is known of each, with its log's end."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        self.problems = dict(problems)
        super().__init__("; ".join(f"{name}: {problem}" for name, problem in self.problems.items()))


class Supervisor:
    """The processes of one minigym. log_dir: made if missing; one log file per name, appended over all lives.
    metrics: where each server shows its metrics, if GYM_CKPT_TELEMETRY says so.

    Used as an async context manager, in a thread that outlives it (the main thread). After `crash` or `stop`
    the same names can be started again.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.metrics = MetricsPorts(log_dir)
        self._processes: dict[str, ManagedProcess] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Pid of every tracked process, which is also its process group, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    async def start(self, specs: Iterable[ProcessSpec], *, within: float = 30.0) -> None:
        """Start servers side by side and wait until all are healthy.

        within: seconds for all of them. Raises Unhealthy, at once when one of them exits, else when the time
        is up; ValueError for a name that is running already; OSError if a program cannot be started. After
        any failure the processes of this call are gone.
        """
        wanted = list(specs)
        names = [spec.name for spec in wanted]
        if taken := [name for name in names if name in self._processes or names.count(name) > 1]:
            raise ValueError(f"{', '.join(sorted(set(taken)))}: running already, or named twice")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        started: list[ManagedProcess] = []
        try:
            for spec in wanted:
                shown = replace(spec, env={**self.metrics.env(spec.name), **spec.env})
                process = ManagedProcess.start(shown, self.log_dir)
                self._processes[spec.name] = process
                started.append(process)
            await _all_healthy(started, within)
        except BaseException:
            await self._end(started)
            raise

    async def first_exit(self) -> str:
        """Wait until any tracked process exits; say which, how, and the end of its log."""
        waits = {asyncio.create_task(process.exited.wait()): process for process in self._processes.values()}
        if not waits:
            raise RuntimeError("no process is running")
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            process = waits[done.pop()]
            return f"{process.spec.name}: {_state(process)}"
        finally:
            for wait in waits:
                wait.cancel()

    async def kill(self, name: str) -> None:
        """SIGKILL to the group of one process, and wait until it is gone. Raises KeyError for others."""
        await self._end([self._processes[name]])

    async def crash(self) -> None:
        """SIGKILL to every process group, and wait until all are gone."""
        await self._end(list(self._processes.values()))

    async def stop(self, *, grace: float = 5.0) -> None:
        """SIGTERM to every process group; after `grace` seconds SIGKILL. All are gone then."""
        processes = list(self._processes.values())
        for process in processes:
            process.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace):
                for process in processes:
                    await process.exited.wait()
        except TimeoutError:
            pass
        finally:
            await self._end(processes)

    async def _end(self, processes: list[ManagedProcess]) -> None:
        for process in processes:
            process.signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(_KILL_WITHIN):
                for process in processes:
                    await process.group_gone()
        finally:
            # Also when cancelled: the signals are sent, so this waits for milliseconds.
            for process in processes:
                process.reap()
                self._processes.pop(process.spec.name, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the servers; at once if the block failed."""
        if error is None:
            await self.stop()
        else:
            await self.crash()


async def _all_healthy(processes: list[ManagedProcess], within: float) -> None:
    """Wait for every health answer. Raises Unhealthy as `Supervisor.start` says."""
    last: dict[str, str] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=within)) as session:
        checks = [asyncio.create_task(_healthy(session, process, last)) for process in processes]
        exits = [asyncio.create_task(process.exited.wait()) for process in processes]
        ready = asyncio.gather(*checks)
        watched: list[asyncio.Future[Any]] = [ready, *exits]
        try:
            await asyncio.wait(watched, timeout=within, return_when=asyncio.FIRST_COMPLETED)
            dead = [process for process in processes if process.ending]
            slow = [process for process, check in zip(processes, checks, strict=True) if not check.done()]
            if dead or slow:
                raise Unhealthy({p.spec.name: _state(p, last.get(p.spec.name, "")) for p in dead or slow})
            ready.result()
        finally:
            for task in (*checks, *exits):
                task.cancel()
            await asyncio.gather(ready, *exits, return_exceptions=True)


async def _healthy(session: aiohttp.ClientSession, process: ManagedProcess, last: dict[str, str]) -> None:
    """Ask until the answer is good; the latest other answer is in `last`."""
    name = process.spec.name
    while problem := await _health_problem(session, process):
        last[name] = problem
        await asyncio.sleep(HEALTH_POLL)


async def _health_problem(session: aiohttp.ClientSession, process: ManagedProcess) -> str | None:
    """Ask once. Good is a 200 which, if it is a JSON object with a `pid`, comes from this process."""
    spec = process.spec
    try:
        async with session.get(f"http://{LOOPBACK}:{spec.port}{spec.health}") as answer:
            if answer.status != 200:
                return f"HTTP {answer.status}"
            body = orjson.loads(await answer.read() or b"null")
    except orjson.JSONDecodeError:
        return None
    except (aiohttp.ClientError, TimeoutError) as error:
        return str(error) or type(error).__name__
    pid = body.get("pid", process.pid) if isinstance(body, dict) else process.pid
    return None if pid == process.pid else f"port {spec.port} is served by process {pid}"


def _state(process: ManagedProcess, answer: str = "") -> str:
    ending = process.ending
    text = f"exited with {ending}" if ending else f"running, but not healthy ({answer or 'no answer yet'})"
    tail = process.tail()
    return f"{text}; end of {process.log.name}:\n{tail}" if tail else f"{text}; {process.log.name} is empty"
