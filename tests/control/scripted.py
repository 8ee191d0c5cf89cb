"""A state owner that does what a test says, and a control plane around it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from gym_ckpt_grpc.auth import TokenSource
from gym_ckpt_grpc.control import (
    Budget,
    Closing,
    ControlPlane,
    ControlSettings,
    EpisodeListKind,
    Opening,
    OwnerDefaults,
    OwnerPort,
    ParticipantServer,
    RecordBatch,
    error_from,
    open_channel,
    wire,
)
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope, RestoreScope
from gym_ckpt_grpc.protocol.report import MAX_BLOCKERS, Blocker, BlockerReason, PrepareReport
from gym_ckpt_grpc.storage import LocalFiles, Record, encode
from gym_ckpt_grpc.telemetry import Telemetry
from gymckpt.v1 import episode_pb2, participant_pb2_grpc
from gymckpt.v1 import participant_pb2 as pb

if TYPE_CHECKING:
    from gymckpt.v1.participant_pb2_grpc import ParticipantServiceAsyncStub as Stub

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Scope = Sequence[EpisodeId] | None
"""Episodes, or None for all."""

FAST = ControlSettings(watch_interval=0.01, status_interval=0.01)


class Gate:
    """A step that a test can hold up, and fail."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.error: BaseException | None = None
        self.count = 0

    def hold(self) -> None:
        """The next step waits for `open.set()`."""
        self.entered.clear()
        self.open.clear()

    async def reached(self, count: int) -> None:
        """Wait until the step was entered so often."""
        async with asyncio.timeout(10):
            while self.count < count:
                self.entered.clear()
                await self.entered.wait()

    async def step(self) -> None:
        self.count += 1
        self.entered.set()
        await self.open.wait()
        if self.error is not None:
            raise self.error


class ScriptedOwner(OwnerDefaults):
    """Episodes are `live` (state by episode), of which `running` block and `restarts` cannot be captured."""

    kind = ParticipantKind.RESOURCES

    def __init__(self) -> None:
        self.live: dict[EpisodeId, Any] = {}
        self.running: set[EpisodeId] = set()
        self.restarts: set[EpisodeId] = set()
        self.pending: set[EpisodeId] = set()
        self.left_out: list[EpisodeId] = []
        self.open = True
        self.closes, self.opens, self.exports = Gate(), Gate(), Gate()
        self.stages, self.activates, self.retires, self.deletes = Gate(), Gate(), Gate(), Gate()
        self.openings: list[Opening] = []
        self.reports = 0
        self.released: list[EpisodeId] = []
        self.retired: list[EpisodeId] = []
        self.releases = Gate()
        self.port: OwnerPort | None = None

    def gates(self) -> list[Gate]:
        return [gate for gate in vars(self).values() if isinstance(gate, Gate)]

    def attach(self, port: OwnerPort) -> None:
        self.port = port

    def park(self, episode: EpisodeId) -> None:
        """An execution reaches its boundary."""
        self.running.discard(episode)
        self.changed()

    def changed(self) -> None:
        assert self.port is not None
        if not self.open:
            self.port.changed()

    async def close_admission(self, closing: Closing) -> None:
        self.open = False
        await self.closes.step()

    async def open_admission(self, opening: Opening) -> None:
        await self.opens.step()
        self.openings.append(opening)
        self.open = True

    def is_ready(self) -> bool:
        return not self.running

    def report(self, limit: int) -> PrepareReport:
        self.reports += 1
        blockers = [Blocker(BlockerReason.RUNNING, 1.0, episode=e, place="step") for e in sorted(self.running)]
        restarts = sorted(self.restarts)
        return PrepareReport(
            tuple(blockers[: min(limit, MAX_BLOCKERS)]),
            len(blockers),
            tuple(restarts[:1000]),
            len(restarts),
            {"live": len(self.live)},
        )

    async def list_episodes(self, which: EpisodeListKind) -> AsyncIterator[Sequence[EpisodeId]]:
        chosen = {
            EpisodeListKind.RESTART: self.restarts,
            EpisodeListKind.BLOCKING: self.running,
            EpisodeListKind.RESTORED_PENDING: self.pending,
        }[which]
        if chosen:
            yield sorted(chosen)

    async def export(self, scope: EpisodeScope) -> AsyncIterator[RecordBatch]:
        await self.exports.step()
        records = [
            Record(episode, "scripted", payloads={"state": encode(state)})
            for episode, state in sorted(self.live.items())
            if episode in scope and episode not in self.left_out
        ]
        yield RecordBatch(records, [e for e in self.left_out if e in scope])

    async def stage(self, records: Sequence[Record], scope: RestoreScope) -> dict[EpisodeId, Any]:
        await self.stages.step()
        return {scope.targets[record.episode]: record.decode("state") for record in records}

    async def activate(self, staged: dict[EpisodeId, Any]) -> None:
        await self.activates.step()
        self.live.update(staged)
        self.pending.update(staged)

    async def discard(self, staged: dict[EpisodeId, Any]) -> None:
        for episode in staged:
            self.live.pop(episode, None)
            self.pending.discard(episode)

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        await self.retires.step()
        for attempt in [e for e in self.live if e.rollout_id == episode.rollout_id and e.attempt <= episode.attempt]:
            self.live.pop(attempt)
            self.pending.discard(attempt)
            self.running.discard(attempt)
        self.running.discard(episode)
        self.retired.append(episode)
        self.changed()

    def check_forget(self, rollout_id: str, through_attempt: int) -> None:
        return None

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        return None

    def restored_pending(self) -> frozenset[EpisodeId]:
        return frozenset(self.pending)

    async def delete_restored(self, episode: EpisodeId) -> None:
        await self.deletes.step()
        self.pending.discard(episode)
        self.live.pop(episode, None)

    async def release_exported(self, episodes: Sequence[EpisodeId]) -> None:
        await self.releases.step()
        self.released += episodes


