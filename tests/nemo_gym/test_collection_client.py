"""What the collection's client makes of each reply, through the framework's own `run_examples`.

A stand-in for the environment server answers on loopback. It is not told what it is: it plays a list of answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from gym_ckpt_grpc.coordinator import PrepareFailed, RestoreFailed, RetireFailed, RetireResult
from gym_ckpt_grpc.integrations.nemo_gym.collection import CheckpointedCollection, as_attempt
from gym_ckpt_grpc.integrations.nemo_gym.dispatch import NotSent
from gym_ckpt_grpc.minigym.ports import free_ports
from gym_ckpt_grpc.participants.refusals import refusal_reply
from gym_ckpt_grpc.protocol.errors import (
    AdmissionClosed,
    ControlError,
    InternalError,
    InvalidArgument,
    OutOfTime,
    StaleAttempt,
    StateCorrupt,
    WorkerUnavailable,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.nemo_gym.deployment import framework_loop

Answer = Callable[[web.Request], Any]
PATIENCE = 0.2
ROW = {"responses_create_params": {"input": []}, "agent_ref": {"name": "agent"}}


class Controller:
    """Stands in for a Coordinator: notes what is retired."""

    def __init__(self) -> None:
        self.retired: list[EpisodeId] = []
        self.forgotten: list[Mapping[str, int]] = []
        self.fails = False

    async def retire(self, episodes: Iterable[EpisodeId], **_: Any) -> RetireResult:
        self.retired += episodes
        if self.fails:
            raise RetireFailed("one is down", RetireResult())
        return RetireResult()

    @asynccontextmanager
    async def restoring(self, source: str, **_: Any) -> AsyncIterator[None]:
        if source:
            raise RestoreFailed(f"{source} is damaged")
        yield

    async def forget(self, rollouts: Mapping[str, int], **_: Any) -> None:
        self.forgotten.append(dict(rollouts))


class Environment:
    """The stand-in. got: the bodies of its `/run`."""

    def __init__(self) -> None:
        self.port = free_ports(1)[0]
        self.got: list[dict[str, Any]] = []
        self.connections: list[str | None] = []
        self.answers: list[Answer] = []
        self.controller = Controller()
        self.collection = CheckpointedCollection(
            self.controller,  # type: ignore[arg-type]
            server_client=self._client(),
            patience=PATIENCE,
        )

    def _client(self) -> ServerClient:
        address = {"entrypoint": "app.py", "host": "127.0.0.1", "port": self.port}
        agent = {"type": "responses_api_agents", "name": "agent"}
        config = {
            "agent": {"responses_api_agents": {"simple_agent": address}},
            "relay": {"environment_servers": {"legacy_agent": {**address, "agent_server": agent}}},
        }
        head = BaseServerConfig(host="127.0.0.1", port=1)
        return ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(config))

    async def _run(self, request: web.Request) -> Any:
        self.got.append(await request.json())
        self.connections.append(request.headers.get("connection"))
        return await self.answers.pop(0)(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/run", self._run)
        app.router.add_post("/aggregate_metrics", self._metrics)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield
        finally:
            await runner.cleanup()

    async def collect(self, row: dict[str, Any], **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """One row, through the framework."""
        (future,) = self.collection.helper().run_examples([row], semaphore=self.collection.gate, **options)
        got: tuple[dict[str, Any], dict[str, Any]] = await future
        return got

    def run(self, runner: asyncio.Runner, row: Mapping[str, Any], *answers: Answer, **options: Any) -> dict[str, Any]:
        """The result of one row that is answered so."""

        async def play() -> dict[str, Any]:
            self.answers = list(answers)
            async with self.served():
                back, result = await self.collect({**ROW, **row}, **options)
            assert back == {**ROW, **row}
            return result

        return runner.run(play())


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with framework_loop() as runner:
        yield runner


@pytest.fixture
def environment() -> Environment:
    return Environment()


def says(content: Any, status: int = 200) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(content, status=status)

    return answer


def refuses(error: ControlError) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        status, headers, body = refusal_reply(error)
        return web.Response(status=status, headers=headers, body=body)

    return answer


async def dies(request: web.Request) -> web.Response:
    """Before a word of the reply."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def dies_midway(request: web.Request) -> web.StreamResponse:
    """With a part of the reply out."""
    reply = web.StreamResponse(headers={"content-length": "1000"})
    await reply.prepare(request)
    await reply.write(b'{"reward": ')
    assert request.transport is not None
    request.transport.abort()
    return reply


