"""Freezing records and writing them: one capture and one write per checkpoint, whoever asks how often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gym_ckpt_grpc.control import capturing
from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.doors import tell_fate
from gym_ckpt_grpc.control.error_details import unexpected
from gym_ckpt_grpc.control.ports import StagingKeys
from gym_ckpt_grpc.control.preparing import Preparing
from gym_ckpt_grpc.control.steps import step, written
from gym_ckpt_grpc.control.tasks import failure_of, hook_cancelled, succeeded
from gym_ckpt_grpc.control.watchdog import TaskKind
from gym_ckpt_grpc.control.work import Captured, CommitReply, Work
from gym_ckpt_grpc.protocol.errors import ControlError, StaleCheckpoint
from gym_ckpt_grpc.protocol.ids import EpisodeScope
from gym_ckpt_grpc.protocol.machine import CommitArguments
from gym_ckpt_grpc.protocol.phases import Operation, Phase
from gym_ckpt_grpc.storage import (
    CheckpointLocation,
    PartManifestInfo,
    Record,
    StopFlag,
    WriteStopped,
    paused_collector,
    preflight,
    write_part,
)
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry import catalogue

PAUSE_LIMIT = 10.0
"""Seconds after which Python's collector goes on, also where a cut is not released yet."""


class Committing:
    """The Capture and Commit half of a checkpoint: PREPARED to COMMITTED."""

    def __init__(self, core: Core, preparing: Preparing) -> None:
        self._core = core
        self._preparing = preparing

    def begin_capture(self, work: Work, scope: EpisodeScope) -> asyncio.Task[Captured]:
        """The one capture of this checkpoint: begun here, or joined. A failed one is begun anew."""
        if work.capture is None:
            self._core.machine.ask(Operation.CAPTURE, scope)
            work.began = self._core.clock()
            self._pause_collector(work)
            work.capture = self._core.tasks.own(self._capture(work, scope), f"capture {work.checkpoint_id}")
            self._core.touch()
        return work.capture

    def _pause_collector(self, work: Work) -> None:
        """A collection walks over all objects of the process: not while admission waits, unless that takes long."""
        work.cut.enter_context(paused_collector())
        limit = asyncio.get_running_loop().call_later(PAUSE_LIMIT, work.cut.close)
        work.cut.callback(limit.cancel)

    async def _capture(self, work: Work, scope: EpisodeScope) -> Captured:
        core = self._core
        try:
            with (
                core.watchdog.running(TaskKind.EXPORT, work.checkpoint_id),
                step(core, work, catalogue.EXPORT, attempt=True) as export,
            ):
                captured = await capturing.capture(core.owner, scope, work)
                export.set(at.RECORDS, len(captured.records))
        except BaseException:
            work.capture = None
            work.cut.close()
            if core.work is work:
                core.machine.unask(Operation.CAPTURE, Operation.COMMIT)
                if core.machine.phase is Phase.COMMITTING:
                    core.move(Phase.PREPARED)
                self._preparing.recheck()
            core.kept.pop(work.checkpoint_id, None)
            core.machine.drop_kept(work.checkpoint_id)
            raise
        work.captured = captured
        if not scope.is_all:
            work.outside = {episode for episode in core.owner.restored_pending() if episode not in scope}
        if core.work is work:
            core.machine.record(Operation.CAPTURE, captured)
            if core.machine.phase is Phase.PREPARED:
                core.move(Phase.CAPTURED)
        return captured

    def begin_commit(
        self,
        work: Work,
        arguments: CommitArguments,
        location: CheckpointLocation,
        base: CheckpointLocation | None = None,
    ) -> asyncio.Task[CommitReply]:
        """The one write of this checkpoint: begun here, or joined. After a failed write the same records again."""
        if work.commit is None or (work.commit.done() and not succeeded(work.commit)):
            capture = self.begin_capture(work, arguments.scope)
            if self._core.work is work:
                self._core.machine.ask(Operation.COMMIT, arguments)
                self._core.move(Phase.COMMITTING)
            work.stop = StopFlag()
            work.began = self._core.clock()
            commit = self._commit(work, capture, arguments, location, base)
            work.commit = self._core.tasks.own(commit, f"commit {work.checkpoint_id}")
        return work.commit

    async def _commit(
        self,
        work: Work,
        capture: asyncio.Task[Captured],
        arguments: CommitArguments,
        location: CheckpointLocation,
        base: CheckpointLocation | None,
    ) -> CommitReply:
        core = self._core
        captured = await asyncio.shield(capture)
        try:
            part, staging_keys = await self._write(work, captured, location, base)
            tell_fate(core, work, durable=True)
            with step(core, work, catalogue.CLEANUP) as cleanup:
                deleting = await self._delete_outside(work)
                cleanup.set(at.EPISODES, len(work.deletions))
        except BaseException as error:
            if self._current(work):
                core.move(Phase.CAPTURED)
            if isinstance(error, WriteStopped):
                raise StaleCheckpoint(f"checkpoint {work.checkpoint_id} was resumed; its write was stopped") from error
            if isinstance(error, ControlError) or not isinstance(error, Exception):
                raise
            raise unexpected(error, "writing records") from error
        finally:
            work.answered_at = core.clock()
        problem = await self._release(captured) if arguments.stop and self._current(work) else ""
        reply = CommitReply(
            manifest_digest=part.manifest_digest,
            record_count=part.record_count,
            bytes=part.bytes,
            left_out=captured.left_out,
            without_record=len(captured.without_record),
            deleting=deleting,
            restart_count=captured.restart_count,
            release_problem=problem,
            staging_keys=staging_keys,
        )
        if self._current(work):
            core.machine.record(Operation.COMMIT, reply)
            core.move(Phase.COMMITTED)
        return reply

    def _current(self, work: Work) -> bool:
        """Whether this work is the open one and has not been resumed."""
        return self._core.work is work and self._core.machine.phase is Phase.COMMITTING

    async def _write(
        self, work: Work, captured: Captured, location: CheckpointLocation, base: CheckpointLocation | None
    ) -> tuple[PartManifestInfo, StagingKeys | None]:
        core = self._core
        identity, stop = core.identity, work.stop

        def progress(records: int, size: int) -> None:  # on the writing thread; a status reads both
            work.records_done, work.bytes_done = records, size

        def write() -> tuple[PartManifestInfo, StagingKeys | None]:
            work.bytes_total = _state_bytes(captured.records)
            # How much of it a base has already is not known before it is read.
            preflight(core.files, location.root, expected_bytes=0 if base else work.bytes_total)
            extra = core.owner.commit_extra(captured.records)
            try:
                part = write_part(
                    core.files,
                    location,
                    identity,
                    checkpoint_id=work.checkpoint_id,
                    records=captured.records,
                    restarts=captured.restart_count,
                    extra=extra.manifest,
                    documents=extra.documents,
                    base=base,
                    compress=core.settings.compress,
                    progress=progress,
                    stop=stop,
                )
            finally:
                work.named |= stop.published
            return part, extra.staging_keys

        work.records_done = work.bytes_done = 0
        with hook_cancelled():  # a file layer may do so, as an author's hook may
            return await written(core, work, write)

    async def _delete_outside(self, work: Work) -> int:
        """Free what was restored and is outside a list scope; gives how many deletions still run after the wait.

        Each is begun once; a retry begins anew only what failed and is still there. Raises the first failure.
        """
        core = self._core
        work.deleting_since = asyncio.get_running_loop().time()
        work.deletions = {episode: task for episode, task in work.deletions.items() if not task.done()}
        begun = []
        for episode in sorted(work.outside & core.owner.restored_pending()):
            if episode not in work.deletions:
                deletion = core.owner.delete_restored(episode)
                work.deletions[episode] = core.tasks.own(deletion, f"delete {episode}")
                begun.append(work.deletions[episode])
        core.watchdog.follow(TaskKind.CLEANUP, work.checkpoint_id, begun)
        if not work.deletions:
            return 0
        _, running = await asyncio.wait(work.deletions.values(), timeout=core.settings.deletion_wait)
        for task in work.deletions.values():
            if failure := failure_of(task):
                raise failure
        return len(running)

    async def _release(self, captured: Captured) -> str:
        """Free compute, best effort, since the records are durable; gives what went wrong, for the reply."""
        core = self._core
        hook = core.owner.release_exported([record.episode for record in captured.records])
        release = core.tasks.own(hook, "free compute")
        await asyncio.wait({release}, timeout=core.settings.deletion_wait)
        if not release.done():
            return f"freeing compute had not ended after {core.settings.deletion_wait:g} s; it goes on"
        failure = failure_of(release)
        if failure is None:
            return ""
        typed = failure if isinstance(failure, ControlError) else unexpected(failure, "freeing compute")
        return typed.message


def _state_bytes(records: Sequence[Record]) -> int:
    return sum(len(payload.data) for record in records for payload in record.payloads.values())
