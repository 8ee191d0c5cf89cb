"""The proof refinement agent: asks for a proof, has it checked, and asks again with what was wrong with it.

It has no loop of its own beside its protocol, so its whole progress is in the protocol boundary, and its sessions
are empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.integrations import episode_of
from gym_ckpt_grpc.minigym.agent_loop import COMPLETIONS, MODEL
from gym_ckpt_grpc.minigym.legacy_agent import check_empty
from gym_ckpt_grpc.minigym.peers import Peers, Reply, cookie
from gym_ckpt_grpc.minigym.resources_server import answer, body_of
from gym_ckpt_grpc.participants import AgentOwner, RestoredSession, RunContext

Step = Literal["seed", "model", "verify", "return"]


class ProofRefinementServer:
    """`/run`: seed, then model and verify in turn until a proof holds or the tries are used up, then return.

    A boundary stands before every outside call; a proof that was delivered is in the next one, and is never asked
    for again. resources: kind of task -> base URL of its resources server.
    """

    def __init__(self, peers: Peers, policy_url: str, resources: Mapping[str, str]) -> None:
        self._peers = peers
        self._policy_url = policy_url
        self._resources = dict(resources)
        self.owner = AgentOwner(self)

    def build_app(self) -> FastAPI:
        """The application, without lifespan or gate."""
        app = FastAPI(title="minigym proof refinement", openapi_url=None)
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/run", self._run, methods=["POST"])
        return app

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok", "role": "proof_refinement"}

    async def _run(self, request: Request) -> Response:
        return answer(await self.owner.run(episode_of(request.scope), await body_of(request), self._protocol))

    async def _protocol(self, context: RunContext) -> Mapping[str, Any]:
        """Walk the steps from the restored boundary, or from the first."""
        state: dict[str, Any] = context.restored or {
            "next": "seed",
            "input": [{"role": "user", "content": context.task["prompt"]}],
            "cookies": {"session": f"session-{context.episode.rollout_id}"},
            "verify": "wait",
            "attempts": [],
            "pending": None,
            "result": None,
        }
        # Registered before anything is seeded: a seed's reply may be lost, and leave a session behind.
        context.on_cleanup(lambda: self._post(context, state, "/close_session", {}))
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
                reply = await self._post(context, state, "/seed_session", context.task["setup"])
                verify = (await context.seed_reply(reply.headers)).value
            return {**state, "next": "model", "verify": verify}
        if step == "model":
            async with context.step("model", mode="replay"):
                pending = await self._ask(context, state)
            return {**state, "next": "verify", "pending": pending}
        async with context.step("verify", mode=state["verify"]):
            messages = [*state["input"], state["pending"]]
            verdict = (
                await self._post(context, state, "/verify", {**context.task["setup"], "messages": messages})
            ).body
        return _judged(context.task, state, verdict)

    async def _ask(self, context: RunContext, state: Mapping[str, Any]) -> Any:
        """One model call, straight to the policy server."""
        body = {"model": MODEL, "messages": state["input"], "tools": [], "seed": context.task["seed"]}
        url = self._policy_url + self.owner.names.path_of(context.episode, COMPLETIONS)
        return (await self._peers.post(url, body)).body["choices"][0]["message"]

    async def _post(self, context: RunContext, state: Mapping[str, Any], path: str, body: Mapping[str, Any]) -> Reply:
        url = self._resources[context.task["kind"]] + self.owner.names.path_of(context.episode, path)
        return await self._peers.post(url, body, headers=cookie(state["cookies"]["session"]))

    # The hooks. All that a run needs is in its boundaries.

    async def export_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """An empty object for each."""
        return {key: {} for key in keys}

    async def restore_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        """Refuse what is not empty, and install nothing."""
        check_empty(sessions)

    async def retire_session(self, key: str) -> None:
        """There is nothing to free."""


def _judged(task: Mapping[str, Any], state: Mapping[str, Any], verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The boundary after a verdict: ask again with what was wrong, or return."""
    proof = state["pending"]
    attempts = [*state["attempts"], {"proof": proof["content"], "reward": verdict["reward"]}]
    judged = {**state, "pending": None, "attempts": attempts}
    if verdict["reward"] < 1.0 and len(attempts) < task["turns"]:
        feedback = {"role": "user", "content": f"The proof does not hold: {verdict['state']}. Mend it."}
        return {**judged, "next": "model", "input": [*state["input"], proof, feedback]}
    transcript = [*state["input"], proof]
    result = {**verdict, "attempts": attempts, "transcript": transcript}
    return {**judged, "next": "return", "result": result}