DONE = says({"reward": 1.0})
ID = {"_ng_rollout_id": "7-0"}


def test_a_reply_is_handed_on_whole(environment: Environment, runner: asyncio.Runner) -> None:
    assert environment.run(runner, ID, DONE) == {"reward": 1.0}
    assert environment.got == [{**ROW, **ID}]
    assert environment.connections == ["close"]  # no row is sent on a connection that the server may be closing


def test_a_failure_of_the_row_is_the_rows(environment: Environment, runner: asyncio.Runner) -> None:
    """As the framework has it: raised, or a row of the sidecar with the text of the reply."""
    result = environment.run(runner, ID, says("ValueError('bad tool')", 500), route_failures_to_sidecar=True)
    assert result["_ng_failure_class"] == "agent_run_error"
    assert "bad tool" in str(result)
    with pytest.raises(aiohttp.ClientResponseError):
        environment.run(runner, {"_ng_rollout_id": "8-0"}, says("bad", 500))
    assert environment.controller.retired == []


@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize("answer", [dies, dies_midway, says("Request was cancelled", 500)])
def test_a_lost_reply_is_no_result(
    environment: Environment, runner: asyncio.Runner, answer: Answer, sidecar: bool
) -> None:
    """The framework itself would send it again, for ever; nobody decides here, so it fails by name."""
    with pytest.raises(OutOfTime, match="7-0"):
        environment.run(runner, ID, answer, DONE, route_failures_to_sidecar=sidecar)
    assert len(environment.got) == 1


def test_a_lost_row_goes_on_as_it_was_decided(environment: Environment, runner: asyncio.Runner) -> None:
    async def decided() -> tuple[EpisodeId, ...]:
        await environment.collection.loss()
        # A checkpoint now would have nothing of it, and be the one that is restored next.
        with pytest.raises(PrepareFailed, match="rows are lost, 7-0 is one of 1"):
            await environment.collection.checkpoint()
        return await environment.collection.restart()

    async def play() -> dict[str, Any]:
        environment.answers = [dies, DONE]
        async with environment.served(), asyncio.TaskGroup() as group:
            decision = group.create_task(decided())
            collecting = group.create_task(environment.collect({**ROW, **ID}))
        assert decision.result() == (EpisodeId("7-0", 1),)
        row, result = collecting.result()
        assert row == {**ROW, **ID}
        return result

    assert runner.run(play()) == {"reward": 1.0}
    assert [body.get("_ng_attempt_index") for body in environment.got] == [None, 1]
    assert environment.controller.retired == [EpisodeId("7-0")]


def test_rows_stay_lost_when_a_restore_fails(environment: Environment, runner: asyncio.Runner) -> None:
    """What was on the wire was given up for it; the controller may restore again, or start them over."""

    async def held(_: web.Request) -> web.Response:
        began.set()
        await over.wait()
        return web.Response()

    async def play() -> dict[str, Any]:
        environment.answers = [held, DONE]
        collection = environment.collection
        async with environment.served():
            collecting = asyncio.create_task(environment.collect({**ROW, **ID}))
            await began.wait()
            with pytest.raises(RestoreFailed, match="ckpt-7 is damaged"):
                async with collection.restoring("ckpt-7"):
                    pass
            assert collection.dispatch.lost == (EpisodeId("7-0"),)
            assert [reason.split(":")[0] for reason in collection.gate.reasons] == ["lost, to be restored or restarted"]
            await collection.restart()
            over.set()
            return (await collecting)[1]

    began, over = asyncio.Event(), asyncio.Event()
    assert runner.run(play()) == {"reward": 1.0}
    assert [body.get("_ng_attempt_index") for body in environment.got] == [None, 1]


