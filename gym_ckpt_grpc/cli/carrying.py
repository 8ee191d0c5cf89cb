"""One command's part of an open checkpoint or restore: take it up, do one step, leave it open behind, and say so.

A step that failed and may be tried again leaves the session as it is. Whatever else ends the step leaves the block as
any exception does: every participant is resumed, and the session is over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from rich.markup import escape

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.cli.output import errors
from gym_ckpt_grpc.cli.session_file import SessionFile
from gym_ckpt_grpc.coordinator import (
    CaptureFailed,
    Checkpoint,
    CommitFailed,
    Coordinator,
    Fleet,
    FleetError,
    ForgetFailed,
    PublishFailed,
    Restoration,
    RetireFailed,
    SessionState,
    Sighting,
    Step,
    look_at,
)
from gym_ckpt_grpc.protocol.errors import (
    ControlError,
    ErrorCode,
    GymCkptError,
    LeaseLost,
    PublishUnknown,
    StaleController,
    UsageError,
)
from gym_ckpt_grpc.protocol.phases import Phase

T = TypeVar("T")
Block = Checkpoint | Restoration
Work = Callable[[Coordinator, Block], Awaitable[T]]
"""One step inside the block of a coordinator."""

AGAIN = (UsageError, CaptureFailed, CommitFailed, PublishFailed, PublishUnknown, RetireFailed, ForgetFailed)
"""Failures after which the same command may be given again, with the session as it is."""
GONE = frozenset({ErrorCode.STALE_CHECKPOINT, ErrorCode.INCARNATION_CHANGED, ErrorCode.LEASE_LOST})
OPEN_PHASES = frozenset({Phase.IDLE.name, Phase.RESUMING.name})


class FleetBusy(GymCkptError):
    """A checkpoint of somebody else is open, and --take-over was not given. Nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a command reaches the fleet. timeout: seconds to wait for each server when looking."""

    token: TokenSource | None
    allow_insecure: bool
    timeout: float
    tls: ClientTls | None = None

    def attach(self, file: SessionFile) -> tuple[SessionState, Coordinator]:
        """The coordinator that goes on with a session."""
        state = file.read()
        coordinator = Coordinator.attach(
            state,
            token=self.token,
            allow_insecure=self.allow_insecure,
            tls=self.tls,
            discovery_timeout=self.timeout,
        )
        return state, coordinator

    async def look_at(self, fleet: Fleet, *, anonymous: bool = False) -> list[Sighting]:
        """Look at a fleet once. anonymous: as somebody who has neither the token nor the certificate."""
        return await look_at(
            fleet,
            token=None if anonymous else self.token,
            timeout=self.timeout,
            allow_insecure=self.allow_insecure,
            tls=self.tls.without_certificate() if self.tls and anonymous else self.tls,
        )

    def begin(self, fleet: Fleet, root: str, *, controller: str, run_id: str, lease: float) -> Coordinator:
        """A coordinator with an epoch of its own."""
        return Coordinator(
            fleet,
            root=root,
            controller_id=controller,
            run_id=run_id,
            token=self.token,
            allow_insecure=self.allow_insecure,
            tls=self.tls,
            lease_ttl=lease,
            discovery_timeout=self.timeout,
        )


async def refuse_busy(fleet: Fleet, access: Access) -> None:
    """Raise FleetBusy if anything is open: a new epoch would end it."""
    found = await access.look_at(fleet)
    open_at = [s for s in found if s.status and s.status.active_checkpoint_id]
    if not open_at:
        return
    status = open_at[0].status
    assert status is not None
    raise FleetBusy(
        f"{status.active_checkpoint_id} of controller {status.controller_id} is open at {len(open_at)} of "
        f"{len(found)} participants: resume it with its session, wait until its lease has ended "
        f"({status.lease_remaining.seconds} s), or end it with --take-over"
    )


async def take_further(file: SessionFile, access: Access, work: Work[T], deadline: float) -> tuple[T, SessionState]:
    """One step of what a session left open; gives its result, and the session as it was left for the next command.

    Raises what the step raised, having said on standard error what became of the session.
    """
    state, coordinator = access.attach(file)
    if state.step is Step.NEW:
        raise UsageError(
            f"the command that made session {file} was killed before it was done; end it: "
            f"gym-ckpt resume --session {file}"
        )
    return await carry(file, coordinator, lambda: coordinator.attached(deadline=deadline), work, new=False)


async def carry(
    file: SessionFile,
    coordinator: Coordinator,
    make: Callable[[], Block],
    work: Work[T],
    *,
    new: bool,
) -> tuple[T, SessionState]:
    """The same for a coordinator that is not entered yet. new: the session begins here, before anything is closed."""
    block: Block | None = None
    failure: GymCkptError | None = None
    result: list[T] = []
    try:
        async with coordinator:
            made = make()
            if new:
                file.write(made.state())
            block = made
            async with block:
                try:
                    result.append(await work(coordinator, block))
                except AGAIN as error:
                    if is_over(error):
                        raise
                    failure = error
                left = await block.detach()
                file.write(left)
    except BaseException as error:
        say_ended(file, block, error, new=new)
        raise
    if failure:
        say_kept(file, left)
        raise failure
    return result[0], left


def is_over(error: GymCkptError) -> bool:
    """Whether a failure says that what was prepared is gone somewhere."""
    failed = [outcome.error for outcome in error.failures] if isinstance(error, FleetError) else [error]
    return any(_is_gone(one) for one in failed)


def _is_gone(error: BaseException | None) -> bool:
    if not isinstance(error, ControlError):
        return False
    return error.code in GONE or (error.code is ErrorCode.INVALID_PHASE and error.phase in OPEN_PHASES)


def say_kept(file: SessionFile, state: SessionState) -> None:
    """Say how long the fleet stays closed, or its records are kept, and how to end that."""
    closed = f"the fleet stays closed for at most {state.lease_left:.0f} s"
    kept = f"the fleet is open, and its records are kept for at most {state.lease_ttl:.0f} s"
    say(
        f"session {file} is kept at step {state.step.value}: {kept if state.step is Step.RELEASED else closed}. "
        f"Try again, or: gym-ckpt resume --session {file}"
    )


def say(text: str) -> None:
    """One line on standard error, as it is."""
    errors.print(escape(text), soft_wrap=True)


def say_ended(file: SessionFile, block: Block | None, error: BaseException, *, new: bool = False) -> None:
    """Say what became of the session of a block that did not stay open, and remove it if it is over."""
    if isinstance(error, StaleController):
        file.remove()
        say(f"session {file} is over and was removed: a newer controller has taken over what it left. Begin anew.")
        return
    if block is None:  # nothing was begun here
        if new:
            file.remove()
        return
    if pending := _not_known_open(block, error):
        say(f"ended, but {pending}. The leases open what is closed, or: gym-ckpt resume --session {file}")
        return
    file.remove()
    expired = isinstance(error, LeaseLost) or (isinstance(error, GymCkptError) and is_over(error))
    what = "has expired" if expired else "is over"
    say(f"session {file} {what} and was removed; nothing is left closed by it. Begin anew: gym-ckpt prepare or restore")


def _not_known_open(block: Block, error: BaseException) -> str:
    if isinstance(block, Checkpoint) and block.result:
        names = ", ".join(str(identity) for identity in block.result.resume_pending)
        return f"not known to be open: {names}" if names else ""
    return "; ".join(getattr(error, "__notes__", ()))
