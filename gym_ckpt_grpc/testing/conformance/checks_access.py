"""Credentials and roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2_grpc

from gym_ckpt_grpc.auth import TokenValue
from gym_ckpt_grpc.protocol.errors import ErrorCode
from gym_ckpt_grpc.testing.client import typed
from gym_ckpt_grpc.testing.conformance.context import PATIENCE, Context
from gym_ckpt_grpc.testing.conformance.results import Group, Skipped
from gymckpt.v1 import participant_pb2 as pb

ACCESS = Group("Credentials")
DENIED = ErrorCode.PERMISSION_DENIED
UNKNOWN = ErrorCode.UNAUTHENTICATED
WRONG = "no-such-token"
REFUSED_WITHIN = 3.0


async def _need_credentials(ctx: Context) -> None:
    """Skip where every caller is let in; that this is so on a loopback address only is the server's own check."""
    async with ctx.beside(token=TokenValue(WRONG)) as stranger:
        try:
            await stranger.status()
        except Exception:
            return
    raise Skipped("the participant asks for no credentials")


def _reading() -> list[Message]:
    return [pb.GetStatusRequest()]


async def _streams(stub: Any) -> Sequence[tuple[str, Any]]:
    async def first(stream: Any) -> Any:
        async for message in stream:
            return message
        return None

    listed = pb.ListEpisodesRequest(kind=pb.EPISODE_LIST_KIND_RETIRED)
    return [
        ("WatchStatus", first(stub.WatchStatus(pb.WatchStatusRequest(), timeout=PATIENCE))),
        ("ListEpisodes", first(stub.ListEpisodes(listed, timeout=PATIENCE))),
    ]


@ACCESS.check("C312")
async def wrong_token(ctx: Context) -> None:
    """A wrong token is UNAUTHENTICATED on every RPC."""
    await _need_credentials(ctx)
    before = await ctx.client.status()
    async with ctx.beside(token=TokenValue(WRONG)) as stranger:
        for request in [*_reading(), *ctx.requests(ctx.new_id(), checkpoint=False).values()]:
            await ctx.refused(UNKNOWN, stranger.send(request), f"{type(request).__name__} with a wrong token")
        for name, call in await _streams(stranger.stub):
            await ctx.refused(UNKNOWN, typed(call), f"{name} with a wrong token")
    await ctx.unchanged(before)


@ACCESS.check("C313")
async def authentication_first(ctx: Context) -> None:
    """A malformed request without a token is UNAUTHENTICATED, not INVALID_ARGUMENT."""
    await _need_credentials(ctx)
    async with ctx.beside() as stranger:
        await ctx.refused(UNKNOWN, stranger.send(pb.PrepareRequest()), "an empty Prepare without a token")
        await ctx.refused(
            UNKNOWN, typed(stranger.stub.Resume(pb.ResumeRequest())), "Resume without a deadline or token"
        )


@ACCESS.check("C314")
async def odd_tokens(ctx: Context) -> None:
    """An odd authorization value is UNAUTHENTICATED, with the server still serving."""
    await _need_credentials(ctx)
    token = ctx.target.token.token().decode("ascii", "replace") if ctx.target.token else "x"
    good = ("authorization", f"Bearer {token}")
    async with ctx.beside() as stranger:
        for what, values in (
            ("an empty value", [("authorization", "")]),
            ("no scheme", [("authorization", token)]),
            ("another scheme", [("authorization", f"Basic {token}")]),
            ("two values", [good, good]),
            ("a prefix of the token", [("authorization", f"Bearer {token[:-1]}")]),
            ("no token behind the scheme", [("authorization", "Bearer ")]),
        ):
            metadata = grpc.aio.Metadata(*values)
            call = stranger.stub.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE, metadata=metadata)
            await ctx.refused(UNKNOWN, typed(call), f"an authorization with {what}")
    await ctx.client.status()


@ACCESS.check("C316")
async def observers(ctx: Context) -> None:
    """An observer may read, and is PERMISSION_DENIED on every mutating RPC."""
    if ctx.target.observer_token is None:
        raise Skipped("no observer token was given (--observer-token-file)")
    before = await ctx.client.status()
    async with ctx.beside(token=ctx.target.observer_token) as observer:
        await observer.status()
        for _, call in await _streams(observer.stub):
            await typed(call)
        for name, request in ctx.requests(ctx.new_id(), checkpoint=False).items():
            await ctx.refused(DENIED, observer.send(request), f"{name} of an observer")
        await ctx.refused(DENIED, observer.send(pb.PrepareRequest()), "a malformed Prepare of an observer")
    await ctx.unchanged(before)


@ACCESS.check("C319")
async def reflection(ctx: Context) -> None:
    """Reflection obeys the same check."""
    await _need_credentials(ctx)
    async with ctx.beside() as stranger:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(stranger.channel)  # type: ignore[arg-type]
        stream = stub.ServerReflectionInfo(timeout=REFUSED_WITHIN)
        code = await stream.code()  # nothing is written: a write that meets the refusal fails as INTERNAL here
        refused = code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
        ctx.expect(refused, "reflection without a token to be refused at once (or not served)", code.name)


@ACCESS.check("C321")
async def silent_refusals(ctx: Context) -> None:
    """The refusal of an unknown caller says nothing about phase, ids or checkpoints."""
    await _need_credentials(ctx)
    texts = set()
    async with ctx.beside() as stranger, ctx.opened() as (id, _):
        for asked in (id, ctx.new_id()):
            refusal = await ctx.refused(UNKNOWN, stranger.renew(asked), "RenewLease without a token")
            texts.add(refusal.text)
            control = refusal.control
            told = [
                name
                for name in ("participant", "phase", "active_checkpoint_id", "episode_count")
                if (control.HasField(name) if name == "participant" else getattr(control, name))  # type: ignore[arg-type]
            ]
            ctx.expect(not told, "no word about the server's state", told)
            ctx.expect(id not in refusal.text, "no checkpoint id in the text", refusal.text)
    ctx.expect(len(texts) == 1, "the same text for an open id and an unknown one", texts)