def test_no_refusal_is_a_failed_row(environment: Environment, runner: asyncio.Runner) -> None:
    closed, stale = AdmissionClosed("closed", retry_after=1), StaleAttempt("retired")
    assert environment.run(runner, ID, refuses(closed), refuses(stale), DONE, route_failures_to_sidecar=True) == {
        "reward": 1.0
    }
    assert [body.get("_ng_attempt_index") for body in environment.got] == [None, None, 1]
    with pytest.raises(InternalError, match="incident 7"):
        environment.run(
            runner, {"_ng_rollout_id": "8-0"}, refuses(InternalError("incident 7")), route_failures_to_sidecar=True
        )


@pytest.mark.parametrize(
    "answer", [refuses(WorkerUnavailable("gone")), refuses(StateCorrupt("diverged")), says("bad gateway", 502)]
)
def test_an_attempt_that_cannot_go_on_is_retired_and_sent_as_the_next(
    environment: Environment, runner: asyncio.Runner, answer: Answer
) -> None:
    assert environment.run(runner, ID, answer, DONE, route_failures_to_sidecar=True) == {"reward": 1.0}
    assert environment.controller.retired == [EpisodeId("7-0")]
    assert environment.got[1]["_ng_attempt_index"] == 1

    async def leave() -> None:
        async with environment.collection:
            pass

    runner.run(leave())
    assert environment.controller.forgotten == [{"7-0": 0}]


def test_what_could_not_be_retired_is_owed(environment: Environment, runner: asyncio.Runner) -> None:
    """Its row goes on, and the next time that something is retired it is retired as well."""

    async def play() -> None:
        collection, controller = environment.collection, environment.controller
        collection.dispatch.move_on([], installed=False)
        controller.fails = True
        await collection._retire([EpisodeId("7-0")])
        controller.fails, controller.retired = False, []
        await collection._retire([EpisodeId("8-0")])
        assert set(controller.retired) == {EpisodeId("7-0"), EpisodeId("8-0")}
        controller.retired = []
        await collection._retire([])
        assert controller.retired == []

    runner.run(play())


def test_a_server_that_does_not_listen_yet(
    environment: Environment, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has begun: the same attempt is sent again."""
    began = asyncio.Event()
    refused = NotSent.__init__

    def noted(self: NotSent, *text: str) -> None:
        began.set()
        refused(self, *text)

    async def play() -> dict[str, Any]:
        environment.answers = [DONE]
        collecting = asyncio.ensure_future(environment.collect({**ROW, **ID}))
        await began.wait()
        async with environment.served():
            return (await collecting)[1]

    monkeypatch.setattr(NotSent, "__init__", noted)
    assert runner.run(play()) == {"reward": 1.0}
    assert environment.got == [{**ROW, **ID}]


def test_a_row_without_an_id_is_refused_by_name(environment: Environment, runner: asyncio.Runner) -> None:
    with pytest.raises(InvalidArgument, match="_ng_rollout_id"):
        environment.run(runner, {}, route_failures_to_sidecar=True)
    assert environment.got == []


def test_other_calls_pass_through(environment: Environment, runner: asyncio.Runner) -> None:
    async def play() -> Any:
        async with environment.served():
            client = environment.collection.client()
            return await (await client.post("relay", "/aggregate_metrics", json={})).json()

    with environment.collection.gate.closed("a checkpoint"):
        assert runner.run(play()) == {"path": "/aggregate_metrics"}


def test_bodies_of_an_attempt() -> None:
    typed = {"episode_id": {"rollout_id": "7-0", "attempt": 0}, "task": {}}
    assert as_attempt(typed, EpisodeId("7-0", 2)) == {
        "episode_id": {"rollout_id": "7-0", "attempt": 2},
        "task": {},
    }
    assert typed["episode_id"] == {"rollout_id": "7-0", "attempt": 0}
    indexed = {"_ng_task_index": 7, "_ng_rollout_index": 0}
    assert as_attempt(indexed, EpisodeId("7-0")) == indexed
    assert as_attempt(indexed, EpisodeId("7-0", 1)) == {**indexed, "_ng_attempt_index": 1}
    named = {"_ng_rollout_id": "step3.7-a2"}
    assert as_attempt(named, EpisodeId("step3.7", 3)) == {"_ng_rollout_id": "step3.7", "_ng_attempt_index": 3}
