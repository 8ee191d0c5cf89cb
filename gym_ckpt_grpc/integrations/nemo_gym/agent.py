"""`AgentMixin`: a released agent as a participant, unmodified: its outside calls are recorded, and replayed.

    class MyAgent(AgentMixin, SimpleAgent):
        checkpoint: ClassVar = Options(instance="agent", kind="agent", root=..., control=..., token_file=...)

The agents of agent_table.py can be captured anywhere between two calls, and inside a policy call. Any other agent is
restart-only: a warning says so, and its rollouts start over after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from starlette.middleware import Middleware

from gym_ckpt_grpc.integrations.asgi import Message
from gym_ckpt_grpc.integrations.nemo_gym.agent_driver import (
    AGENT_CLOSE,
    RUN,
    SESSION_ID,
    AgentDriver,
    Handle,
    TaggingDriver,
    json_reply,
    plain_reply,
    reply_of,
)
from gym_ckpt_grpc.integrations.nemo_gym.agent_state import AgentState
from gym_ckpt_grpc.integrations.nemo_gym.agent_table import Agent, agent_of
from gym_ckpt_grpc.integrations.nemo_gym.diverged import DivergedAttempts
from gym_ckpt_grpc.integrations.nemo_gym.loop_steps import LoopSteps, PolicyCalls
from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES
from gym_ckpt_grpc.integrations.nemo_gym.options import Options
from gym_ckpt_grpc.integrations.nemo_gym.participant import Embedding, check_workers, kept, options_of_server
from gym_ckpt_grpc.integrations.nemo_gym.peers import Peers
from gym_ckpt_grpc.integrations.nemo_gym.recorded import ReplyRecord
from gym_ckpt_grpc.integrations.nemo_gym.step_client import StepClient, intercept
from gym_ckpt_grpc.integrations.nemo_gym.steps import AGENT_SEED, Call, RunSteps
from gym_ckpt_grpc.participants import AgentOwner, RestartOnlyOwner, RunContext, SessionContext, run_key
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId


class AgentMixin:
    """Stands in front of an agent's class; everything is done in `setup_webserver`."""

    checkpoint: ClassVar[Options]

    def setup_webserver(self) -> Any:
        """The agent's application, gated; its lifespan serves the control plane."""
        options = options_of_server(self)
        check_workers(self)
        participant = kept(self, lambda: _participant_of(self, options))
        app = super().setup_webserver()  # type: ignore[misc]
        participant.install(app)
        return app

    def _capture_correlation_enabled(self) -> bool:
        """Whether calls carry their rollout: to the agent itself, and from there to the model."""
        return True


def _participant_of(server: Any, options: Options) -> CapturedAgent | RestartOnlyAgent:
    server.server_client = StepClient.of(server.server_client)
    config = getattr(server.server_client, "global_config_dict", None)
    peers = Peers(config if isinstance(config, Mapping) else {}, options.instance, options.policy)
    agent = None if options.mode == "restart_only" else agent_of(type(server))
    return RestartOnlyAgent(server, options, peers) if agent is None else CapturedAgent(server, options, peers, agent)


class RestartOnlyAgent:
    """An agent whose episodes start over. Its calls carry their rollout."""

    def __init__(self, server: Any, options: Options, peers: Peers) -> None:
        self.owner = RestartOnlyOwner(names=NAMES, seed_paths=(AGENT_SEED,))
        self._peers = peers
        self._embedding = Embedding(self.owner, options, server=server)

    def install(self, app: Any) -> None:
        """Make the application the participant's."""
        self._embedding.install(
            app,
            gate=self.owner.gate(),
            position="inside",
            drivers=[Middleware(TaggingDriver, peers=self._peers)],
            bodies=(RUN, AGENT_SEED, AGENT_CLOSE),
        )


