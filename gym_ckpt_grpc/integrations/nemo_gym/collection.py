"""The framework's own rollout collection, checkpointed: its rows survive a crash of the servers that run them.

    async with Coordinator(fleet, root=...) as coordinator, CheckpointedCollection(coordinator) as collection:
        for future in collection.helper().run_examples(rows, semaphore=collection.gate):
            row, result = await future

Meanwhile, in another task: `await collection.checkpoint()`; and after a crash, once the servers are up again:

    await collection.loss()
    async with collection.restoring("latest"):
        ...                                    # the trainer's own state

The rows go on where they were; `run_examples` notices nothing. Source: coordination section 11.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from aiohttp.streams import EmptyStreamReader
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import ServerClient
from nemo_gym.server_utils import setup_server_client as framework_client
from pydantic import BaseModel, PrivateAttr

from gym_ckpt_grpc.coordinator import CheckpointResult, Coordinator, FleetError, PrepareFailed, Restoration
from gym_ckpt_grpc.integrations.nemo_gym.dispatch import MAX_RESTARTS, Dispatch, Lost, NotSent
from gym_ckpt_grpc.integrations.nemo_gym.dispatch_gate import PATIENCE, DispatchGate
from gym_ckpt_grpc.integrations.nemo_gym.names import episode_of_body
from gym_ckpt_grpc.participants import raise_refusal
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateNotFound, WorkerUnavailable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import LATEST

log = logging.getLogger(__name__)

RUN = "/run"
UNAVAILABLE = frozenset({502, 503, 504})
"""Statuses of something in between that reached no server; the servers of the framework do not give them."""
STOPPED = b"Request was cancelled"
"""In the 500 of a server of the framework that was stopped while it served; it says nothing of the rollout."""


class CheckpointedCollection:
    """Rows sent through `helper` (or `client`), and a coordinator that checkpoints and restores the servers under them.

    coordinator: entered. server_client: the framework's client to send through; None: as its own collection makes it.
    limit: rows under way at once. patience: seconds that a row waits for a checkpoint, a restore, a decision after a
    crash, or a server that takes it; then it fails with OutOfTime. max_restarts: how often a row starts over from its
    input.

    A row whose servers went away is *lost*: nothing is sent while any is, until `restoring` or `restart` decides. Its
    attempt never comes back; it goes on as the one that the coordinator installed. No refusal of the control layer
    becomes a row's result.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        server_client: ServerClient | None = None,
        limit: int | None = None,
        patience: float = PATIENCE,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self.coordinator = coordinator
        self.gate = DispatchGate(limit, patience=patience)
        self.dispatch = Dispatch(self.gate, retire=self._retire_one, max_restarts=max_restarts)
        self._server_client = server_client
        self._owed: set[EpisodeId] = set()
        self._marks: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.forget()

    # ---- for the framework

    def helper(self) -> RolloutCollectionHelper:
        """A collection of the framework that sends its rows through here."""
        return _Helper.of(self)

    def client(self, head_server_config: Any = None) -> ServerClient:
        """A client of the framework whose `/run` calls are checkpointed; others pass through."""
        plain = self._server_client or framework_client(head_server_config)
        client = _Client(head_server_config=plain.head_server_config, global_config_dict=plain.global_config_dict)
        client._dispatch = self.dispatch
        return client

    # ---- for the controller

    @property
    def in_flight(self) -> tuple[EpisodeId, ...]:
        """What a checkpoint has to continue: rows under way, and restored ones that are not sent yet."""
        return self.dispatch.in_flight

    async def loss(self) -> tuple[EpisodeId, ...]:
        """Wait until rows have lost their servers, and name their attempts."""
        return await self.dispatch.loss()

    async def checkpoint(
        self, *, ready_within: float = 30.0, deadline: float = 120.0, checkpoint_id: str | None = None, **commit: Any
    ) -> CheckpointResult:
        """Checkpoint all that is in flight, publish it, and go on. No row is sent meanwhile; none fails by it.

        commit: further arguments of `Checkpoint.commit`. Raises what the operations of a Checkpoint raise, and
        PrepareFailed while rows are lost: servers that came back hold nothing of them, and a checkpoint of that would
        be the latest. The checkpoint before it then stands.
        """
        if lost := self.dispatch.lost:
            raise PrepareFailed(f"rows are lost, {lost[0]} is one of {len(lost)}: restore them, or restart them, first")
        await self._retire([])
        with self.gate.closed("a checkpoint"):
            async with self.coordinator.checkpoint(deadline=deadline, checkpoint_id=checkpoint_id) as checkpoint:
                report = await checkpoint.prepare(ready_within=ready_within)
                await checkpoint.commit(report.continued(self.in_flight), **commit)
                await checkpoint.publish()
        assert checkpoint.result is not None
        return checkpoint.result

    @asynccontextmanager
    async def restoring(self, source: str = LATEST, *, deadline: float = 120.0) -> AsyncIterator[Restoration]:
        """Take everything in flight back to a checkpoint; rows go on once the block has ended.

        What the checkpoint continues is sent as the attempt that was installed. What it does not continue starts over
        as its next attempt. What has been delivered since is retired. If it fails all rows under way stay lost.
        """
        with self.gate.closed(f"a restore of {source}"):
            self.dispatch.recall()
            async with self.coordinator.restoring(source, deadline=deadline) as restored:
                yield restored
            await self._go_on(restored)

    async def _go_on(self, restored: Restoration) -> None:
        delivered = self.dispatch.delivered
        installed = {episode.rollout_id: episode for episode in restored.continued}
        over = {e.rollout_id: e for e in restored.restarts if e.rollout_id not in delivered}
        over |= {e.rollout_id: e for e in self.dispatch.lost if e.rollout_id not in installed}
        done = [episode for rollout, episode in installed.items() if rollout in delivered]
        await self._retire([*over.values(), *done])
        self.dispatch.move_on(set(installed.values()) - set(done), installed=True)
        self.dispatch.move_on([episode.next() for episode in over.values()], installed=False)

    async def restart(self, *, deadline: float = 60.0) -> tuple[EpisodeId, ...]:
        """Start all that is lost over from its input, without a restore, and name the attempts it goes on as.

        For a crash before the first checkpoint, or of one server that no other depends on.
        """
        over = self.dispatch.lost
        await self._retire(over, deadline=deadline)
        following = [episode.next() for episode in over]
        self.dispatch.move_on(following, installed=False)
        return tuple(following)

    async def forget(self, *, deadline: float = 60.0) -> None:
        """End the refusal of attempts retired here whose rollouts have a result since. Raises ForgetFailed."""
        ended = {rollout: attempt for rollout, attempt in self._marks.items() if rollout in self.dispatch.delivered}
        await self.coordinator.forget(ended, deadline=deadline)
        for rollout in ended:
            self._marks.pop(rollout, None)

    async def _retire(self, episodes: Iterable[EpisodeId], *, deadline: float = 60.0) -> None:
        """Retire attempts, and those that an earlier call could not; what fails is owed, and no row waits for it."""
        self._owed.update(episodes)
        for episode in self._owed:
            self._marks[episode.rollout_id] = max(episode.attempt, self._marks.get(episode.rollout_id, 0))
        try:
            await self.coordinator.retire(self._owed, deadline=deadline)
        except FleetError as error:
            log.warning("%d attempts are not retired everywhere yet: %s", len(self._owed), error)
        else:
            self._owed.clear()

    async def _retire_one(self, episode: EpisodeId) -> None:
        self._marks[episode.rollout_id] = max(episode.attempt, self._marks.get(episode.rollout_id, 0))
        await self.coordinator.retire([episode])


