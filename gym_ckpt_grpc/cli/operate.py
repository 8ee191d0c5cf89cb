"""`gym-ckpt prepare commit publish resume restore retire forget`: one checkpoint or restore, a process per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gym_ckpt_grpc.cli.carrying import Access, Block, carry, refuse_busy, say, say_ended, say_kept, take_further
from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, print_json, size, table
from gym_ckpt_grpc.cli.session_file import SessionFile
from gym_ckpt_grpc.coordinator import (
    Checkpoint,
    CheckpointState,
    Coordinator,
    Fleet,
    FleetReport,
    NotPrepared,
    Outcome,
    Restoration,
    RetireFailed,
    RetireResult,
    SessionState,
)
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId

GRACE = 30.0
"""Seconds beyond `ready_within` that a prepare has for looking and for its calls."""
SHOWN = 10
"""Blockers that people are shown per participant; --json has all that the replies list."""


def a_checkpoint(block: Block) -> Checkpoint:
    """The block as a checkpoint. Raises UsageError for that of a restore."""
    if not isinstance(block, Checkpoint):
        raise UsageError(f"the session is of restore {block.id}: it can only be resumed")
    return block


# ---- prepare


async def prepare(
    file: SessionFile,
    access: Access,
    *,
    fleet: Fleet | None,
    root: str,
    ready_within: float,
    lease: float,
    controller: str,
    run_id: str,
    take_over: bool,
    as_json: bool,
) -> Exit:
    """Close the fleet at a safe cut; FAILED with the blockers if that took longer than `ready_within`."""

    async def work(coordinator: Coordinator, block: Block) -> FleetReport:
        try:
            return await a_checkpoint(block).prepare(ready_within=ready_within)
        except NotPrepared as error:
            return error.report

    deadline = ready_within + access.timeout + GRACE
    with file.held():
        if file.exists:
            report, left = await take_further(file, access, work, deadline)
        else:
            if fleet is None or not root:
                raise UsageError(f"session {file} is new: it needs --fleet and --root")
            if not take_over:
                await refuse_busy(fleet, access)
            coordinator = access.begin(fleet, root, controller=controller, run_id=run_id, lease=lease)
            report, left = await carry(
                file, coordinator, lambda: coordinator.checkpoint(deadline=deadline), work, new=True
            )
        _tell_prepared(file, report, left, as_json=as_json)
        return Exit.OK if report.ready else Exit.FAILED


def _tell_prepared(file: SessionFile, report: FleetReport, left: SessionState, *, as_json: bool) -> None:
    if as_json:
        print_json({**_open(file, left), "ready": report.ready, **_report(report)})
    else:
        people.print(table("", ["participant", "blockers", "restarts", "counts"], _rows(report)))
        for name, one in report.participants.items():
            oldest = sorted(one.blockers, key=lambda blocker: -blocker.age)[:SHOWN]
            for blocker in oldest:
                people.print(f"{name}: {blocker}", markup=False, soft_wrap=True)
            if one.blocker_count > len(oldest):
                people.print(f"{name}: and {one.blocker_count - len(oldest):,} more", markup=False)
        for name, reason in report.excluded.items():
            people.print(f"excluded: {name}: {reason}", markup=False, soft_wrap=True)
        people.print(f"{left.checkpoint_id}: {'prepared' if report.ready else 'not ready in time'}", markup=False)
    if report.ready:
        say(f"closed for at most {left.lease_left:.0f} s: next gym-ckpt commit --session {file} --episodes FILE")
    else:
        say_kept(file, left)


def _rows(report: FleetReport) -> list[list[object]]:
    return [
        [name, one.blocker_count, one.restart_count, " ".join(f"{k}={v}" for k, v in sorted(one.counts.items()) if v)]
        for name, one in report.participants.items()
    ]


def blockers_of(report: FleetReport) -> list[dict[str, Any]]:
    """All that the replies list, the oldest first."""
    return [
        {
            "participant": name,
            "episode": blocker.episode.capture_key if blocker.episode else "",
            "worker": blocker.worker,
            "reason": blocker.reason.name,
            "age": round(blocker.age, 3),
            "place": blocker.place,
        }
        for name, blocker in sorted(report.blockers, key=lambda pair: -pair[1].age)
    ]


def _report(report: FleetReport) -> dict[str, Any]:
    return {
        "blocker_count": report.blocker_count,
        "blockers": blockers_of(report),
        "participants": {
            name: {
                "blocker_count": one.blocker_count,
                "restart_count": one.restart_count,
                "counts": dict(one.counts),
            }
            for name, one in report.participants.items()
        },
        "restarts": [episode.capture_key for episode in report.restarts],
        "excluded": dict(report.excluded),
    }


def _open(file: SessionFile, left: SessionState) -> dict[str, Any]:
    return {
        "session": str(file),
        "checkpoint_id": left.checkpoint_id,
        "epoch": left.epoch,
        "step": left.step.value,
        "lease_left": left.lease_left,
    }


# ---- commit and publish


async def commit(
    file: SessionFile,
    access: Access,
    episodes: Sequence[EpisodeId],
    *,
    reopen: bool,
    incremental: bool,
    deadline: float,
    as_json: bool,
) -> Exit:
    """Write these episodes everywhere, durable; what restarts is left out and listed.

    reopen: open the fleet once they are frozen, before they are written.
    """

    async def work(coordinator: Coordinator, block: Block) -> Checkpoint:
        checkpoint = a_checkpoint(block)
        scope = checkpoint.report.continued(episodes)
        await checkpoint.commit(scope, reopen_when_captured=reopen, incremental=incremental)
        return checkpoint

    with file.held():
        checkpoint, left = await take_further(file, access, work, deadline)
        parts: list[Outcome[Any]] = [o for o in checkpoint.outcomes["Commit"] if o.ok]
        records, written = sum(o.answer.record_count for o in parts), sum(o.answer.bytes for o in parts)
        if as_json:
            print_json(
                {
                    **_open(file, left),
                    "records": records,
                    "bytes": written,
                    "base": checkpoint.base_id,
                    "released": checkpoint.released,
                    "capture_seconds": round(checkpoint.timing.capture, 3),
                    "commit_seconds": round(checkpoint.timing.commit, 3),
                    "continued": [episode.capture_key for episode in checkpoint.continued],
                    "restarts": {episode.capture_key: why for episode, why in checkpoint.restarts.items()},
                    "excluded": dict(checkpoint.report.excluded),
                }
            )
        else:
            rows = [[o.name, o.answer.record_count, size(o.answer.bytes), o.duration] for o in parts]
            people.print(table("", ["participant", "records", "size", "seconds"], rows))
            counts = f"{len(checkpoint.continued):,} rollouts continue, {len(checkpoint.restarts):,} start over"
            people.print(f"{left.checkpoint_id}: committed, not published; {counts}", markup=False)
            for line in _how(checkpoint):
                people.print(line, markup=False)
        state = "open again" if checkpoint.released else f"closed for at most {left.lease_left:.0f} s"
        say(f"{state}: next gym-ckpt publish --session {file}")
        return Exit.OK


def _how(checkpoint: Checkpoint) -> list[str]:
    """What this command did beyond writing, for people."""
    timing = checkpoint.timing
    lines = [f"unchanged records stay in {checkpoint.base_id}"] if checkpoint.base_id else []
    if checkpoint.reopening:
        lines.append(f"released once frozen, after {timing.capture:.3f} s; durable {timing.commit:.3f} s later")
    return lines


async def publish(file: SessionFile, access: Access, *, deadline: float, as_json: bool) -> Exit:
    """Write the aggregate manifest and the sequence entry: afterwards it can be restored."""

    async def work(coordinator: Coordinator, block: Block) -> Checkpoint:
        checkpoint = a_checkpoint(block)
        await checkpoint.publish()
        return checkpoint

    with file.held():
        checkpoint, left = await take_further(file, access, work, deadline)
        publication = checkpoint.publication
        if as_json:
            print_json(
                {
                    **_open(file, left),
                    "sequence_number": publication.number,
                    "manifest_digest": publication.digest,
                    "latest_error": publication.latest_error,
                }
            )
        else:
            people.print(f"{left.checkpoint_id}: published as number {publication.number}", markup=False)
            if publication.latest_error:
                say(f"LATEST was not moved: {publication.latest_error}")
        say(f"next: gym-ckpt resume --session {file}")
        return Exit.OK


# ---- resume


class _Unwanted(Exception):
    """The operator does not want what was restored."""


async def resume(file: SessionFile, access: Access, *, deadline: float, abort: bool, as_json: bool) -> Exit:
    """Open the fleet and end the session, whatever its step; UNREACHABLE if somebody is not known to be open."""
    with file.held():
        state, coordinator = access.attach(file)
        block: Block | None = None
        try:
            async with coordinator:
                block = coordinator.attached(deadline=deadline)
                told = await _leave(state, block, abort=abort)
        except BaseException as error:
            say_ended(file, block, error)
            raise
        if not told["resume_pending"] and not told["notes"]:
            file.remove()
        if as_json:
            print_json(told)
        else:
            number = f" as number {told['sequence_number']}" if told["sequence_number"] else ""
            people.print(f"{state.purpose} {state.checkpoint_id}: {told['state']}{number}", markup=False)
            for note in [*filter(None, [told["failure"]]), *told["notes"]]:
                people.print(note, markup=False, soft_wrap=True)
            pending = ", ".join(told["resume_pending"])
            people.print(f"not known to be open: {pending}" if pending else "every participant is open", markup=False)
        return Exit.UNREACHABLE if told["resume_pending"] or told["notes"] else Exit.OK


async def _leave(state: SessionState, block: Block, *, abort: bool) -> dict[str, Any]:
    try:
        async with block:
            if abort and isinstance(block, Restoration):
                raise _Unwanted
    except _Unwanted as unwanted:
        return _resumed(state, "aborted", notes=getattr(unwanted, "__notes__", ()))
    return _checkpoint_resumed(state, block) if isinstance(block, Checkpoint) else _resumed(state, "open")


def _checkpoint_resumed(state: SessionState, checkpoint: Checkpoint) -> dict[str, Any]:
    result = checkpoint.result
    assert result is not None
    word = "aborted" if result.state is CheckpointState.ABORTED else "published"
    return {
        **_resumed(state, word, notes=result.notes),
        "sequence_number": result.sequence_number,
        "resume_pending": [str(identity) for identity in result.resume_pending],
        "replaced": [str(identity) for identity in result.replaced],
        "failure": result.failure,
    }


def _resumed(state: SessionState, word: str, *, notes: Iterable[str] = ()) -> dict[str, Any]:
    return {
        "purpose": state.purpose,
        "checkpoint_id": state.checkpoint_id,
        "state": word,
        "sequence_number": 0,
        "source": state.source,
        "episodes": list(state.targets) if word == "open" else [],
        "resume_pending": [],
        "replaced": [],
        "failure": "",
        "notes": list(notes),
    }


# ---- restore


async def restore(
    file: SessionFile,
    access: Access,
    *,
    fleet: Fleet,
    root: str,
    checkpoint: str,
    lease: float,
    controller: str,
    run_id: str,
    deadline: float,
    take_over: bool,
    as_json: bool,
) -> Exit:
    """Install a published checkpoint; the fleet stays closed until `resume`."""

    async def work(coordinator: Coordinator, block: Block) -> Restoration:
        assert isinstance(block, Restoration)
        return block

    with file.held():
        if file.exists:
            raise UsageError(f"session {file} is there: resume it, or name another file")
        if not take_over:
            await refuse_busy(fleet, access)
        coordinator = access.begin(fleet, root, controller=controller, run_id=run_id, lease=lease)
        restored, left = await carry(
            file, coordinator, lambda: coordinator.restoring(checkpoint, deadline=deadline), work, new=True
        )
        if as_json:
            print_json(
                {
                    **_open(file, left),
                    "source": restored.source_checkpoint_id,
                    "episodes": [episode.capture_key for episode in restored.continued],
                    "restarts": {episode.capture_key: why for episode, why in restored.restarts.items()},
                    "placements": {e.capture_key: list(where) for e, where in restored.placements.items()},
                }
            )
        else:
            rows = [[o.name, o.answer.record_count, size(o.answer.bytes), o.duration] for o in restored.outcomes]
            people.print(table("", ["participant", "records", "size", "seconds"], rows))
            counts = f"{len(restored.continued):,} rollouts are installed, {len(restored.restarts):,} start over"
            people.print(f"{restored.source_checkpoint_id}: {counts}; closed until resume", markup=False)
        say(f"closed for at most {left.lease_left:.0f} s: next gym-ckpt resume --session {file}")
        return Exit.OK


# ---- retire and forget, inside a session or with an epoch of their own


async def retire(
    begun: SessionFile | Coordinator, access: Access, episodes: Sequence[EpisodeId], *, deadline: float, as_json: bool
) -> Exit:
    """Refuse and free attempts everywhere; FAILED if something of one remains somewhere."""

    async def work(coordinator: Coordinator) -> RetireResult:
        try:
            return await coordinator.retire(episodes, deadline=deadline)
        except RetireFailed as error:
            return error.result

    result = await _aside(begun, access, work, deadline)
    if as_json:
        print_json(
            {
                "retired": [episode.capture_key for episode in result.retired],
                "incomplete": {episode.capture_key: why for episode, why in result.incomplete.items()},
            }
        )
    else:
        for episode, why in result.incomplete.items():
            for name, text in why.items():
                people.print(f"{episode} is not retired at {name}: {text}", markup=False, soft_wrap=True)
        people.print(f"{len(result.retired):,} retired, {len(result.incomplete):,} incomplete", markup=False)
    return Exit.FAILED if result.incomplete else Exit.OK


async def forget(
    begun: SessionFile | Coordinator, access: Access, rollouts: dict[str, int], *, deadline: float, as_json: bool
) -> Exit:
    """End the refusal of retired rollouts. Raises ForgetFailed."""

    async def work(coordinator: Coordinator) -> None:
        await coordinator.forget(rollouts, deadline=deadline)

    await _aside(begun, access, work, deadline)
    if as_json:
        print_json({"forgotten": rollouts})
    else:
        people.print(f"{len(rollouts):,} rollouts are forgotten; a mark above the attempt named stays", markup=False)
    return Exit.OK


async def _aside(begun: SessionFile | Coordinator, access: Access, work: Any, deadline: float) -> Any:
    if isinstance(begun, Coordinator):
        async with begun as coordinator:
            return await work(coordinator)

    async def in_block(coordinator: Coordinator, block: Block) -> Any:
        return await work(coordinator)

    with begun.held():
        result, left = await take_further(begun, access, in_block, deadline)
        say(f"session {begun} goes on at step {left.step.value}, closed for at most {left.lease_left:.0f} s")
        return result


# ---- episodes of command lines and files


def read_episodes(file: Path, text: str) -> list[EpisodeId]:
    """Capture keys, one per line; empty lines are skipped. Raises UsageError naming file and line."""
    found: list[EpisodeId] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(EpisodeId.from_capture_key(line.strip()))
        except ValueError as error:
            raise UsageError(f"{file}, line {number}: {error}") from error
    return found