class CapturedAgent:
    """An audited agent: its owner and its embedding."""

    def __init__(self, server: Any, options: Options, peers: Peers, agent: Agent) -> None:
        self.state = AgentState(server, peers)
        self.owner = AgentOwner(self.state, names=NAMES)
        self.peers = peers
        self.agent = agent
        self.clients = {name: PolicyCalls(peers.service(name)) for name in peers.policy}
        self.diverged = DivergedAttempts()
        self._embedding = Embedding(self.owner, options, server=server)
        place = next(each for each in type(server).__mro__ if each.__module__.startswith("responses_api_agents."))
        for name in agent.requests:
            intercept(place.__module__, name)

    def install(self, app: Any) -> None:
        """Make the application the participant's."""
        self._embedding.install(
            app,
            gate=self.owner.gate(passing=(RUN, AGENT_SEED, AGENT_CLOSE)),
            position="inside",
            drivers=[Middleware(AgentDriver, work=self)],
            bodies=(RUN, AGENT_SEED, AGENT_CLOSE),
        )

    # ---- runs

    async def run(self, episode: EpisodeId, handle: Handle) -> Message:
        """A legacy run; gives the handler's reply. Refuses an attempt whose replay has diverged."""
        self.diverged.check(episode)

        async def protocol(context: RunContext) -> Message:
            async def generate(call: Call, index: str) -> ReplyRecord:
                return await self._generation(episode, call, index)

            steps = RunSteps(context, self.peers, fresh_ids=self.agent.fresh_ids, generate=generate)
            return await steps.run(handle)

        try:
            return await self.owner.run(episode, {}, protocol)
        except StateCorrupt as error:
            self.diverged.add(episode, error)
            raise

    async def _generation(self, episode: EpisodeId, call: Call, index: str) -> ReplyRecord:
        """A policy call of the run itself, as an activation of its session."""

        async def loop(session: SessionContext, state: Any) -> ReplyRecord:
            await session.boundary({"calls": []})
            return await self.clients[call.server].call(session, call)

        record: ReplyRecord = await self.owner.invoke(episode, run_key(episode), loop, index=index)
        return record

    # ---- sessions

    async def activation(self, episode: EpisodeId, key: str, index: str | None, handle: Handle) -> Message:
        """One activation; gives the handler's reply. Refuses an attempt whose replay has diverged: the restored
        boundary is used up, and the session's tools have what was done up to there."""
        self.diverged.check(episode)

        async def loop(session: SessionContext, state: Any) -> ReplyRecord:
            steps = LoopSteps(session, state, self.peers, self.clients, fresh_ids=self.agent.fresh_ids)
            self.state.running.add(key)
            try:
                return plain_reply(await steps.run(handle))
            finally:
                self.state.running.discard(key)

        try:
            return reply_of(await self.owner.invoke(episode, key, loop, index=index))
        except StateCorrupt as error:
            self.diverged.add(episode, error)
            raise

    async def seed(self, episode: EpisodeId, key: str, handle: Handle) -> Message:
        """Seed a session; gives the handler's reply, which also judges a seed that comes again."""
        built: list[Message] = []

        async def build() -> None:
            built.append(await handle())
            if built[0]["status"] >= 300:
                raise _NotSeeded

        with suppress(_NotSeeded):
            await self.owner.seed(episode, key, {SESSION_ID: key}, build)
        return built[0] if built else await handle()

    def episode_of(self, key: str) -> EpisodeId | None:
        """The episode of a session, None if there is none of this id."""
        return self.state.episode_of(key)

    async def close(self, episode: EpisodeId, key: str, handle: Handle) -> Message:
        """Close a session; gives the handler's reply. One that a retire frees, or has freed, is left to that."""
        closed: list[Message] = []

        async def free() -> None:
            closed.append(await handle())
            if closed[0]["status"] >= 300:
                raise _NotClosed

        with suppress(_NotClosed):
            await self.owner.close_session(episode, key, free)
        if closed:
            return closed[0]
        if self.state.holds(key) or self.owner.admission.refuses(episode):
            return json_reply({SESSION_ID: key})
        return await handle()


class _NotSeeded(Exception):
    """The handler answered a seed with an error: there is no session."""


class _NotClosed(Exception):
    """The handler answered a close with an error: the session stays."""
