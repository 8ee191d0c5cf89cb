"""An open checkpoint or restore goes from one coordinator to the next: one epoch, one order, no Resume between."""

from __future__ import annotations

import msgspec
import pytest

from gym_ckpt_grpc.coordinator import (
    Checkpoint,
    CheckpointState,
    CommitFailed,
    Coordinator,
    Fleet,
    NotPrepared,
    Restoration,
    RestoreFailed,
    Server,
    SessionState,
    Step,
)
from gym_ckpt_grpc.protocol.errors import LeaseLost, StaleController, StateUnwritable, UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, read_episodes
from tests.coordinator.fleet_of_nodes import Nodes, refuse

EPISODES = tuple(EpisodeId(f"{number}-0", number % 2) for number in range(4))


def passed_on(state: SessionState) -> Coordinator:
    """Through its JSON form, as another process gets it."""
    return Coordinator.attach(SessionState.from_json(state.to_json()), exit_timeout=10.0)


def checkpoint_of(coordinator: Coordinator) -> Checkpoint:
    block = coordinator.attached(deadline=20)
    assert isinstance(block, Checkpoint)
    return block


def restore_of(coordinator: Coordinator) -> Restoration:
    block = coordinator.attached(deadline=20)
    assert isinstance(block, Restoration)
    return block


async def prepared(nodes: Nodes, **options: float) -> SessionState:
    async with nodes.coordinator(**options) as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        return await checkpoint.detach()


async def committed(nodes: Nodes, scope: tuple[EpisodeId, ...], **options: float) -> SessionState:
    async with passed_on(await prepared(nodes, **options)) as coordinator, checkpoint_of(coordinator) as checkpoint:
        await checkpoint.commit(scope)
        return await checkpoint.detach()


async def published(nodes: Nodes, scope: tuple[EpisodeId, ...]) -> str:
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        await checkpoint.prepare(ready_within=5)
        await checkpoint.commit(scope)
        await checkpoint.publish()
    return checkpoint.id


async def test_each_step_in_a_process_of_its_own(nodes: Nodes) -> None:
    """The same calls, each once, under one epoch; closed from the first Prepare to the one Resume."""
    nodes.add(*EPISODES)
    state = await committed(nodes, EPISODES)
    assert nodes.phases() == {"COMMITTED"}
    async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
        number = await checkpoint.publish()
        state = await checkpoint.detach()
    assert nodes.phases() == {"COMMITTED"}
    async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
        assert nodes.journal.begun("Resume") == []
    assert checkpoint.result is not None
    assert (checkpoint.result.state, checkpoint.result.sequence_number) == (CheckpointState.PUBLISHED, number)
    assert nodes.all_open()
    for method in ("Prepare", "Capture", "Commit", "Resume"):
        assert sorted(nodes.journal.begun(method)) == ["agent", "env", "model", "res"]
    root = CheckpointRoot(str(nodes.root))
    assert [entry.kind for entry in root.sequence.entries()] == ["claim", "publication", "release"]  # type: ignore[union-attr]
    found = root.find()
    assert found.manifest.epoch == 1
    assert read_episodes(root.files, found.location, found.manifest).continued == EPISODES


async def test_the_state_is_strict_json(nodes: Nodes) -> None:
    state = await prepared(nodes)
    assert SessionState.from_json(state.to_json()) == state
    assert state.step is Step.PREPARED
    assert {member.held for member in state.members} == {True}
    assert 0 < state.lease_left <= 30
    plain = msgspec.json.decode(state.to_json())
    for spoilt in ({"schema_version": 2}, {"format": "x"}, {"extra": 1}, {"epoch": 0}, {"scope": ["bad id"]}):
        with pytest.raises(UsageError, match="no session"):
            SessionState.from_json(msgspec.json.encode({**plain, **spoilt}))
    with pytest.raises(UsageError, match="no session"):
        SessionState.from_json(b"{")


async def test_a_lease_that_ended_between_is_lost_by_name_and_ends_the_checkpoint(nodes: Nodes) -> None:
    """The participants opened by themselves; one that still holds it is resumed."""
    nodes.add(*EPISODES)
    state = await prepared(nodes, lease_ttl=0.5)
    for node in nodes:
        await node.owner.opened.wait()
    with pytest.raises(LeaseLost, match="env"):
        async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
            await checkpoint.commit(EPISODES)
    assert nodes.journal.begun("Capture") == []
    assert sorted(nodes.journal.begun("Resume")) == ["agent", "env", "model", "res"]
    assert nodes.all_open()


async def test_one_participant_that_started_anew_is_a_lost_lease(nodes: Nodes) -> None:
    nodes.add(*EPISODES)
    state = await prepared(nodes)
    await nodes["agent"].restart()
    with pytest.raises(LeaseLost, match="agent/agent/0"):
        async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
            await checkpoint.commit(EPISODES)
    assert nodes.all_open()


