"""`Embedding` and `checkpointed`: what every kind of server has in common, and one real process of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import grpc
import pytest
from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.rollout_correlation import RolloutContextMiddleware
from pydantic import Field
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

from gym_ckpt_grpc.auth import TokenFile
from gym_ckpt_grpc.control import open_channel
from gym_ckpt_grpc.integrations import episode_of, visit_of
from gym_ckpt_grpc.integrations.nemo_gym import NAMES, checkpointed
from gym_ckpt_grpc.integrations.nemo_gym.classes import mixin_of, released_class
from gym_ckpt_grpc.integrations.nemo_gym.participant import Embedding, found
from gym_ckpt_grpc.integrations.nemo_gym.resources import ResourcesMixin
from gym_ckpt_grpc.minigym.ports import LOOPBACK, free_ports
from gym_ckpt_grpc.participants import EnvironmentOwner, ResourcesMode, ResourcesOwner, ResourcesSettings
from gym_ckpt_grpc.protocol import EpisodeId
from gym_ckpt_grpc.protocol.errors import StaleAttempt, UsageError
from gym_ckpt_grpc.testing import ParticipantClient
from tests.nemo_gym.deployment import Deployment
from tests.nemo_gym.servers import build, client_of, options, response, rows, text
from tests.participants.fakes import FakePort, close, reopen, spin

ROW = rows("example_session_state_mgmt")[0]
"""From 3 to 6."""
VERIFY = {**ROW, "response": response(text("6"))}


# ---- the class ------------------------------------------------------------------------------------------------


class Within:
    """A server's class may stand within another."""

    class Counter(StatefulCounterResourcesServer):  # type: ignore[misc]
        """A counter."""


@pytest.mark.parametrize("released", [StatefulCounterResourcesServer, Within.Counter])
def test_a_checkpointed_class_has_the_released_ones_name_and_so_its_cookies_and_keys(released: Any) -> None:
    cls: Any = checkpointed(released, options())
    names = ("__name__", "__qualname__", "__module__", "__doc__")
    assert [getattr(cls, name) for name in names] == [getattr(released, name) for name in names]
    assert cls.model_fields.keys() == released.model_fields.keys()
    assert build(cls).get_session_middleware_key() == build(released).get_session_middleware_key()
    assert released_class(cls) is released


@pytest.mark.parametrize(("cls", "given"), [(StatefulCounterResourcesServer, False), (SimpleResourcesServer, None)])
def test_ray_is_not_started_for_a_class_that_says_nothing_of_it(cls: Any, given: bool | None) -> None:
    assert cls.ray_enabled is given
    assert checkpointed(cls, options()).ray_enabled is False  # type: ignore[attr-defined]


def test_what_a_class_says_of_ray_stays() -> None:
    class Needs(SimpleResourcesServer):  # type: ignore[misc]
        ray_enabled = True

    assert checkpointed(Needs, options()).ray_enabled is True  # type: ignore[attr-defined]


def test_a_class_with_the_mixin_takes_other_options_and_is_no_deeper() -> None:
    class Mine(ResourcesMixin, StatefulCounterResourcesServer):  # type: ignore[misc]
        checkpoint: ClassVar = options()

    again: Any = checkpointed(Mine, options(instance="other"))
    assert (again.checkpoint.instance, again.__mro__.count(ResourcesMixin)) == ("other", 1)


def test_a_mixin_without_options_says_so_at_the_start() -> None:
    class Mine(ResourcesMixin, StatefulCounterResourcesServer):  # type: ignore[misc]
        pass

    with pytest.raises(UsageError, match="checkpoint: ClassVar"):
        build(Mine).setup_webserver()


def test_there_is_a_mixin_for_each_kind_and_no_other() -> None:
    with pytest.raises(UsageError, match="judge"):
        mixin_of(StatefulCounterResourcesServer, "judge")


def test_a_kind_that_is_not_the_mixins_stops_the_start() -> None:
    with pytest.raises(UsageError, match="agent"):
        Embedding(ResourcesOwner(), options(kind="agent"))


# ---- setting up -----------------------------------------------------------------------------------------------


class Expensive(StatefulCounterResourcesServer):  # type: ignore[misc]
    """Notes that it was set up."""

    set_up: list[str] = Field(default_factory=list)

    def setup_webserver(self) -> Any:
        self.set_up.append("set up")
        return super().setup_webserver()


