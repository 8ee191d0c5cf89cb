"""Reading over the wire: the fleet, the root's checkpoints, events; and deleting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue
from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator import Fleet, Server
from gym_ckpt_grpc.coordinator.served import CoordinatorServer
from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    InvalidArgument,
    PermissionDenied,
    StateNotFound,
    Unauthenticated,
    UsageError,
)
from gym_ckpt_grpc.storage import CheckpointRoot
from gymckpt.v1 import coordinator_pb2 as pb
from tests.coordinator.fleet_of_nodes import Nodes, episodes
from tests.coordinator.served.conftest import Served, serving, typed


@pytest.mark.behaviour("C258")
async def test_participants_are_listed_while_servers_are_down(nodes: Nodes) -> None:
    """One reply with a finding for each; nothing fails."""
    async with serving(nodes) as served:
        whole = await served.send("ListParticipants")
        assert [s.finding for s in whole.servers] == [pb.SERVER_FINDING_OK] * 4
        await nodes["env"].stop()
        await nodes["res"].stop()
        reply = await served.send("ListParticipants")
    found = {s.address: pb.ServerFinding.Name(s.finding).removeprefix("SERVER_FINDING_") for s in reply.servers}
    assert found == {
        nodes["env"].address: "DOWN",
        nodes["model"].address: "OK",
        nodes["agent"].address: "OK",
        nodes["res"].address: "DOWN",
    }
    assert all(s.message for s in reply.servers if s.finding == pb.SERVER_FINDING_DOWN)
    assert [s.status.participant.service for s in reply.servers if s.HasField("status")] == ["model", "agent"]


async def test_checkpoints_come_in_pages_newest_first(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    ids = [f"ck-{n}" for n in range(5)]
    numbers = [(await served.taken(in_flight, id)).sequence_number for id in ids]
    token, told, sizes = "", [], []
    while True:
        reply = await served.send("ListCheckpoints", page_size=2, page_token=token)
        told += [(c.checkpoint_id, c.sequence_number) for c in reply.checkpoints]
        sizes.append(len(reply.checkpoints))
        if not (token := reply.next_page_token):
            break
    assert told == list(zip(ids, numbers, strict=True))[::-1]
    assert sizes == [2, 2, 1]
    for token in ("x", "-1", "0", "9" * 30):
        assert isinstance(await served.refusal("ListCheckpoints", page_token=token), InvalidArgument)


async def test_one_that_cannot_be_read_is_listed_with_its_problem(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    for id in ("ck-1", "ck-2"):
        await served.taken(in_flight, id)
    spoil(served, "ck-1")
    newest, oldest = (await served.send("ListCheckpoints")).checkpoints
    assert (newest.checkpoint_id, newest.problem) == ("ck-2", "")
    assert oldest.checkpoint_id == "ck-1"
    assert "checkpoint.json" in oldest.problem


def directory_of(served: Served, id: str) -> Path:
    return Path(served.nodes.root, "checkpoints", id)


def spoil(served: Served, id: str) -> None:
    """Make its aggregate manifest unreadable."""
    (directory_of(served, id) / "checkpoint.json").write_text("junk")


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def sizes_of(directory: Path) -> list[int]:
    """Of every file but the intent, which no manifest names, and what is written for people, whenever that is done."""
    beside = ("intent.json", "events.jsonl")
    return [p.stat().st_size for p in directory.rglob("*") if p.is_file() and p.name not in beside and p.name[0] != "."]


def records_of(served: Served, id: str, node: str) -> Path:
    place = Path(served.nodes.root, "checkpoints", id, "participants", served.nodes[node].kind, node, "0")
    (file,) = place.glob("records-*.gck")
    return file


@pytest.mark.behaviour("C259")
async def test_verify_streams_findings_and_ends_with_a_verdict(served: Served) -> None:
    """Any changed byte of any file is found, with its file, and the episode where it is a record's."""
    in_flight = served.nodes.add(*episodes(2))
    await served.taken(in_flight)
    whole = await served.stream("VerifyCheckpoint", checkpoint_id="latest")
    verdict = whole[-1].verdict
    assert (len(whole), verdict.intact, verdict.finding_count) == (1, True, 0)
    directory = directory_of(served, "ck-1")
    sizes = sizes_of(directory)
    assert (verdict.file_count, verdict.bytes) == (len(sizes), sum(sizes)) == (10, sum(sizes))
    file = records_of(served, "ck-1", "agent")
    data = bytearray(file.read_bytes())
    at = data.index(b"agent")
    data[at] ^= 1  # a byte of a payload
    file.write_bytes(data)
    *findings, last = await served.stream("VerifyCheckpoint", checkpoint_id="ck-1")
    assert {m.finding.file for m in findings} == {str(file.relative_to(directory))}
    assert {m.finding.episode.rollout_id for m in findings} <= {"r0", "r1"}
    assert any(m.finding.episode.rollout_id for m in findings)
    assert (last.verdict.intact, last.verdict.finding_count) == (False, len(findings))
    with pytest.raises(StateNotFound):
        await served.stream("VerifyCheckpoint", checkpoint_id="none")