async def test_a_lease_that_is_gone_at_the_end_of_a_step_is_not_handed_on(nodes: Nodes) -> None:
    """The step says so itself, and reopens, instead of leaving it to the next one."""

    async def step() -> None:
        async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await nodes["res"].restart()
            await checkpoint.detach()

    with pytest.raises(LeaseLost, match="resources/res/0"):
        await step()
    assert nodes.all_open()


async def test_what_is_committed_is_published_after_its_leases_ended(nodes: Nodes) -> None:
    """The data are durable, and only the epoch still matters."""
    nodes.add(*EPISODES)
    state = await committed(nodes, EPISODES, lease_ttl=0.5)
    for node in nodes:
        await node.owner.opened.wait()
    async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
        assert await checkpoint.publish() == 2
        state = await checkpoint.detach()
    assert {member.held for member in state.members} == {False}


@pytest.mark.parametrize("at_participants", [True, False])
async def test_a_replaced_controller_makes_no_call(nodes: Nodes, at_participants: bool) -> None:
    """Whether the root tells it or the participants do."""
    nodes.add(*EPISODES)
    state = await prepared(nodes)
    if at_participants:
        async with nodes.coordinator(controller_id="other", root=str(nodes.root.with_name("elsewhere"))):
            pass
    else:
        CheckpointRoot(str(nodes.root)).sequence.claim("other", "other")
    before = len(nodes.journal)
    with pytest.raises(StaleController):
        async with passed_on(state) as coordinator, checkpoint_of(coordinator):
            raise AssertionError("never entered")
    later = {entry.method for entry in nodes.journal[before:]}
    assert later == ({"RenewLease"} if at_participants else set())


async def test_a_block_that_fails_after_detach_reopens_as_ever(nodes: Nodes) -> None:
    """Such as when the state could not be written."""

    async def failing() -> None:
        async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=5)
            await checkpoint.detach()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        await failing()
    assert nodes.all_open()
    assert CheckpointRoot(str(nodes.root)).sequence.epoch() == (1, True)


async def test_prepared_again_after_it_was_not_ready(nodes: Nodes) -> None:
    nodes.add(*EPISODES)
    nodes["model"].owner.run(EPISODES[0])
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        with pytest.raises(NotPrepared):
            await checkpoint.prepare(ready_within=0.3)
        state = await checkpoint.detach()
    assert state.step is Step.PREPARING
    assert [member.service for member in state.members if member.held] == ["env", "model"]
    nodes["model"].owner.park(EPISODES[0])
    async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
        report = await checkpoint.prepare(ready_within=5)
        assert report.ready
    assert nodes.all_open()


async def test_what_prepare_learned_reaches_the_manifest(nodes: Nodes) -> None:
    """A restart that only the first process heard of is in no scope, and is listed."""
    nodes.add(*EPISODES)
    nodes["agent"].owner.restarts.add(EPISODES[1])
    async with passed_on(await prepared(nodes)) as coordinator, checkpoint_of(coordinator) as checkpoint:
        await checkpoint.commit(checkpoint.report.continued(EPISODES))
        state = await checkpoint.detach()
    async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
        await checkpoint.publish()
    root = CheckpointRoot(str(nodes.root))
    found = root.find()
    assert read_episodes(root.files, found.location, found.manifest).restarts == {EPISODES[1]: "restart"}


async def test_a_commit_that_failed_is_sent_again_with_what_was_captured(nodes: Nodes) -> None:
    """The Capture is replayed, what it left out included; another scope is refused and sends nothing."""
    nodes.add(*EPISODES)
    nodes["agent"].owner.left_out.add(EPISODES[2])
    nodes["agent"].always["Commit"] = refuse(StateUnwritable("disk full"))
    async with passed_on(await prepared(nodes)) as coordinator:
        block = coordinator.attached(deadline=2)
        assert isinstance(block, Checkpoint)
        async with block as checkpoint:
            with pytest.raises(CommitFailed):
                await checkpoint.commit(EPISODES)
            nodes["agent"].always.clear()
            state = await checkpoint.detach()
    assert (state.step, state.scope) == (Step.CAPTURED, tuple(episode.capture_key for episode in EPISODES))
    async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
        with pytest.raises(UsageError, match="another one"):
            await checkpoint.commit(EPISODES[:1])
        nodes["agent"].owner.left_out.clear()  # the reply is replayed: it is not asked anew
        await checkpoint.commit(EPISODES)
        assert {outcome.answer.replayed for outcome in checkpoint.outcomes["Capture"]} == {True}
        assert checkpoint.restarts == {EPISODES[2]: "left_out"}
        await checkpoint.publish()
    assert nodes.all_open()


