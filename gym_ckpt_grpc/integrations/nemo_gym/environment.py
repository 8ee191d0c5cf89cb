"""`EnvironmentMixin`: an environment server of the framework as a participant, unmodified.

    class MyEnvironment(EnvironmentMixin, SingleAgentTurnEnvironmentServer):
        checkpoint: ClassVar = Options(instance="turn", kind="environment", root=..., control=..., token_file=...)

Episodes of the servers of environment_table.py can be captured between any two of their calls; those of other servers
start over after a crash, unless the options say `mode: exported`, with which an author promises the same of a `run`.
`environment_servers/legacy_agent` owns nothing, and takes no part: its agent does.

What the framework does around an episode is done here instead, so that time in which a checkpoint holds it does not
count: slots and the wait for one, its deadline, its cleanup. Their options and their answers are the framework's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from anyio import CancelScope
from nemo_gym.episode_types import EpisodeFailure
from nemo_gym.rollout_correlation import rollout_context

from gym_ckpt_grpc.control import Closing, Opening
from gym_ckpt_grpc.integrations.nemo_gym.diverged import DivergedAttempts
from gym_ckpt_grpc.integrations.nemo_gym.environment_table import is_replayable
from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES, episode_of_body
from gym_ckpt_grpc.integrations.nemo_gym.options import Options
from gym_ckpt_grpc.integrations.nemo_gym.participant import Embedding, check_workers, found, kept, options_of_server
from gym_ckpt_grpc.integrations.nemo_gym.step_client import Peers, StepClient
from gym_ckpt_grpc.integrations.nemo_gym.steps import CURRENT, RunSteps, UnrecordedSteps
from gym_ckpt_grpc.participants import EnvironmentOwner, EnvironmentSettings, EpisodeContext
from gym_ckpt_grpc.participants.steps import EpisodeDeadline
from gym_ckpt_grpc.protocol.errors import StateCorrupt, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId

RUN = "/run"

Handle = Callable[[Any], Awaitable[Any]]


class EnvironmentMixin:
    """Stands in front of an environment server's class; see the module."""

    checkpoint: ClassVar[Options]

    def setup_webserver(self) -> Any:
        """The server's application, gated; its lifespan serves the control plane."""
        options = options_of_server(self)
        check_workers(self)
        participant = kept(self, lambda: EnvironmentParticipant(self, options))
        app = super().setup_webserver()  # type: ignore[misc]
        participant.install(app)
        return app

    async def run_request(self, request: Any) -> Any:
        """One episode, of a typed request; a flat row has become one before."""
        participant = found(self)
        bare: Handle = super().run_request  # type: ignore[misc]
        return await (participant.run(request, bare) if participant is not None else bare(request))

    async def run(self, request: Any, cleanup: Any) -> Any:
        """The protocol of one episode, with a cleanup that its owner runs."""
        episode = _EPISODE.get()
        bare = super().run  # type: ignore[misc]
        return await bare(request, cleanup if episode is None else episode.cleanup_instead_of(cleanup))


class EnvironmentParticipant:
    """The owner of one server's episodes and its embedding. Takes the server's limits over from its configuration."""

    def __init__(self, server: Any, options: Options) -> None:
        if options.mode == "stateless":
            raise UsageError(f"{options.instance} is an environment server, whose episodes are state: not stateless")
        config = server.config
        self._server = server
        self._diverged = DivergedAttempts()
        self._replays = options.mode == "exported" or (options.mode is None and is_replayable(type(server)))
        self.queue = Queue(config.max_concurrent_episodes, config.queue_timeout_seconds)
        settings = EnvironmentSettings(
            boundaries=self._replays,
            episode_limit=config.default_episode_timeout_seconds,
            cleanup_limit=config.cleanup_timeout_seconds,
        )
        self.owner = _Owner(self.queue, settings)
        # Left to the framework they would count time in which nothing may move.
        taken = ("max_concurrent_episodes", "queue_timeout_seconds", "default_episode_timeout_seconds")
        server.config = config.model_copy(update=dict.fromkeys(taken))
        server._admission = None
        server.server_client = StepClient.of(server.server_client)
        everything = getattr(server.server_client, "global_config_dict", None)
        self._peers = Peers(everything if isinstance(everything, Mapping) else {}, options.instance)
        self._embedding = Embedding(self.owner, options, server=server)

    def install(self, app: Any) -> None:
        """Make the application the participant's."""
        self._embedding.install(app, gate=self.owner.gate(), position="outside", bodies=(RUN,))

    async def run(self, request: Any, bare: Handle) -> Any:
        """Run an episode by the framework's own `run_request`; gives its response.

        Raises the ControlError of a refusal, whatever the protocol has made of it.
        """
        episode = _id_of(request)
        self._diverged.check(episode)
        task = request.task.model_dump(mode="json")

        async def protocol(context: EpisodeContext) -> Any:
            steps: RunSteps | _RestartSteps
            if self._replays:
                steps = RunSteps(context, self._peers, fresh_ids=True)
            else:
                steps = _RestartSteps(episode, self._peers)
            token = _EPISODE.set(_Episode(context, steps))
            try:
                return await steps.run(lambda: bare(request))
            finally:
                _EPISODE.reset(token)

        try:
            async with self.queue.slot():
                return await _cancelled_once(self.owner.run(episode, task, protocol))
        except QueueTimeout:
            self.owner.admission.check_mark(episode)
            return self._failed(request, "Episode admission timed out", stage="admission")
        except TimeoutError:
            return self._failed(request, "Episode timed out")
        except StateCorrupt as error:
            self._diverged.add(episode, error)
            raise

    def _failed(self, request: Any, reason: str, **more: str) -> Any:
        return self._server.failure_response(request, EpisodeFailure(failure_reason=reason, terminal=False, **more))


