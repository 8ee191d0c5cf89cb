"""Fences: epochs, resumed ids, incarnations, marks."""

from __future__ import annotations

from gym_ckpt_grpc.control import EpisodeListKind
from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.testing.conformance.context import LEASE, OTHER_CONTROLLER, Context
from gym_ckpt_grpc.testing.conformance.results import Group
from gymckpt.v1 import participant_pb2 as pb

FENCES = Group("Fences")
STALE = ErrorCode.STALE_CHECKPOINT
OLD = ErrorCode.STALE_CONTROLLER


@FENCES.check("C12")
async def nothing_open(ctx: Context) -> None:
    """Capture, Commit and RenewLease without an open checkpoint are INVALID_PHASE."""
    before = await ctx.client.status()
    requests = ctx.requests(ctx.new_id())
    for name in ("Capture", "Commit", "RenewLease"):
        if name in requests:
            call = ctx.client.send(requests[name])
            await ctx.refused(ErrorCode.INVALID_PHASE, call, f"{name} without an open checkpoint")
    await ctx.unchanged(before)


@FENCES.check("C16")
async def resumed_ids(ctx: Context) -> None:
    """A resumed id is refused with STALE_CHECKPOINT by every RPC but Resume, Retire and Forget."""
    async with ctx.opened() as (id, _):
        await ctx.client.resume(id)
    before = await ctx.client.status()
    requests = ctx.requests(id)
    for name in ("Prepare", "Capture", "Commit", "Restore", "RenewLease"):
        if name in requests:
            await ctx.refused(STALE, ctx.client.send(requests[name]), f"{name} of a resumed id")
    await ctx.unchanged(before)


@FENCES.check("C17", "C58")
async def unknown_ids(ctx: Context) -> None:
    """Resume of an id never seen fences it, also while another is open."""
    client, unknown = ctx.client, ctx.new_id()
    reply = await client.resume(unknown)
    ctx.same("the phase after it", reply.phase, pb.PHASE_IDLE)
    await ctx.refused(STALE, client.prepare(unknown), "its delayed Prepare")
    async with ctx.opened() as (id, _):
        late = ctx.new_id()
        reply = await client.resume(late)
        ctx.same("the active id that a Resume of another one reports", reply.active_checkpoint_id, id)
        ctx.same("the open checkpoint after it", (await client.status()).active_checkpoint_id, id)
        await ctx.refused(STALE, client.prepare(late), "its delayed Prepare while another is open")
        ctx.same("the open checkpoint after that", (await client.status()).active_checkpoint_id, id)
    await ctx.refused(STALE, client.prepare(late), "its delayed Prepare once the other has ended")


@FENCES.check("C18")
async def second_resume(ctx: Context) -> None:
    """A second Resume is replayed and reports the true phase and the active id."""
    client = ctx.client
    async with ctx.opened() as (first, _):
        ctx.expect(not (await client.resume(first)).replayed, "the first Resume not to be a replay", "replayed")
    again = await client.resume(first)
    ctx.same("(replayed, phase) of the second Resume", (again.replayed, again.phase), (True, pb.PHASE_IDLE))
    async with ctx.opened() as (id, _):
        again = await client.resume(first)
        status = await client.status()
        ctx.same("the open checkpoint after it", status.active_checkpoint_id, id)
        ctx.same("the active id it reports", again.active_checkpoint_id, id)
        closed = again.phase in (pb.PHASE_PREPARING, pb.PHASE_PREPARED)
        ctx.expect(again.replayed and closed, "a replay with the phase of the open checkpoint", again)


@FENCES.check("C19")
async def passed_epochs(ctx: Context) -> None:
    """A passed epoch is refused with STALE_CONTROLLER by every mutating RPC."""
    before = await ctx.client.status()
    for name, request in ctx.requests(ctx.new_id(), epoch=ctx.epoch - 1, checkpoint=False).items():
        await ctx.refused(OLD, ctx.client.send(request), f"{name} under a passed epoch")
    await ctx.unchanged(before)


@FENCES.check("C20")
async def two_epochs(ctx: Context) -> None:
    """Of two controllers of one id the higher epoch is obeyed, the lower one is not any more."""
    client = ctx.client
    old = client.epoch
    async with ctx.opened() as (id, _):
        higher = ctx.raise_epoch()
        await client.renew(id, epoch=higher, controller=OTHER_CONTROLLER)
        ctx.same("the controller after it", (await client.status()).controller_id, OTHER_CONTROLLER)
        await ctx.refused(OLD, client.renew(id, epoch=old), "RenewLease of the lower epoch")
        await ctx.refused(OLD, client.resume(id, epoch=old), "Resume of the lower epoch")
        ctx.same("the open checkpoint after it", (await client.status()).active_checkpoint_id, id)
        await client.resume(id, epoch=higher, controller=OTHER_CONTROLLER)