class Clock:
    """A monotonic clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class HeldFiles(LocalFiles):
    """Local files whose operations a test can hold up, or fail, by the end of the path they are about."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.released = threading.Event()
        self.calls: list[str] = []
        self._hold: tuple[str, str] | None = None
        self._fail: tuple[str, Exception] | None = None

    def hold(self, operation: str, suffix: str = "") -> None:
        """The next such operation waits for `release`."""
        self.entered.clear()
        self.released.clear()
        self._hold = (operation, suffix)

    def release(self) -> None:
        self._hold = None
        self.released.set()

    def fail(self, operation: str, error: Exception | None) -> None:
        """Such operations fail from now on; not any more with None."""
        self._fail = None if error is None else (operation, error)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 5)

    def _step(self, operation: str, path: str) -> None:
        self.calls.append(f"{operation} {path}")
        if self._hold and self._hold[0] == operation and path.endswith(self._hold[1]):
            self._hold = None
            self.entered.set()
            assert self.released.wait(20)
        if self._fail and self._fail[0] == operation:
            raise self._fail[1]

    def create(self, path: str) -> Any:
        self._step("create", path)
        return super().create(path)

    def publish(self, temporary: str, path: str) -> None:
        self._step("publish", path)
        super().publish(temporary, path)

    def open(self, path: str) -> Any:
        self._step("open", path)
        return super().open(path)


async def typed(call: Awaitable[T]) -> T:
    """The reply, or the typed error that the call carries."""
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        raise error_from(failure) or failure from failure


