"""Restore: what is installed, when nothing is, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.protocol.errors import ErrorCode, GymCkptError, InvalidPhase
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.testing.client import unreplayed
from gym_ckpt_grpc.testing.conformance.context import LEASE, PATIENCE, SHORT_LEASE, Context, Source
from gym_ckpt_grpc.testing.conformance.results import Broken, Group, Skipped
from gymckpt.v1 import participant_pb2 as pb

RESTORE = Group("Restore")
CORRUPT = ErrorCode.STATE_CORRUPT
WRONG_DIGEST = "0" * 64


async def source_of(ctx: Context) -> Source:
    """The checkpoint that restores read: made once, with the expendable episodes, which are retired after it."""
    if ctx.source is None:
        ctx.need_root()
        expendable = ctx.target.expendable
        async with ctx.prepared() as id:
            scope = list(dict.fromkeys([*await ctx.pending(), *expendable]))
            reply = await ctx.client.commit(id, scope, timeout=60.0)
            committed = await ctx.client.listed(EpisodeListKind.COMMITTED, id)
        recorded = tuple(episode for episode in expendable if episode in committed)
        await ctx.drop(recorded)
        ctx.source = Source(id, reply.manifest_digest, recorded)
    return ctx.source


@dataclass(frozen=True, slots=True)
class Restored:
    """An open Restore. before: the status before it."""

    id: str
    source: Source
    episodes: Sequence[EpisodeId]
    targets: Sequence[EpisodeId]
    reply: pb.RestoreResponse
    before: pb.ParticipantStatus


@asynccontextmanager
async def restored(
    ctx: Context, episodes: Sequence[EpisodeId] | None = None, *, ttl: float = LEASE
) -> AsyncIterator[Restored]:
    """A Restore of the source's episodes (of made-up ones without any); all of it is gone at the end."""
    source = await source_of(ctx)
    chosen = list(episodes or source.recorded or ctx.rollouts(2))
    targets = [episode.next() for episode in chosen]
    id, before = ctx.new_id(), await ctx.client.status()
    try:
        try:
            reply = await ctx.client.restore(id, chosen, source=source.id, digest=source.digest, ttl=ttl)
        except InvalidPhase as refusal:
            if refusal.active_checkpoint_id or source.recorded:
                raise
            raise Skipped(f"live work here stands in the way of a restore: {refusal.message}") from None
        yield Restored(id, source, chosen, targets, reply, before)
    finally:
        with suppress(GymCkptError, grpc.aio.AioRpcError):
            await ctx.client.resume(id)
            await ctx.drop(targets)


@RESTORE.check("C130", "C138")
async def next_attempts(ctx: Context) -> None:
    """Restore installs every episode of its scope as its next attempt."""
    stranger = ctx.rollouts(1)
    source = await source_of(ctx)
    async with restored(ctx, [*source.recorded, *stranger]) as done:
        reply, recorded = done.reply, len(source.recorded)
        ctx.same("the phase", wire.phase_from(reply.phase), Phase.RESTORED)
        ctx.same("source_checkpoint_id", reply.source_checkpoint_id, source.id)
        installed = sorted(wire.episodes_from(reply.installed))
        ctx.same("the installed episodes", installed, sorted(done.targets))
        counts = (reply.installed_count, reply.record_count, reply.without_record_count)
        ctx.same("(installed, records, without record)", counts, (recorded + 1, recorded, 1))
        pending = set(await ctx.pending())
        missing = sorted(e.next() for e in source.recorded if e.next() not in pending)
        ctx.expect(not missing, "every restored episode among the pending ones", f"missing: {missing[:5]}")


@RESTORE.check("C131")
async def closed_until_resume(ctx: Context) -> None:
    """Admission is closed from Restore until Resume, and open after it."""
    async with restored(ctx) as done:
        status = await ctx.client.status()
        ctx.same("the phase", wire.phase_from(status.phase), Phase.RESTORED)
        ctx.same("the open checkpoint", status.active_checkpoint_id, done.id)
        ctx.expect(status.HasField("closed_for"), "how long it has been closed", "closed_for is absent")
        reply = await ctx.client.resume(done.id)
        ctx.same("the phase after Resume", wire.phase_from(reply.phase), Phase.IDLE)
        ctx.expect(not (await ctx.client.status()).HasField("closed_for"), "open admission", "closed_for is present")