def test_several_worker_processes_are_refused_before_anything_is_set_up() -> None:
    """They would import the server's module, and serve it without a gate."""
    server = build(checkpointed(Expensive, options()), num_workers=2)
    with pytest.raises(UsageError, match=r"counter has num_workers = 2"):
        server.setup_webserver()
    assert server.set_up == []
    for one in (1, None):
        assert build(checkpointed(StatefulCounterResourcesServer, options()), num_workers=one).setup_webserver()


async def test_a_server_that_is_set_up_twice_has_one_owner_and_a_gate_in_front_of_each_application() -> None:
    server = build(checkpointed(StatefulCounterResourcesServer, options()))
    first, owner = server.setup_webserver(), found(server).owner
    second = server.setup_webserver()
    assert found(server).owner is owner
    owner.attach(FakePort())
    for app, rollout in ((first, "r"), (second, "s")):
        async with client_of(app) as client:
            assert (await client.post(f"/ng-rollout/{rollout}/seed_session", json=ROW)).status_code == 200
    assert sorted(str(each.episode) for each in owner._sessions) == ["r", "s"]


# ---- the embedding --------------------------------------------------------------------------------------------


class Note:
    """A middleware that notes what it sees of each request."""

    def __init__(self, app: Any, name: str, notes: list[Any]) -> None:
        self.app, self.name, self.notes = app, name, notes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.notes.append((self.name, scope["path"], type(visit_of(scope)).__name__))
        await self.app(scope, receive, send)


def _application(notes: list[Any]) -> FastAPI:
    """An application that strips the prefix itself, as the framework's servers do."""
    app = FastAPI()
    app.add_middleware(RolloutContextMiddleware)
    app.add_middleware(Note, name="its own", notes=notes)

    @app.post("/tool")
    async def tool(request: Request) -> str:
        notes.append(("handler", request.url.path, str(episode_of(request.scope))))
        return "done"

    @app.post("/stale")
    async def stale() -> str:
        raise StaleAttempt("attempt r was retired", episodes=[EpisodeId("r")])

    return app


def _embedded(position: Any, notes: list[Any], **more: Any) -> tuple[FastAPI, ResourcesOwner]:
    owner = ResourcesOwner(settings=ResourcesSettings(mode=ResourcesMode.STATELESS), names=NAMES)
    app = _application(notes)
    embedding = Embedding(owner, options())
    for _ in range(2):  # the second time changes nothing
        embedding.install(app, gate=owner.gate(), position=position, **more)
    app.add_middleware(Note, name="added later", notes=notes)
    return app, owner


@pytest.mark.parametrize(("position", "seen_by_its_own"), [("inside", "Visit"), ("outside", "Request")])
async def test_a_gate_stands_behind_all_middlewares_or_in_front_of_them(position: str, seen_by_its_own: str) -> None:
    notes: list[Any] = []
    app, owner = _embedded(position, notes, drivers=[Middleware(Note, name="driver", notes=notes)])
    owner.attach(FakePort())
    async with client_of(app) as client:
        assert (await client.post("/ng-rollout/r-a1/tool")).json() == "done"
        assert notes == [
            ("added later", "/ng-rollout/r-a1/tool", "Visit"),
            ("its own", "/ng-rollout/r-a1/tool", seen_by_its_own),
            ("driver", "/tool", "Request"),
            ("handler", "/tool", "r-a1"),
        ]
        await close(owner)
        held = asyncio.ensure_future(client.post("/tool"))
        await spin(50)
        assert owner.admission.waiting == 1
        await reopen(owner)
        await held


@pytest.mark.parametrize("position", ["inside", "outside"])
async def test_an_application_without_middlewares_is_gated_inside_of_those_that_come_later(position: Any) -> None:
    """An environment server: the framework adds what sees exceptions and clients that leave when it runs it."""
    notes: list[Any] = []
    owner, app = ResourcesOwner(settings=ResourcesSettings(mode=ResourcesMode.STATELESS), names=NAMES), FastAPI()
    Embedding(owner, options()).install(app, gate=owner.gate(), position=position)
    app.add_middleware(Note, name="added later", notes=notes)
    async with client_of(app) as client:
        assert (await client.post("/ng-rollout/-bad/tool")).status_code == 400
    assert notes == [("added later", "/ng-rollout/-bad/tool", "Visit")]


