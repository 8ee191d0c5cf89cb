"""The legacy agent: its `/run` owns the protocol, and sends itself the call in which the loop runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.control import InvalidState
from gym_ckpt_grpc.integrations import episode_of
from gym_ckpt_grpc.minigym.agent_loop import AgentLoop, Assignment
from gym_ckpt_grpc.minigym.peers import Peers, cookie
from gym_ckpt_grpc.minigym.resources_server import answer, body_of
from gym_ckpt_grpc.participants import (
    AgentOwner,
    DirectAgent,
    PolicyClient,
    RestoredSession,
    RunContext,
    SessionContext,
    run_key,
)

Step = Literal["seed", "loop", "verify", "return"]


class LegacyAgentServer:
    """`/run`: seed, loop, verify, return, each behind a boundary from which it can go on.

    own_url: base of this server's routes. resources: kind of task -> base URL of its resources server.
    """

    def __init__(
        self, peers: Peers, policy_url: str, own_url: str, resources: Mapping[str, str], *, checkpointing: bool = True
    ) -> None:
        self._peers = peers
        self._own_url = own_url
        self._resources = dict(resources)
        self._loop = AgentLoop(peers, policy_url, resources)
        self._runs = AgentOwner(self) if checkpointing else DirectAgent()

    @property
    def owner(self) -> AgentOwner:
        """The owner of its state; there is none with checkpointing off."""
        assert isinstance(self._runs, AgentOwner), "checkpointing is off"
        return self._runs

    @property
    def policy(self) -> PolicyClient:
        """The client of all policy calls."""
        return self._loop.policy

    def build_app(self) -> FastAPI:
        """The application, without lifespan or gate."""
        app = FastAPI(title="minigym legacy agent", openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/run", self._run, methods=["POST"])
        app.add_api_route("/v1/responses", self._responses, methods=["POST"])
        return app

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": "legacy_agent"}

    async def _run(self, request: Request) -> Response:
        return answer(await self._runs.run(episode_of(request.scope), await body_of(request), self._protocol))

    async def _responses(self, request: Request) -> Response:
        """The call of a run to its own server: the body is the run's assignment."""
        episode = episode_of(request.scope)
        assignment = Assignment.from_state(await body_of(request))
        index = request.headers.get(self._runs.names.activation_header)

        async def loop(session: SessionContext, state: Any) -> dict[str, Any]:
            return await self._loop.run(session, assignment, state)

        return answer(await self._runs.invoke(episode, run_key(episode), loop, index=index))

    async def _protocol(self, context: RunContext) -> Mapping[str, Any]:
        """Walk the steps from the restored boundary, or from the first."""
        rollout = context.episode.rollout_id
        state: dict[str, Any] = context.restored or {"next": "seed", "cookies": {"session": f"session-{rollout}"}}
        # Registered before anything is seeded: a seed's reply may be lost, and leave a session behind.
        context.on_cleanup(lambda: self._close(context, state))
        while True:
            await context.boundary(state)
            if state["next"] == "return":
                result: Mapping[str, Any] = state["result"]
                return result
            state = await self._step(context, state)

    async def _step(self, context: RunContext, state: dict[str, Any]) -> dict[str, Any]:
        """Run the step that a boundary names, and give the next boundary."""
        step: Step = state["next"]
        if step == "seed":
            async with context.step("seed", mode="replay"):
                tools, verify = await self._seed(context, state)
            return {**state, "next": "loop", "tools": tools, "verify": verify}
        if step == "loop":
            async with context.step("loop", mode="replay"):
                reply = await self._call_itself(context, state)
            return {**state, "next": "verify", "messages": reply["messages"]}
        async with context.step("verify", mode=state["verify"]):
            verdict = await self._verify(context, state)
        result = {"reward": verdict["reward"], "state": verdict["state"], "transcript": state["messages"]}
        return {**state, "next": "return", "result": result}

    async def _seed(self, context: RunContext, state: Mapping[str, Any]) -> tuple[Any, str]:
        url = self._url(context, "/seed_session")
        reply = await self._peers.post(url, context.task["setup"], headers=_cookies(state))
        return reply.body["tools"], (await context.seed_reply(reply.headers)).value

    async def _call_itself(self, context: RunContext, state: Mapping[str, Any]) -> Any:
        task = context.task
        assignment = {
            "prompt": task["prompt"],
            "tools": state["tools"],
            "resources": task["kind"],
            "session_id": state["cookies"]["session"],
            "seed": task["seed"],
            "turns": task["turns"],
            "stream": task.get("stream", False),
        }
        url = self._own_url + self._runs.names.path_of(context.episode, "/v1/responses")
        return (await self._peers.post(url, assignment, headers=context.self_call_headers())).body

    async def _verify(self, context: RunContext, state: Mapping[str, Any]) -> Any:
        body = {**context.task["setup"], "messages": state["messages"]}
        return (await self._peers.post(self._url(context, "/verify"), body, headers=_cookies(state))).body

    async def _close(self, context: RunContext, state: Mapping[str, Any]) -> None:
        await self._peers.post(self._url(context, "/close_session"), {}, headers=_cookies(state))

    def _url(self, context: RunContext, path: str) -> str:
        return self._resources[context.task["kind"]] + self._runs.names.path_of(context.episode, path)

    # The hooks. All that a run needs is in its boundaries.

    async def export_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """An empty object for each."""
        return {key: {} for key in keys}

    async def restore_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        """Refuse what is not empty, and install nothing."""
        check_empty(sessions)

    async def retire_session(self, key: str) -> None:
        """There is nothing to free."""


def check_empty(sessions: Sequence[RestoredSession]) -> None:
    """Raise InvalidState naming the first session whose state is not the empty object."""
    for session in sessions:
        if session.state != {}:
            raise InvalidState(f"session {session.key} has a state: this agent keeps none", session.episode)


def _cookies(state: Mapping[str, Any]) -> dict[str, str]:
    return cookie(state["cookies"]["session"])
