"""The conformance kit: what it says of healthy participants, and of those broken on purpose."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.participants import ResourcesMode, ResourcesOwner, ResourcesSettings
from gym_ckpt_grpc.protocol import EpisodeId, ParticipantKind
from gym_ckpt_grpc.protocol.errors import CheckpointConflict, PermissionDenied, Unauthenticated, UsageError
from gym_ckpt_grpc.testing import (
    CHECKS,
    FakeOwner,
    Report,
    Result,
    Served,
    Unreachable,
    Verdict,
    run_conformance,
    serve,
)
from tests.testing.broken import CONTROLLER, FAULTS, OBSERVER, Fault, serve_broken

LISTS = Path(__file__).parents[2] / "docs" / "behaviour" / "control.md"
TOKENS: dict[str, Any] = {"token": CONTROLLER, "observer_token": OBSERVER}


def unbroken(report: Report) -> None:
    """Nothing is broken, and nothing was left behind."""
    assert [str(result) for result in report.of(Verdict.BROKEN)] == []
    assert report.left == ()
    assert report.ok


def skipped(report: Report) -> set[str]:
    """Names of the checks that were skipped."""
    return {result.check.name for result in report.of(Verdict.SKIPPED)}


@asynccontextmanager
async def fake(tmp_path: Path, owner: FakeOwner | None = None) -> AsyncIterator[Served]:
    async with serve(owner or FakeOwner(), roots=[tmp_path], **TOKENS) as served:
        yield served


def test_the_kit_looks_at_sixty_behaviours_of_the_list() -> None:
    """Each check names behaviours that stand in docs/behaviour/control.md, and has a name and a title of its own."""
    known = set(re.findall(r"^- ([A-Z]\d+) ", LISTS.read_text(encoding="utf-8"), re.MULTILINE))
    ids = {i for check in CHECKS for i in check.ids}
    assert ids <= known
    assert len(ids) >= 60
    assert len({check.name for check in CHECKS}) == len(CHECKS) == len({check.title for check in CHECKS})
    assert all(check.ids and check.title and check.group for check in CHECKS)


async def test_a_healthy_participant_passes_fully(tmp_path: Path) -> None:
    """With episodes at boundaries, restarts and expendable ones: only what needs a blocker is skipped."""
    owner = FakeOwner()
    kept = owner.add("kept-1", "kept-2-a3")
    owner.add("restart", restart=True)
    expendable = owner.add("spare-1", "spare-2", "spare-3")
    async with fake(tmp_path, owner) as served:
        seen: list[Result] = []
        report = await run_conformance(
            served.address, root=str(tmp_path), expendable=expendable, on_result=seen.append, **TOKENS
        )
        unbroken(report)
        assert skipped(report) == {"missed_prepare", "blockers", "resume_ends_wait"}
        assert len(report.ids(Verdict.HOLDS)) >= 80
        assert seen == list(report.results)
        assert len(report.results) == len(CHECKS)
        status = await served.client.status()
        assert status.marks_held == status.restored_pending == 0
    assert owner.open
    assert set(owner.live) == {*kept, EpisodeId("restart")}
    assert list((tmp_path / "checkpoints").iterdir()) == []


async def test_a_participant_without_episodes_passes(tmp_path: Path) -> None:
    """No episodes, no token, no root: what needs them is skipped, with the reason."""
    async with serve(FakeOwner(), address=f"unix:{tmp_path}/s") as served:
        report = await run_conformance(served.address, only=["C7", "C17", "C36", "C78", "C312", "C316", "C93"])
        unbroken(report)
        reasons = {result.check.name: result.why for result in report.of(Verdict.SKIPPED)}
        assert set(reasons) == {
            *("commit_reply", "lost_storage_replies", "wrong_token", "observers", "pending_outside")
        }
        assert "--root" in reasons["commit_reply"]
        assert "no credentials" in reasons["wrong_token"]


async def test_a_blocked_participant_passes(tmp_path: Path) -> None:
    """Executions that never park: what needs a safe cut is skipped, and what is said of blockers is looked at."""
    owner = FakeOwner()
    running = owner.add("busy-1", "busy-2", running=True)
    async with fake(tmp_path, owner) as served:
        report = await run_conformance(served.address, root=str(tmp_path), ready_within=0.3, **TOKENS)
        unbroken(report)
        assert {"C32", "C47", "C48", "C50", "C55"} <= set(report.ids(Verdict.HOLDS))
        assert "2 executions block" in next(r.why for r in report.results if r.check.name == "prepare_replayed")
    assert owner.open
    assert owner.running == set(running)


@pytest.mark.parametrize("kind", list(ParticipantKind))
async def test_pending_episodes_survive(tmp_path: Path, kind: ParticipantKind) -> None:
    """Restored episodes that nothing has started yet are in every scope, so no Commit of the kit frees them."""
    owner = FakeOwner(kind)
    episodes = owner.add("waiting-a1", "waiting-too-a1")
    owner.pending.update(episodes)
    async with fake(tmp_path, owner) as served:
        only = ["C31", "C33", "C61", "C78", "C79", "C81", "C88", "C115", "C118", "C130", "C10", "C36"]
        if kind is not ParticipantKind.POLICY_MODEL:
            only.append("C94")
        unbroken(await run_conformance(served.address, root=str(tmp_path), only=only, **TOKENS))
    assert owner.pending == set(episodes) == set(owner.live)


class Sessions:
    """Hooks of a resources server."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    async def export_sessions(self, session_ids: Any) -> dict[str, int]:
        return {key: self.counts[key] for key in session_ids}

    async def restore_sessions(self, sessions: Any) -> None:
        self.counts.update({each.session_id: each.state for each in sessions})

    async def retire_session(self, session_id: str) -> None:
        self.counts.pop(session_id, None)