async def failure(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """How a call fails, as grpc tells it."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


class Participant:
    """A served control plane with a scripted owner, a stub to call it, and short requests.

    clock: of leases and marks, the real one if None. Calls raise typed errors.
    """

    def __init__(
        self,
        root: Path,
        *,
        settings: ControlSettings | None = None,
        clock: Clock | None = None,
        owner: ScriptedOwner | None = None,
        token: TokenSource | None = None,
        telemetry: Telemetry | None = None,
        **serving: Any,
    ) -> None:
        self.owner = owner or ScriptedOwner()
        self.root, self.files, self.token = root, HeldFiles(), token
        self.identity = ParticipantIdentity(ParticipantKind.RESOURCES, "scripted")
        self.plane = ControlPlane(
            self.owner,
            self.identity,
            roots=[str(root)],
            settings=settings or FAST,
            clock=clock or time.monotonic,
            files=self.files,
            telemetry=telemetry,
        )
        self.server = ParticipantServer(self.plane, **serving)
        self.channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Participant:
        await self.server.start()
        self.channel = open_channel(self.server.address, token=self.token)
        self.stub: Stub = participant_pb2_grpc.ParticipantServiceStub(self.channel)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.channel is not None
        for gate in self.owner.gates():
            gate.error = None
            gate.open.set()
        self.files.release()
        await self.channel.close()
        await self.server.stop(0)

    def add(self, *names: str, running: bool = False) -> list[EpisodeId]:
        """Live episodes with these rollout ids."""
        episodes = [EpisodeId(name) for name in names]
        for episode in episodes:
            self.owner.live[episode] = {"name": episode.rollout_id}
            if running:
                self.owner.running.add(episode)
        return episodes

    def is_open(self) -> bool:
        """Whether the owner's admission is open."""
        return self.owner.open

    async def waiters(self, count: int) -> None:
        """Wait until so many calls wait for the install."""
        await eventually(lambda: self.plane._core.work is not None and self.plane._core.work.waiters == count)

    async def status(self) -> pb.ParticipantStatus:
        return (await self.stub.GetStatus(pb.GetStatusRequest(), timeout=5)).status

    async def phase(self) -> str:
        return pb.Phase.Name((await self.status()).phase).removeprefix("PHASE_")

    async def until(self, phase: str) -> pb.ParticipantStatus:
        """Watch the status until it has this phase."""
        async with asyncio.timeout(10):
            watch = self.stub.WatchStatus(pb.WatchStatusRequest(), timeout=20)
            async for message in watch:
                if message.status.phase == pb.Phase.Value("PHASE_" + phase):
                    watch.cancel()
                    return message.status
        raise AssertionError(f"never {phase}")

    def uri(self, checkpoint_id: str) -> str:
        return (self.root / "checkpoints" / checkpoint_id).as_uri()

    def written(self, checkpoint_id: str = "c1") -> list[str]:
        """Names of the files under a checkpoint."""
        return sorted(path.name for path in (self.root / "checkpoints" / checkpoint_id).rglob("*") if path.is_file())

    # Calls

    async def prepare(
        self, id: str = "c1", *, within: float = 1.0, ttl: float | None = None, timeout: float = 5, **who: Any
    ) -> pb.PrepareResponse:
        request = pb.PrepareRequest(context=context(id, **who), ready_within=wire.duration(within))
        if ttl is not None:
            request.lease_ttl.CopyFrom(wire.duration(ttl))
        return await typed(self.stub.Prepare(request, timeout=timeout))

    async def capture(
        self, scope: Scope = None, id: str = "c1", *, timeout: float = 5, incarnation: str = "", **who: Any
    ) -> pb.CaptureResponse:
        request = pb.CaptureRequest(
            context=context(id, **who), scope=scope_message(scope), expected_incarnation_id=incarnation
        )
        return await typed(self.stub.Capture(request, timeout=timeout))

    async def commit(
        self,
        scope: Scope = None,
        id: str = "c1",
        *,
        timeout: float = 5,
        incarnation: str = "",
        stop: bool = False,
        uri: str = "",
        base: str = "",
        **who: Any,
    ) -> pb.CommitResponse:
        request = pb.CommitRequest(
            context=context(id, **who),
            scope=scope_message(scope),
            storage_uri=uri or self.uri(id),
            base_checkpoint_uri=self.uri(base) if base else "",
            expected_incarnation_id=incarnation,
            stop=stop,
        )
        return await typed(self.stub.Commit(request, timeout=timeout))

    async def resume(
        self, id: str = "c1", *, keep_write: bool = False, timeout: float = 5, **who: Any
    ) -> pb.ResumeResponse:
        request = pb.ResumeRequest(context=context(id, **who), keep_write=keep_write)
        return await typed(self.stub.Resume(request, timeout=timeout))

    async def restore(
        self,
        scope: Sequence[EpisodeId],
        id: str = "r1",
        *,
        source: str = "c1",
        digest: str = "",
        install_as: Sequence[int] = (),
        ttl: float | None = None,
        timeout: float = 5,
        **who: Any,
    ) -> pb.RestoreResponse:
        request = pb.RestoreRequest(
            context=context(id, **who),
            storage_uri=self.uri(source),
            source_checkpoint_id=source,
            expected_manifest_digest=digest,
            scope=wire.episode_list(scope),
            install_as=install_as,
        )
        if ttl is not None:
            request.lease_ttl.CopyFrom(wire.duration(ttl))
        return await typed(self.stub.Restore(request, timeout=timeout))

    async def retire(
        self, episodes: Sequence[EpisodeId], id: str = "", *, timeout: float = 5, **who: Any
    ) -> pb.RetireResponse:
        request = pb.RetireRequest(context=context(id, **who), episodes=wire.episode_list(episodes))
        return await typed(self.stub.Retire(request, timeout=timeout))

    async def forget(
        self, rollouts: dict[str, int], id: str = "", *, timeout: float = 5, **who: Any
    ) -> pb.ForgetResponse:
        entries = [pb.ForgetRollout(rollout_id=r, through_attempt=a) for r, a in rollouts.items()]
        request = pb.ForgetRequest(context=context(id, **who), rollouts=entries)
        return await typed(self.stub.Forget(request, timeout=timeout))

    async def renew(self, id: str = "c1", *, timeout: float = 5, **who: Any) -> pb.RenewLeaseResponse:
        return await typed(self.stub.RenewLease(pb.RenewLeaseRequest(context=context(id, **who)), timeout=timeout))

    async def listed(self, kind: pb.EpisodeListKind.ValueType, id: str = "") -> list[EpisodeId]:
        """The whole list, every message of it within its limit."""
        request = pb.ListEpisodesRequest(kind=kind, checkpoint_id=id)
        found: list[EpisodeId] = []
        try:
            async for message in self.stub.ListEpisodes(request, timeout=5):
                batch = wire.episodes_from(message.episodes)
                assert 1 <= len(batch) <= 1000
                found += batch
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure) or failure from failure
        return found


def scope_message(scope: Scope) -> episode_pb2.EpisodeScope:
    return wire.scope_to(EpisodeScope.all() if scope is None else EpisodeScope.of(scope))


def unreplayed(reply: M) -> M:
    """A reply without its `replayed` flag, for comparing."""
    twin = type(reply)()
    twin.CopyFrom(reply)
    twin.replayed = False  # type: ignore[attr-defined]
    return twin


async def eventually(condition: Callable[[], bool]) -> None:
    """Look until it holds, for states that tell nobody of themselves."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to hold")


@contextlib.asynccontextmanager
async def running(call: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """A call under way beside the test; ended with it."""
    task = asyncio.ensure_future(call)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def context(checkpoint_id: str = "c1", *, epoch: int = 1, controller: str = "t") -> pb.ControlContext:
    return pb.ControlContext(checkpoint_id=checkpoint_id, controller_id=controller, epoch=epoch)
