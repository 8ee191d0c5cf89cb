"""What a check works with: clients, ids of its own, and expectations that fail with both sides named."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.control import EpisodeListKind, open_channel, wire
from gym_ckpt_grpc.protocol.errors import ControlError, ErrorCode, GymCkptError
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.storage import uri_to_path
from gym_ckpt_grpc.testing.client import ParticipantClient
from gym_ckpt_grpc.testing.conformance.refusals import Forms, Refusal, read_refusal
from gym_ckpt_grpc.testing.conformance.results import Broken, Skipped
from gymckpt.v1 import participant_pb2 as pb

CONTROLLER = "conformance"
OTHER_CONTROLLER = "conformance-2"
LEASE = 30.0
"""Seconds that a participant stays closed at most, should the kit be killed."""
SHORT_LEASE = 1.0
PATIENCE = 8.0
"""Seconds for something that should happen at once or at the end of a short lease."""
LATER_WAIT = 0.25
"""Seconds to wait for a safe cut once it was not reached in the full time."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is tested, and with what. expendable: live episodes that the kit may checkpoint, retire and restore."""

    address: str
    token: TokenSource | None
    observer_token: TokenSource | None
    root: str
    expendable: tuple[EpisodeId, ...]
    ready_within: float
    allow_insecure: bool
    tls: ClientTls | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that the kit committed. recorded: its episodes with a record, which are expendable."""

    id: str
    digest: str
    recorded: tuple[EpisodeId, ...]


class Context:
    """One run against one participant. identity, kind: of it. epoch: above all that it had obeyed before."""

    def __init__(self, target: Target, channel: grpc.aio.Channel, first: pb.ParticipantStatus) -> None:
        self.target = target
        self.channel = channel
        self.identity = wire.identity_from(first.participant)
        self.kind: ParticipantKind = self.identity.kind
        self.forms = Forms(self.identity.incarnation_id)
        self.nonce = secrets.token_hex(3)
        self.prefix = f"conform-{self.nonce}-"
        self.client = ParticipantClient(
            channel,
            root=target.root,
            epoch=first.highest_epoch + 1,
            controller=CONTROLLER,
            on_reply=self.forms.reply,
        )
        self.source: Source | None = None
        self._numbers = 0
        self._missed = False

    # ---- ids

    @property
    def epoch(self) -> int:
        return self.client.epoch

    def raise_epoch(self) -> int:
        """The next epoch, of all calls from here on."""
        self.client.epoch += 1
        return self.client.epoch

    def new_id(self) -> str:
        """A checkpoint id that nobody has used."""
        self._numbers += 1
        return f"{self.prefix}c{self._numbers}"

    def rollouts(self, count: int = 1) -> list[EpisodeId]:
        """First attempts of rollouts that nobody has."""
        self._numbers += count
        return [EpisodeId(f"{self.prefix}r{self._numbers - i}") for i in range(count)]

    def requests(self, id: str, *, epoch: int | None = None, checkpoint: bool = True) -> dict[str, Message]:
        """A legal request of every mutating RPC; Commit and Restore only with a root. checkpoint: the id everywhere."""
        client, [episode] = self.client, self.rollouts()
        context = client.context(id, epoch=epoch)
        loose = context if checkpoint else client.context("", epoch=epoch)
        found: dict[str, Message] = {
            "Prepare": pb.PrepareRequest(context=context, lease_ttl=wire.duration(LEASE)),
            "Capture": client.capture_request(id, [], epoch=epoch),
            "Resume": pb.ResumeRequest(context=context),
            "Retire": pb.RetireRequest(context=loose, episodes=wire.episode_list([episode])),
            "Forget": pb.ForgetRequest(context=loose, rollouts=[pb.ForgetRollout(rollout_id=episode.rollout_id)]),
            "RenewLease": pb.RenewLeaseRequest(context=context),
        }
        if self.target.root:
            captured = client.capture_request(id, [], epoch=epoch)
            found["Commit"] = pb.CommitRequest(context=context, scope=captured.scope, storage_uri=client.uri(id))
            found["Restore"] = pb.RestoreRequest(
                context=context,
                storage_uri=client.uri(id),
                source_checkpoint_id=id,
                scope=wire.episode_list([episode]),
                lease_ttl=wire.duration(LEASE),
            )
        return found

    # ---- what is needed

    def need_root(self) -> None:
        """Skip the check without a root."""
        if not self.target.root:
            raise Skipped("no root was given to write to (--root)")

    def need_files(self, id: str) -> Path:
        """The checkpoint's directory as this host sees it; skip the check where it does not."""
        self.need_root()
        directory = self.directory(id)
        if not directory.is_dir():
            raise Skipped("the participant's files cannot be seen from here")
        return directory

    def directory(self, id: str) -> Path:
        """Where a checkpoint is, if the root is on this host."""
        return Path(uri_to_path(self.target.root)) / "checkpoints" / id

    def need_expendable(self, count: int) -> None:
        """Skip the check with fewer expendable episodes."""
        if len(self.target.expendable) < count:
            raise Skipped(f"needs {count} expendable episodes (--expendable)")

    async def pending(self) -> list[EpisodeId]:
        """Restored episodes that wait for their start: every list scope must have them, else they are deleted."""
        return await self.client.listed(EpisodeListKind.RESTORED_PENDING)

    # ---- phases

    @asynccontextmanager
    async def opened(self, *, ttl: float = LEASE, within: float = 0.0) -> AsyncIterator[tuple[str, pb.PrepareResponse]]:
        """A checkpoint of its own, prepared or not; resumed at the end."""
        id = self.new_id()
        try:
            yield id, await self.client.prepare(id, within=within, ttl=ttl)
        finally:
            with suppress(GymCkptError, grpc.aio.AioRpcError):
                await self.client.resume(id)

    @asynccontextmanager
    async def prepared(self, *, ttl: float = LEASE) -> AsyncIterator[str]:
        """A checkpoint at a safe cut; skips the check where the participant does not reach one."""
        wait = min(self.target.ready_within, LATER_WAIT) if self._missed else self.target.ready_within
        async with self.opened(ttl=ttl, within=wait) as (id, reply):
            if reply.phase == pb.PHASE_PREPARING and reply.report.blocker_count:
                self._missed = True
                raise Skipped(f"{reply.report.blocker_count} executions block: no safe cut within {wait} s")
            self.same("the phase of a Prepare", wire.phase_from(reply.phase).name, "PREPARED")
            yield id

    @asynccontextmanager
    async def blocked(self) -> AsyncIterator[tuple[str, pb.PrepareResponse]]:
        """A checkpoint that something holds up; skips the check where nothing does."""
        async with self.opened(within=LATER_WAIT) as (id, reply):
            if reply.phase != pb.PHASE_PREPARING:
                raise Skipped("nothing blocks here")
            yield id, reply

    async def lease_below(self, seconds: float) -> float:
        """Wait until less than this is left of the lease, and give what is left."""
        async with asyncio.timeout(PATIENCE):
            while True:
                left = wire.seconds((await self.client.status()).lease_remaining)
                if left < seconds:
                    return left
                await asyncio.sleep(0.02)

    async def closed_by_lease(self) -> pb.ParticipantStatus:
        """Wait until the participant has opened by itself."""
        try:
            return await self.client.until(Phase.IDLE, within=PATIENCE)
        except TimeoutError:
            raise Broken(f"IDLE by itself after a lease of {SHORT_LEASE} s", "it stays closed") from None

    # ---- expectations

    def expect(self, holds: bool, expected: str, seen: object) -> None:
        """The check fails unless it holds."""
        if not holds:
            raise Broken(expected, str(seen)[:400])

    def same(self, what: str, seen: object, expected: object) -> None:
        """The check fails unless both are equal."""
        self.expect(seen == expected, f"{what} is {expected}", seen)

    async def refused(self, code: ErrorCode, call: Awaitable[Any], what: str) -> Refusal:
        """The check fails unless the call is refused with this code."""
        refusal = await self.failing(call, f"{what} is refused with {code.name}")
        self.expect(refusal.code is code, f"{what} is refused with {code.name}", refusal)
        return refusal

    async def failing(self, call: Awaitable[Any], expected: str) -> Refusal:
        """The check fails unless the call is refused; gives how."""
        try:
            async with asyncio.timeout(PATIENCE + self.client.timeout):
                reply = await call
        except TimeoutError:
            raise Broken(expected, "no answer at all") from None
        except ControlError as error:
            failure = error.__cause__
        except grpc.aio.AioRpcError as error:
            failure = error
        else:
            raise Broken(expected, f"it succeeded: {' '.join(str(reply).split())[:200]}")
        if not isinstance(failure, grpc.aio.AioRpcError):
            raise Broken(expected, repr(failure))
        refusal = read_refusal(failure)
        self.forms.refusal(expected.split(" is ")[0], refusal)
        return refusal

    async def unchanged(self, before: pb.ParticipantStatus) -> None:
        """The check fails unless phase, open checkpoint, epoch, marks and pending episodes are as before."""
        after = await self.client.status()
        for name in ("phase", "active_checkpoint_id", "highest_epoch", "marks_held", "restored_pending"):
            self.same(f"{name} after refused calls", getattr(after, name), getattr(before, name))

    # ---- cleaning up

    async def tidy(self) -> None:
        """Reopen and forget whatever the last check left. Raises what stands in the way."""
        status = await self.client.status()
        if status.active_checkpoint_id.startswith(self.prefix):
            await self.client.resume(status.active_checkpoint_id, epoch=max(self.epoch, status.highest_epoch))
        if status.marks_held:
            marks = await self.client.listed(EpisodeListKind.RETIRED)
            await self.forget([mark for mark in marks if mark.rollout_id.startswith(self.prefix)])

    async def forget(self, episodes: Sequence[EpisodeId]) -> None:
        """Forget these attempts; none is fine."""
        if episodes:
            await self.client.forget({episode.rollout_id: episode.attempt for episode in episodes})

    async def drop(self, targets: Sequence[EpisodeId]) -> None:
        """Free what a restore installed, and every trace of it."""
        if targets:
            await self.client.retire(targets)
            await self.forget(targets)

    @asynccontextmanager
    async def beside(self, address: str = "", token: TokenSource | None = None) -> AsyncIterator[ParticipantClient]:
        """Another client, with another token or by another way."""
        target = self.target
        channel = open_channel(
            address or target.address,
            token=token,
            allow_insecure=target.allow_insecure,
            tls=target.tls,
            dedicated=True,
        )
        async with channel:
            yield ParticipantClient(channel, root=target.root, epoch=self.epoch, controller=CONTROLLER)