@pytest.mark.parametrize("position", ["inside", "outside"])
async def test_a_refusal_that_a_handler_raises_is_answered_as_one(position: str) -> None:
    """Not by a middleware for exceptions: an agent gives the answer of such a one to the model, as a tool's result."""
    app, _ = _embedded(position, [])

    @app.middleware("http")
    async def told_to_the_model(request: Request, call_next: Any) -> Any:
        try:
            return await call_next(request)
        except Exception as error:
            return JSONResponse(repr(error), status_code=500)

    app.user_middleware.append(app.user_middleware.pop(0))  # behind a gate outside
    async with client_of(app) as client:
        answer = await client.post("/stale")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "STALE_ATTEMPT")


async def test_the_control_server_stands_as_long_as_the_application_and_begins_after_it(tmp_path: Path) -> None:
    """A restore finds an application that has started."""
    (port,) = free_ports(1)
    events: list[str] = []
    app = FastAPI()

    @asynccontextmanager
    async def own(_: Any) -> AsyncIterator[None]:
        events.append(f"started, served: {await _service(port)}")
        yield
        events.append(f"ends, served: {await _service(port)}")

    app.router.lifespan_context = own
    owner = EnvironmentOwner(names=NAMES)
    given = options(kind="environment", service="turn", root=str(tmp_path), control=f"{LOOPBACK}:{port}")
    Embedding(owner, given).install(app, gate=owner.gate(), position="inside")
    async with app.router.lifespan_context(app):
        events.append(f"serves: {await _service(port)}")
    assert events == ["started, served: None", "serves: turn", "ends, served: None"]


async def _service(port: int) -> str | None:
    """Who answers at a control port; None if nobody does."""
    channel = open_channel(f"{LOOPBACK}:{port}")
    try:
        return str((await ParticipantClient(channel, timeout=10).status()).participant.service)
    except grpc.aio.AioRpcError:
        return None
    finally:
        await channel.close()


# ---- a real process -------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
async def test_a_killed_session_counter_goes_on_from_its_checkpoint_under_the_same_cookie(tmp_path: Path) -> None:
    """Served by its own `run_webserver`; a call that a checkpoint held has the answer that it would have had."""
    async with Deployment(tmp_path / "deployment", ["counter"]) as deployment:
        url = f"http://{LOOPBACK}:{deployment.port('counter')}"
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(url, cookie_jar=jar) as http, deployment.coordinator() as coordinator:
            assert await _post(http, "/ng-rollout/task-7/seed_session", ROW) == {}
            await _post(http, "/increment_counter", {"count": 1})
            async with coordinator.checkpoint() as checkpoint:
                report = await checkpoint.prepare(ready_within=10)
                held = asyncio.create_task(_post(http, "/increment_counter", {"count": 2}))
                await _waiting(deployment)
                await checkpoint.commit(report.continued([EpisodeId("task-7")]))
                await checkpoint.publish()
            assert await held == {"success": True}
            assert await _post(http, "/get_counter_value", {}) == {"count": 6}
            assert (await _post(http, "/verify", VERIFY))["reward"] == 1.0
        await deployment.crash()
        await deployment.start("counter")
        async with (
            aiohttp.ClientSession(url, cookie_jar=jar) as http,
            http.post("/increment_counter", json={"count": 2}) as early,
        ):
            assert (early.status, (await early.json())["error"]["code"]) == (404, "STATE_NOT_FOUND")
        async with deployment.coordinator() as coordinator, coordinator.restoring("latest") as restored:
            assert [str(each) for each in restored.continued] == ["task-7-a1"]
        async with aiohttp.ClientSession(url, cookie_jar=jar) as http:
            assert await _post(http, "/get_counter_value", {}) == {"count": 4}
            await _post(http, "/increment_counter", {"count": 2})
            assert (await _post(http, "/verify", VERIFY))["reward"] == 1.0


async def _post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as reply:
        reply.raise_for_status()
        return await reply.json()


async def _waiting(deployment: Deployment) -> None:
    """Until the server's gate holds a request, as its status says."""
    channel = open_channel(deployment.control("counter"), token=TokenFile(str(deployment.token_file)))
    try:
        async with asyncio.timeout(30):
            async for status in ParticipantClient(channel).watch():
                if status.report.counts["waiting"]:
                    return
    finally:
        await channel.close()
