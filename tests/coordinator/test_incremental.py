"""Incremental checkpoints, as the coordinator decides them: which base, the same for all, and when a full one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gym_ckpt_grpc.coordinator import Checkpoint, CheckpointResult, CommitFailed, Coordinator, Fleet
from gym_ckpt_grpc.coordinator.incremental import find_base
from gym_ckpt_grpc.protocol.errors import InternalError, StateCorrupt, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles, encode
from tests.coordinator.fleet_of_nodes import Nodes, episodes, refuse


def bases(nodes: Nodes, checkpoint_id: str) -> set[str]:
    """The bases that participants were told for one checkpoint."""
    calls = [call for node in nodes for call in node.calls["Commit"] if call.context.checkpoint_id == checkpoint_id]
    assert calls
    return {call.base_checkpoint_uri for call in calls}


def uri(nodes: Nodes, checkpoint_id: str) -> str:
    return CheckpointRoot(str(nodes.root)).location(checkpoint_id).uri


def result_of(checkpoint: Checkpoint) -> CheckpointResult:
    assert checkpoint.result is not None
    return checkpoint.result


async def take(
    coordinator: Coordinator, in_flight: list[EpisodeId], checkpoint_id: str | None = None, **options: Any
) -> Checkpoint:
    async with coordinator.checkpoint(checkpoint_id=checkpoint_id) as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(in_flight, **options)
        await checkpoint.publish()
    return checkpoint


@pytest.mark.behaviour("C183")
async def test_all_participants_get_the_newest_published_checkpoint_as_base(nodes: Nodes) -> None:
    """Whichever run it is of; one that was aborted in between is none."""
    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator(incremental=True, run_id="run-1") as coordinator:
        first = await take(coordinator, in_flight)
    async with nodes.coordinator(incremental=True, run_id="run-2") as coordinator:
        async with coordinator.checkpoint() as aborted:
            await aborted.prepare(ready_within=5)
            await aborted.commit(in_flight)
        second = await take(coordinator, in_flight)
        third = await take(coordinator, in_flight, reopen_when_captured=True)
    assert bases(nodes, first.id) == {""}
    assert bases(nodes, aborted.id) == bases(nodes, second.id) == {uri(nodes, first.id)}
    assert bases(nodes, third.id) == {uri(nodes, second.id)}
    assert [result_of(c).base for c in (first, second, third)] == ["", first.id, second.id]


@pytest.mark.behaviour("C183")
async def test_what_did_not_change_is_not_written_again_and_restores(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(4))
    for node in nodes:
        for episode in in_flight:
            node.owner.live[episode] = {"text": f"{node.name} {episode} " * 500}
    async with nodes.coordinator(incremental=True) as coordinator:
        full = result_of(await take(coordinator, in_flight))
        for node in nodes:
            node.owner.live[in_flight[0]] = {"text": "changed"}
        after = await take(coordinator, in_flight)
    result = result_of(after)
    assert (full.chain, result.chain) == (0, 1)
    assert result.bytes < full.bytes / 2
    assert result.state_bytes > full.state_bytes / 2
    for node in nodes:
        await node.restart()
    async with nodes.coordinator(incremental=True) as coordinator, coordinator.restoring() as restored:
        assert len(restored.continued) == 4
    assert nodes["env"].owner.live[in_flight[0].next()] == {"text": "changed"}
    assert nodes["env"].owner.live[in_flight[3].next()] == {"text": f"env {in_flight[3]} " * 500}


async def test_a_chain_ends_with_a_full_checkpoint(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator(incremental=True, max_chain=3) as coordinator:
        taken = [await take(coordinator, in_flight, f"ck-{i}") for i in range(7)]
    assert [result_of(checkpoint).chain for checkpoint in taken] == [0, 1, 2, 0, 1, 2, 0]
    assert bases(nodes, "ck-3") == {""}
    assert any("ck-2 ends a chain of 3" in event.message for event in coordinator.events)


@pytest.mark.parametrize(
    ("chains", "limit", "full"),
    [((0, 0), 8, False), ((6, 0), 8, False), ((0, 7), 8, True), ((0,), 1, True), ((0,), 2, False), ((9,), 8, True)],
)
def test_the_longest_chain_of_any_participant_counts(chains: tuple[int, ...], limit: int, full: bool) -> None:
    members = [SimpleNamespace(chain=chain) for chain in chains]
    location = SimpleNamespace(uri="file:///root/checkpoints/ck-1", checkpoint_id="ck-1")
    found = SimpleNamespace(location=location, manifest=SimpleNamespace(members=members))
    root = cast(CheckpointRoot, SimpleNamespace(find=lambda selector: found))
    assert (find_base(root, limit).uri == "") is full


@pytest.mark.parametrize("problem", [StateCorrupt("damaged"), InternalError("odd")], ids=lambda error: error.code.name)
def test_whatever_cannot_be_read_is_no_base(problem: Exception) -> None:
    def find(selector: str) -> Any:
        raise problem

    base = find_base(cast(CheckpointRoot, SimpleNamespace(find=find)), 8)
    assert base.uri == ""
    assert "written in full" in base.reason


async def test_a_damaged_newest_checkpoint_gives_a_full_one_and_an_event(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator(incremental=True) as coordinator:
        first = await take(coordinator, in_flight)
        manifest = nodes.root / "checkpoints" / first.id / "checkpoint.json"
        manifest.chmod(0o600)
        manifest.write_text("{")
        second = await take(coordinator, in_flight)
        assert bases(nodes, second.id) == {""}
        told = [event.message for event in coordinator.events if event.checkpoint_id == second.id]
        assert any("written in full, since" in text for text in told)
    for node in nodes:
        await node.restart()
    async with nodes.coordinator() as coordinator, coordinator.restoring(second.id) as restored:
        assert len(restored.continued) == 2


async def test_it_is_asked_for_by_the_coordinator_or_by_a_commit(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator() as coordinator:
        first = await take(coordinator, in_flight)
        assert bases(nodes, (await take(coordinator, in_flight)).id) == {""}
        asked = await take(coordinator, in_flight, incremental=True)
        assert bases(nodes, asked.id) != {""}
        assert bases(nodes, asked.id) != {uri(nodes, first.id)}
    async with nodes.coordinator(incremental=True) as coordinator:
        assert bases(nodes, (await take(coordinator, in_flight, incremental=False)).id) == {""}
        assert bases(nodes, (await take(coordinator, in_flight)).id) != {""}


async def test_a_commit_that_is_repeated_names_the_same_base(nodes: Nodes) -> None:
    """Also where another checkpoint was published meanwhile: a participant takes no other arguments."""
    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator(incremental=True) as coordinator:
        first = await take(coordinator, in_flight)
        nodes["agent"].script["Commit"] = [refuse(InternalError("once"))]
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            with pytest.raises(CommitFailed):
                await checkpoint.commit(in_flight)
            await checkpoint.commit(in_flight, incremental=False)
            await checkpoint.publish()
    assert bases(nodes, checkpoint.id) == {uri(nodes, first.id)}
    assert len(nodes["agent"].calls["Commit"]) == 3


@pytest.mark.parametrize("chosen", [True, False])
async def test_another_process_goes_on_with_the_base_that_was_chosen(nodes: Nodes, chosen: bool) -> None:
    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator() as coordinator:
        first = await take(coordinator, in_flight)
        nodes["agent"].script["Commit"] = [refuse(InternalError("once"))]
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            with pytest.raises(CommitFailed):
                await checkpoint.commit(in_flight, incremental=chosen)
            state = await checkpoint.detach()
    async with Coordinator.attach(type(state).from_json(state.to_json())) as coordinator:
        block = coordinator.attached()
        assert isinstance(block, Checkpoint)
        async with block:
            await block.commit(in_flight, incremental=not chosen)
            await block.publish()
    assert bases(nodes, checkpoint.id) == {uri(nodes, first.id) if chosen else ""}


async def test_a_participant_that_is_new_writes_in_full(nodes: Nodes) -> None:
    """It has no part in the base; the others refer to theirs."""
    in_flight = nodes.add(*episodes(2))
    async with nodes.coordinator(incremental=True) as coordinator:
        await take(coordinator, in_flight)
    await nodes.start("res-2")
    nodes["res-2"].add(*in_flight)
    async with nodes.coordinator(incremental=True) as coordinator:
        checkpoint = await take(coordinator, in_flight)
    assert checkpoint.manifest is not None
    chains = {member.participant.service: member.chain for member in checkpoint.manifest.members}
    assert chains == {"env": 1, "model": 1, "agent": 1, "res": 1, "res-2": 0}
    for node in nodes:
        await node.restart()
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        assert len(restored.continued) == 2


async def test_the_base_is_read_once_and_only_if_it_is_wanted(nodes: Nodes) -> None:
    """On a thread, after the release: nothing of it is in the pause."""
    reads: list[str] = []

    class Watched(LocalFiles):
        def open(self, path: str) -> Any:
            reads.append(path)
            return super().open(path)

    in_flight = nodes.add(*episodes(1))
    async with nodes.coordinator(incremental=True) as coordinator:
        first = await take(coordinator, in_flight, trainer=encode({"step": 1}))
    manifest = f"{first.id}/checkpoint.json"
    async with nodes.coordinator(files=Watched()) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        reads.clear()
        await checkpoint.capture(in_flight)
        await checkpoint.reopen()
        assert reads == []
        await checkpoint.commit(in_flight, incremental=True)
        assert sum(path.endswith(manifest) for path in reads) == 1


def test_a_chain_has_at_least_one_checkpoint(tmp_path: Path) -> None:
    fleet = Fleet.from_mapping({"servers": [{"kind": "policy_model", "service": "p", "address": "h:1"}]})
    with pytest.raises(UsageError, match="max_chain"):
        Coordinator(fleet, root=str(tmp_path), max_chain=0)
