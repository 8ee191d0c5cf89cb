"""The environment: runs one episode as explicit stages, each behind a boundary from which it can go on.

Where the agent owns the episodes, a relay stands in its place and only passes them on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.integrations import episode_of
from gym_ckpt_grpc.minigym.peers import Peers, Reply, cookie
from gym_ckpt_grpc.minigym.resources_server import answer, body_of
from gym_ckpt_grpc.participants import DataPlaneNames, DirectEnvironment, EnvironmentOwner, EpisodeContext

Stage = Literal["seed", "invoke_agent", "close_agent", "verify", "return"]
AGENT_OPEN = ("seed", "invoke_agent", "close_agent")
"""Stages in which the agent may have a session of the episode."""


class EnvironmentServer:
    """`/run`: seed, invoke the agent, close its session, verify, return.

    resources: kind of task -> base URL of its resources server. checkpointing: False runs episodes directly.
    """

    def __init__(
        self, peers: Peers, agent_url: str, resources: Mapping[str, str], *, checkpointing: bool = True
    ) -> None:
        self._peers = peers
        self._agent_url = agent_url
        self._resources = dict(resources)
        self._episodes = EnvironmentOwner() if checkpointing else DirectEnvironment()

    @property
    def owner(self) -> EnvironmentOwner:
        """The owner of its state; there is none with checkpointing off."""
        assert isinstance(self._episodes, EnvironmentOwner), "checkpointing is off"
        return self._episodes

    def build_app(self) -> FastAPI:
        """The application, without lifespan or gate."""
        app = FastAPI(title="minigym environment", openapi_url=None)
        app.add_api_route("/health", _health, methods=["GET"])
        app.add_api_route("/run", self._run, methods=["POST"])
        return app

    async def _run(self, request: Request) -> Response:
        task = await body_of(request)
        return answer(await self._episodes.run(episode_of(request.scope), task, self._episode))

    async def _episode(self, context: EpisodeContext) -> Mapping[str, Any]:
        resources_url = self._resources[context.task["kind"]]
        return await SingleTurn(context, self._peers, self._agent_url, resources_url, self._episodes.names).run()


class SingleTurn:
    """One episode. state: its boundary, which carries everything that the rest of the episode needs.

    The session ids assigned here are part of it, so that a stage which runs twice meets the sessions of its first
    try.
    """

    def __init__(
        self, context: EpisodeContext, peers: Peers, agent_url: str, resources_url: str, names: DataPlaneNames
    ) -> None:
        rollout = context.episode.rollout_id
        self.state: dict[str, Any] = context.restored or {
            "next": "seed",
            "session_id": f"session-{rollout}",
            "agent_session_id": f"agent-{rollout}",
        }
        self._context = context
        self._peers = peers
        self._agent_url = agent_url
        self._resources_url = resources_url
        self._names = names

    async def run(self) -> Mapping[str, Any]:
        """Walk the stages from the restored boundary, or from the first; gives the result."""
        context = self._context
        context.on_cleanup(self._close_resources)
        if self.state["next"] != "seed":
            context.on_cleanup(self._leave_agent)
        while True:
            await context.boundary(self.state)
            if self.state["next"] == "return":
                result: Mapping[str, Any] = self.state["result"]
                return result
            self.state = await self._stage(self.state)

    async def _stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Run the stage that a boundary names, and give the next boundary."""
        stage: Stage = state["next"]
        context = self._context
        if stage == "seed":
            async with context.step("seed", mode="replay"):
                verify = await self._seed()
            return {**state, "next": "invoke_agent", "verify": verify}
        if stage == "invoke_agent":
            async with context.step("invoke_agent", mode="replay"):
                reply = await self._invoke()
            return {**state, "next": "close_agent", "messages": reply["messages"]}
        if stage == "close_agent":
            async with context.step("close_agent", mode="wait"):
                observations = await self._close_agent()
            return {**state, "next": "verify", "observations": observations}
        async with context.step("verify", mode=state["verify"]):
            verdict = await self._verify()
        result = {"reward": verdict["reward"], "state": verdict["state"], "transcript": state["messages"]}
        return {**state, "next": "return", "result": result}

    async def _seed(self) -> str:
        """Seed the resources, then the agent; gives the mode in which `/verify` may run."""
        task, state, context = self._context.task, self.state, self._context
        seeded = await self._resources("/seed_session", task["setup"])
        verify = await context.seed_reply(seeded.headers)
        assignment = {
            "agent_session_id": state["agent_session_id"],
            "prompt": task["prompt"],
            "tools": seeded.body["tools"],
            "resources": task["kind"],
            "session_id": state["session_id"],
            "seed": task["seed"],
            "turns": task["turns"],
            "stream": task.get("stream", False),
        }
        context.on_cleanup(self._leave_agent)  # before the seed: its reply may be lost, and leave a session behind
        reply = await self._agent("/seed_session", assignment)
        await context.seed_reply(reply.headers)
        return verify.value

    async def _invoke(self) -> Any:
        body = {"agent_session_id": self.state["agent_session_id"]}
        return (await self._agent("/v1/responses", body, {self._names.activation_header: "1"})).body

    async def _close_agent(self) -> Any:
        """Close the agent's session; gives what it observed, which comes exactly once."""
        return (await self._agent("/close_session", {"agent_session_id": self.state["agent_session_id"]})).body

    async def _leave_agent(self) -> None:
        if self.state["next"] in AGENT_OPEN:
            await self._close_agent()

    async def _verify(self) -> Any:
        body = {**self._context.task["setup"], "messages": self.state["messages"]}
        return (await self._resources("/verify", body)).body

    async def _close_resources(self) -> None:
        await self._resources("/close_session", {})

    async def _agent(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        return await self._peers.post(self._agent_url + self._path(path), body, headers=headers)

    async def _resources(self, path: str, body: Any) -> Reply:
        url = self._resources_url + self._path(path)
        return await self._peers.post(url, body, headers=cookie(self.state["session_id"]))

    def _path(self, path: str) -> str:
        return self._names.path_of(self._context.episode, path)


class LegacyRelay:
    """`/run` passed on to an agent that owns the episode. No participant: it owns nothing, and has no gate.

    A restart of it, or a checkpoint, costs nothing but the calls under way.
    """

    def __init__(self, peers: Peers, agent_url: str, names: DataPlaneNames | None = None) -> None:
        self._peers = peers
        self._agent_url = agent_url
        self._prefix = (names or DataPlaneNames()).rollout_prefix

    def build_app(self) -> FastAPI:
        """The application, complete: with the rollout prefix in its route, since there is no gate to take it off."""
        app = FastAPI(title="minigym relay", openapi_url=None)
        app.add_api_route("/health", _health, methods=["GET"])
        app.add_api_route(self._prefix + "/{capture_key}/run", self._run, methods=["POST"])
        return app

    async def _run(self, capture_key: str, request: Request) -> Response:
        """The agent's own answer, a refusal with its Retry-After included."""
        url = f"{self._agent_url}{self._prefix}/{capture_key}/run"
        reply = await self._peers.request("POST", url, await body_of(request))
        passed = answer(reply.body, status=reply.status)
        if (after := reply.headers.get("retry-after")) is not None:
            passed.headers["retry-after"] = after
        return passed


async def _health() -> dict[str, Any]:
    return {"status": "ok", "role": "environment", "pid": os.getpid()}
