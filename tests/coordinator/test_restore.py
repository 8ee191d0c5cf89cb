"""Restoring: verified as a whole, installed at all or none, and cleaned up after."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.coordinator import Checkpoint, CheckpointState, EventKind, RestoreFailed
from gym_ckpt_grpc.protocol.errors import (
    InternalError,
    PublishUnknown,
    StateCorrupt,
    StateNotFound,
    StateUnwritable,
    UsageError,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import LocalFiles, decode, encode
from tests.coordinator.fleet_of_nodes import Gate, Node, Nodes, broken, edit, episodes, refuse


async def take(nodes: Nodes, in_flight: list[EpisodeId], **options: Any) -> Checkpoint:
    """A published checkpoint of these episodes."""
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(report.continued(in_flight), **options)
        await checkpoint.publish()
    return checkpoint


async def crash(nodes: Nodes) -> None:
    """Every process is gone and started anew."""
    for node in nodes:
        await node.restart()
    nodes.journal.clear()


def part(nodes: Nodes, checkpoint: Checkpoint, node: Node) -> Path:
    return Path(nodes.root, "checkpoints", checkpoint.id, "participants", node.kind, node.service, "0")


async def fails(nodes: Nodes, source: str = "latest", **options: Any) -> BaseException:
    """The error of a restore that must not reach its body."""
    async with nodes.coordinator() as coordinator:
        with pytest.raises(Exception) as raised:
            async with coordinator.restoring(source, **options):
                pytest.fail("the body was entered")
        assert nodes.all_open()
    return raised.value


async def test_a_restore_installs_next_attempts_and_opens(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(3))
    for node in nodes:
        node.owner.live.pop(in_flight[2])
    checkpoint = await take(nodes, in_flight, trainer=encode({"step": 7}))
    await crash(nodes)
    async with nodes.coordinator() as coordinator:
        async with coordinator.restoring(deadline=20) as restored:
            assert nodes.phases() == {"RESTORED"}
            assert restored.source_checkpoint_id == checkpoint.id
            assert restored.continued == (EpisodeId("r0", 1), EpisodeId("r1", 1))
            assert restored.restarts == {in_flight[2]: "no_record"}
            for node in nodes:
                member = restored.manifest.member(node.identity.place)
                assert member is not None
                assert node.calls["Restore"][0].expected_manifest_digest == member.manifest_digest
            assert restored.trainer is not None
            assert decode(restored.trainer) == {"step": 7}
        assert nodes.all_open()
        assert nodes.journal.begun("Retire") == []
        async with coordinator.checkpoint() as second:
            await second.prepare(ready_within=5)
            await second.commit(restored.continued)
            await second.publish()
    assert second.manifest is not None
    assert second.manifest.source_checkpoint == checkpoint.id


async def test_a_restore_names_where_each_rollout_s_state_is(nodes: Nodes) -> None:
    await nodes.start("res-2", service="res", instance="1")
    one, two = episodes(2)
    nodes.add(one)
    nodes["agent"].add(two)
    nodes["res-2"].add(two)
    nodes["res-2"].owner.live.pop(one)
    nodes["res"].owner.live.pop(two, None)
    await take(nodes, [one, two])
    await crash(nodes)
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        assert restored.placements == {
            one.next(): ("environment/env/0", "policy_model/model/0", "agent/agent/0", "resources/res/0"),
            two.next(): ("agent/agent/0", "resources/res/1"),
        }


def remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def change_manifest(directory: Path) -> None:
    file = directory / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"restarts": 0', b'"restarts": 1'))


def cut_records(directory: Path) -> None:
    (file,) = directory.glob("records-*.gck")
    file.write_bytes(file.read_bytes()[:-1])


def remove_records(directory: Path) -> None:
    (file,) = directory.glob("records-*.gck")
    file.unlink()


@pytest.mark.behaviour("C242")
@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (remove_manifest, StateNotFound),
        (change_manifest, StateCorrupt),
        (cut_records, StateCorrupt),
        (remove_records, StateNotFound),
    ],
)
async def test_a_damaged_part_is_found_before_the_first_install(nodes: Nodes, damage: Any, kind: Any) -> None:
    checkpoint = await take(nodes, nodes.add(*episodes(2)))
    damage(part(nodes, checkpoint, nodes["res"]))
    await crash(nodes)
    error = await fails(nodes)
    assert isinstance(error, kind)
    assert error.participant == "resources/res/0"
    assert nodes.journal.begun("Restore") == []


@pytest.mark.behaviour("C242")
async def test_a_part_swapped_with_an_earlier_one_is_found(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    first = await take(nodes, in_flight)
    nodes["agent"].owner.live[in_flight[0]] = "later"
    second = await take(nodes, in_flight)
    agent = nodes["agent"]
    shutil.rmtree(part(nodes, second, agent))
    shutil.copytree(part(nodes, first, agent), part(nodes, second, agent))
    await crash(nodes)
    error = await fails(nodes)
    assert isinstance(error, StateCorrupt)
    assert error.participant == "agent/agent/0"
    assert nodes.journal.begun("Restore") == []


async def test_bytes_changed_inside_a_chunk_fail_the_restore_everywhere(nodes: Nodes) -> None:
    """What only reading the state can find: the participant refuses, and nothing restored is left on any."""
    checkpoint = await take(nodes, nodes.add(*episodes(2)))
    (file,) = part(nodes, checkpoint, nodes["res"]).glob("records-*.gck")
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    await crash(nodes)
    error = await fails(nodes)
    assert isinstance(error, RestoreFailed)
    assert isinstance(error.cause, StateCorrupt)
    assert all(node.episodes == set() for node in nodes)


async def test_nothing_published_is_not_found(nodes: Nodes) -> None:
    assert isinstance(await fails(nodes), StateNotFound)
    assert isinstance(await fails(nodes, "ckpt-x"), StateNotFound)


class NoEntries(LocalFiles):
    """Makes no sequence entries once armed."""

    armed = False

    def publish(self, temporary: str, path: str) -> None:
        if self.armed and "sequence/" in path:
            raise StateUnwritable("no entries today")
        super().publish(temporary, path)


async def test_a_complete_checkpoint_that_was_not_published_is_not_restored(nodes: Nodes) -> None:
    in_flight, files = nodes.add(*episodes(1)), NoEntries()
    async with nodes.coordinator(files=files) as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(in_flight)
            files.armed = True
            with pytest.raises(PublishUnknown):
                await checkpoint.publish()
        files.armed = False
    assert checkpoint.result is not None
    assert checkpoint.result.state is CheckpointState.ABORTED
    assert checkpoint.manifest is not None
    await crash(nodes)
    error = await fails(nodes, checkpoint.id)
    assert isinstance(error, StateNotFound)
    assert "never published" in error.message


@pytest.mark.behaviour("C243")
async def test_what_outlived_the_crash_is_retired_everywhere_first(nodes: Nodes) -> None:
    """One process lived on with the very attempts of the checkpoint: its late calls are refused."""
    in_flight = nodes.add(*episodes(2))
    await take(nodes, in_flight)
    for node in nodes:
        if node.name != "agent":
            await node.restart()
    nodes.journal.clear()
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        assert restored.continued == tuple(e.next() for e in in_flight)
        marks = nodes["agent"].plane._core.retirement
        assert all(marks.refuses(episode) for episode in in_flight)
    assert sorted(nodes.journal.begun("Retire")) == ["agent", "env", "model", "res"]
    first_restore = next(i for i, e in enumerate(nodes.journal) if e.method == "Restore")
    retires = [i for i, e in enumerate(nodes.journal) if e.method == "Retire" and e.what == "end"]
    assert max(retires) < first_restore
    assert all(node.episodes == set(restored.continued) for node in nodes)


@pytest.mark.behaviour("C327")
async def test_a_trainer_that_dies_again_restores_above_the_running_attempts(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    await take(nodes, in_flight)
    await crash(nodes)
    for attempt in (1, 2, 3):
        async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
            assert {episode.attempt for episode in restored.continued} == {attempt}
        assert nodes.all_open()
        for node in nodes:
            assert node.episodes == set(restored.continued)
            node.owner.pending.clear()  # they were started


@pytest.mark.behaviour("C327")
async def test_restored_attempts_that_nothing_started_are_replaced_too(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    await take(nodes, in_flight)
    await crash(nodes)
    for attempt in (1, 2):
        async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
            assert {episode.attempt for episode in restored.continued} == {attempt}


@pytest.mark.behaviour("C244")
async def test_missing_and_extra_participants_are_refused_by_name(nodes: Nodes) -> None:
    await take(nodes, nodes.add(*episodes(1)))
    await crash(nodes)
    gone = nodes.all.pop("res")
    await nodes.start("res-2", service="other")
    try:
        error = await fails(nodes)
    finally:
        nodes.all["res"] = gone
    assert isinstance(error, RestoreFailed)
    assert "in the checkpoint and not in the fleet: resources/res/0" in str(error)
    assert "in the fleet and not in the checkpoint: resources/other/0" in str(error)
    assert nodes.journal.begun("Restore") == []


@pytest.mark.behaviour("C244")
async def test_one_that_the_manifest_names_as_excluded_is_neither(nodes: Nodes) -> None:
    nodes.add(*episodes(1))
    nodes["res"].declared = {"required": False}
    fleet = nodes.fleet()
    await nodes["res"].stop()
    async with nodes.coordinator(fleet=fleet) as coordinator, coordinator.checkpoint() as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(report.continued(episodes(1)))
        await checkpoint.publish()
    await crash(nodes)
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        assert restored.continued == ()
        assert restored.restarts == {episodes(1)[0]: "excluded"}
    assert sorted(nodes.journal.begun("Restore")) == ["agent", "env", "model"]
    assert nodes.all_open()


@pytest.mark.behaviour("C245", "C246")
async def test_a_restore_that_fails_on_one_leaves_nothing_on_any(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    await take(nodes, in_flight)
    await crash(nodes)
    nodes["res"].always["Restore"] = refuse(InternalError("incident 1"))
    error = await fails(nodes)
    assert isinstance(error, RestoreFailed)
    assert "1 of 4" in str(error)
    assert [(o.name, o.ok) for o in error.outcomes] == [
        ("environment/env/0", True),
        ("policy_model/model/0", True),
        ("agent/agent/0", True),
        ("resources/res/0", False),
    ]
    for node in nodes:
        assert node.episodes == set()
        assert all(node.plane._core.retirement.refuses(episode.next()) for episode in in_flight)


@pytest.mark.behaviour("C246")
async def test_the_refusal_after_a_failed_restore_ends_with_forget(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    await take(nodes, in_flight)
    await crash(nodes)
    nodes["res"].script["Restore"] = [refuse(InternalError("incident 1"))]
    await fails(nodes)
    async with nodes.coordinator() as coordinator:
        await coordinator.forget([episode.next() for episode in in_flight])
    for node in nodes:
        assert not any(node.plane._core.retirement.refuses(episode.next()) for episode in in_flight)


@pytest.mark.behaviour("C322")
async def test_a_retryable_failure_is_tried_again_while_time_is_left(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    await take(nodes, in_flight)
    await crash(nodes)
    res = nodes["res"].owner
    res.install_error = RuntimeError("not yet")

    async def mend(inner: Any, request: Any, context: Any) -> Any:
        res.install_error = None
        return await inner(request, context)

    async def as_it_is(inner: Any, request: Any, context: Any) -> Any:
        return await inner(request, context)

    nodes["res"].script["Restore"] = [as_it_is, mend]
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        assert {episode.attempt for episode in restored.continued} == {1}
    assert len(nodes["res"].calls["Restore"]) == 2
    assert len(nodes["env"].calls["Restore"]) == 1


@pytest.mark.behaviour("C322")
async def test_after_a_clean_up_the_same_checkpoint_restores_one_attempt_higher(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(2))
    await take(nodes, in_flight)
    await crash(nodes)
    nodes["res"].script["Restore"] = [refuse(InternalError("incident 1"))]
    await fails(nodes)
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        assert {episode.attempt for episode in restored.continued} == {2}
    assert list(nodes["env"].calls["Restore"][-1].install_as) == [2, 2]


@pytest.mark.behaviour("C247")
async def test_a_clean_up_that_fails_too_still_reopens_everyone(nodes: Nodes) -> None:
    await take(nodes, nodes.add(*episodes(1)))
    await crash(nodes)
    nodes["res"].always["Restore"] = refuse(InternalError("incident 1"))
    nodes["agent"].always["Retire"] = refuse(InternalError("incident 2"))
    error = await fails(nodes)
    assert isinstance(error, RestoreFailed)
    assert "incident 1" in str(error)
    assert any("incident 2" in note for note in error.__notes__)
    assert sorted(set(nodes.journal.begun("Resume"))) == ["agent", "env", "model", "res"]


@pytest.mark.behaviour("C248")
@pytest.mark.parametrize("method", ["Restore", "ListEpisodes"])
async def test_the_clean_up_runs_when_the_caller_is_cancelled(nodes: Nodes, method: str) -> None:
    await take(nodes, nodes.add(*episodes(1)))
    await crash(nodes)
    gate, closing = Gate(), Gate()
    as_it_is = edit(lambda reply: None)
    nodes["res"].script[method] = [gate.hold()] if method == "Restore" else [as_it_is, as_it_is, gate.hold()]
    nodes["model"].script["Retire"] = [closing.hold()]

    async def restore() -> None:
        async with coordinator.restoring():
            pytest.fail("the body was entered")

    async with nodes.coordinator() as coordinator:
        task = asyncio.create_task(restore())
        await gate.entered.wait()
        task.cancel()
        await closing.entered.wait()
        task.cancel()
        await asyncio.sleep(0)
        closing.open.set()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert nodes.all_open()
    assert all(node.episodes == set() for node in nodes)


@pytest.mark.behaviour("C249")
@pytest.mark.parametrize("field", ["record_count", "installed_count"])
async def test_restored_counts_are_compared_with_the_manifest(nodes: Nodes, field: str) -> None:
    await take(nodes, nodes.add(*episodes(3)))
    await crash(nodes)
    nodes["agent"].script["Restore"] = [edit(lambda reply: setattr(reply, field, 2))]
    error = await fails(nodes)
    assert isinstance(error, RestoreFailed)
    assert "agent/agent/0 installed 2 of 3" in str(error)
    assert all(node.episodes == set() for node in nodes)


async def test_an_episode_that_is_installed_nowhere_fails_the_restore(nodes: Nodes) -> None:
    await take(nodes, nodes.add(*episodes(2)))
    await crash(nodes)

    def lose(replies: list[Any]) -> None:
        if replies:
            del replies[0].episodes.rollout_ids[0]
            del replies[0].episodes.attempts[0]

    for node in nodes:
        node.always["ListEpisodes"] = edit(lose)
    assert "installed nowhere: r0-a1" in str(await fails(nodes))


async def test_a_participant_replaced_between_restore_and_resume_fails_the_restore(nodes: Nodes) -> None:
    await take(nodes, nodes.add(*episodes(1)))
    await crash(nodes)
    async with nodes.coordinator() as coordinator:
        with pytest.raises(RestoreFailed, match="agent/agent/0"):
            async with coordinator.restoring():
                await nodes["agent"].restart()
        assert nodes.all_open()
    assert all(node.episodes == set() for node in nodes)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
async def test_any_other_exit_retires_and_resumes(nodes: Nodes, kind: type[BaseException]) -> None:
    await take(nodes, nodes.add(*episodes(1)))
    await crash(nodes)
    raised = kind("the body's own")

    async def body() -> None:
        async with coordinator.restoring():
            raise raised

    async with nodes.coordinator() as coordinator:
        with pytest.raises(kind) as found:
            await body()
        assert found.value is raised
        assert nodes.all_open()
    assert all(node.episodes == set() for node in nodes)


async def test_a_resume_that_is_lost_is_sent_again_before_the_lease_frees_anything(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    await take(nodes, in_flight)
    await crash(nodes)
    nodes["agent"].script["Resume"] = [broken(), broken(after=True)]
    async with nodes.coordinator() as coordinator, coordinator.restoring():
        pass
    assert all(node.episodes == {in_flight[0].next()} for node in nodes)


async def test_a_part_of_the_scope_can_be_restored(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(3))
    await take(nodes, in_flight)
    await crash(nodes)
    async with nodes.coordinator() as coordinator:
        async with coordinator.restoring(scope=[in_flight[1]]) as restored:
            assert restored.continued == (in_flight[1].next(),)
        with pytest.raises(UsageError, match="does not continue x"):
            async with coordinator.restoring(scope=[EpisodeId("x")]):
                pytest.fail("the body was entered")


async def test_the_source_is_pinned_until_the_first_publication(nodes: Nodes) -> None:
    in_flight = nodes.add(*episodes(1))
    first = await take(nodes, in_flight)
    await crash(nodes)
    async with nodes.coordinator() as coordinator:
        async with coordinator.restoring() as restored:
            pass
        assert [pin.checkpoint_id for pin in coordinator.root.pins()] == [first.id]
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.commit(restored.continued)
            await checkpoint.publish()
        assert coordinator.root.pins() == ()


async def test_a_restore_is_told_as_an_event(nodes: Nodes) -> None:
    checkpoint = await take(nodes, nodes.add(*episodes(1)))
    await crash(nodes)
    async with nodes.coordinator() as coordinator, coordinator.restoring():
        pass
    told = [e.message for e in coordinator.events if e.kind is EventKind.RESTORE]
    assert told == [f"1 installed from {checkpoint.id}"]
