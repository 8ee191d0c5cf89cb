"""Installing a checkpoint's records: verify, stage aside, make live, all or nothing."""

from __future__ import annotations

import contextlib
from functools import partial

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.core import Core
from gym_ckpt_grpc.control.doors import free_restored, give_up
from gym_ckpt_grpc.control.error_details import unexpected
from gym_ckpt_grpc.control.ports import Closing, HookFailed, InvalidState
from gym_ckpt_grpc.control.steps import step
from gym_ckpt_grpc.control.tasks import hook_cancelled
from gym_ckpt_grpc.control.watchdog import TaskKind
from gym_ckpt_grpc.control.work import RestoreReply, Work
from gym_ckpt_grpc.protocol.errors import ControlError, InstallFailed, StaleCheckpoint, StateCorrupt
from gym_ckpt_grpc.protocol.ids import RestoreScope
from gym_ckpt_grpc.protocol.machine import Call
from gym_ckpt_grpc.protocol.phases import Operation, Phase
from gym_ckpt_grpc.storage import CheckpointLocation, Part, read_part
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry import catalogue


class Installing:
    """RESTORING to RESTORED, or back to IDLE with nothing installed."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def begin(
        self, call: Call, ttl: float, budget: Budget, scope: RestoreScope, location: CheckpointLocation, digest: str
    ) -> Work:
        core = self._core
        now = core.clock()
        core.machine.begin(call, ttl=ttl, now=now)
        work = core.begin_open(Work(call.checkpoint_id, closed_at=now, began=now))
        closing = Closing(call.checkpoint_id, work.number, budget)
        install = self._install(work, closing, scope, location, digest)
        work.install = core.tasks.own(install, f"install {location.checkpoint_id}")
        core.touch()
        return work

    async def _install(
        self, work: Work, closing: Closing, scope: RestoreScope, location: CheckpointLocation, digest: str
    ) -> RestoreReply:
        core = self._core
        try:
            with core.watchdog.running(TaskKind.INSTALL, work.checkpoint_id):
                with hook_cancelled():
                    await core.owner.close_admission(closing)
                work.closed = True
                with step(core, work, catalogue.READ) as reading:
                    part = await self._read(scope, location, digest)
                    work.records_done, work.bytes_done = len(part.records), part.bytes_read
                    reading.set(at.RECORDS, len(part.records))
                    reading.set(at.BYTES, part.bytes_read)
                with step(core, work, catalogue.INSTALL, attempt=True) as installing:
                    installing.set(at.RECORDS, len(part.records))
                    await self._make_live(work, part, scope)
        except Exception as error:
            failure = self._typed(error)
            await give_up(core, work, Phase.RESTORING)
            raise failure from error
        work.installed = frozenset(scope.targets.values())
        for kept in core.kept.values():
            kept.outside -= work.installed  # installed anew: no business of an earlier checkpoint
        if core.work is not work or core.machine.phase is not Phase.RESTORING:
            # A Resume came at the last moment: what it discards must not stay live.
            await free_restored(core, scope.targets.values())
            raise StaleCheckpoint(f"restore {work.checkpoint_id} was resumed before it ended")
        reply = RestoreReply(
            source_checkpoint_id=location.checkpoint_id,
            record_count=len(part.records),
            without_record=len(scope) - len({record.episode for record in part.records}),
            bytes=part.bytes_read,
            installed=tuple(scope.targets.values()),
        )
        core.machine.record(Operation.RESTORE, reply)
        core.move(Phase.RESTORED)
        core.recorder.volume("restore", records=reply.record_count, size=reply.bytes)
        return reply

    async def _read(self, scope: RestoreScope, location: CheckpointLocation, digest: str) -> Part:
        core = self._core
        place = core.identity.place
        read = partial(
            read_part,
            core.files,
            location,
            place,
            checkpoint_id=location.checkpoint_id,
            expected_digest=digest or None,
            scope=scope,
            decoded=True,  # there, not on the loop, where owners take the records apart
        )
        with hook_cancelled():
            return await core.in_thread(read)

    async def _make_live(self, work: Work, part: Part, scope: RestoreScope) -> None:
        try:
            with hook_cancelled():
                await self._activate(work, part, scope)
        except Exception as error:
            raise self._typed(error) from error

    async def _activate(self, work: Work, part: Part, scope: RestoreScope) -> None:
        owner = self._core.owner
        owner.accept_manifest_extra(part.manifest.extra)
        staged = await owner.stage(part.records, scope)
        try:
            self._require_waiter(work)
            await owner.activate(staged)
        except BaseException:
            with contextlib.suppress(Exception):
                await owner.discard(staged)
            raise
        try:
            self._require_waiter(work)
        except InstallFailed:
            await free_restored(self._core, scope.targets.values())
            raise

    def _require_waiter(self, work: Work) -> None:
        resumed = self._core.work is not work or self._core.machine.phase is not Phase.RESTORING
        if work.waiters == 0 and not resumed:
            raise InstallFailed("nobody waits for this install any more; it was discarded")

    def _typed(self, error: Exception) -> ControlError:
        if isinstance(error, ControlError):
            return error
        episodes = [error.episode] if isinstance(error, InvalidState | HookFailed) and error.episode else []
        if isinstance(error, InvalidState):
            return StateCorrupt(f"the server refuses a record: {error}", episodes=episodes)
        incident = unexpected(error, "installing records").message
        return InstallFailed(f"the install hook failed: {incident}", episodes=episodes)
