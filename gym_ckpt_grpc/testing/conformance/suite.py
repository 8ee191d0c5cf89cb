"""Running the checks against one participant."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from gym_ckpt_grpc.auth import ClientTls, TokenSource, TokenValue
from gym_ckpt_grpc.control import open_channel, wire
from gym_ckpt_grpc.protocol.errors import CheckpointConflict, GymCkptError, Unauthenticated, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import path_to_uri, uri_to_path
from gym_ckpt_grpc.testing.client import ParticipantClient
from gym_ckpt_grpc.testing.conformance.checks_access import ACCESS
from gym_ckpt_grpc.testing.conformance.checks_faults import FAULTS
from gym_ckpt_grpc.testing.conformance.checks_fences import FENCES
from gym_ckpt_grpc.testing.conformance.checks_fields import FIELDS, forms
from gym_ckpt_grpc.testing.conformance.checks_open import OPEN
from gym_ckpt_grpc.testing.conformance.checks_restore import RESTORE
from gym_ckpt_grpc.testing.conformance.checks_storage import STORAGE
from gym_ckpt_grpc.testing.conformance.context import Context, Target
from gym_ckpt_grpc.testing.conformance.results import Broken, Check, Report, Result, Skipped, Verdict, chosen
from gymckpt.v1 import participant_pb2 as pb

LIMIT = 60.0
"""Seconds that one check may take."""
MAX_EPOCH = 2**63

_ALL = [c for g in (FIELDS, FENCES, OPEN, STORAGE, RESTORE, ACCESS, FAULTS) for c in g.checks]
CHECKS: tuple[Check, ...] = (*(c for c in _ALL if c.run is not forms), *(c for c in _ALL if c.run is forms))
"""Every check. The one about forms comes last: it judges what all the others have seen."""


class Unreachable(GymCkptError):
    """The participant could not be reached."""


async def run_conformance(
    address: str,
    *,
    token: str | TokenSource | None = None,
    observer_token: str | TokenSource | None = None,
    root: str | None = None,
    expendable: Sequence[EpisodeId] = (),
    only: Sequence[str] = (),
    ready_within: float = 5.0,
    allow_insecure: bool = False,
    tls: ClientTls | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Drive a running participant through the behaviours, over the wire only.

    address: as for a channel. token: a controller's. root: a `file://` URI or absolute path that the participant
    may write to; without it Commit and Restore are skipped. expendable: live episodes that may be checkpointed,
    retired and restored, and are gone at the end; nothing else of the participant is changed for good, but its
    highest epoch rises. only: ids or names of checks. ready_within: seconds to wait for a safe cut.
    on_result: told of each result.

    It closes admission often and briefly: do not run it against servers in use. Raises Unreachable,
    Unauthenticated, PermissionDenied, CheckpointConflict if a checkpoint is open, UsageError for an unknown `only`.
    """
    checks = chosen(CHECKS, only)
    if unknown := set(only) - {name for check in CHECKS for name in (*check.ids, check.name)}:
        raise UsageError(f"no check has the id or name {', '.join(sorted(unknown))}")
    target = Target(
        address,
        _source(token),
        _source(observer_token),
        _root_uri(root),
        tuple(expendable),
        ready_within,
        allow_insecure,
        tls,
    )
    channel = open_channel(address, token=target.token, allow_insecure=allow_insecure, tls=tls)
    async with channel:
        context = Context(target, channel, await _first_look(ParticipantClient(channel), address))
        await context.client.resume(context.new_id())  # from here on its epoch is obeyed; needs the right role
        results, left = [], []
        for check in checks:
            result, problem = await _run(context, check)
            on_result(result)
            results.append(result)
            left += [problem] if problem else []
        _remove_files(context)
    identity = context.identity
    return Report(address, str(identity), identity.incarnation_id, tuple(results), tuple(left))


def _source(token: str | TokenSource | None) -> TokenSource | None:
    return TokenValue(token) if isinstance(token, str) else token


def _root_uri(root: str | None) -> str:
    return path_to_uri(uri_to_path(root, field="root")) if root else ""


async def _first_look(client: ParticipantClient, address: str) -> pb.ParticipantStatus:
    """The status before anything is done; refuses to break into somebody's checkpoint."""
    try:
        status = await client.status()
    except grpc.aio.AioRpcError as failure:
        if failure.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise Unauthenticated(f"{address} refused the credentials") from None
        raise Unreachable(f"{address}: {failure.code().name}: {failure.details()}") from None
    if status.phase != pb.PHASE_IDLE:
        raise CheckpointConflict(
            f"checkpoint {status.active_checkpoint_id} of {status.controller_id} is open there "
            f"({wire.phase_from(status.phase).name}): end it first",
            active_checkpoint_id=status.active_checkpoint_id,
        )
    if status.highest_epoch >= MAX_EPOCH:
        raise UsageError(f"its highest epoch is {status.highest_epoch}: none above it is left to use")
    return status


async def _run(context: Context, check: Check) -> tuple[Result, str]:
    """One check, and what it left behind that could not be tidied up."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(LIMIT):
            await check.run(context)
    except Broken as broken:
        result = Result(check, Verdict.BROKEN, expected=broken.expected, seen=broken.seen)
    except Skipped as skipped:
        result = Result(check, Verdict.SKIPPED, why=str(skipped))
    except TimeoutError:
        result = Result(check, Verdict.BROKEN, expected=f"an end within {LIMIT:.0f} s", seen="it hangs")
    except GymCkptError as error:
        result = Result(check, Verdict.BROKEN, expected="a reply", seen=str(error)[:400])
    except grpc.aio.AioRpcError as failure:
        seen = f"{failure.code().name}: {failure.details()}"
        result = Result(check, Verdict.BROKEN, expected="a reply", seen=seen[:400])
    else:
        result = Result(check, Verdict.HOLDS)
    left = ""
    try:
        async with asyncio.timeout(LIMIT):
            await context.tidy()
    except (GymCkptError, grpc.aio.AioRpcError, TimeoutError) as error:
        left = f"after {check.name}: {str(error)[:200] or type(error).__name__}"
    took = time.monotonic() - began
    return Result(check, result.verdict, result.expected, result.seen, result.why, took), left


def _remove_files(context: Context) -> None:
    """Remove the checkpoints of this run, as far as they can be seen from here."""
    if context.target.root:
        for directory in context.directory("x").parent.glob(f"{context.prefix}*"):
            with suppress(OSError):
                shutil.rmtree(directory)
