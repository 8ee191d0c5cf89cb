"""What can be read of a root without an epoch: its checkpoints, their lists, and whether they are intact."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.control.error_details import cut
from gym_ckpt_grpc.coordinator.served import wire as served
from gym_ckpt_grpc.coordinator.session import in_batches
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import MAX_LISTED
from gym_ckpt_grpc.storage import (
    LATEST,
    CheckpointRoot,
    EpisodeLists,
    Finding,
    Found,
    Level,
    Listed,
    read_episodes,
    verify_checkpoint,
)
from gymckpt.v1 import coordinator_pb2 as pb

DEFAULT_PAGE = 50


async def find(root: CheckpointRoot, selector: str) -> Found:
    """A complete checkpoint of the root. Raises StateNotFound, StateCorrupt."""
    return await in_thread(lambda: root.find(selector), "reading the checkpoint")


async def page(root: CheckpointRoot, request: pb.ListCheckpointsRequest) -> pb.ListCheckpointsResponse:
    """One page of the published checkpoints. The token is the number of the last one that was told."""
    size = request.page_size or DEFAULT_PAGE
    below = int(request.page_token) if request.page_token else None

    def read() -> list[Listed]:
        return list(itertools.islice(root.published(below=below), size + 1))

    entries = await in_thread(read, "reading the root")
    chosen = entries[:size]
    return pb.ListCheckpointsResponse(
        checkpoints=[served.summary_of_listed(entry) for entry in chosen],
        next_page_token=str(chosen[-1].publication.number) if len(entries) > size else "",
    )


async def lists_of(root: CheckpointRoot, selector: str) -> EpisodeLists:
    """Both lists of a checkpoint of the root. Raises StateNotFound, StateCorrupt."""

    def read() -> EpisodeLists:
        found = root.find(selector)
        return read_episodes(root.files, found.location, found.manifest)

    return await in_thread(read, "reading the lists")


def batches(
    episodes: Sequence[EpisodeId],
    *,
    reasons: Sequence[str] = (),
    places: Sequence[tuple[str, ...]] = (),
) -> list[pb.ListCheckpointEpisodesResponse]:
    """A list in batches; reasons and places, where given, are in the same order."""
    starts = range(0, len(episodes), MAX_LISTED)
    return [
        pb.ListCheckpointEpisodesResponse(
            episodes=wire.episode_list(batch),
            reasons=reasons[start : start + MAX_LISTED],
            holders=served.holders(places[start : start + MAX_LISTED]),
        )
        for start, batch in zip(starts, in_batches(episodes, MAX_LISTED), strict=True)
    ]


async def verify(root: CheckpointRoot, selector: str) -> AsyncIterator[pb.VerifyCheckpointResponse]:
    """Read every byte; each fault as it is found, the verdict last. Raises StateNotFound."""
    checkpoint_id = await in_thread(lambda: _existing(root, selector), "looking for the checkpoint")
    findings = verify_checkpoint(root, checkpoint_id)
    files = size = faults = 0
    while (finding := await in_thread(lambda: next(findings, None), "verifying")) is not None:
        size += finding.size
        files += finding.level is Level.CHECKED
        if finding.is_fault:
            faults += 1
            yield pb.VerifyCheckpointResponse(finding=_fault(finding))
    verdict = pb.VerifyVerdict(intact=faults == 0, file_count=files, bytes=size, finding_count=faults)
    yield pb.VerifyCheckpointResponse(verdict=verdict)


def _existing(root: CheckpointRoot, selector: str) -> str:
    """The id of something that is there, damaged or not."""
    if selector == LATEST:
        if (newest := root.sequence.latest()) is None:
            raise StateNotFound(f"nothing is published in {root.path!r}")
        return newest.checkpoint_id
    try:
        root.find(selector)
    except StateCorrupt:
        pass  # that is what the verification is to tell
    except StateNotFound:
        if not root.files.exists(root.location(selector).aggregate):
            raise
    return selector


def _fault(finding: Finding) -> pb.VerifyFinding:
    who = f" [{finding.participant}]" if finding.participant else ""
    return pb.VerifyFinding(
        file=finding.file,
        episode=wire.episode_to(finding.episode) if finding.episode else None,
        message=cut(f"{finding.level.value}: {finding.message}{who}"),
    )
