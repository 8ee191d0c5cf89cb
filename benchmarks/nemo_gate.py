"""What the mixins of NeMo Gym cost a rollout while no checkpoint is open.

    .venv-nemo-gym/bin/python -m benchmarks.nemo_gate               the table; about two minutes
    .venv-nemo-gym/bin/python -m benchmarks.nemo_gate --json FILE --gate
    .venv-nemo-gym/bin/python -m benchmarks.nemo_gate --callgrind   instructions as well (valgrind; some minutes)

Gated: nanoseconds per gated request in a tight loop, of the middlewares alone in front of an application that does
nothing, times the requests of a rollout, as a share of the rollout's time on bare servers. The rollout is the shortest
there is, a session counter's with a model that answers at once, so that the share of any other is smaller.
Not gated: the median time of the same rollout with and without the mixins, every server a process, run by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import Gate, Group, Report, Row, this_machine, to_json
from benchmarks.table import show
from gym_ckpt_grpc.integrations.asgi import App, CheckpointMiddleware, Message, Scope
from gym_ckpt_grpc.integrations.nemo_gym.inner import SelfCalls
from gym_ckpt_grpc.integrations.nemo_gym.names import BYPASS, NAMES
from gym_ckpt_grpc.integrations.nemo_gym.outer import IdentityMiddleware
from gym_ckpt_grpc.participants import (
    AgentOwner,
    GateRequest,
    PolicyModelOwner,
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
)
from gym_ckpt_grpc.participants.agent_sessions import AgentHooks

LIMIT = 2.0
"""Percent of a rollout's time that the gates may take."""
LOOP = 2000
"""Rollouts per sample of the tight loop."""
PAIRS = 40
"""Rollouts of each side of the A/B."""
HEADERS = (
    (b"host", b"127.0.0.1:18001"),
    (b"content-type", b"application/json"),
    (
        b"cookie",
        b'StatefulCounterResourcesServer___counter="eyJzZXNzaW9uX2lkIjogIng.aw3Bwg.7xPJarfYb0K8r8EwYwlvnYYre6I"',
    ),
    (b"accept", b"*/*"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"user-agent", b"Python/3.13 aiohttp/3.14"),
    (b"content-length", b"1900"),
)
ROW = json.dumps(
    {
        "responses_create_params": {"input": [{"role": "user", "content": "add 1 then add 2"}], "tools": ["x" * 900]},
        "initial_count": 3,
        "expected_count": 6,
        "_ng_task_index": 7,
        "_ng_rollout_index": 0,
    }
).encode()


# ---- the tight loop ------------------------------------------------------------------------------------------


async def nothing(scope: Scope, receive: Any, send: Any) -> None:
    """An application that answers at once."""
    await receive()
    await send(START)
    await send(BODY)


START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
BODY: Message = {"type": "http.response.body", "body": b"{}"}


async def received() -> Message:
    """The body of every request: a task's row."""
    return {"type": "http.request", "body": ROW, "more_body": False}


async def sent(message: Message) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One server's requests of one rollout, in front of nothing. paths: in their order."""

    name: str
    paths: Sequence[str]
    gated: App
    session: Mapping[str, str]

    async def run(self, app: App, rollouts: int) -> float:
        """Nanoseconds per request."""
        scopes = [self._scope(path) for path in self.paths]
        if gc.isenabled():  # callgrind would count it
            gc.collect()
        began = time.process_time_ns()
        for _ in range(rollouts):
            for scope in scopes:
                # What a server hands over is a scope of its own.
                await app({**scope, "state": {}}, received, sent)
        return (time.process_time_ns() - began) / (rollouts * len(scopes))

    def _scope(self, path: str) -> Scope:
        return {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": list(HEADERS),
            "session": dict(self.session),
        }


def loops() -> list[Loop]:
    """The servers of a rollout of the session counter: two additions and a look, by a simple agent."""
    return [_resources(), _agent(), _policy()]


