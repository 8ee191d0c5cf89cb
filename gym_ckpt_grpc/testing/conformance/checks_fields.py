"""Fields, deadlines, and the order in which a request is judged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gym_ckpt_grpc.control import EpisodeListKind, wire
from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.protocol.ids import MAX_CHECKPOINT_ID, MAX_ROLLOUT_ID, EpisodeId
from gym_ckpt_grpc.testing.client import typed
from gym_ckpt_grpc.testing.conformance.context import LEASE, PATIENCE, Context
from gym_ckpt_grpc.testing.conformance.refusals import MAX_DETAILS
from gym_ckpt_grpc.testing.conformance.results import Broken, Group
from gymckpt.v1 import episode_pb2
from gymckpt.v1 import participant_pb2 as pb

FIELDS = Group("Fields and deadlines")
BAD = ErrorCode.INVALID_ARGUMENT


async def _bad(ctx: Context, request: Message, field: str, what: str) -> None:
    """The request is refused, and a violation names the field or something inside it."""
    refusal = await ctx.refused(BAD, ctx.client.send(request), what)
    named = any(found == field or found.startswith((f"{field}.", f"{field}[")) for found in refusal.fields)
    ctx.expect(named, f"a violation of {field} for {what}", refusal.fields or "no violations")


@FIELDS.check("C1")
async def ids(ctx: Context) -> None:
    """Legal checkpoint and rollout ids pass, others are refused."""
    client = ctx.client
    await client.resume(f"{ctx.prefix}{'x' * MAX_CHECKPOINT_ID}"[:MAX_CHECKPOINT_ID])
    for bad in ("", "-x", ".x", "a b", "a/b", "../a", "\u00e9", "a\n", "x" * (MAX_CHECKPOINT_ID + 1)):
        request = pb.ResumeRequest(context=client.context(bad))
        await _bad(ctx, request, "context.checkpoint_id", f"checkpoint_id {bad[:20]!r}")
    longest = f"{ctx.prefix}{'x' * MAX_ROLLOUT_ID}"[:MAX_ROLLOUT_ID]
    await client.forget({longest: 0})
    for bad in ("", "-x", "_x", "a b", "a/b", "a\n", "x" * (MAX_ROLLOUT_ID + 1)):
        await _bad(ctx, _retire(ctx, [bad], [0]), "episodes", f"rollout_id {bad[:20]!r}")


@FIELDS.check("C2")
async def attempt_suffixes(ctx: Context) -> None:
    """A rollout_id that ends in -a<N> is refused, -a0 and -a01 pass."""
    for end in ("-a1", "-a10"):
        await _bad(ctx, _retire(ctx, [f"{ctx.prefix}r{end}"], [0]), "episodes", f"rollout_id ending in {end}")
    for end in ("-a0", "-a01"):
        await ctx.client.send(_retire(ctx, [f"{ctx.prefix}r{end}"], [0]))


def _retire(ctx: Context, rollouts: Iterable[str], attempts: Iterable[int]) -> pb.RetireRequest:
    episodes = episode_pb2.EpisodeList(rollout_ids=rollouts, attempts=attempts)
    return pb.RetireRequest(context=ctx.client.context(""), episodes=episodes)


@FIELDS.check("C5")
async def bad_fields(ctx: Context) -> None:
    """Every bad field of every RPC is refused by name."""
    before = await ctx.client.status()
    for name, request in ctx.requests(ctx.new_id()).items():
        bare = type(request)()
        bare.CopyFrom(request)
        bare.ClearField("context")
        await _bad(ctx, bare, "context", f"{name} without a context")
    for faulty, field in [*_bad_openings(ctx), *_bad_lists(ctx), *_bad_storage(ctx)]:
        await _bad(ctx, faulty, field, f"{type(faulty).__name__.removesuffix('Request')} with a bad {field}")
    for kind in (0, 99):
        asked = _first(ctx, pb.ListEpisodesRequest(kind=pb.EpisodeListKind.ValueType(kind)))
        await ctx.refused(BAD, typed(asked), f"ListEpisodes of kind {kind}")
    call = typed(_first(ctx, pb.ListEpisodesRequest(kind=pb.EPISODE_LIST_KIND_COMMITTED)))
    await ctx.refused(BAD, call, "ListEpisodes of COMMITTED without a checkpoint_id")
    await ctx.unchanged(before)


async def _first(ctx: Context, request: pb.ListEpisodesRequest) -> object:
    async for message in ctx.client.stub.ListEpisodes(request, timeout=ctx.client.timeout):
        return message
    return "an empty list"


def _bad_openings(ctx: Context) -> list[tuple[Message, str]]:
    context = ctx.client.context(ctx.new_id())
    anonymous = ctx.client.context(ctx.new_id(), controller="")
    return [
        (pb.PrepareRequest(context=anonymous), "context.controller_id"),
        (pb.PrepareRequest(context=context, lease_ttl=Duration()), "lease_ttl"),
        (pb.PrepareRequest(context=context, lease_ttl=Duration(seconds=-1)), "lease_ttl"),
        (pb.PrepareRequest(context=context, ready_within=Duration(seconds=-1)), "ready_within"),
        (pb.PrepareRequest(context=context, ready_within=Duration(seconds=1, nanos=-1)), "ready_within"),
        (pb.CaptureRequest(context=context), "scope"),
        (pb.CaptureRequest(context=context, scope=episode_pb2.EpisodeScope(all=False)), "scope"),
    ]


def _bad_lists(ctx: Context) -> list[tuple[Message, str]]:
    context, name = ctx.client.context(""), f"{ctx.prefix}r"
    twice = [pb.ForgetRollout(rollout_id=name), pb.ForgetRollout(rollout_id=name)]
    return [
        (_retire(ctx, [], []), "episodes"),
        (_retire(ctx, [name], []), "episodes"),
        (_retire(ctx, [name, name], [0, 1]), "episodes"),
        (_retire(ctx, [name], [2**32 - 1]), "episodes"),
        (_retire(ctx, (f"{name}{i}" for i in range(1001)), [0] * 1001), "episodes"),
        (pb.ForgetRequest(context=context), "rollouts"),
        (pb.ForgetRequest(context=context, rollouts=twice), "rollouts"),
    ]


def _bad_storage(ctx: Context) -> list[tuple[Message, str]]:
    id, uri = ctx.new_id(), "file:///conform/checkpoints"
    context, scope = ctx.client.context(id), episode_pb2.EpisodeScope(all=True)
    one = episode_pb2.EpisodeList(rollout_ids=[f"{ctx.prefix}r"], attempts=[3])

    def restore(**fields: object) -> pb.RestoreRequest:
        whole: dict[str, object] = {"storage_uri": f"{uri}/{id}", "source_checkpoint_id": id, "scope": one}
        whole.update(fields)
        return pb.RestoreRequest(context=context, **whole)  # type: ignore[arg-type]

    return [
        (pb.CommitRequest(context=context, scope=scope), "storage_uri"),
        (pb.CommitRequest(context=context, scope=scope, storage_uri=f"{uri}/../{id}"), "storage_uri"),
        (pb.CommitRequest(context=context, scope=scope, storage_uri=f"{uri}/{id}"), "storage_uri"),
        (pb.CommitRequest(context=context, scope=scope, storage_uri=f"ftp://conform/{id}"), "storage_uri"),
        (restore(storage_uri=""), "storage_uri"),
        (restore(scope=None), "scope"),
        (restore(source_checkpoint_id=""), "source_checkpoint_id"),
        (restore(expected_manifest_digest="ABC"), "expected_manifest_digest"),
        (restore(install_as=[4, 5]), "install_as"),
        (restore(install_as=[3]), "install_as"),
    ]


@FIELDS.check("C6")
async def all_violations(ctx: Context) -> None:
    """One BadRequest lists all violations; nothing changes and no lease is extended."""
    async with ctx.opened() as (id, _):
        left = await ctx.lease_below(LEASE - 0.1)
        before = await ctx.client.status()
        request = pb.PrepareRequest(
            context=ctx.client.context(id, controller="no good"),
            ready_within=Duration(seconds=-1),
            lease_ttl=Duration(),
        )
        refusal = await ctx.refused(BAD, ctx.client.send(request), "a Prepare with three bad fields")
        for field in ("context.controller_id", "ready_within", "lease_ttl"):
            ctx.expect(field in refusal.fields, f"a violation of {field} among all three", refusal.fields)
        after = wire.seconds((await ctx.client.status()).lease_remaining)
        ctx.expect(after <= left, f"a lease of at most {left:.2f} s after the refused call", f"{after:.2f} s")
        ctx.same("the open checkpoint", (await ctx.client.status()).active_checkpoint_id, before.active_checkpoint_id)


@FIELDS.check("C7")
async def deadlines(ctx: Context) -> None:
    """A mutating call needs a deadline; a very long one is taken."""
    before = await ctx.client.status()
    for name, request in ctx.requests(ctx.new_id(), checkpoint=False).items():
        stub = getattr(ctx.client.stub, name)
        refusal = await ctx.refused(BAD, typed(stub(request)), f"{name} without a deadline")
        told = "deadline" in refusal.text.lower() or "deadline" in refusal.fields
        ctx.expect(told, f"the refusal of {name} to name the deadline", refusal)
    await ctx.unchanged(before)
    await ctx.client.resume(ctx.new_id(), timeout=10 * 3600.0)


@FIELDS.check("C8")
async def ready_within(ctx: Context) -> None:
    """A Prepare whose ready_within is not below its deadline is refused."""
    for timeout in (1.0, 2.5):
        request = pb.PrepareRequest(context=ctx.client.context(ctx.new_id()), ready_within=wire.duration(3.0))
        refusal = await ctx.refused(BAD, ctx.client.send(request, timeout=timeout), "such a Prepare")
        ctx.expect("ready_within" in refusal.fields, "a violation of ready_within", refusal.fields)


@FIELDS.check("C11")
async def order(ctx: Context) -> None:
    """A call with several faults is refused for the first in the order of checks."""
    client, fenced = ctx.client, ctx.new_id()
    await client.resume(fenced)
    low = ctx.epoch - 1
    faulty = pb.CaptureRequest(context=client.context(fenced, epoch=low))
    await ctx.refused(BAD, client.send(faulty), "a bad field under a passed epoch")
    call = client.capture(fenced, [], incarnation="another", epoch=low)
    await ctx.refused(ErrorCode.STALE_CONTROLLER, call, "a passed epoch with another incarnation")
    call = client.capture(fenced, [], incarnation="another")
    await ctx.refused(ErrorCode.INCARNATION_CHANGED, call, "another incarnation with a resumed id")
    async with ctx.opened():
        call = client.capture(fenced, [])
        await ctx.refused(ErrorCode.STALE_CHECKPOINT, call, "a resumed id while another is open")
        call = client.capture(ctx.new_id(), [])
        refusal = await ctx.refused(ErrorCode.CHECKPOINT_CONFLICT, call, "another id in the wrong phase")
        active = (await client.status()).active_checkpoint_id
        ctx.same("the active id in that refusal", refusal.control.active_checkpoint_id, active)


@FIELDS.check("C24", "C37", "C39")
async def forms(ctx: Context) -> None:
    """Identity is in every answer; every refusal is one typed error of the table.

    Every RPC once more, well and badly; with what all checks before have seen.
    """
    client, fenced = ctx.client, ctx.new_id()
    await client.resume(fenced)
    for kind in range(2, 6):
        async with asyncio.timeout(PATIENCE):
            listing = pb.ListEpisodesRequest(kind=pb.EpisodeListKind.ValueType(kind))
            async for message in client.stub.ListEpisodes(listing, timeout=client.timeout):
                ctx.forms.reply("ListEpisodes", message)
    async with ctx.opened() as (id, _):
        await client.renew(id)
        for name, request in ctx.requests(fenced).items():
            if name != "Resume":
                await ctx.failing(client.send(request), f"{name} of a resumed id is refused")
    for name, request in ctx.requests("no good").items():
        await ctx.failing(client.send(request), f"{name} with a bad id is refused")
    forms = ctx.forms
    for problems, expected in (
        (forms.identity, "the identity of this process in every reply and error"),
        (forms.statuses, "the gRPC status of the error table for each code"),
        (forms.forms, "one ControlError and one ErrorInfo in every refusal"),
        (forms.sizes, "replies within 1 MiB and details within 6 KiB"),
    ):
        if problems:
            raise Broken(expected, "; ".join(problems))


@FIELDS.check("C41")
async def cut_lists(ctx: Context) -> None:
    """Lists in replies are cut with exact counts; ListEpisodes gives every entry once."""
    client = ctx.client
    names = [episode.rollout_id for episode in ctx.rollouts(1100)]
    before = (await client.status()).marks_held
    for part in (names[:1000], names[1000:]):
        await client.send(_retire(ctx, part, [0] * len(part)), timeout=60.0)
    ctx.same("marks_held", (await client.status()).marks_held, before + len(names))
    batches = await client.batches(EpisodeListKind.RETIRED)
    ctx.expect(all(0 < len(b) <= 1000 for b in batches), "batches of 1 to 1,000", [len(b) for b in batches])
    listed = sorted(e.rollout_id for b in batches for e in b if e.rollout_id.startswith(ctx.prefix))
    ctx.expect(listed == sorted(names), f"each of {len(names)} marks listed once", f"{len(listed)} entries")
    if ctx.target.root:
        await _cut_error(ctx, names)
    reply = await client.forget(dict.fromkeys(names, 0), timeout=60.0)
    seen = (len(reply.rollout_ids), reply.rollout_count)
    ctx.same("(rollout_ids, rollout_count) of that Forget", seen, (1000, len(names)))


async def _cut_error(ctx: Context, names: list[str]) -> None:
    """A Restore of attempts that are all retired: its error counts them all, and lists what fits."""
    request = ctx.requests(ctx.new_id())["Restore"]
    assert isinstance(request, pb.RestoreRequest)
    request.scope.CopyFrom(episode_pb2.EpisodeList(rollout_ids=names, attempts=[0] * len(names)))
    await ctx.client.send(_retire(ctx, names[:1000], [1] * 1000), timeout=60.0)
    refusal = await ctx.refused(ErrorCode.STALE_ATTEMPT, ctx.client.send(request), "a Restore of retired attempts")
    ctx.same("episode_count of that error", refusal.control.episode_count, 1000)
    ctx.expect(refusal.size <= MAX_DETAILS, f"at most {MAX_DETAILS} bytes of details", f"{refusal.size} bytes")
    await ctx.forget([EpisodeId(name, 1) for name in names[:1000]])
