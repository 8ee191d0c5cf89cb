"""Short calls of one participant, for tests: requests are built here, failures are typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from gym_ckpt_grpc.control import EpisodeListKind, error_from, wire
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.protocol.phases import Phase
from gymckpt.v1 import episode_pb2, participant_pb2_grpc
from gymckpt.v1 import participant_pb2 as pb

if TYPE_CHECKING:
    from gymckpt.v1.participant_pb2_grpc import ParticipantServiceAsyncStub as Stub

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Scope = Sequence[EpisodeId] | None
"""Episodes, or None for all of them."""


async def typed(call: Awaitable[T]) -> T:
    """The reply, or the typed error that the failed call carries (else the failure itself)."""
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        error = error_from(failure)
        if error is None:
            raise
        raise error from failure


def scope_message(scope: Scope) -> episode_pb2.EpisodeScope:
    """The message of a scope; None is `all`."""
    return wire.scope_to(EpisodeScope.all() if scope is None else EpisodeScope.of(scope))


def unreplayed(reply: M) -> M:
    """A reply without its identity and its `replayed` flag: what a replay must repeat."""
    twin = type(reply)()
    twin.CopyFrom(reply)
    for name in ("participant", "replayed"):
        if name in reply.DESCRIPTOR.fields_by_name:
            twin.ClearField(name)
    return twin


class ParticipantClient:
    """One participant over a channel. Every call takes the checkpoint's id, then keywords, and raises ControlErrors.

    root: a `file://` root, from which `uri` makes storage URIs. epoch, controller: of every call that names no
    other. timeout: seconds of a call that names none. on_reply: told of (RPC, reply).
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        root: str = "",
        epoch: int = 1,
        controller: str = "test",
        timeout: float = 10.0,
        on_reply: Callable[[str, Message], None] = lambda method, reply: None,
    ) -> None:
        self.channel = channel
        self.stub: Stub = participant_pb2_grpc.ParticipantServiceStub(channel)
        self.root = root.rstrip("/")
        self.epoch = epoch
        self.controller = controller
        self.timeout = timeout
        self._on_reply = on_reply

    def context(self, id: str, *, epoch: int | None = None, controller: str | None = None) -> pb.ControlContext:
        """The context of a request."""
        return pb.ControlContext(
            checkpoint_id=id,
            controller_id=self.controller if controller is None else controller,
            epoch=self.epoch if epoch is None else epoch,
        )

    def uri(self, id: str) -> str:
        """The storage URI of a checkpoint under the root."""
        return f"{self.root}/checkpoints/{id}"

    async def send(self, request: Message, *, timeout: float | None = None) -> Message:
        """Send any unary request of the service, by the type of its message."""
        method = type(request).__name__.removesuffix("Request")
        reply: Message = await typed(getattr(self.stub, method)(request, timeout=timeout or self.timeout))
        self._on_reply(method, reply)
        return reply

    # ---- mutating calls

    async def prepare(
        self, id: str, *, within: float = 1.0, ttl: float | None = None, timeout: float | None = None, **who: Any
    ) -> pb.PrepareResponse:
        """Prepare; within: seconds to wait for a safe cut. ttl: of the lease, in seconds."""
        request = pb.PrepareRequest(context=self.context(id, **who), ready_within=wire.duration(within))
        if ttl is not None:
            request.lease_ttl.CopyFrom(wire.duration(ttl))
        return await self._reply(pb.PrepareResponse, request, timeout or within + self.timeout)

    async def capture(
        self, id: str, scope: Scope = None, *, incarnation: str = "", timeout: float | None = None, **who: Any
    ) -> pb.CaptureResponse:
        """Capture a scope."""
        return await self._reply(
            pb.CaptureResponse, self.capture_request(id, scope, incarnation=incarnation, **who), timeout
        )

    def capture_request(self, id: str, scope: Scope = None, *, incarnation: str = "", **who: Any) -> pb.CaptureRequest:
        """The request of a Capture."""
        return pb.CaptureRequest(
            context=self.context(id, **who), scope=scope_message(scope), expected_incarnation_id=incarnation
        )

    async def commit(
        self,
        id: str,
        scope: Scope = None,
        *,
        uri: str = "",
        base: str = "",
        stop: bool = False,
        incarnation: str = "",
        timeout: float | None = None,
        **who: Any,
    ) -> pb.CommitResponse:
        """Commit a scope, to the checkpoint's directory under the root unless `uri` names another.

        base: id of an earlier checkpoint under the root whose unchanged records are named, not written again.
        """
        request = pb.CommitRequest(
            context=self.context(id, **who),
            scope=scope_message(scope),
            storage_uri=uri or self.uri(id),
            base_checkpoint_uri=self.uri(base) if base else "",
            expected_incarnation_id=incarnation,
            stop=stop,
        )
        return await self._reply(pb.CommitResponse, request, timeout)

    async def resume(
        self, id: str, *, keep_write: bool = False, timeout: float | None = None, **who: Any
    ) -> pb.ResumeResponse:
        """Resume, which also fences an id."""
        return await self._reply(
            pb.ResumeResponse, pb.ResumeRequest(context=self.context(id, **who), keep_write=keep_write), timeout
        )

    async def restore(
        self,
        id: str,
        scope: Sequence[EpisodeId],
        *,
        source: str,
        digest: str = "",
        install_as: Sequence[int] = (),
        ttl: float | None = None,
        timeout: float | None = None,
        **who: Any,
    ) -> pb.RestoreResponse:
        """Restore from a checkpoint under the root."""
        request = pb.RestoreRequest(
            context=self.context(id, **who),
            storage_uri=self.uri(source),
            source_checkpoint_id=source,
            expected_manifest_digest=digest,
            scope=wire.episode_list(scope),
            install_as=install_as,
        )
        if ttl is not None:
            request.lease_ttl.CopyFrom(wire.duration(ttl))
        return await self._reply(pb.RestoreResponse, request, timeout)

    async def retire(
        self, episodes: Sequence[EpisodeId], *, id: str = "", timeout: float | None = None, **who: Any
    ) -> pb.RetireResponse:
        """Retire, outside a checkpoint unless `id` names one."""
        return await self._reply(
            pb.RetireResponse,
            pb.RetireRequest(context=self.context(id, **who), episodes=wire.episode_list(episodes)),
            timeout,
        )

    async def forget(
        self, rollouts: Mapping[str, int], *, id: str = "", timeout: float | None = None, **who: Any
    ) -> pb.ForgetResponse:
        """Forget {rollout_id: through_attempt}."""
        entries = [pb.ForgetRollout(rollout_id=r, through_attempt=a) for r, a in rollouts.items()]
        return await self._reply(
            pb.ForgetResponse, pb.ForgetRequest(context=self.context(id, **who), rollouts=entries), timeout
        )

    async def renew(self, id: str, *, timeout: float | None = None, **who: Any) -> pb.RenewLeaseResponse:
        """Renew the lease."""
        return await self._reply(pb.RenewLeaseResponse, pb.RenewLeaseRequest(context=self.context(id, **who)), timeout)

    async def _reply(self, kind: type[M], request: Message, timeout: float | None) -> M:
        reply = await self.send(request, timeout=timeout)
        assert isinstance(reply, kind)
        return reply

    # ---- reading

    async def status(self) -> pb.ParticipantStatus:
        """The status of this moment."""
        return (await self._reply(pb.GetStatusResponse, pb.GetStatusRequest(), None)).status

    async def phase(self) -> Phase:
        """The phase of this moment."""
        return wire.phase_from((await self.status()).phase)

    async def watch(self) -> AsyncIterator[pb.ParticipantStatus]:
        """Statuses as they change; close it (`aclosing`) to end the stream."""
        stream = self.stub.WatchStatus(pb.WatchStatusRequest())
        try:
            async for message in stream:
                self._on_reply("WatchStatus", message)
                yield message.status
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure) or failure from None
        finally:
            stream.cancel()

    async def until(self, phase: Phase, *, within: float = 10.0) -> pb.ParticipantStatus:
        """Watch the status until it has this phase; raises TimeoutError."""
        async with asyncio.timeout(within):
            watch = self.watch()
            try:
                async for status in watch:
                    if status.phase == wire.phase_to(phase):
                        return status
            finally:
                await watch.aclose()  # type: ignore[attr-defined]
        raise TimeoutError(f"the stream ended before phase {phase.name}")

    async def batches(self, kind: EpisodeListKind, id: str = "") -> list[list[EpisodeId]]:
        """The messages of ListEpisodes, each as its episodes."""
        request = pb.ListEpisodesRequest(kind=pb.EpisodeListKind.ValueType(int(kind)), checkpoint_id=id)
        found = []
        try:
            async for message in self.stub.ListEpisodes(request, timeout=self.timeout):
                self._on_reply("ListEpisodes", message)
                found.append(list(wire.episodes_from(message.episodes)))
        except grpc.aio.AioRpcError as failure:
            error = error_from(failure)
            if error is None:
                raise
            raise error from failure
        return found

    async def listed(self, kind: EpisodeListKind, id: str = "") -> list[EpisodeId]:
        """A whole list."""
        return [episode for batch in await self.batches(kind, id) for episode in batch]