def _resources() -> Loop:
    def session_of(request: GateRequest) -> str | None:
        session_id: str | None = request.scope["session"].get("session_id")
        return session_id

    settings = ResourcesSettings(
        mode=ResourcesMode.STATELESS, session_of=session_of, session_after=lambda request, _: session_of(request)
    )
    owner = ResourcesOwner(settings=settings, names=NAMES)
    paths = ("/seed_session", "/increment_counter", "/increment_counter", "/get_counter_value", "/verify")
    gate = CheckpointMiddleware(nothing, SelfCalls(owner, "x"), bypass=BYPASS, keep_path=True, post_only=("/mcp",))
    outer = IdentityMiddleware(gate, bodies=("/seed_session", "/reset", "/close_session"))
    return Loop("resources", paths, outer, {"session_id": "s1"})


class NoState(AgentHooks):
    """Hooks of an agent without sessions."""

    async def export_sessions(self, keys: Any) -> Any:
        return {}

    async def restore_sessions(self, sessions: Any) -> None: ...

    async def retire_session(self, key: str) -> None: ...


def _agent() -> Loop:
    owner = AgentOwner(NoState(), names=NAMES)
    gate = CheckpointMiddleware(nothing, owner.gate(passing=("/run",)), bypass=BYPASS, keep_path=True)
    outer = IdentityMiddleware(gate, bodies=("/run", "/v1/agent_sessions", "/v1/agent_sessions/close"))
    return Loop("agent", ("/run", "/ng-rollout/7-0/v1/responses"), outer, {"session_id": "a1"})


def _policy() -> Loop:
    gate = CheckpointMiddleware(nothing, PolicyModelOwner(names=NAMES).gate(), bypass=BYPASS, keep_path=True)
    outer = IdentityMiddleware(gate, honours_untagged=True)
    return Loop("policy model", ("/ng-rollout/7-0/v1/responses",) * 4, outer, {})


