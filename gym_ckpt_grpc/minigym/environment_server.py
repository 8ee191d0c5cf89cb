"""The environment: runs one episode as explicit stages, each behind a boundary from which it can go on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.integrations import episode_of
from gym_ckpt_grpc.minigym.peers import Peers, cookie
from gym_ckpt_grpc.minigym.resources_server import answer, body_of
from gym_ckpt_grpc.participants import EnvironmentOwner, EpisodeContext

Stage = Literal["seed", "invoke_agent", "close_agent", "verify", "return"]


class EnvironmentServer:
    """`/run`: seed, invoke the agent, close its session, verify, return.

    resources: kind of task -> base URL of its resources server.
    """

    def __init__(self, peers: Peers, agent_url: str, resources: Mapping[str, str]) -> None:
        self._peers = peers
        self._agent_url = agent_url
        self._resources = dict(resources)
        self.owner = EnvironmentOwner()

    def build_app(self) -> FastAPI:
        """The application, without lifespan or gate."""
        app = FastAPI(title="minigym environment", openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/run", self._run, methods=["POST"])
        return app

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": "environment", "pid": os.getpid()}

    async def _run(self, request: Request) -> Response:
        task = await body_of(request)
        return answer(await self.owner.run(episode_of(request.scope), task, self._episode))

    async def _episode(self, context: EpisodeContext) -> Mapping[str, Any]:
        """Walk the stages from the restored boundary, or from the first.

        A boundary carries everything that the rest of the episode needs, the session ids assigned here included,
        so that a stage which runs twice meets the sessions of its first try.
        """
        rollout = context.episode.rollout_id
        state: dict[str, Any] = context.restored or {
            "next": "seed",
            "session_id": f"session-{rollout}",
            "agent_session_id": f"agent-{rollout}",
        }
        # Registered before anything is seeded: a seed's reply may be lost, and leave a session behind.
        context.on_cleanup(lambda: self._close_resources(context, state))
        context.on_cleanup(lambda: self._close_agent(context, state))
        while True:
            await context.boundary(state)
            if state["next"] == "return":
                result: Mapping[str, Any] = state["result"]
                return result
            state = await self._stage(context, state)

    async def _stage(self, context: EpisodeContext, state: dict[str, Any]) -> dict[str, Any]:
        """Run the stage that a boundary names, and give the next boundary."""
        stage: Stage = state["next"]
        if stage == "seed":
            async with context.step("seed", mode="replay"):
                await self._seed(context, state)
            return {**state, "next": "invoke_agent"}
        if stage == "invoke_agent":
            async with context.step("invoke_agent", mode="replay"):
                reply = await self._invoke(context, state)
            return {**state, "next": "close_agent", "messages": reply["messages"]}
        if stage == "close_agent":
            async with context.step("close_agent", mode="wait"):
                await self._close_agent(context, state)
            return {**state, "next": "verify"}
        async with context.step("verify", mode="wait"):
            verdict = await self._verify(context, state)
        result = {"reward": verdict["reward"], "state": verdict["state"], "transcript": state["messages"]}
        return {**state, "next": "return", "result": result}

    async def _seed(self, context: EpisodeContext, state: Mapping[str, Any]) -> None:
        task, url = context.task, self._resources_url(context)
        seeded = await self._peers.post(
            url + self._path(context, "/seed_session"), task["setup"], headers=cookie(state["session_id"])
        )
        await context.seed_reply(seeded.headers)
        assignment = {
            "agent_session_id": state["agent_session_id"],
            "prompt": task["prompt"],
            "tools": seeded.body["tools"],
            "resources_url": url,
            "session_id": state["session_id"],
            "seed": task["seed"],
            "turns": task["turns"],
        }
        reply = await self._peers.post(self._agent_url + self._path(context, "/seed_session"), assignment)
        await context.seed_reply(reply.headers)

    async def _invoke(self, context: EpisodeContext, state: Mapping[str, Any]) -> Any:
        body = {"agent_session_id": state["agent_session_id"]}
        headers = {self.owner.names.activation_header: "1"}
        url = self._agent_url + self._path(context, "/v1/responses")
        return (await self._peers.post(url, body, headers=headers)).body

    async def _close_agent(self, context: EpisodeContext, state: Mapping[str, Any]) -> None:
        body = {"agent_session_id": state["agent_session_id"]}
        await self._peers.post(self._agent_url + self._path(context, "/close_session"), body)

    async def _verify(self, context: EpisodeContext, state: Mapping[str, Any]) -> Any:
        url = self._resources_url(context) + self._path(context, "/verify")
        return (await self._peers.post(url, context.task["setup"], headers=cookie(state["session_id"]))).body

    async def _close_resources(self, context: EpisodeContext, state: Mapping[str, Any]) -> None:
        url = self._resources_url(context) + self._path(context, "/close_session")
        await self._peers.post(url, {}, headers=cookie(state["session_id"]))

    def _resources_url(self, context: EpisodeContext) -> str:
        return self._resources[context.task["kind"]]

    def _path(self, context: EpisodeContext, path: str) -> str:
        return self.owner.names.path_of(context.episode, path)