async def test_a_resources_participant_passes_fully(tmp_path: Path) -> None:
    """A ResourcesOwner with sessions, of which two are expendable: their state is freed, the third one's stays."""
    hooks = Sessions()
    owner = ResourcesOwner(hooks, ResourcesSettings(mode=ResourcesMode.EXPORTED))
    async with serve(owner, roots=[tmp_path], **TOKENS) as served:
        for name in ("one", "two", "kept"):
            hooks.counts[name] = 3
            owner.session_started(name, EpisodeId(name))
        report = await run_conformance(
            served.address, root=str(tmp_path), expendable=[EpisodeId("one"), EpisodeId("two")], **TOKENS
        )
        unbroken(report)
        assert skipped(report) == {"missed_prepare", "blockers", "resume_ends_wait", "restarts"}
    assert hooks.counts == {"kept": 3}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_broken_participant_is_found(tmp_path: Path, name: str) -> None:
    """Each id that the fault breaks is reported as broken, with what was expected and what was seen."""
    fault = FAULTS[name]
    async with serve_broken(fault, tmp_path) as (address, expendable):
        report = await run_conformance(
            address, root=str(tmp_path), expendable=expendable, only=fault.ids, ready_within=1.0, **TOKENS
        )
    assert not report.ok
    assert set(fault.ids) <= set(report.ids(Verdict.BROKEN))
    assert all(result.expected and result.seen for result in report.of(Verdict.BROKEN))


async def test_the_broken_server_is_sound_without_a_fault(tmp_path: Path) -> None:
    """What the broken ones are made of passes: it is the fault that the kit finds."""
    ids = [i for fault in FAULTS.values() for i in fault.ids]
    async with serve_broken(Fault(ids), tmp_path) as (address, expendable):
        unbroken(await run_conformance(address, root=str(tmp_path), expendable=expendable, only=ids, **TOKENS))


# ---- before anything is done


async def test_an_open_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """Somebody's checkpoint is open: the kit refuses to run, names it, and changes nothing."""
    async with fake(tmp_path) as served:
        await served.client.prepare("theirs", controller="trainer")
        before = await served.client.status()
        with pytest.raises(CheckpointConflict, match="theirs of trainer"):
            await run_conformance(served.address, **TOKENS)
        after = await served.client.status()
        assert (after.active_checkpoint_id, after.highest_epoch) == ("theirs", before.highest_epoch)
        await served.client.resume("theirs", controller="trainer")


async def test_the_token_must_be_good_and_a_controllers(tmp_path: Path) -> None:
    """Refused credentials end the run before any check."""
    async with fake(tmp_path) as served:
        with pytest.raises(Unauthenticated):
            await run_conformance(served.address, token="wrong")
        with pytest.raises(PermissionDenied):
            await run_conformance(served.address, token=OBSERVER)


async def test_a_server_that_is_not_there() -> None:
    """Unreachable, naming the address."""
    async with serve(FakeOwner()) as served:
        address = served.address
    with pytest.raises(Unreachable, match=address):
        await run_conformance(address)


async def test_only_must_name_a_check() -> None:
    """A mistyped id is a usage error."""
    with pytest.raises(UsageError, match="C9999"):
        await run_conformance("127.0.0.1:1", only=["C7", "C9999"])


async def test_a_later_run_passes_on_the_same_process(tmp_path: Path) -> None:
    """The epoch of each run is above all before it, and ids never repeat."""
    async with fake(tmp_path) as served:
        for _ in range(2):
            unbroken(await run_conformance(served.address, root=str(tmp_path), only=["C19", "C22", "C78"], **TOKENS))
