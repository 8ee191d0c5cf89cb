"""A real deployment of the released framework: one process per server, each started by `gym-ckpt nemo-gym <instance>`.

The model behind them is scripted (scripted_model.py). Everything is on loopback, and on the same ports in every life.
Import it only in tests of the framework: the collector's side imports the framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import ServerClient, get_global_aiohttp_client, global_aiohttp_client_exit
from omegaconf import OmegaConf

from gym_ckpt_grpc.auth import TokenFile
from gym_ckpt_grpc.coordinator import Coordinator, Fleet, Server
from gym_ckpt_grpc.integrations.nemo_gym.collection import CheckpointedCollection
from gym_ckpt_grpc.minigym.ports import LOOPBACK, free_ports
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.supervisor import Supervisor
from tests.nemo_gym.scripted_model import example_rows

MODEL = "scripted_model"
REPOSITORY, OWN_HOOKS = Path(__file__).parents[2], Path(__file__).parent / "own_hooks"
WITHIN = 120.0
"""Seconds for servers to start: on a busy machine the imports of ten of them take their time."""


def _named(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "name": name}


def _agent(implementation: str, resources: str, **more: Any) -> dict[str, Any]:
    block = {
        "resources_server": _named("resources_servers", resources),
        "model_server": _named("responses_api_models", "policy_model"),
    }
    return {"responses_api_agents": {implementation: {**block, **more}}}


def _relay(agent: str) -> dict[str, Any]:
    return {"environment_servers": {"legacy_agent": {"agent_server": _named("responses_api_agents", agent)}}}


INSTANCES: Mapping[str, Mapping[str, Any]] = {
    "workplace": {"resources_servers": {"workplace_assistant": {"domain": "agent"}}},
    "workplace_agent": _agent("simple_agent", "workplace", max_steps=8),
    "workplace_relay": _relay("workplace_agent"),
    "counter": {"resources_servers": {"example_session_state_mgmt": {"domain": "agent"}}},
    "counter_agent": _agent("simple_agent", "counter"),
    "counter_relay": _relay("counter_agent"),
    "blackjack": {"resources_servers": {"blackjack": {"domain": "games"}}},
    "blackjack_agent": _agent("gymnasium_agent", "blackjack", max_steps=12),
    "blackjack_relay": _relay("blackjack_agent"),
    "weather": {"resources_servers": {"example_single_tool_call": {"domain": "agent"}}},
    "session_agent": _agent("simple_agent", "weather"),
    "turn": {
        "environment_servers": {
            "single_agent_turn": {
                "resources_server": _named("resources_servers", "weather"),
                "agent_server": _named("responses_api_agents", "session_agent"),
                "resources_tool_transports": ["direct_http"],
                "cleanup_timeout_seconds": 30,
            }
        }
    },
    "mcp_weather": {"resources_servers": {"example_mcp_weather": {"domain": "agent", "expose_tools_over_mcp": True}}},
    "policy_model": {"responses_api_models": {"openai_model": {"openai_api_key": "none", "openai_model": "scripted"}}},
}
"""Every instance that a test may start, without its addresses."""

TASKS = {
    "workplace": "workplace_assistant",
    "counter": "example_session_state_mgmt",
    "blackjack": "blackjack",
    "weather": "example_single_tool_call",
}
"""Resources instance -> the released server whose example tasks are played with it."""

KINDS = {
    "resources_servers": "resources",
    "responses_api_agents": "agent",
    "environment_servers": "environment",
    "responses_api_models": "policy_model",
}


def row_of(task: str, number: int, *, attempt: int = 0, rollout: str = "") -> dict[str, Any]:
    """Row `number` of a task's examples, over and over: as the collector sends it to `<task>_agent`.

    rollout: its id, `<task>-<number>` unless given; the scripted model hears it as well. The weather is played by an
    environment server with agent sessions, and its rows have the form for that.
    """
    rollout = rollout or f"{task}-{number}"
    examples = example_rows(TASKS[task])
    row = examples[number % len(examples)]
    asked = {**row["responses_create_params"], "metadata": {"rollout": rollout}}
    indices = {"_ng_task_index": number, "_ng_rollout_index": 0, "_ng_rollout_id": rollout}
    if attempt:
        indices["_ng_attempt_index"] = attempt
    if task == "weather":
        named = {"taskset": task, "task_id": f"row-{number % len(examples)}"}
        typed = {"task_id": named, "task_input": {"responses_create_params": asked, "task_data": {}}}
        return {**typed, "_ng_environment_server": "turn", **indices}
    return {**row, "responses_create_params": asked, "agent_ref": {"name": f"{task}_agent"}, **indices}


def told(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a rollout was told: its reward, each result of a tool or a game in its order, and how it ended."""
    inner = result.get("result") or result
    said = (inner.get("response") or {}).get("output") or []
    heard = [item.get("output", item.get("content")) for item in said if _from_outside(item)]
    how = {name: inner.get(name) for name in ("reward", "terminated", "truncated", "info", "_ng_failure_class")}
    return {**how, "failure": result.get("failure"), "heard": heard}