async def test_a_process_that_died_after_its_publication(nodes: Nodes) -> None:
    """The state still says committed: the exit reads the root before it says what it ended."""
    nodes.add(*EPISODES)
    state = await committed(nodes, EPISODES)
    async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
        number = await checkpoint.publish()
        await checkpoint.detach()  # and the state of it is lost
    async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
        pass
    assert checkpoint.result is not None
    assert (checkpoint.result.state, checkpoint.result.sequence_number) == (CheckpointState.PUBLISHED, number)


async def test_a_process_that_died_while_it_prepared_can_only_be_ended(nodes: Nodes) -> None:
    async with nodes.coordinator() as coordinator, coordinator.checkpoint() as checkpoint:
        state = checkpoint.state()
        assert (state.step, state.members) == (Step.NEW, ())
        await checkpoint.prepare(ready_within=5)
        await checkpoint.detach()  # and the state of it is lost
    assert nodes.phases() == {"PREPARED"}
    async with passed_on(state) as coordinator, checkpoint_of(coordinator) as checkpoint:
        with pytest.raises(UsageError, match="abandoned"):
            await checkpoint.prepare()
    assert nodes.all_open()


async def test_marks_go_along(nodes: Nodes) -> None:
    """A participant that starts anew later still gets them; one that has them already does not."""
    nodes.add(*EPISODES)
    async with passed_on(await prepared(nodes)) as coordinator, checkpoint_of(coordinator) as checkpoint:
        await coordinator.retire([EPISODES[3]])
        state = await checkpoint.detach()
    assert state.marks == {EPISODES[3].rollout_id: EPISODES[3].attempt}
    await nodes["res"].restart()
    before = len(nodes.journal)
    async with passed_on(state) as coordinator, checkpoint_of(coordinator):
        with pytest.raises(Exception, match="INVALID_PHASE"):  # a checkpoint is open: no Forget now
            await coordinator.forget({EPISODES[3].rollout_id: 0})
    retired = [entry.node for entry in nodes.journal[before:] if entry.method == "Retire" and entry.what == "begin"]
    assert retired == ["res"]


async def test_a_restore_goes_to_the_process_that_resumes_it(nodes: Nodes) -> None:
    nodes.add(*EPISODES)
    source = await published(nodes, EPISODES)
    for node in nodes:
        await node.restart()
    async with nodes.coordinator() as coordinator, coordinator.restoring() as restored:
        installed = restored.continued
        state = await restored.detach()
    assert nodes.phases() == {"RESTORED"}
    assert CheckpointRoot(str(nodes.root)).sequence.epoch() == (state.epoch, False)
    assert (state.purpose, state.source, state.targets) == (
        "restore",
        source,
        tuple(episode.capture_key for episode in installed),
    )
    async with passed_on(state) as coordinator, restore_of(coordinator) as restored:
        assert restored.source_checkpoint_id == source
    assert nodes.all_open()
    for node in nodes:
        assert set(installed) == node.owner.pending


@pytest.mark.parametrize("died", [False, True])
async def test_a_restore_that_is_not_wanted_is_freed_everywhere(nodes: Nodes, died: bool) -> None:
    """By an exception in the block; or since the process that restored died before it could say what it installed."""
    nodes.add(*EPISODES)
    await published(nodes, EPISODES)
    for node in nodes:
        await node.restart()
    async with nodes.coordinator() as coordinator:
        restoration = coordinator.restoring()
        unfinished = restoration.state()
        async with restoration as restored:
            state = await restored.detach()

    async def going_on() -> None:
        async with passed_on(unfinished if died else state) as coordinator, restore_of(coordinator):
            if not died:
                raise RuntimeError("the trainer's state does not fit")

    with pytest.raises(RestoreFailed if died else RuntimeError):
        await going_on()
    assert nodes.all_open()
    assert all(not node.owner.live for node in nodes)


async def test_detach_needs_something_open(nodes: Nodes) -> None:
    nodes.add(*EPISODES)
    async with nodes.coordinator() as coordinator:
        with pytest.raises(UsageError, match="not attached"):
            coordinator.attached()
        async with coordinator.checkpoint() as checkpoint:
            with pytest.raises(UsageError, match="detach"):
                await checkpoint.detach()
        with pytest.raises(UsageError, match="detach"):
            await checkpoint.detach()


def test_a_fleet_reads_back_equal() -> None:
    """Every field of every server, whatever it is."""
    fleet = Fleet(
        [
            Server(
                kind="resources",
                service="sandbox",
                address="unix:sandbox.sock",
                instance="a",
                instances=2,
                required=False,
                used_by=("math",),
                capabilities=("fork",),
                protocol_minor=0,
            ),
            Server(service="judge", address="judge:7000", participant=False),
        ],
        require_kinds=["resources"],
    )
    assert Fleet.from_mapping(fleet.to_mapping()) == fleet