class _Helper(RolloutCollectionHelper):  # type: ignore[misc]
    """The framework's collection with a client of ours."""

    _collection: CheckpointedCollection = PrivateAttr()

    @classmethod
    def of(cls, collection: CheckpointedCollection) -> _Helper:
        helper = cls()
        helper._collection = collection
        return helper

    def setup_server_client(self, head_server_config: Any = None) -> ServerClient:
        return self._collection.client(head_server_config)


class _Client(ServerClient):  # type: ignore[misc]
    """Sends rows through a Dispatch: one connection and one try for each attempt."""

    _dispatch: Dispatch = PrivateAttr()

    async def request(self, server_name: str, url_path: str, method: str, **options: Any) -> aiohttp.ClientResponse:
        if url_path != RUN or method.upper() != "POST":
            passed: aiohttp.ClientResponse = await super().request(
                server_name=server_name, url_path=url_path, method=method, **options
            )
            return passed
        body = options.pop("json", None)
        if isinstance(body, BaseModel):
            body = body.model_dump(exclude_unset=True)
        episode = episode_of_body(body) if isinstance(body, Mapping) else None
        if episode is None:
            raise InvalidArgument("a row needs a rollout id: `_ng_rollout_id`, or both indices, or `episode_id`")
        post = super().request

        async def send(attempt: EpisodeId) -> aiohttp.ClientResponse:
            # A connection of its own: one that was kept open may be found closed only when the row is on it, and a row
            # that may have been taken is not sent twice.
            headers = {**(options.get("headers") or {}), "Connection": "close"}
            sent = {**options, "json": as_attempt(body, attempt), "headers": headers, "_max_connection_retries": 1}
            try:
                response: aiohttp.ClientResponse = await post(
                    server_name=server_name, url_path=url_path, method=method, **sent
                )
                content = await response.read()
            except aiohttp.ClientConnectorError as error:
                raise NotSent(f"{server_name} does not listen: {error}") from error
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
                raise Lost(f"{server_name} went away: {error!r}") from error
            _check(response, content, server_name)
            response.content = _Read(content)
            return response

        return await self._dispatch.run(episode, send)


def as_attempt(body: Mapping[str, Any], episode: EpisodeId) -> dict[str, Any]:
    """A row's body for one attempt of its rollout; the row itself is left as it is."""
    if episode_of_body(body) == episode:
        return dict(body)
    if isinstance(body.get("episode_id"), Mapping):
        return {**body, "episode_id": {**body["episode_id"], "attempt": episode.attempt}}
    row = {**body, "_ng_attempt_index": episode.attempt}
    if "_ng_rollout_id" in row:
        row["_ng_rollout_id"] = episode.rollout_id  # which may have named an attempt itself
    return row


def _check(response: aiohttp.ClientResponse, content: bytes, server_name: str) -> None:
    """Raise for a reply that says nothing of the rollout: a refusal, or a server that was stopped or not reached."""
    if response.status < 400:
        return
    try:
        decoded = orjson.loads(content)
    except orjson.JSONDecodeError:
        decoded = None
    try:
        raise_refusal(response.status, decoded, dict(response.headers))
    except StateNotFound as error:
        raise Lost(f"behind {server_name}: {error.message}") from error  # a server that was started anew, alone
    if response.status == 500 and STOPPED in content:
        raise Lost(f"{server_name} was stopped: {content[:200].decode(errors='replace')}")
    if response.status in UNAVAILABLE:
        raise WorkerUnavailable(f"{server_name} answered {response.status}: {content[:200].decode(errors='replace')}")


class _Read(EmptyStreamReader):
    """The content of a reply that is whole: the framework reads it again where the status is a failure's."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    async def read(self, n: int = -1) -> bytes:
        """All of it, each time."""
        return self._content
