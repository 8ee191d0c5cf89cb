"""Commit: what is written, its replays, and records kept after Resume."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.testing.client import unreplayed
from gym_ckpt_grpc.testing.conformance.context import LEASE, SHORT_LEASE, Context
from gym_ckpt_grpc.testing.conformance.results import Group
from gymckpt.v1 import participant_pb2 as pb

STORAGE = Group("Commit")
STALE = ErrorCode.STALE_CHECKPOINT
DROP_SLACK = 1.0
"""Seconds within which kept records must be gone after their lease_ttl."""


@dataclass(frozen=True, slots=True)
class Committed:
    """An open checkpoint that is durable. strangers: episodes of its scope that the participant does not know."""

    id: str
    scope: Sequence[EpisodeId]
    strangers: Sequence[EpisodeId]
    reply: pb.CommitResponse


@asynccontextmanager
async def committed(ctx: Context) -> AsyncIterator[Committed]:
    """Prepare and Commit, to what was pending and two episodes that nobody has."""
    ctx.need_root()
    async with ctx.prepared() as id:
        strangers = ctx.rollouts(2)
        scope = [*await ctx.pending(), *strangers]
        yield Committed(id, scope, strangers, await ctx.client.commit(id, scope))


def manifests(ctx: Context, id: str) -> list[str]:
    """Manifests under a checkpoint's directory, as far as this host can see it."""
    return sorted(str(path) for path in ctx.directory(id).rglob("manifest.json"))


@STORAGE.check("C78", "C101")
async def commit_reply(ctx: Context) -> None:
    """Commit replies with digest, count and bytes, and counts scope episodes without a record."""
    async with committed(ctx) as done:
        reply = done.reply
        digest = reply.manifest_digest
        ctx.expect(re.fullmatch(r"[0-9a-f]{64}", digest) is not None, "a sha256 in lower-case hex", digest)
        ctx.expect(reply.bytes > 0, "the bytes of the part", reply.bytes)
        ctx.expect(not reply.replayed, "no replay", "a replay")
        ctx.same("the phase", await ctx.client.phase(), Phase.COMMITTED)
        listed = await ctx.client.listed(EpisodeListKind.COMMITTED, done.id)
        ctx.same("record_count", reply.record_count, len(listed))
        ctx.expect(not set(listed) & set(done.strangers), "records of known episodes only", listed[:5])
        missing = len(done.scope) - len(set(listed))
        ctx.same("without_record_count", reply.without_record_count, missing)


@STORAGE.check("C79", "C89", "R9")
async def commit_replayed(ctx: Context) -> None:
    """A repeated Commit is replayed with the same manifest, whatever its scope's order."""
    async with committed(ctx) as done:
        before = manifests(ctx, done.id)
        again = await ctx.client.commit(done.id, list(reversed(done.scope)))
        ctx.expect(again.replayed, "a replay", "none")
        same = unreplayed(again) == unreplayed(done.reply)
        ctx.expect(same, f"the recorded reply: {unreplayed(done.reply)}", unreplayed(again))
        ctx.same("the manifests in its directory", manifests(ctx, done.id), before)
        ctx.expect(len(before) <= 1, "one manifest", before)


@STORAGE.check("C88")
async def other_arguments(ctx: Context) -> None:
    """A completed Commit with another scope or another stop is refused with CHECKPOINT_CONFLICT."""
    conflict = ErrorCode.CHECKPOINT_CONFLICT
    async with committed(ctx) as done:
        await ctx.refused(conflict, ctx.client.commit(done.id, done.scope[:-1]), "Commit of another scope")
        await ctx.refused(conflict, ctx.client.commit(done.id, done.scope, stop=True), "Commit with another stop")
        ctx.same("the phase after it", await ctx.client.phase(), Phase.COMMITTED)


@STORAGE.check("C81")
async def commit_what_was_captured(ctx: Context) -> None:
    """Commit after Capture writes exactly what was captured, and no other scope."""
    ctx.need_root()
    async with ctx.prepared() as id:
        scope = [*await ctx.pending(), *ctx.rollouts(1)]
        captured = await ctx.client.capture(id, scope)
        other = ctx.client.commit(id, [*scope, *ctx.rollouts(1)])
        await ctx.refused(ErrorCode.CHECKPOINT_CONFLICT, other, "Commit of a scope that was not captured")
        written = await ctx.client.commit(id, scope)
        ctx.same("record_count", written.record_count, captured.record_count)
        ctx.same("left_out_count", written.left_out_count, captured.left_out_count)


@STORAGE.check("C94")
async def scope_all(ctx: Context) -> None:
    """Scope all frees nothing that is pending; a policy model refuses it by name."""
    ctx.need_root()
    async with ctx.prepared() as id:
        if ctx.kind is ParticipantKind.POLICY_MODEL:
            call = ctx.client.commit(id, None)
            refusal = await ctx.refused(ErrorCode.INVALID_ARGUMENT, call, "scope all of a policy model")
            ctx.expect("scope" in refusal.fields, "a violation of scope", refusal.fields)
            return
        pending = await ctx.pending()
        await ctx.client.commit(id, None, timeout=60.0)
        ctx.same("pending episodes after it", await ctx.pending(), pending)