@pytest.mark.behaviour("C260")
async def test_what_is_held_is_not_deleted_and_the_holder_is_named(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    for id in ("ck-1", "ck-2", "ck-3", "ck-4"):
        await served.taken(in_flight, id)
    root = CheckpointRoot(str(served.nodes.root))
    root.pin("ck-2", epoch=served.coordinator.epoch)
    spoil(served, "ck-3")
    await served.prepared("open")
    for id, holder in (
        ("ck-4", "newest published"),
        ("ck-2", f"pinned by the restore of epoch {served.coordinator.epoch}"),
        ("ck-3", "cannot be read"),
        ("open", "is open"),
    ):
        error = await served.refusal("DeleteCheckpoint", checkpoint_id=id)
        assert isinstance(error, CheckpointConflict), id
        assert holder in error.message
        assert id in error.message
    assert isinstance(await served.refusal("DeleteCheckpoint", checkpoint_id="none"), StateNotFound)
    assert isinstance(await served.refusal("DeleteCheckpoint", checkpoint_id="latest"), InvalidArgument)
    for _ in range(2):  # deleted already is no error
        assert (await served.send("DeleteCheckpoint", checkpoint_id="ck-1")).checkpoint_id == "ck-1"
    assert names_in(served.nodes.root / "checkpoints") == ["ck-2", "ck-3", "ck-4"]
    assert [c.checkpoint_id for c in (await served.send("ListCheckpoints")).checkpoints] == ["ck-4", "ck-3", "ck-2"]
    assert isinstance(await served.refusal("GetCheckpoint", checkpoint_id="ck-1"), StateNotFound)


async def test_the_source_of_an_open_restore_is_held(served: Served) -> None:
    in_flight = served.nodes.add(*episodes(1))
    for id in ("ck-1", "ck-2"):
        await served.taken(in_flight, id)
    for node in served.nodes:
        await node.restart()
    await served.send("RestoreCheckpoint", checkpoint_id="ck-1", restore_id="re-1")
    assert isinstance(await served.refusal("DeleteCheckpoint", checkpoint_id="ck-1"), CheckpointConflict)
    await served.send("ResumeCheckpoint", checkpoint_id="re-1")
    assert isinstance(await served.refusal("DeleteCheckpoint", checkpoint_id="ck-1"), CheckpointConflict)
    restored = [episode.next() for episode in in_flight]
    await served.taken(restored, "ck-3")  # the restored run has published: nothing holds its source any more
    await served.send("DeleteCheckpoint", checkpoint_id="ck-1")


async def test_events_are_watched_from_a_number_on(served: Served) -> None:
    await served.prepared("ck-1")
    last = served.coordinator.events.last
    call = served.stub.WatchEvents(pb.WatchEventsRequest(from_number=last), timeout=20)
    first: Any = await call.read()
    assert first.event.number == last
    assert first.event.epoch == served.coordinator.epoch
    await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
    second: Any = await call.read()
    assert (second.event.number, second.event.kind) == (last + 1, pb.EVENT_KIND_RESUME)
    call.cancel()
    beyond: Any = await served.stub.WatchEvents(pb.WatchEventsRequest(from_number=10_000), timeout=20).read()
    assert beyond.event.number == 1  # the service was restarted since: everything that is remembered


@pytest.mark.behaviour("C207")
async def test_progress_of_a_stage_is_pushed_while_it_runs(served: Served) -> None:
    """How many blockers are left, each time that changes; the Prepare itself has not replied."""
    first, second = served.nodes.add(*episodes(2))
    env = served.nodes["env"].owner
    env.running.update((first, second))
    prepare = asyncio.create_task(served.prepared("ck-1"))
    texts = []
    async for message in served.stub.WatchEvents(pb.WatchEventsRequest(), timeout=20):
        if message.event.kind != pb.EVENT_KIND_STAGE:
            continue
        texts.append(message.event.message)
        assert message.event.checkpoint_id == "ck-1"
        if "2 blockers" in texts[-1]:
            env.park(first)
        elif "1 blockers" in texts[-1]:
            assert not prepare.done()
            env.park(second)
        elif "resources" in texts[-1]:
            break
    await prepare
    assert texts[:2] == [f"environment: 0 of 1 prepared so far, {left} blockers left" for left in (2, 1)]
    assert "environment: 1 of 1 prepared" in texts


async def test_roles_health_and_addresses_are_those_of_a_participant(nodes: Nodes) -> None:
    tokens = {Role.CONTROLLER: TokenValue("token-of-controller"), Role.OBSERVER: TokenValue("token-of-observer")}
    authenticator = Authenticator(tokens)
    async with serving(nodes, authenticator=authenticator, token=tokens[Role.OBSERVER]) as served:
        assert len((await served.send("ListParticipants")).servers) == 4
        assert isinstance(await served.refusal("PrepareCheckpoint"), PermissionDenied)
        with pytest.raises(PermissionDenied):
            await served.stream("RunCheckpoint", in_flight=wire.episode_list([]))
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        request = health_pb2.HealthCheckRequest(service="gymckpt.v1.CoordinatorService")
        assert (await health.Check(request, timeout=5)).status == health_pb2.HealthCheckResponse.SERVING
        async with grpc.aio.insecure_channel(served.server.address) as stranger:
            with pytest.raises(Unauthenticated):
                await typed(Served(nodes, served.coordinator, served.server, stranger).send("ListParticipants"))
    async with nodes.coordinator() as coordinator:
        with pytest.raises(UsageError, match="not local"):
            CoordinatorServer(coordinator, "0.0.0.0:0")


async def test_a_block_of_the_same_process_is_in_the_way(served: Served) -> None:
    async with served.coordinator.checkpoint(checkpoint_id="inside"):
        error = await served.refusal("PrepareCheckpoint", checkpoint_id="ck-1")
    assert isinstance(error, CheckpointConflict)
    assert error.active_checkpoint_id == "inside"


@pytest.mark.behaviour("C197")
async def test_a_name_stands_for_all_its_addresses(tmp_path: Path) -> None:
    """One participant per address; too few are counted, whichever way they are missing."""
    nodes = await Nodes(tmp_path / "root").start("model")
    for n in range(4):
        await nodes.start(f"env-{n}", service="math-env", instance=str(n))
    envs = [nodes[f"env-{n}"] for n in range(4)]
    answers = [node.address for node in envs]
    asked = []

    async def resolver(host: str, port: int) -> list[str]:
        asked.append((host, port))
        if not answers:
            raise OSError("no such name")
        return answers

    pool = Server(kind="environment", service="math-env", address="dns:///math-env.pool:7000", instances=4)
    fleet = Fleet([pool, nodes["model"].server], resolver=resolver)
    try:
        async with serving(nodes, coordinator={"fleet": fleet}) as served:
            reply = await served.prepared("ck-1")
            assert [(o.participant.service, o.participant.instance) for o in reply.outcomes] == [
                *(("math-env", str(n)) for n in range(4)),
                ("model", "0"),
            ]
            assert set(asked) == {("math-env.pool", 7000)}
            await served.send("ResumeCheckpoint", checkpoint_id="ck-1")
            await envs[3].stop()
            reply = await served.send("PrepareCheckpoint", checkpoint_id="ck-2")
            assert "3 of 4 of math-env" in reply.error.message
            assert envs[3].address in reply.error.message
            await served.send("ResumeCheckpoint", checkpoint_id="ck-2")
            answers.pop()
            reply = await served.send("PrepareCheckpoint", checkpoint_id="ck-3")
            assert "3 of 4 of math-env" in reply.error.message
            await served.send("ResumeCheckpoint", checkpoint_id="ck-3")
            answers.clear()
            reply = await served.send("ListParticipants")
            assert [s.finding for s in reply.servers] == [pb.SERVER_FINDING_DOWN, pb.SERVER_FINDING_OK]
            assert "no such name" in reply.servers[0].message
    finally:
        await nodes.stop()
