"""Freezing an owner's records for a scope."""

from __future__ import annotations

from gym_ckpt_grpc.control.error_details import unexpected
from gym_ckpt_grpc.control.ports import EpisodeListKind, HookFailed, StateOwner
from gym_ckpt_grpc.control.tasks import hook_cancelled
from gym_ckpt_grpc.control.work import Captured, Work
from gym_ckpt_grpc.protocol.errors import ControlError, ExportFailed, RestartInScope
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.protocol.report import MAX_LISTED
from gym_ckpt_grpc.storage import Record


async def restarts_of(owner: StateOwner) -> set[EpisodeId]:
    """Every in-flight episode that this owner cannot capture."""
    found: set[EpisodeId] = set()
    async for batch in owner.list_episodes(EpisodeListKind.RESTART):
        found.update(batch)
    return found


async def capture(owner: StateOwner, scope: EpisodeScope, work: Work) -> Captured:
    """Export the scope. Raises RestartInScope listing the offenders, or ExportFailed naming the episode.

    A record of an episode outside the scope is the owner's fault and fails the export too.
    """
    restarts = await restarts_of(owner)
    offenders = sorted(restarts & scope.members)
    if offenders:
        raise RestartInScope(
            f"the scope names {len(offenders)} episodes that restart",
            episodes=offenders[:MAX_LISTED],
            episode_count=len(offenders),
        )
    records: list[Record] = []
    left_out: list[EpisodeId] = []
    try:
        with hook_cancelled():
            async for batch in owner.export(scope):
                records += batch.records
                left_out += batch.left_out
                work.records_done = len(records)
    except ControlError:
        raise
    except HookFailed as error:
        episodes = [error.episode] if error.episode else []
        raise ExportFailed(str(error), episodes=episodes) from error
    except Exception as error:
        raise ExportFailed(f"the export hook failed: {unexpected(error, 'exporting records').message}") from error
    without: tuple[EpisodeId, ...] = ()
    if not scope.is_all:
        with_record = {record.episode for record in records}
        if stray := with_record - scope.members:
            raise ExportFailed("the export has episodes outside the scope", episodes=sorted(stray)[:MAX_LISTED])
        missing = scope.members - with_record
        without = tuple(episode for episode in scope if episode in missing) if missing else ()
    return Captured(tuple(records), tuple(left_out), without, len(restarts))
