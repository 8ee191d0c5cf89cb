"""An open checkpoint: closing, waiting, replays, leases, and what Resume leaves."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.testing.client import unreplayed
from gym_ckpt_grpc.testing.conformance.context import LEASE, PATIENCE, SHORT_LEASE, Context
from gym_ckpt_grpc.testing.conformance.results import Broken, Group, Skipped
from gymckpt.v1 import participant_pb2 as pb

OPEN = Group("An open checkpoint")
AT_ONCE = 2.0
"""Seconds within which something is said to happen at once, whatever the host is busy with."""
MAX_LEASE = 600.0


@OPEN.check("C51", "R1")
async def admission_and_phase(ctx: Context) -> None:
    """Admission is open in IDLE and closed in every other phase."""
    _consistent(ctx, await ctx.client.status())
    async with ctx.opened() as (id, _):
        status = await ctx.client.status()
        ctx.same("the open checkpoint", status.active_checkpoint_id, id)
        ctx.same("its controller", status.controller_id, ctx.client.controller)
        _consistent(ctx, status)
        reply = await ctx.client.resume(id)
        ctx.same("the phase that Resume reports", reply.phase, pb.PHASE_IDLE)
    status = await ctx.client.status()
    ctx.same("the phase after Resume", status.phase, pb.PHASE_IDLE)
    _consistent(ctx, status)


def _consistent(ctx: Context, status: pb.ParticipantStatus) -> None:
    """The status tells one story: in IDLE nothing is closed, held or owned; else all of it is."""
    closed = status.phase != pb.PHASE_IDLE
    seen = {
        "closed_for": status.HasField("closed_for"),
        "lease_remaining": status.HasField("lease_remaining"),
        "active_checkpoint_id": bool(status.active_checkpoint_id),
        "controller_id": bool(status.controller_id),
    }
    name = wire.phase_from(status.phase).name
    for field, present in seen.items():
        ctx.expect(present is closed, f"{field} {'present' if closed else 'absent'} in {name}", f"{field}: {present}")


@OPEN.check("C44")
async def ready_means_ready(ctx: Context) -> None:
    """A participant that says PREPARED, or is in that phase, has nothing that still runs."""
    async with ctx.opened(within=ctx.target.ready_within) as (_, reply):
        if reply.phase != pb.PHASE_PREPARED:
            raise Skipped(f"{reply.report.blocker_count} executions block")
        ctx.same("blocker_count of a Prepare that replied PREPARED", reply.report.blocker_count, 0)
        listed = await ctx.client.listed(EpisodeListKind.BLOCKING)
        ctx.expect(not listed, "no blocking episodes in PREPARED", listed[:5])


@OPEN.check("C31", "C46")
async def prepare_replayed(ctx: Context) -> None:
    """A Prepare that ended prepared is replayed; with another lease it is a conflict."""
    async with ctx.prepared() as id:
        first = await ctx.client.prepare(id, ttl=LEASE)
        again = await ctx.client.prepare(id, ttl=LEASE)
        ctx.same("replayed of the same Prepare", (first.replayed, again.replayed), (True, True))
        ctx.expect(unreplayed(first) == unreplayed(again), "the recorded reply", "two replays that differ")
        conflict = ctx.client.prepare(id, ttl=LEASE + 1)
        await ctx.refused(ErrorCode.CHECKPOINT_CONFLICT, conflict, "Prepare with another lease_ttl")


@OPEN.check("C31", "C102")
async def capture_replayed(ctx: Context) -> None:
    """Capture is replayed, its scope compared as a set."""
    async with ctx.prepared() as id:
        scope = [*await ctx.pending(), *ctx.rollouts(3)]
        first = await ctx.client.capture(id, scope)
        again = await ctx.client.capture(id, list(reversed(scope)))
        ctx.same("replayed of (Capture, Capture again)", (first.replayed, again.replayed), (False, True))
        same = unreplayed(first) == unreplayed(again)
        ctx.expect(same, f"the recorded reply: {unreplayed(first)}", unreplayed(again))
        conflict = ctx.client.capture(id, scope[1:])
        await ctx.refused(ErrorCode.CHECKPOINT_CONFLICT, conflict, "Capture of another scope")
        ctx.same("the phase after it", await ctx.client.phase(), Phase.CAPTURED)


@OPEN.check("C33")
async def all_is_not_none(ctx: Context) -> None:
    """Scope all and an empty list are different arguments."""
    if await ctx.pending():
        raise Skipped("restored episodes are pending, which an empty scope would free")
    async with ctx.prepared() as id:
        await ctx.client.capture(id, [])
        await ctx.refused(ErrorCode.CHECKPOINT_CONFLICT, ctx.client.capture(id, None), "Capture of all after none")


@OPEN.check("C34")
async def replay_extends(ctx: Context) -> None:
    """A replay extends the lease."""
    async with ctx.prepared() as id:
        before = await ctx.lease_below(LEASE - 0.2)
        await ctx.client.prepare(id, ttl=LEASE)
        left = wire.seconds((await ctx.client.status()).lease_remaining)
        ctx.expect(left > before, f"more than {before:.2f} s of lease after a replay", f"{left:.2f} s")


@OPEN.check("C32")
async def missed_prepare(ctx: Context) -> None:
    """A Prepare that ended PREPARING is not recorded: the next one waits again."""
    async with ctx.blocked() as (id, _):
        began = time.monotonic()
        again = await ctx.client.prepare(id, within=0.4, ttl=LEASE)
        waited = time.monotonic() - began
        if again.phase != pb.PHASE_PREPARING:
            raise Skipped("what blocked has ended meanwhile")
        ctx.expect(not again.replayed and waited >= 0.35, "a new wait of 0.4 s", f"{waited:.2f} s, {again.replayed=}")


@OPEN.check("C47", "C48", "C55")
async def blockers(ctx: Context) -> None:
    """A Prepare that misses its cut replies PREPARING with blockers and stays closed."""
    async with ctx.blocked() as (id, reply):
        report = reply.report
        listed, count = list(report.blockers), report.blocker_count
        ctx.expect(count >= max(1, len(listed)), "an exact count of blockers, 1 and up", count)
        ctx.same("blockers listed", len(listed), min(100, count))
        for blocker in listed:
            named = blocker.HasField("episode") or blocker.worker or blocker.place
            ctx.expect(bool(named), "an episode, worker or place in each blocker", blocker)
            ctx.expect(blocker.reason != 0 and blocker.HasField("age"), "reason and age in each blocker", blocker)
        ages = [wire.seconds(blocker.age) for blocker in listed]
        ctx.expect(ages == sorted(ages, reverse=True), "the oldest blockers first", ages)
        status = await ctx.client.status()
        ctx.same("the open checkpoint after it", status.active_checkpoint_id, id)
        _consistent(ctx, status)


@OPEN.check("C50")
async def resume_ends_wait(ctx: Context) -> None:
    """Resume ends a waiting Prepare at once, which then replies IDLE."""
    async with ctx.blocked() as (id, _):
        waiting = asyncio.create_task(ctx.client.prepare(id, within=20.0, ttl=LEASE, timeout=30.0))
        try:
            await ctx.client.renew(id)
            await ctx.client.resume(id)
            async with asyncio.timeout(AT_ONCE):
                reply = await waiting
        except TimeoutError:
            raise Broken("the waiting Prepare to end at once", f"it waits on after {AT_ONCE} s") from None
        finally:
            waiting.cancel()
        ctx.same("the phase in its reply", wire.phase_from(reply.phase).name, "IDLE")


@OPEN.check("C49")
async def no_wait(ctx: Context) -> None:
    """Prepare with ready_within zero closes admission and replies at once."""
    began = time.monotonic()
    async with ctx.opened(within=0.0) as (id, reply):
        took = time.monotonic() - began
        ctx.expect(took < AT_ONCE, f"a reply within {AT_ONCE} s", f"{took:.1f} s")
        ctx.expect(reply.phase in (pb.PHASE_PREPARING, pb.PHASE_PREPARED), "PREPARING or PREPARED", reply.phase)
        ctx.same("the open checkpoint", (await ctx.client.status()).active_checkpoint_id, id)


@OPEN.check("C56")
async def watching(ctx: Context) -> None:
    """WatchStatus gives the state on opening, then each change."""
    seen: list[str] = []
    try:
        async with asyncio.timeout(PATIENCE), aclosing(ctx.client.watch()) as statuses:  # type: ignore[type-var]
            async for status in statuses:
                seen.append(wire.phase_from(status.phase).name)
                if len(seen) == 1:
                    async with ctx.opened() as (id, _):
                        await _next_closed(statuses, seen)
                        await ctx.client.resume(id)
                elif seen[-1] == "IDLE":
                    break
    except TimeoutError:
        raise Broken("IDLE, a closed phase, IDLE", ", ".join(seen) or "nothing at all") from None
    ctx.expect(seen[0] == "IDLE" and seen[-1] == "IDLE", "IDLE on opening and at the end", ", ".join(seen))


async def _next_closed(statuses: object, seen: list[str]) -> None:
    async for status in statuses:  # type: ignore[attr-defined]
        seen.append(wire.phase_from(status.phase).name)
        if seen[-1] != "IDLE":
            return


@OPEN.check("C99", "C100")
async def restarts(ctx: Context) -> None:
    """A scope that names a restart is refused; without it the same checkpoint goes on."""
    async with ctx.prepared() as id:
        found = await ctx.client.listed(EpisodeListKind.RESTART)
        if not found:
            raise Skipped("no restart is in flight here")
        pending = await ctx.pending()
        call = ctx.client.capture(id, [*pending, found[0]])
        refusal = await ctx.refused(ErrorCode.RESTART_IN_SCOPE, call, "a scope that names a restart")
        listed = wire.episodes_from(refusal.control.episodes)
        ctx.same("the episodes in that refusal", listed, (found[0],))
        ctx.same("the phase after it", await ctx.client.phase(), Phase.PREPARED)
        await ctx.client.capture(id, pending)


@OPEN.check("C120", "C121", "C128")
async def lease_ends(ctx: Context) -> None:
    """The participant opens by itself when the lease ends, and counts it once."""
    before = (await ctx.client.status()).leases_expired
    began = time.monotonic()
    async with ctx.opened(ttl=SHORT_LEASE) as (id, _):
        status = await ctx.closed_by_lease()
        took = time.monotonic() - began
        ctx.expect(took >= SHORT_LEASE * 0.9, f"a lease of {SHORT_LEASE} s", f"it ended after {took:.2f} s")
        _consistent(ctx, status)
        ctx.same("leases_expired", (await ctx.client.status()).leases_expired, before + 1)
        await ctx.refused(ErrorCode.STALE_CHECKPOINT, ctx.client.renew(id), "RenewLease of that id")
        if ctx.target.root:
            await ctx.refused(ErrorCode.STALE_CHECKPOINT, ctx.client.commit(id, []), "Commit of that id")


@OPEN.check("C122")
async def renewals(ctx: Context) -> None:
    """Renewals keep a checkpoint open past its first lease."""
    ttl = SHORT_LEASE
    async with ctx.opened(ttl=ttl) as (id, _):
        ends = time.monotonic() + 1.5 * ttl
        while time.monotonic() < ends:
            await asyncio.sleep(ttl / 8)
            await ctx.client.renew(id)
        ctx.same("the open checkpoint", (await ctx.client.status()).active_checkpoint_id, id)


@OPEN.check("C123", "R14")
async def lease_length(ctx: Context) -> None:
    """No call shortens a lease, and lease_ttl is clamped to 10 minutes."""
    async with ctx.opened(ttl=LEASE) as (id, _):
        for call in (
            ctx.client.status,
            lambda: ctx.client.renew(id),
            lambda: ctx.client.prepare(id, within=0, ttl=LEASE),
        ):
            before, began = wire.seconds((await ctx.client.status()).lease_remaining), time.monotonic()
            await call()
            left = wire.seconds((await ctx.client.status()).lease_remaining)
            passed = time.monotonic() - began
            ctx.expect(left >= before - passed - 0.05, f"at least {before - passed:.2f} s left", f"{left:.2f} s")
    async with ctx.opened(ttl=2 * MAX_LEASE):
        left = wire.seconds((await ctx.client.status()).lease_remaining)
        ctx.expect(left <= MAX_LEASE, "at most 600 s of lease", f"{left:.0f} s")


@OPEN.check("C125")
async def renewing(ctx: Context) -> None:
    """RenewLease replies with what is left in every open phase, at once."""
    async with ctx.prepared() as id:
        await _renewed(ctx, id, Phase.PREPARED)
        pending = await ctx.pending()
        await ctx.client.capture(id, pending)
        await _renewed(ctx, id, Phase.CAPTURED)
        if ctx.target.root:
            await ctx.client.commit(id, pending)
            await _renewed(ctx, id, Phase.COMMITTED)


async def _renewed(ctx: Context, id: str, phase: Phase) -> None:
    began = time.monotonic()
    reply = await ctx.client.renew(id)
    ctx.expect(time.monotonic() - began < AT_ONCE, "RenewLease at once", f"after {time.monotonic() - began:.1f} s")
    ctx.same("the phase that RenewLease reports", wire.phase_from(reply.phase), phase)
    left = wire.seconds(reply.lease_remaining)
    ctx.expect(LEASE / 2 < left <= LEASE, f"close to {LEASE} s of lease", f"{left:.2f} s")


@OPEN.check("C67")
async def forget_while_open(ctx: Context) -> None:
    """Forget while a checkpoint is open is refused with INVALID_PHASE and keeps the mark."""
    [episode] = ctx.rollouts()
    await ctx.client.retire([episode])
    async with ctx.opened() as (id, _):
        call = ctx.client.forget({episode.rollout_id: 0}, id=id)
        await ctx.refused(ErrorCode.INVALID_PHASE, call, "Forget while a checkpoint is open")
    ctx.expect(episode in await ctx.client.listed(EpisodeListKind.RETIRED), "the mark to stay", "it is gone")


@OPEN.check("C60", "C70", "C77")
async def retire_while_open(ctx: Context) -> None:
    """An episode can be retired while prepared, again with the same outcome; its mark shows."""
    async with ctx.prepared() as id:
        episodes = ctx.rollouts(2)
        first = await ctx.client.retire(episodes, id=id)
        again = await ctx.client.retire(episodes, id=id)
        done = [(wire.episode_from(o.episode), o.state) for o in first.outcomes]
        ctx.same("the outcomes", done, [(e, pb.RETIRE_STATE_RETIRED) for e in episodes])
        ctx.expect(list(first.outcomes) == list(again.outcomes), "the same outcomes again", again.outcomes)
        status = await ctx.client.status()
        ctx.same("the open checkpoint after it", status.active_checkpoint_id, id)
        shown = status.marks_held >= 2 and status.HasField("oldest_mark_age")
        ctx.expect(shown, "marks held and the oldest one's age in the status", status.marks_held)
        marks = await ctx.client.listed(EpisodeListKind.RETIRED)
        ctx.expect(set(episodes) <= set(marks), "both marks in the list", f"{len(marks)} others")


@OPEN.check("C61")
async def retire_when_frozen(ctx: Context) -> None:
    """Retire in CAPTURED is refused with INVALID_PHASE; the same call after Resume succeeds."""
    [episode] = ctx.rollouts()
    async with ctx.prepared() as id:
        await ctx.client.capture(id, await ctx.pending())
        call = ctx.client.retire([episode], id=id)
        await ctx.refused(ErrorCode.INVALID_PHASE, call, "Retire in CAPTURED")
        marks = await ctx.client.listed(EpisodeListKind.RETIRED)
        ctx.expect(episode not in marks, "no mark of a refused Retire", "it has one")
        await ctx.client.resume(id)
        reply = await ctx.client.retire([episode], id=id)
        ctx.same("its outcome after Resume", [o.state for o in reply.outcomes], [pb.RETIRE_STATE_RETIRED])


@OPEN.check("C35")
async def replies_dropped(ctx: Context) -> None:
    """Recorded replies are dropped at Resume; a prepared checkpoint of a new id is fresh."""
    async with ctx.prepared() as id:
        await ctx.client.capture(id, await ctx.pending())
        await ctx.client.resume(id)
    for call, name in ((ctx.client.prepare(id, ttl=LEASE), "Prepare"), (ctx.client.capture(id, []), "Capture")):
        await ctx.refused(ErrorCode.STALE_CHECKPOINT, call, f"{name} after Resume")
    async with ctx.prepared():
        ctx.same("the phase of a new one", await ctx.client.phase(), Phase.PREPARED)