@RESTORE.check("C132")
async def no_marks(ctx: Context) -> None:
    """Restore creates no marks."""
    async with restored(ctx) as done:
        ctx.same("marks_held", (await ctx.client.status()).marks_held, done.before.marks_held)


@RESTORE.check("C136")
async def scope_only(ctx: Context) -> None:
    """Only scope episodes are installed."""
    ctx.need_expendable(2)
    source = await source_of(ctx)
    async with restored(ctx, source.recorded[:1]) as done:
        pending = set(await ctx.pending())
        ctx.expect(done.targets[0] in pending, f"{done.targets[0]} to be pending", sorted(pending)[:5])
        stray = [e.next() for e in source.recorded[1:] if e.next() in pending]
        ctx.expect(not stray, "nothing else of the checkpoint", stray)


@RESTORE.check("C145")
async def restore_replayed(ctx: Context) -> None:
    """A completed Restore is replayed; with another scope or digest it is a conflict."""
    conflict = ErrorCode.CHECKPOINT_CONFLICT
    async with restored(ctx) as done:
        known = {"source": done.source.id, "digest": done.source.digest, "ttl": LEASE}
        again = await ctx.client.restore(done.id, list(reversed(done.episodes)), **known)  # type: ignore[arg-type]
        ctx.expect(again.replayed, "a replay", "none")
        same = unreplayed(again) == unreplayed(done.reply)
        ctx.expect(same, f"the recorded reply: {unreplayed(done.reply)}", unreplayed(again))
        other = ctx.client.restore(done.id, ctx.rollouts(1), **known)  # type: ignore[arg-type]
        await ctx.refused(conflict, other, "Restore of another scope")
        other = ctx.client.restore(done.id, done.episodes, source=done.source.id, digest=WRONG_DIGEST, ttl=LEASE)
        await ctx.refused(conflict, other, "Restore of another digest")


@RESTORE.check("C146", "C147")
async def wrong_digest(ctx: Context) -> None:
    """Another manifest digest is STATE_CORRUPT and installs nothing; the id can be used again."""
    source = await source_of(ctx)
    episodes = list(source.recorded or ctx.rollouts(1))
    before, id = await ctx.client.status(), ctx.new_id()
    call = ctx.client.restore(id, episodes, source=source.id, digest=WRONG_DIGEST, ttl=LEASE)
    await ctx.refused(CORRUPT, call, "Restore of another digest")
    await ctx.unchanged(before)
    try:
        await ctx.client.restore(id, episodes, source=source.id, digest=source.digest, ttl=LEASE)
        await ctx.client.resume(id)
    finally:
        await ctx.client.resume(id)
        await ctx.drop([episode.next() for episode in episodes])
    again = ctx.client.restore(id, episodes, source=source.id, digest=source.digest, ttl=LEASE)
    await ctx.refused(ErrorCode.STALE_CHECKPOINT, again, "Restore of a resumed id")


@RESTORE.check("C148")
async def no_source(ctx: Context) -> None:
    """A source with nothing for this participant is STATE_NOT_FOUND."""
    ctx.need_root()
    before = await ctx.client.status()
    call = ctx.client.restore(ctx.new_id(), ctx.rollouts(1), source=ctx.new_id(), ttl=LEASE)
    await ctx.refused(ErrorCode.STATE_NOT_FOUND, call, "Restore of a checkpoint that is not there")
    await ctx.unchanged(before)


@RESTORE.check("C133")
async def damaged(ctx: Context) -> None:
    """Changed bytes of a manifest are STATE_CORRUPT; nothing is installed."""
    source = await source_of(ctx)
    found = list(ctx.need_files(source.id).rglob("manifest.json"))
    if len(found) != 1:
        raise Skipped("this participant's manifest cannot be told from here")
    whole = found[0].read_bytes()
    before = await ctx.client.status()
    try:
        found[0].write_bytes(whole.replace(b"0", b"1").replace(b"2", b"3"))
    except OSError as error:
        raise Skipped(f"the manifest cannot be written from here: {error.strerror}") from None
    try:
        call = ctx.client.restore(ctx.new_id(), ctx.rollouts(1), source=source.id, digest=source.digest, ttl=LEASE)
        await ctx.refused(CORRUPT, call, "Restore of a damaged manifest")
    finally:
        found[0].write_bytes(whole)
    await ctx.unchanged(before)