async def tight(samples: int, rollouts: int) -> dict[str, tuple[list[float], list[float]]]:
    """Per server: (gated, bare) nanoseconds per request, by turns."""
    taken: dict[str, tuple[list[float], list[float]]] = {}
    for loop in loops():
        gated, bare = taken[loop.name] = ([], [])
        await loop.run(loop.gated, max(1, rollouts // 10))
        for _ in range(samples):
            bare.append(await loop.run(nothing, rollouts))
            gated.append(await loop.run(loop.gated, rollouts))
    return taken


# ---- instructions --------------------------------------------------------------------------------------------


def instructions(rollouts: int) -> dict[str, float]:
    """Instructions per gated request, by server, as callgrind counts them in the loop and nowhere else."""
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        raise SystemExit("--callgrind needs valgrind")
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for at, loop in enumerate(loops()):
            gated, bare = (_count(directory, f"{at}:{kind}:{rollouts}") for kind in ("gated", "bare"))
            found[loop.name] = (gated - bare) / (rollouts * len(loop.paths))
    return found


def _count(directory: str, which: str) -> int:
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={directory}/out"]
    command += [sys.executable, "-m", "benchmarks.nemo_gate", "--only", which]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    line = next(line for line in ran.stderr.splitlines() if "Collected :" in line)
    return int(line.rpartition(":")[2])


async def only(text: str) -> None:
    """What callgrind looks at: one loop, warm, and nothing around it."""
    at, kind, rollouts = text.split(":")
    loop = loops()[int(at)]
    app = loop.gated if kind == "gated" else nothing
    await loop.run(app, 50)
    gc.disable()
    for switch, times in (("on", int(rollouts)), ("off", 0)):
        control = ["callgrind_control", f"--instr={switch}", str(os.getpid())]
        process = await asyncio.create_subprocess_exec(*control, stdout=subprocess.DEVNULL)
        assert await process.wait() == 0, f"{' '.join(control)} failed"
        if times:
            await loop.run(app, times)


# ---- whole rollouts ------------------------------------------------------------------------------------------

SERVERS = ("policy_model", "counter", "counter_agent", "counter_relay")


async def whole(directory: Path, pairs: int, tell: Callable[[str], None]) -> tuple[list[float], list[float]]:
    """Milliseconds of a rollout with the mixins and without, by turns, each server a process."""
    import aiohttp

    from tests.nemo_gym.deployment import Deployment, row_of

    class Bare(Deployment):
        """The same servers as they were released."""

        @property
        def participants(self) -> list[str]:
            return []

    taken: dict[str, list[float]] = {"ours": [], "bare": []}
    async with (
        Deployment(directory / "ours", SERVERS) as ours,
        Bare(directory / "bare", SERVERS) as bare,
        aiohttp.ClientSession() as http,
    ):
        sides = {"ours": ours, "bare": bare}

        async def once(side: str, number: int) -> float:
            url = f"http://127.0.0.1:{sides[side].port('counter_relay')}/run"
            row = row_of("counter", 0, rollout=f"{side}-{number}")
            began = time.perf_counter()
            async with http.post(url, json=row) as answer:
                reward = (await answer.json())["reward"]
            if reward != 1.0:
                raise SystemExit(f"a rollout of {side} had the reward {reward}, not 1")
            return 1000 * (time.perf_counter() - began)

        for number in range(pairs + 5):
            tell(f"rollout {number + 1} of {pairs + 5}")
            for side in random.sample(sorted(sides), 2):
                seconds = await once(side, number)
                if number >= 5:  # the first ones connect
                    taken[side].append(seconds)
    return taken["ours"], taken["bare"]


# ---- the report ----------------------------------------------------------------------------------------------


def report(options: argparse.Namespace, tell: Callable[[str], None]) -> Report:
    """Measure, and say what was found."""
    tell("tight loops")
    taken = asyncio.run(tight(options.samples, LOOP if not options.smoke else 20))
    counted = instructions(options.counted) if options.callgrind else {}
    tell("whole rollouts")
    with tempfile.TemporaryDirectory() as directory:
        ours, bare = asyncio.run(_within(whole(Path(directory), options.pairs, tell)))
    rows = []
    nanoseconds = 0.0
    for loop in loops():
        gated, alone = taken[loop.name]
        costs = tuple(with_gate - without for with_gate, without in zip(gated, alone, strict=True))
        row = Row(name=loop.name, unit="ns", samples=costs)
        facts: dict[str, float | str] = {
            "application ns": sorted(alone)[len(alone) // 2],
            "requests": float(len(loop.paths)),
            "us per rollout": row.median * len(loop.paths) / 1000,
        }
        if counted:
            facts["instructions"] = counted[loop.name]
        rows.append(Row(name=loop.name, unit="ns", samples=costs, facts=facts))
        nanoseconds += row.median * len(loop.paths)
    both = [
        Row(name="bare", unit="ms", samples=tuple(bare)),
        Row(name="with the mixins", unit="ms", samples=tuple(ours)),
    ]
    share = 100 * nanoseconds / 1e6 / both[0].median
    gates = (Gate(name="gates, share of a rollout's time", value=share, limit=LIMIT, unit="%", at_most=True),)
    groups = (
        Group(
            name="gate",
            title="A gated request, no checkpoint open",
            rows=tuple(rows),
            gates=gates,
            notes=(f"{nanoseconds / 1000:.0f} us of gates in a rollout that takes {both[0].median:.0f} ms bare",),
        ),
        Group(
            name="rollout",
            title="A whole rollout of the session counter, one at a time",
            rows=tuple(both),
            notes=(
                f"with / bare, medians: {both[1].median / both[0].median:.3f}; not gated",
                "it has in it what the agent records of its calls, and what a machine with few cores adds",
            ),
        ),
    )
    return Report(machine=this_machine(""), seed=0, smoke=options.smoke, groups=groups)


async def _within(work: Awaitable[Any]) -> Any:
    return await work


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="one JSON object, to stdout by default")
    parser.add_argument("--gate", action="store_true", help="exit 1 if the gate is missed")
    parser.add_argument("--callgrind", action="store_true", help="count instructions, too")
    parser.add_argument("--counted", type=int, default=100, help="rollouts that callgrind sees, default %(default)s")
    parser.add_argument("--samples", type=int, default=15, help="of each tight loop, default %(default)s")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="rollouts of each side, default %(default)s")
    parser.add_argument("--smoke", action="store_true", help="every path, quickly; times mean nothing")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        asyncio.run(only(options.only))
        return 0
    if options.smoke:
        options.samples, options.pairs, options.counted = 2, 2, 2
    found = report(options, lambda text: print(text, file=sys.stderr))
    if options.json == "-":
        sys.stdout.write(to_json(found).decode())
    else:
        show(found)
        if options.json:
            Path(options.json).write_bytes(to_json(found))
    missed = [] if options.smoke else found.missed()
    for gate in missed if options.gate else []:
        print(f"missed: {gate}", file=sys.stderr)
    return 1 if options.gate and missed else 0


if __name__ == "__main__":
    sys.exit(main())
