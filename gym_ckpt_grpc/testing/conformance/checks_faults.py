"""Lost replies, and many calls at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from gym_ckpt_grpc.protocol.errors import GymCkptError
from gym_ckpt_grpc.testing.client import ParticipantClient, unreplayed
from gym_ckpt_grpc.testing.conformance.checks_restore import source_of
from gym_ckpt_grpc.testing.conformance.checks_storage import manifests
from gym_ckpt_grpc.testing.conformance.context import LEASE, PATIENCE, Context
from gym_ckpt_grpc.testing.conformance.results import Broken, Group, Skipped
from gym_ckpt_grpc.testing.network import Cable, Network
from gymckpt.v1 import participant_pb2 as pb

FAULTS = Group("Faults")
STREAMS = 500
AT_ONCE = 1.0
Call = Callable[[ParticipantClient], Awaitable[Any]]


@asynccontextmanager
async def _by_cable(ctx: Context) -> AsyncIterator[tuple[Cable, ParticipantClient]]:
    """A client whose connection can lose a reply."""
    async with Network() as network:
        try:
            cable = await network.cable(ctx.target.address)
        except (OSError, ValueError) as error:
            raise Skipped(f"no cable can be laid to it: {error}") from None
        async with ctx.beside(cable.address, ctx.target.token) as client:
            await client.status()
            yield cable, client


async def _lost(ctx: Context, cable: Cable, client: ParticipantClient, call: Call, what: str, *, recorded: bool) -> Any:
    """Lose the reply of a call, ask twice again, and give the answer, which must be the same both times."""
    client.epoch = ctx.epoch
    cable.lose_reply()
    try:
        await call(client)
    except grpc.aio.AioRpcError:
        pass
    except GymCkptError as error:
        raise Broken(f"the reply of {what} to be lost", str(error)) from None
    else:
        raise Skipped("the connection is not plain HTTP/2: no reply can be lost")
    async with asyncio.timeout(PATIENCE):
        await cable.lost.wait()
    again, twice = await _asked(client, call), await _asked(client, call)
    ctx.expect(unreplayed(again) == unreplayed(twice), f"the same answer of {what} each time", unreplayed(twice))
    if recorded:
        replayed = (again.replayed, twice.replayed)
        ctx.expect(replayed == (True, True), f"{what} to be replayed after its reply was lost", replayed)
    return again


async def _asked(client: ParticipantClient, call: Call) -> Any:
    """The answer of a call, over a new connection where the old one turns out to be gone."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call(client)
            except grpc.aio.AioRpcError as failure:
                if failure.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)


@FAULTS.check("C36")
async def lost_checkpoint_replies(ctx: Context) -> None:
    """A Prepare, Capture or Resume whose reply was lost is answered again, its work done once."""
    async with _by_cable(ctx) as (cable, client), ctx.prepared() as id:
        scope = [*await ctx.pending(), *ctx.rollouts(1)]
        await ctx.client.resume(id)
        id = ctx.new_id()
        wait = ctx.target.ready_within
        try:
            prepare: Call = lambda c: c.prepare(id, within=wait, ttl=LEASE)  # noqa: E731
            await _lost(ctx, cable, client, prepare, "Prepare", recorded=True)
            await _lost(ctx, cable, client, lambda c: c.capture(id, scope), "Capture", recorded=True)
            await _lost(ctx, cable, client, lambda c: c.resume(id), "Resume", recorded=True)
        finally:
            await ctx.client.resume(id)


@FAULTS.check("C36")
async def lost_retire_replies(ctx: Context) -> None:
    """A Retire or Forget whose reply was lost is answered again."""
    episodes = ctx.rollouts(2)
    rollouts = {episode.rollout_id: episode.attempt for episode in episodes}
    async with _by_cable(ctx) as (cable, client):
        before = (await ctx.client.status()).marks_held
        reply = await _lost(ctx, cable, client, lambda c: c.retire(episodes), "Retire", recorded=False)
        states = [outcome.state for outcome in reply.outcomes]
        ctx.same("the outcomes", states, [pb.RETIRE_STATE_RETIRED] * 2)
        ctx.same("marks_held", (await ctx.client.status()).marks_held, before + 2)
        await _lost(ctx, cable, client, lambda c: c.forget(rollouts), "Forget", recorded=False)
        ctx.same("marks_held after Forget", (await ctx.client.status()).marks_held, before)


@FAULTS.check("C36")
async def lost_storage_replies(ctx: Context) -> None:
    """A Commit or Restore whose reply was lost is answered again, with one manifest."""
    ctx.need_root()
    source = await source_of(ctx)
    async with _by_cable(ctx) as (cable, client):
        async with ctx.prepared() as id:
            scope = [*await ctx.pending(), *ctx.rollouts(1)]
            reply = await _lost(ctx, cable, client, lambda c: c.commit(id, scope), "Commit", recorded=True)
            ctx.expect(len(manifests(ctx, id)) <= 1, "one manifest", manifests(ctx, id))
            ctx.expect(bool(reply.manifest_digest), "the digest in the answer", "none")
        episodes, id = list(source.recorded or ctx.rollouts(1)), ctx.new_id()
        known = {"source": source.id, "digest": source.digest, "ttl": LEASE}
        try:
            restore: Call = lambda c: c.restore(id, episodes, **known)  # type: ignore[arg-type]  # noqa: E731
            await _lost(ctx, cable, client, restore, "Restore", recorded=True)
        finally:
            await ctx.client.resume(id)
            await ctx.drop([episode.next() for episode in episodes])


@FAULTS.check("C153")
async def many_calls(ctx: Context) -> None:
    """With 500 long calls open, RenewLease, GetStatus and Resume answer within 1 s."""
    async with AsyncExitStack() as stack:
        crowd = await stack.enter_async_context(ctx.beside(token=ctx.target.token))
        streams = [crowd.stub.WatchStatus(pb.WatchStatusRequest()) for _ in range(STREAMS)]
        stack.callback(lambda: [stream.cancel() for stream in streams])
        try:
            async with asyncio.timeout(4 * PATIENCE):
                await asyncio.gather(*(_opened(stream) for stream in streams))
        except grpc.aio.AioRpcError as failure:
            raise Skipped(f"it takes fewer calls at once: {failure.code().name}") from None
        id, _ = await stack.enter_async_context(ctx.opened())
        for name, call in (
            ("RenewLease", lambda: ctx.client.renew(id)),
            ("GetStatus", ctx.client.status),
            ("Resume", lambda: ctx.client.resume(id)),
        ):
            began = time.monotonic()
            await call()
            took = time.monotonic() - began
            ctx.expect(took <= AT_ONCE, f"{name} within {AT_ONCE} s", f"after {took:.2f} s")


async def _opened(stream: Any) -> None:
    async for _ in stream:
        return