def _from_outside(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "function_call_output" or item.get("role") == "user"


class Model:
    """A test's side of the scripted model."""

    def __init__(self, port: int) -> None:
        self._url = f"http://{LOOPBACK}:{port}"
        self.asked: list[tuple[str, int]] = []

    async def hold(self, rules: Mapping[str, int]) -> None:
        """Let these rollouts wait from these steps on, and no others."""
        async with aiohttp.ClientSession() as http, http.put(f"{self._url}/holds", json=dict(rules)) as answer:
            answer.raise_for_status()

    async def changes(self) -> AsyncGenerator[dict[str, int]]:
        """rollout -> step of all that are held, after each change; what it was asked is in `asked`."""
        version = -1
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            while True:
                async with http.get(f"{self._url}/held", params={"after": version}) as answer:
                    news = await answer.json()
                version, self.asked = news["version"], [(rollout, step) for rollout, step in news["asked"]]
                yield news["held"]

    async def answered(self, rollouts: Iterable[str]) -> None:
        """Wait until none of these is held any more."""
        async with contextlib.aclosing(self.changes()) as changes:
            async for held in changes:
                if not held.keys() & set(rollouts):
                    return

    async def so_far(self) -> list[tuple[str, int]]:
        """(rollout, step) of each question that it was asked, in their order."""
        async with contextlib.aclosing(self.changes()) as changes:
            await anext(changes)
        return self.asked


class Deployment:
    """Servers by the names of INSTANCES, in a directory that holds the root, the token, the configuration and the logs.

    settings: more of an instance's options, by instance. Used as an async context manager; leaving it ends every
    process. After `crash` it can be started again.
    """

    def __init__(
        self, directory: Path, instances: Sequence[str], *, settings: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.directory, self.instances = directory, tuple(instances)
        self.settings = {name: dict(more) for name, more in (settings or {}).items()}
        self.root, self.token_file = directory / "ckpt", directory / "token"
        self.root.mkdir(parents=True)
        self.token_file.write_text("a-token-of-24-characters-or-more")
        self.token_file.chmod(0o600)
        self._ports = free_ports(2 * len(self.instances) + 1)
        self.model = Model(self._ports[-1])
        self.supervisor = Supervisor(directory / "logs")

    def port(self, instance: str) -> int:
        """HTTP port of an instance."""
        return self._ports[2 * self.instances.index(instance)]

    def control(self, instance: str) -> str:
        """Control address of an instance."""
        return f"{LOOPBACK}:{self._ports[2 * self.instances.index(instance) + 1]}"

    def kind(self, instance: str) -> str:
        """Which state it owns."""
        return KINDS[next(iter(INSTANCES[instance]))]

    @property
    def participants(self) -> list[str]:
        """The instances that own state. A relay owns none."""
        return [name for name in self.instances if not name.endswith("_relay")]

    def config(self) -> dict[str, Any]:
        """The framework's configuration, with the options of this project in it."""
        options = {name: {"control": self.control(name), **self.settings.get(name, {})} for name in self.participants}
        whole: dict[str, Any] = {
            "head_server": {"host": LOOPBACK, "port": 1},
            "dry_run": False,
            "gym_ckpt": {"root": str(self.root), "token_file": str(self.token_file), "instances": options},
        }
        for name in self.instances:
            [(kind, implementations)] = INSTANCES[name].items()
            [(implementation, block)] = implementations.items()
            block = {"entrypoint": "app.py", "host": LOOPBACK, "port": self.port(name), **block}
            if kind == "responses_api_models":
                block["openai_base_url"] = f"http://{LOOPBACK}:{self._ports[-1]}/v1"
            whole[name] = {kind: {implementation: block}}
        return whole

    def argv(self, instance: str) -> list[str]:
        """The command that starts an instance."""
        return [str(Path(sys.executable).parent / "gym-ckpt"), "nemo-gym", instance]

    def _spec(self, instance: str) -> ProcessSpec:
        # A server's own directory comes first on its path, and has a package `tests` too: hooks need another place.
        # The guard of conftest.py is in the variable already.
        paths = [str(REPOSITORY), str(OWN_HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {"NEMO_GYM_CONFIG_DICT": json.dumps(self.config()), "PYTHONPATH": os.pathsep.join(paths)}
        if instance != MODEL:
            return ProcessSpec(instance, self.argv(instance), self.port(instance), health="/healthz", env=env)
        port = self._ports[-1]
        return ProcessSpec(MODEL, [sys.executable, "-m", "tests.nemo_gym.scripted_model", str(port)], port, env=env)

    async def start(self, *instances: str) -> None:
        """Start these, or all with the scripted model, and wait until they serve."""
        await self.supervisor.start(map(self._spec, instances or (MODEL, *self.instances)), within=WITHIN)

    async def crash(self) -> None:
        """SIGKILL to every process, the scripted model's as well."""
        await self.supervisor.crash()

    def fleet(self, *instances: str) -> Fleet:
        """These participants, or all."""
        chosen = instances or self.participants
        return Fleet(
            [Server(kind=self.kind(name), service=name, address=self.control(name)) for name in chosen],
            require_kinds=[],
        )

    def coordinator(self, *instances: str) -> Coordinator:
        """A controller of these participants, or of all."""
        return Coordinator(self.fleet(*instances), root=str(self.root), token=TokenFile(str(self.token_file)))

    def client(self, calls: set[asyncio.Task[Any]] | None = None) -> ServerClient:
        """The framework's own client, told where the servers are. calls: gets the tasks that call."""

        class Client(ServerClient):  # type: ignore[misc]
            async def request(self, *args: Any, **kwargs: Any) -> Any:
                if calls is not None and (task := asyncio.current_task()) is not None:
                    calls.add(task)
                return await super().request(*args, **kwargs)

        head = BaseServerConfig(host=LOOPBACK, port=1)
        return Client(head_server_config=head, global_config_dict=OmegaConf.create(self.config()))

    @contextlib.asynccontextmanager
    async def collecting(self) -> AsyncGenerator[CheckpointedCollection]:
        """A trainer: a controller of all participants, and the collection whose rows it checkpoints."""
        async with (
            self.coordinator() as coordinator,
            CheckpointedCollection(coordinator, server_client=self.client()) as collection,
        ):
            yield collection

    async def __aenter__(self) -> Deployment:
        await self.supervisor.__aenter__()
        await self.start()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.crash()
        await self.supervisor.__aexit__(*error)


class Collection:
    """Rollouts on their way through the framework's own collector.

    through: with its client and dispatch gate; None: with the framework's own client and none. results: by rollout
    id, as they come.
    """

    def __init__(
        self,
        deployment: Deployment,
        rows: Sequence[Mapping[str, Any]],
        *,
        through: CheckpointedCollection | None = None,
    ) -> None:
        self.results: dict[str, dict[str, Any]] = {}
        self.rows = [dict(row) for row in rows]
        self._through = through
        self._model = deployment.model
        self._news = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        self._client = deployment.client(self._calls)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> Collection:
        """Dispatch all of them."""
        self._task = asyncio.create_task(self._collect())
        self._task.add_done_callback(lambda _: self._news.set())
        return self

    async def met(self) -> dict[str, int]:
        """Wait until each rollout is held by the model or has ended; rollout -> step of those that are held."""
        wanted = {row["_ng_rollout_id"] for row in self.rows}
        held: dict[str, int] = {}

        async def watch() -> None:
            async for now in self._model.changes():
                held.clear()
                held.update(now)
                self._news.set()

        watching = asyncio.create_task(watch())
        try:
            while not wanted <= held.keys() | self.results.keys() and not watching.done():
                assert self._task is not None
                if self._task.done():
                    self._task.result()  # raises what ended it
                self._news.clear()
                await self._news.wait()
        finally:
            watching.cancel()
        if watching.done() and not watching.cancelled():
            watching.result()
        return {rollout: step for rollout, step in held.items() if rollout in wanted}

    async def _collect(self) -> None:
        client = self._client

        class Bare(RolloutCollectionHelper):  # type: ignore[misc]
            def setup_server_client(self, head_server_config: Any = None) -> ServerClient:
                return client

        through = self._through
        helper, gate = (Bare(), None) if through is None else (through.helper(), through.gate)
        for each in helper.run_examples(self.rows, semaphore=gate, route_failures_to_sidecar=True):
            row, result = await each
            self.results[row["_ng_rollout_id"]] = result
            self._news.set()

    async def ended(self) -> dict[str, dict[str, Any]]:
        """Wait for all results."""
        assert self._task is not None
        await self._task
        return self.results

    async def drop(self) -> None:
        """What a crash of the trainer does to its requests: else the framework's client would send them for ever."""
        assert self._task is not None
        ending = [self._task, *self._calls]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


@contextlib.contextmanager
def framework_loop() -> Iterator[asyncio.Runner]:
    """A loop for the collector's side: the framework's one HTTP session of a process belongs to one loop."""

    async def close() -> None:
        await get_global_aiohttp_client().close()

    with asyncio.Runner() as runner:
        try:
            yield runner
        finally:
            runner.run(close())
            global_aiohttp_client_exit()