def _id_of(request: Any) -> EpisodeId:
    """The episode of a typed request. Raises InvalidArgument for one that only the framework takes for legal."""
    episode = episode_of_body({"episode_id": request.episode_id.model_dump()})
    assert episode is not None
    return episode


async def _cancelled_once(work: Coroutine[Any, Any, Any]) -> Any:
    """Give what `work` gives. When the client leaves, it is cancelled once, and its cleanup is awaited.

    The framework cancels the request again in every turn of the loop until it has ended; a cleanup that waits for
    another server would keep this one busy with that.
    """
    running = asyncio.create_task(work)
    try:
        await asyncio.wait({running})
    except asyncio.CancelledError:
        running.cancel()
        with CancelScope(shield=True):
            await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # nobody is there to hear it
        raise
    return running.result()


# ---- one episode ------------------------------------------------------------------------------------------------


class _Episode:
    """What the server's `run` needs to know of the episode that it is called for."""

    def __init__(self, context: EpisodeContext, steps: RunSteps | _RestartSteps) -> None:
        self._context = context
        self._steps = steps

    def cleanup_instead_of(self, cleanup: Any) -> Any:
        """A cleanup that the owner runs, to its end, exactly once, and never by a cancelled task.

        The framework finds its own one empty. Its shield holds off only cancels of its own kind, and no retire.
        """
        own = type(cleanup)(episode_id=cleanup.episode_id, cleanup_timeout_seconds=cleanup.cleanup_timeout_seconds)

        async def clean() -> None:
            self._steps.cleaning()
            CURRENT.set(self._steps)  # this is a task of its own, with a context of its own
            with rollout_context(self._context.episode.capture_key):
                await own.aclose()

        self._context.on_cleanup(clean)
        return own


_EPISODE: ContextVar[_Episode | None] = ContextVar("nemo_gym_episode", default=None)


class _RestartSteps(UnrecordedSteps):
    """The calls of an episode that cannot be captured; a refusal that one meets ends it."""

    async def run(self, handler: Callable[[], Awaitable[Any]]) -> Any:
        """Run the handler. Raises the refusal that a call of it met, whatever it made of that."""
        token = CURRENT.set(self)
        try:
            result = await handler()
        finally:
            CURRENT.reset(token)
        if self.refusal is not None:
            raise self.refusal
        return result

    def cleaning(self) -> None:
        """From now on a refusal is what the cleanup makes of it: the protocol has ended."""


# ---- slots ------------------------------------------------------------------------------------------------------


class QueueTimeout(Exception):
    """No slot came free in time."""


class Queue:
    """Slots for episodes, given in the order in which they are asked for.

    slots: at a time, None for any number. patience: seconds to wait for one, None without end; time in which a
    checkpoint is open does not count.
    """

    def __init__(self, slots: int | None, patience: float | None) -> None:
        self._slots = asyncio.Semaphore(slots) if slots is not None else None
        self._patience = patience
        self._waiting: dict[EpisodeDeadline, None] = {}  # in the order they came
        self._closed = False

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Have a slot for the length of the block. Raises QueueTimeout."""
        if self._slots is None:
            yield
            return
        await self._wait_for(self._slots)
        try:
            yield
        finally:
            self._slots.release()

    async def _wait_for(self, slots: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(self._patience) as scope:
                deadline = EpisodeDeadline(scope)
                self._waiting[deadline] = None
                if self._closed:
                    deadline.suspend()
                try:
                    await slots.acquire()
                finally:
                    del self._waiting[deadline]
        except TimeoutError:
            raise QueueTimeout from None

    def close(self) -> None:
        """A checkpoint is open."""
        self._closed = True
        for deadline in self._waiting:
            deadline.suspend()

    def open(self) -> None:
        """It is over."""
        self._closed = False
        for deadline in self._waiting:
            deadline.resume()


class _Owner(EnvironmentOwner):
    """An owner that tells the queue in front of it when it closes."""

    def __init__(self, queue: Queue, settings: EnvironmentSettings) -> None:
        super().__init__(settings, names=NAMES)
        self._queue = queue

    async def close_admission(self, closing: Closing) -> None:
        self._queue.close()
        await super().close_admission(closing)

    async def open_admission(self, opening: Opening) -> None:
        await super().open_admission(opening)
        self._queue.open()
