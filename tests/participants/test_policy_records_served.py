"""A policy model owner with its ledger behind a real control plane, on a real disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import CommitExtra, EpisodeListKind
from gym_ckpt_grpc.integrations.ledger_routes import LedgerRoutes
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StaleAttempt, StateCorrupt, StateUnwritable
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointLocation, LocalFiles, Part, read_part
from gym_ckpt_grpc.testing import Served, serve
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import HeldFiles, eventually
from tests.participants.fakes import R1, R2, R, S, call, spin
from tests.participants.policy_rig import FakeBackend, PolicyServer
from tests.participants.served_kinds import export_these
from tests.participants.test_policy_records import CUT, lines, with_cuts
from tests.participants.test_policy_records_export import ids, read
from tests.participants.test_policy_records_install import calls_of, ledger_of

S1 = EpisodeId("s", 1)
NAME = "inference-0"


class Life:
    """One process: the server, and its participant."""

    def __init__(self, server: PolicyServer, p: Served, files: HeldFiles) -> None:
        self.server = server
        self.p = p
        self.files = files

    @property
    def worker(self) -> FakeBackend:
        return self.server.backends[NAME]

    async def checkpoint(self, id: str, *episodes: EpisodeId) -> pb.CommitResponse:
        assert (await self.p.client.prepare(id)).phase == pb.PHASE_PREPARED
        reply = await self.p.client.commit(id, episodes)
        await self.p.client.resume(id)
        return reply

    async def restored(self, source: str, *episodes: EpisodeId) -> None:
        await self.p.client.restore(f"restore-{source}", episodes, source=source)
        await self.p.client.resume(f"restore-{source}")


@pytest.fixture
def live(tmp_path: Path) -> Callable[..., Any]:
    """Starts a life on one disk, with one inference worker that outlives it and one root for checkpoints."""
    worker = FakeBackend(NAME)

    @asynccontextmanager
    async def started(**options: Any) -> AsyncIterator[Life]:
        files = HeldFiles()
        server = PolicyServer(tmp_path / "ledger", worker, attach=False)
        async with serve(server.owner, service="policy", roots=[tmp_path / "root"], files=files, **options) as p:
            try:
                yield Life(server, p, files)
            finally:
                files.release()
                await server.end()

    (tmp_path / "root").mkdir()
    return started


def part_of(tmp_path: Path, id: str) -> Part:
    place = (ParticipantKind.POLICY_MODEL, "policy", "0")
    location = CheckpointLocation(str((tmp_path / "root").resolve()), id)
    return read_part(LocalFiles(), location, place, checkpoint_id=id)


@pytest.mark.behaviour("P111")
async def test_a_commit_writes_the_index_names_it_and_replies_with_it(live: Any, tmp_path: Path) -> None:
    async with live() as life:
        await life.server.turns(R, 2)
        running = await life.server.begin(S)
        reply = await life.checkpoint("c1", R, S)
        life.server.go.set()
        await running.end()
        cut = life.server.call_ids[2]
        of_r = sorted(f"r/{each}" for each in life.server.call_ids[:2])
        every = sorted([*of_r, f"cuts/s/{cut}/{cut}-1"])
        assert (reply.staging_keys.count, list(reply.staging_keys.first)) == (3, every)
        part = part_of(tmp_path, "c1")
        assert part.documents == {"staging_keys": {"r": of_r, "s": [f"cuts/s/{cut}/{cut}-1"]}}
        assert part.manifest.extra == {"staging_keys": {"count": 3, "digest": lines(every)}}
        assert reply.staging_keys.digest == lines(every)
        assert [file.label for file in part.manifest.files] == ["", "staging_keys"]


@pytest.mark.behaviour("P110")
async def test_a_commit_of_scope_all_is_refused_and_the_checkpoint_stays_open(live: Any) -> None:
    async with live() as life:
        await life.server.turns(R, 1)
        await life.p.client.prepare("c1")
        with pytest.raises(InvalidArgument) as caught:
            await life.p.client.commit("c1")
        assert caught.value.violations[0].field == "scope"
        assert (await life.p.client.commit("c1", [R])).record_count == 1


@pytest.mark.behaviour("P12", "P13")
async def test_a_failed_write_is_retried_with_the_same_records_and_its_cuts_stay(live: Any, tmp_path: Path) -> None:
    async with live() as life:
        running = await life.server.begin(R)
        await life.p.client.prepare("c1")
        life.files.fail("create", StateUnwritable("full"))
        with pytest.raises(StateUnwritable):
            await life.p.client.commit("c1", [R])
        life.server.go.set()
        await spin(20)  # the call finishes while closed: its finished cut is in no record any more
        life.files.fail("create", None)
        await life.p.client.commit("c1", [R])
        await life.p.client.resume("c1")
        await running.end()
        cut = read(part_of(tmp_path, "c1").records[0]).cuts[0]
        assert (cut.finish_reason, life.worker.released, list(life.worker.cuts)) == ("", [], [cut.cut_id])


@pytest.mark.behaviour("P153")
@pytest.mark.parametrize("reached", ["prepared", "captured"])
async def test_a_resume_without_a_durable_commit_releases_every_cut(live: Any, reached: str) -> None:
    async with live() as life:
        running = await life.server.begin(R)
        await life.p.client.prepare("c1")
        if reached == "captured":
            await life.p.client.capture("c1", [R])
        assert len(life.worker.cuts) == 1
        await life.p.client.resume("c1")
        await eventually(lambda: not life.worker.cuts)
        life.server.go.set()
        assert (await running.end()).status == 200


@pytest.mark.behaviour("P155", "P154")
@pytest.mark.parametrize("end", ["written", "dropped"])
async def test_after_a_keeping_resume_cuts_go_only_once_the_write_has_failed(live: Any, end: str) -> None:
    """Not at the Resume, not at a try that failed, and never if a later try succeeds."""
    async with live() as life:
        running = await life.server.begin(R)
        await life.p.client.prepare("c1")
        await life.p.client.capture("c1", [R])
        await life.p.client.resume("c1", keep_write=True)
        life.files.fail("create", StateUnwritable("full"))
        with pytest.raises(StateUnwritable):
            await life.p.client.commit("c1", [R])
        await spin()
        assert (len(life.worker.cuts), life.worker.released) == (1, [])
        life.files.fail("create", None)
        if end == "written":
            await life.p.client.commit("c1", [R])
        await life.p.client.resume("c1")
        await spin()
        assert len(life.worker.released) == (0 if end == "written" else 1)
        life.server.go.set()
        assert (await running.end()).status == 200


@pytest.mark.behaviour("P118", "P22", "P238")
async def test_a_commit_deletes_what_is_unstarted_and_outside_its_scope(live: Any) -> None:
    """Rows and cuts go without a fence; the started one keeps its ledger; nothing is pending afterwards."""
    async with live() as life:
        for episode in (R, S):
            await life.server.turns(episode, 1)
        running = await life.server.begin(S)
        await life.checkpoint("c1", R, S)
        life.server.go.set()
        await running.end()
    async with live() as life:
        await life.restored("c1", R, S)
        await life.server.turns(R1, 1)
        before = calls_of(life.server, R1)
        assert life.server.counts("restored_cuts") == (1,)
        reply = await life.checkpoint("c2")
        assert (reply.record_count, reply.deleting) == (0, 0)
        assert await life.p.client.listed(EpisodeListKind.RESTORED_PENDING) == []
        assert (calls_of(life.server, R1), calls_of(life.server, S1)) == (before, [])
        assert life.server.counts("restored_cuts") == (0,)
        await life.server.turns(S1, 1)
        assert len(calls_of(life.server, S1)) == 1


@pytest.mark.behaviour("P237", "P150", "P143")
async def test_rows_and_cuts_go_through_two_restores_unclaimed_and_are_used_by_the_third_attempt(
    live: Any, tmp_path: Path
) -> None:
    async with live() as life:
        conversation = await life.server.turns(R, 2)
        running = await life.server.begin(R, messages=conversation)
        await life.checkpoint("c1", R)
        first = life.server.call_ids
        life.server.go.set()
        await running.end()
    async with live() as life:
        await life.restored("c1", R)
        await life.checkpoint("c2", R1)
    again = part_of(tmp_path, "c2").records
    assert ([each.episode for each in again], ids(again[0])) == ([R1], first[:2])
    async with live() as life:
        await life.restored("c2", R1)
        life.server.go.set()
        assert (await life.server.call(R2, messages=conversation).end()).status == 200
        given = life.server.given[0]
        assert given is not None
        assert (given.source_capture_key, given.source_call_id) == ("r", first[2])
        manifest = ledger_of(life.server).manifest(R2)
        assert [each["capture_key"] for each in manifest["calls"]] == ["r", "r", "r-a2"]
        assert manifest["calls"][2]["parent_id"] == first[1]


@pytest.mark.behaviour("P239")
async def test_a_checkpoint_restored_twice_continues_from_it_both_times(live: Any) -> None:
    """With calls of the first replacement in between, and its crash."""
    async with live() as life:
        conversation = await life.server.turns(R, 1)
        await life.checkpoint("c1", R)
        first = life.server.call_ids
    for _ in range(2):
        async with live() as life:
            await life.restored("c1", R)
            assert calls_of(life.server, R1) == first
            life.server.go.set()
            await life.server.call(R1, messages=conversation).end()
            assert len(calls_of(life.server, R1)) == 2


@pytest.mark.behaviour("P122")
async def test_a_damaged_record_is_state_corrupt_and_installs_nothing(live: Any, tmp_path: Path) -> None:
    async with live() as life:
        export_these(life.server.owner, [with_cuts(CUT.to_json(), CUT.to_json() | {"cut_id": "more"})])
        life.server.owner.commit_extra = lambda records: CommitExtra()
        await life.checkpoint("c1", R)
    async with live() as life:
        with pytest.raises(StateCorrupt) as caught:
            await life.p.client.restore("restore", [R], source="c1")
        assert caught.value.episodes == (R,)
        assert await life.p.client.listed(EpisodeListKind.RESTORED_PENDING) == []


@pytest.mark.behaviour("P121", "P31")
async def test_a_retire_over_the_wire_fences_known_and_unknown_attempts(live: Any) -> None:
    """While a checkpoint is open too; and Forget lifts nothing."""
    async with live() as life:
        await life.server.turns(R, 1)
        await life.p.client.prepare("c1")
        await life.p.client.retire([R, S], id="c1")
        assert (await life.p.client.commit("c1", [])).record_count == 0
        await life.p.client.resume("c1")
        await life.p.client.forget({"r": 0, "s": 0})
        for episode in (R, S):
            with pytest.raises(StaleAttempt):
                ledger_of(life.server).manifest(episode)
        assert (await asyncio.to_thread(ledger_of(life.server).manifest, R1))["calls"] == []


@pytest.mark.behaviour("P120")
async def test_the_ledgers_routes_remove_nothing_while_closed_and_the_commit_has_the_rows(live: Any) -> None:
    """ADMISSION_CLOSED for a retire and a delete, reading goes on; after Resume they work."""
    async with live() as life:
        owner, ledger = life.server.owner, ledger_of(life.server)
        routes = LedgerRoutes(ledger, closed=lambda: owner.admission.closed, token=None, inner=life.server.app)
        await life.server.turns(R, 1)
        await life.p.client.prepare("c1")
        removals = {"retire": {"capture_keys": ["r"]}, "delete": {"rollout_ids": ["r"]}}
        for name, body in removals.items():
            refused = await call(routes, f"/ledger/{name}", body).end()
            assert (refused.status, refused.code) == (503, "ADMISSION_CLOSED")
        read_on = await call(routes, "/ledger/manifest/r", method="GET").end()
        assert (read_on.status, len(read_on.json()["calls"])) == (200, 1)
        assert (await life.p.client.commit("c1", [R])).record_count == 1
        await life.p.client.resume("c1")
        for name, body in removals.items():
            assert (await call(routes, f"/ledger/{name}", body).end()).status == 200
        assert calls_of(life.server, R) == []
