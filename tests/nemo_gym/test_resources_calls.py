"""Calls of a resources server itself: to a judge, to other servers, to itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nemo_gym import server_utils
from nemo_gym.rollout_correlation import rollout_context
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer

from gym_ckpt_grpc.integrations.asgi import CheckpointMiddleware
from gym_ckpt_grpc.integrations.nemo_gym import NAMES
from gym_ckpt_grpc.integrations.nemo_gym.inner import INNER_HEADER
from gym_ckpt_grpc.integrations.nemo_gym.names import UNTAGGED_HEADER
from gym_ckpt_grpc.integrations.nemo_gym.outer import IdentityMiddleware
from gym_ckpt_grpc.participants import PolicyModelOwner
from tests.nemo_gym.servers import Participant, build, client_of, held, rows
from tests.participants.fakes import FakePort, call, close, reopen, spin

SEED = {**rows("example_session_state_mgmt")[0], "_ng_task_index": 7, "_ng_rollout_index": 0}

JUDGED = {
    "observability_enabled": True,
    "judge": {"responses_api_models": {"openai_model": {"host": "127.0.0.1", "port": 2}}},
    "tools": {"resources_servers": {"x": {"host": "127.0.0.1", "port": 3}}},
    "counter": {"resources_servers": {"x": {"host": "127.0.0.1", "port": 4}}},
}


class Sent:
    """A request that the framework's client would have sent."""

    def __init__(self, url: str, headers: dict[str, str] | None = None, **_: Any) -> None:
        self.path = "/" + url.split("/", 3)[3]
        self.headers = headers or {}


async def _sent_by(server: Any, to: str, path: str = "/v1/responses", **given: Any) -> Sent:
    """What a handler of a server sends, in the rollout r."""
    sent: list[Sent] = []

    async def request(**arguments: Any) -> None:
        sent.append(Sent(**arguments))

    with pytest.MonkeyPatch.context() as patch, rollout_context("r"):
        patch.setattr(server_utils, "request", request)
        server.server_client.global_config_dict.update(JUDGED)
        await server.server_client.post(to, path, **given)
    return sent[0]


async def test_a_judge_call_of_a_verify_is_nobodys_even_where_the_judge_is_the_policy_itself() -> None:
    """Under the rollout prefix that it carries, it would wait at the gate of a server that waits for the verify."""
    bare, ours = build(StatefulCounterResourcesServer), Participant(StatefulCounterResourcesServer)
    policy, port, seen = PolicyModelOwner(names=NAMES), FakePort(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    policy.attach(port)
    gated = CheckpointMiddleware(app, policy.gate(), keep_path=True)
    served = IdentityMiddleware(gated, honours_untagged=True)
    await close(policy)
    plain = await _sent_by(bare, "judge")
    held = call(served, plain.path, headers=plain.headers)
    await spin(30)
    assert (plain.path, held.answer.status, seen) == ("/ng-rollout/r/v1/responses", 0, [])
    marked = await _sent_by(ours.server, "judge", headers={"x-other": "kept"})
    assert (marked.path, marked.headers) == (plain.path, {"x-other": "kept", UNTAGGED_HEADER: "1"})
    assert (await call(served, marked.path, headers=marked.headers).end()).status == 200
    held.leave()
    await held.end()
    await policy.close()


async def test_calls_to_servers_that_generate_nothing_are_as_they_were() -> None:
    sent = await _sent_by(Participant(StatefulCounterResourcesServer).server, "tools", "/verify")
    assert (sent.path, sent.headers) == ("/ng-rollout/r/verify", {})


async def test_a_call_of_the_server_to_itself_passes_and_only_its_root_is_counted() -> None:
    """Held, it would wait for the end of a checkpoint that waits for the request around it."""
    counter = Participant(StatefulCounterResourcesServer)
    async with client_of(counter.app) as client:
        await client.post("/seed_session", json=SEED)
        secret = (await _sent_by(counter.server, "counter")).headers[INNER_HEADER]
        await close(counter.owner)
        async with asyncio.timeout(30):
            inner = await client.post("/get_counter_value", json={}, headers={INNER_HEADER: secret})
        assert (inner.json(), counter.owner.is_ready()) == ({"count": 3}, True)
        forged = asyncio.ensure_future(client.post("/get_counter_value", json={}, headers={INNER_HEADER: "1"}))
        await held(counter)
        await reopen(counter.owner)
        assert (await forged).json() == {"count": 3}