@FENCES.check("C21")
async def two_controllers(ctx: Context) -> None:
    """The same epoch with another controller is refused with CHECKPOINT_CONFLICT."""
    async with ctx.opened() as (id, _):
        for call in (ctx.client.renew, ctx.client.resume):
            refused = call(id, controller=OTHER_CONTROLLER)
            await ctx.refused(ErrorCode.CHECKPOINT_CONFLICT, refused, f"{call.__name__} of another controller")
        ctx.same("the controller after it", (await ctx.client.status()).controller_id, ctx.client.controller)


@FENCES.check("C22")
async def epoch_zero(ctx: Context) -> None:
    """Epoch 0 is refused once a higher one was seen; a refused call never raises the epoch."""
    client = ctx.client
    await ctx.refused(OLD, client.resume(ctx.new_id(), epoch=0), "epoch 0 after a higher one")
    far = ctx.epoch + 1000
    await ctx.refused(ErrorCode.INVALID_PHASE, client.renew(ctx.new_id(), epoch=far), "RenewLease of nothing")
    faulty = pb.ResumeRequest(context=client.context("no good", epoch=far))
    await ctx.refused(ErrorCode.INVALID_ARGUMENT, client.send(faulty), "a bad id under a high epoch")
    ctx.same("highest_epoch after refused calls", (await client.status()).highest_epoch, ctx.epoch)


@FENCES.check("R13")
async def epochs_never_fall(ctx: Context) -> None:
    """The highest epoch obeyed never falls."""
    client = ctx.client
    low, high = client.epoch, ctx.raise_epoch()
    await client.resume(ctx.new_id())
    ctx.same("highest_epoch after it was obeyed", (await client.status()).highest_epoch, high)
    async with ctx.opened() as (id, _):
        await ctx.refused(OLD, client.prepare(id, epoch=low), "Prepare of a passed epoch")
    await ctx.refused(OLD, client.prepare(ctx.new_id(), epoch=low), "Prepare of a passed epoch after a Resume")
    ctx.same("highest_epoch in the end", (await client.status()).highest_epoch, high)


@FENCES.check("C23")
async def many_resumed(ctx: Context) -> None:
    """At least 64 resumed ids are remembered."""
    fenced = [ctx.new_id() for _ in range(64)]
    for id in fenced:
        await ctx.client.resume(id)
    for id in fenced:
        await ctx.refused(STALE, ctx.client.prepare(id, ttl=LEASE), f"Prepare of {id}, one of 64 resumed ids,")


@FENCES.check("C25")
async def incarnations(ctx: Context) -> None:
    """Another expected_incarnation_id is refused with INCARNATION_CHANGED in any phase."""
    changed, client = ErrorCode.INCARNATION_CHANGED, ctx.client
    await ctx.refused(changed, client.capture(ctx.new_id(), [], incarnation="another"), "Capture while IDLE")
    async with ctx.opened() as (id, _):
        await ctx.refused(changed, client.capture(id, [], incarnation="another"), "Capture while one is open")
        if ctx.target.root:
            await ctx.refused(changed, client.commit(id, [], incarnation="another"), "Commit while one is open")


@FENCES.check("C27", "C64")
async def marks(ctx: Context) -> None:
    """One mark per retired rollout, which an earlier attempt never lowers."""
    [episode] = ctx.rollouts()
    before = (await ctx.client.status()).marks_held
    for attempt in (3, 1, 3):
        await ctx.client.retire([EpisodeId(episode.rollout_id, attempt)])
    mine = [e for e in await ctx.client.listed(EpisodeListKind.RETIRED) if e.rollout_id == episode.rollout_id]
    ctx.same("the marks of a rollout retired at 3, 1 and 3", [e.attempt for e in mine], [3])
    ctx.same("marks_held", (await ctx.client.status()).marks_held, before + 1)


@FENCES.check("C29", "C66")
async def forgetting(ctx: Context) -> None:
    """Forget removes the marks and replies with the sorted ids; a mark never set is no fault."""
    client = ctx.client
    before = (await client.status()).marks_held
    first, second, never = sorted(ctx.rollouts(3))
    await client.retire([second, first])
    reply = await client.forget({second.rollout_id: 0, never.rollout_id: 0, first.rollout_id: 0})
    expected = [first.rollout_id, second.rollout_id, never.rollout_id]
    ctx.same("(rollout_ids, count) of that Forget", (list(reply.rollout_ids), reply.rollout_count), (expected, 3))
    ctx.same("marks_held after it", (await client.status()).marks_held, before)


@FENCES.check("C30")
async def delayed_forget(ctx: Context) -> None:
    """A delayed Forget leaves a newer mark as it is."""
    client, [episode] = ctx.client, ctx.rollouts()
    newer = EpisodeId(episode.rollout_id, 2)
    await client.retire([newer])
    await client.forget({episode.rollout_id: 1})
    ctx.expect(newer in await client.listed(EpisodeListKind.RETIRED), "the mark of attempt 2 to stay", "it is gone")
    await client.forget({episode.rollout_id: 2})
    ctx.expect(newer not in await client.listed(EpisodeListKind.RETIRED), "no mark at the end", "it stays")