@STORAGE.check("C61")
async def retire_when_committed(ctx: Context) -> None:
    """Retire in COMMITTED is refused with INVALID_PHASE."""
    async with committed(ctx) as done:
        call = ctx.client.retire(done.strangers, id=done.id)
        await ctx.refused(ErrorCode.INVALID_PHASE, call, "Retire in COMMITTED")


@STORAGE.check("C115")
async def kept_records(ctx: Context) -> None:
    """Resume(keep_write) reopens; the Commit after it writes what was captured."""
    ctx.need_root()
    async with ctx.prepared() as id:
        scope = [*await ctx.pending(), *ctx.rollouts(1)]
        captured = await ctx.client.capture(id, scope)
        reply = await ctx.client.resume(id, keep_write=True)
        ctx.same("the phase after it", reply.phase, pb.PHASE_IDLE)
        written = await ctx.client.commit(id, scope)
        ctx.same("record_count", written.record_count, captured.record_count)
        again = await ctx.client.commit(id, scope)
        ctx.same("the digest of the same Commit again", again.manifest_digest, written.manifest_digest)


@STORAGE.check("C116")
async def kept_dropped(ctx: Context) -> None:
    """Kept records are dropped by a plain Resume and by a higher epoch; nothing is written."""
    ctx.need_root()
    for by in ("a plain Resume", "a higher epoch"):
        async with ctx.prepared() as id:
            scope = [*await ctx.pending(), *ctx.rollouts(1)]
            await ctx.client.capture(id, scope)
            await ctx.client.resume(id, keep_write=True)
            if by == "a higher epoch":
                ctx.raise_epoch()
                await ctx.client.resume(ctx.new_id())
            else:
                await ctx.client.resume(id)
            await ctx.refused(STALE, ctx.client.commit(id, scope), f"Commit of records dropped by {by}")
            ctx.same("manifests of it", manifests(ctx, id), [])


@STORAGE.check("C117")
async def kept_expire(ctx: Context) -> None:
    """Kept records for which no Commit comes within lease_ttl are dropped."""
    ctx.need_root()
    async with ctx.prepared(ttl=SHORT_LEASE) as id:
        scope = [*await ctx.pending(), *ctx.rollouts(1)]
        await ctx.client.capture(id, scope)
        await ctx.client.resume(id, keep_write=True)
        await asyncio.sleep(SHORT_LEASE + DROP_SLACK)
        await ctx.refused(STALE, ctx.client.commit(id, scope), "Commit of kept records after lease_ttl")


@STORAGE.check("C118")
async def kept_beside_another(ctx: Context) -> None:
    """A new checkpoint can be captured while an earlier one's records are kept."""
    ctx.need_root()
    async with ctx.prepared() as first:
        scope = [*await ctx.pending(), *ctx.rollouts(1)]
        await ctx.client.capture(first, scope)
        await ctx.client.resume(first, keep_write=True)
        async with ctx.prepared() as second:
            await ctx.client.capture(second, scope)
            await ctx.client.commit(first, scope)
            ctx.same("the open checkpoint after it", (await ctx.client.status()).active_checkpoint_id, second)
            await ctx.client.commit(second, scope)
        await ctx.client.resume(first)


@STORAGE.check("R6")
async def no_late_manifest(ctx: Context) -> None:
    """A checkpoint resumed before its Commit never gets a manifest."""
    ctx.need_root()
    async with ctx.prepared() as id:
        scope = await ctx.pending()
        await ctx.client.capture(id, scope)
        await ctx.client.resume(id)
        await ctx.refused(STALE, ctx.client.commit(id, scope), "Commit after Resume")
        ctx.same("manifests of it", manifests(ctx, id), [])


@STORAGE.check("C10")
async def legality(ctx: Context) -> None:
    """Each phase allows what the legality table says, and refuses the rest with INVALID_PHASE.

    The phases that can be stood in, for the id that is open; what would change the phase comes last.
    """
    ctx.need_root()
    no, client = ErrorCode.INVALID_PHASE, ctx.client
    async with ctx.prepared() as id:
        scope = await ctx.pending()
        request = ctx.requests(id)
        await ctx.refused(no, client.send(request["Restore"]), "Restore in PREPARED")
        await ctx.refused(no, client.send(request["Forget"]), "Forget in PREPARED")
        await client.capture(id, scope)
        for phase in (Phase.CAPTURED, Phase.COMMITTED):
            ctx.same("the phase", await client.phase(), phase)
            for name in ("Restore", "Retire", "Forget"):
                await ctx.refused(no, client.send(request[name]), f"{name} in {phase.name}")
            replay = await client.prepare(id, ttl=LEASE)
            ctx.expect(replay.replayed, f"Prepare in {phase.name} to be replayed", "not replayed")
            ctx.same("the phase in that reply", wire.phase_from(replay.phase), Phase.PREPARED)
            ctx.expect((await client.capture(id, scope)).replayed, "Capture to be replayed", "not replayed")
            await client.commit(id, scope)