@RESTORE.check("C74")
async def retire_restored(ctx: Context) -> None:
    """What was restored can be retired in RESTORED and after the Resume that follows."""
    async with restored(ctx) as done:
        first, second = done.targets[0], done.targets[-1]
        reply = await ctx.client.retire([first], id=done.id)
        ctx.same("its outcome in RESTORED", [o.state for o in reply.outcomes], [pb.RETIRE_STATE_RETIRED])
        ctx.same("the phase after it", await ctx.client.phase(), Phase.RESTORED)
        ctx.expect(first not in await ctx.pending(), f"{first} to be gone", "it is pending")
        await ctx.client.resume(done.id)
        reply = await ctx.client.retire([second])
        ctx.same("its outcome after Resume", [o.state for o in reply.outcomes], [pb.RETIRE_STATE_RETIRED])
        ctx.expect(second not in await ctx.pending(), f"{second} to be gone", "it is pending")


@RESTORE.check("C26")
async def marked_attempts(ctx: Context) -> None:
    """An attempt at or below a mark is not installed; a later one of the rollout is."""
    source = await source_of(ctx)
    [episode] = ctx.rollouts(1)
    await ctx.client.retire([EpisodeId(episode.rollout_id, 3)])
    known = {"source": source.id, "digest": source.digest, "ttl": LEASE}
    for attempt in (1, 3):
        call = ctx.client.restore(ctx.new_id(), [episode], install_as=[attempt], **known)  # type: ignore[arg-type]
        refusal = await ctx.refused(ErrorCode.STALE_ATTEMPT, call, f"attempt {attempt} below mark 3")
        ctx.expect(refusal.control.episode_count == 1, "the episode in that refusal", refusal.control.episode_count)
    id = ctx.new_id()
    try:
        reply = await ctx.client.restore(id, [episode], install_as=[4], **known)  # type: ignore[arg-type]
        installed = wire.episodes_from(reply.installed)
        ctx.same("what is installed", installed, (EpisodeId(episode.rollout_id, 4),))
    except InvalidPhase as refusal:
        raise Skipped(f"live work here stands in the way of a restore: {refusal.message}") from None
    finally:
        await ctx.client.resume(id)
        await ctx.drop([EpisodeId(episode.rollout_id, 4)])


@RESTORE.check("C326")
async def lease_of_a_restore(ctx: Context) -> None:
    """A lease that ends in RESTORED frees what was installed and leaves no refusal."""
    async with restored(ctx, ttl=SHORT_LEASE) as done:
        await ctx.closed_by_lease()
        after = await ctx.client.status()
        ctx.same("marks_held after it", after.marks_held, done.before.marks_held)
        ctx.same("restored_pending after it", after.restored_pending, done.before.restored_pending)
        async with restored(ctx, done.episodes) as again:
            ctx.same("installed_count of the same Restore", again.reply.installed_count, len(done.targets))


@RESTORE.check("C93", "C98")
async def pending_outside(ctx: Context) -> None:
    """A Commit frees pending episodes outside its list, without a mark, and writes none of them."""
    ctx.need_expendable(1)
    async with restored(ctx) as done:
        await ctx.client.resume(done.id)
        marks = (await ctx.client.status()).marks_held
        async with ctx.prepared() as id:
            others = [episode for episode in await ctx.pending() if episode not in done.targets]
            await ctx.client.commit(id, others)
            written = await ctx.client.listed(EpisodeListKind.COMMITTED, id)
            ctx.expect(not set(written) & set(done.targets), "no record of them", written[:5])
            await _gone(ctx, done.targets)
            ctx.same("the other pending episodes", sorted(await ctx.pending()), sorted(others))
            ctx.same("marks_held", (await ctx.client.status()).marks_held, marks)


async def _gone(ctx: Context, targets: Sequence[EpisodeId]) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            while set(await ctx.pending()) & set(targets):  # noqa: ASYNC110 - it is told of by polling only
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise Broken("pending episodes outside the scope to be freed", "they are still pending") from None


@RESTORE.check("C10")
async def legality_restored(ctx: Context) -> None:
    """RESTORED allows Retire, Forget and RenewLease, and refuses Prepare, Capture and Commit."""
    async with restored(ctx) as done:
        request = ctx.requests(done.id)
        for name in ("Prepare", "Capture", "Commit"):
            call = ctx.client.send(request[name])
            await ctx.refused(ErrorCode.INVALID_PHASE, call, f"{name} in RESTORED")
        for name in ("Retire", "Forget", "RenewLease"):
            await ctx.client.send(request[name])
        ctx.same("the phase after it", await ctx.client.phase(), Phase.RESTORED)
