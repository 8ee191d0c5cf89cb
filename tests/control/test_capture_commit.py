"""Capture and Commit: one capture and one write per checkpoint, whoever asks how often."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_ckpt_grpc.control import ControlSettings, HookFailed
from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    ControlError,
    ExportFailed,
    IncarnationChanged,
    InternalError,
    InvalidArgument,
    InvalidPhase,
    OutOfTime,
    RestartInScope,
    StateNotFound,
    StateUnwritable,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.storage import CheckpointLocation, LocalFiles, read_part
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import Participant, ScriptedOwner, running, unreplayed

A, B = EpisodeId("a"), EpisodeId("b")


def stored(p: Participant, checkpoint_id: str = "c1") -> dict[EpisodeId, object]:
    """What a checkpoint has of this participant."""
    part = read_part(
        LocalFiles(),
        CheckpointLocation(str(p.root.resolve()), checkpoint_id),
        p.identity.place,
        checkpoint_id=checkpoint_id,
    )
    return {record.episode: record.decode("state") for record in part.records}


@pytest.mark.behaviour("C78", "C79", "C101")
async def test_a_commit_and_its_replay(tmp_path: Path) -> None:
    """Digest, counts and bytes; the repeated one is identical and nothing is written again."""
    async with Participant(tmp_path) as p:
        p.add("a", "b")
        await p.prepare()
        first = await p.commit([A, B, EpisodeId("elsewhere")])
        assert len(first.manifest_digest) == 64
        assert (first.record_count, first.without_record_count, first.replayed) == (2, 1, False)
        assert first.bytes > 0
        assert await p.phase() == "COMMITTED"
        calls = len(p.files.calls)
        second = await p.commit([EpisodeId("elsewhere"), B, A])
        assert second.replayed
        assert unreplayed(second) == first
        assert len([c for c in p.files.calls[calls:] if not c.startswith("open")]) == 0
        assert stored(p) == {A: {"name": "a"}, B: {"name": "b"}}
        assert await p.listed(pb.EPISODE_LIST_KIND_COMMITTED, "c1") == [A, B]
        assert await p.listed(pb.EPISODE_LIST_KIND_WITHOUT_RECORD, "c1") == [EpisodeId("elsewhere")]


@pytest.mark.behaviour("C80", "C81", "C31")
async def test_a_capture_freezes(tmp_path: Path) -> None:
    """What happens to live state afterwards is not in what Commit writes; the capture ran once."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        first = await p.capture([A])
        assert (first.record_count, await p.phase()) == (1, "CAPTURED")
        p.owner.live[A] = {"name": "changed"}
        again = await p.capture([A])
        assert again.replayed
        assert unreplayed(again) == first
        with pytest.raises(CheckpointConflict):
            await p.capture()
        with pytest.raises(CheckpointConflict):
            await p.commit()
        await p.commit([A])
        assert p.owner.exports.count == 1
        assert stored(p) == {A: {"name": "a"}}


@pytest.mark.behaviour("C82")
async def test_not_ready_any_more(tmp_path: Path) -> None:
    """Refused naming the blockers, nothing written at all, not even a directory; after a Prepare it works."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.owner.running.add(A)
        with pytest.raises(InvalidPhase) as caught:
            await p.commit(epoch=7)
        assert (caught.value.episodes, caught.value.episode_count) == ((A,), 1)
        status = await p.status()
        assert (status.phase, status.highest_epoch) == (pb.PHASE_PREPARING, 1)
        assert not (tmp_path / "checkpoints").exists()
        assert p.files.calls == []
        async with running(p.prepare(within=4)) as call:
            p.owner.park(A)
            await call
        assert (await p.commit()).record_count == 1


@pytest.mark.behaviour("C83", "C84", "C85", "C89", "C13", "C87", "C105", "C125")
async def test_a_write_that_outlives_its_call(tmp_path: Path) -> None:
    """DEADLINE_EXCEEDED, phase COMMITTING; retries join the one write and get the right manifest."""
    async with Participant(tmp_path) as p:
        p.add("a", "b")
        await p.prepare()
        p.files.hold("create")
        with pytest.raises(OutOfTime, match="commit"):
            await p.commit([A, B], timeout=0.6)
        p.owner.live[A] = {"name": "changed"}
        async with running(p.commit([B, A])) as retry:
            async with asyncio.timeout(1):
                status = await p.status()
                assert (status.phase, list(status.writes_under_way)) == (pb.PHASE_COMMITTING, ["c1"])
                assert status.progress.operation == "commit"
                assert (await p.renew()).phase == pb.PHASE_COMMITTING
            for other in (p.commit([A]), p.commit([A, B], stop=True)):
                with pytest.raises(CheckpointConflict):
                    await other
            p.files.release()
            reply = await retry
        assert reply.record_count == 2
        assert await p.phase() == "COMMITTED"
        assert (await p.commit([A, B])).manifest_digest == reply.manifest_digest
        assert p.owner.exports.count == 1
        assert len([c for c in p.files.calls if c.startswith("publish") and c.endswith("manifest.json")]) == 1
        assert stored(p)[A] == {"name": "a"}


@pytest.mark.behaviour("C86", "C92", "C87")
async def test_a_failed_write(tmp_path: Path) -> None:
    """Phase CAPTURED, no checkpoint; a retry stores the first capture's records, and only under the same arguments."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.files.fail("publish", StateUnwritable("no space left on '/x'"))
        with pytest.raises(StateUnwritable, match="no space"):
            await p.commit([A])
        assert await p.phase() == "CAPTURED"
        assert "manifest.json" not in p.written()
        with pytest.raises(StateNotFound):
            await p.listed(pb.EPISODE_LIST_KIND_COMMITTED, "c1")
        p.owner.live[A] = {"name": "changed"}
        p.files.fail("publish", None)
        with pytest.raises(CheckpointConflict):
            await p.commit([A], stop=True)
        assert not (await p.commit([A])).replayed
        assert stored(p) == {A: {"name": "a"}}


async def test_an_unexpected_failure_of_a_write_leaks_nothing(tmp_path: Path) -> None:
    """INTERNAL with an incident id; the same Commit works afterwards."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.files.fail("create", ZeroDivisionError("a secret"))
        with pytest.raises(InternalError, match=r"incident [0-9a-f]{12} ") as caught:
            await p.commit()
        assert "secret" not in str(caught.value)
        p.files.fail("create", None)
        await p.commit()


@pytest.mark.behaviour("C87", "C88")
async def test_another_destination(tmp_path: Path) -> None:
    """Of the same checkpoint id, under another configured root: a conflict, before and after the write ended."""
    other = tmp_path / "other"
    other.mkdir()
    async with Participant(tmp_path) as p:
        p.plane._core.roots = (str(tmp_path), str(other))
        p.add("a")
        await p.prepare()
        elsewhere = (other / "checkpoints" / "c1").as_uri()
        p.files.hold("create")
        async with running(p.commit()) as call:
            await p.files.wait_entered()
            with pytest.raises(CheckpointConflict):
                await p.commit(uri=elsewhere)
            p.files.release()
            await call
        with pytest.raises(CheckpointConflict):
            await p.commit(uri=elsewhere)
        assert not (other / "checkpoints").exists()


@pytest.mark.behaviour("C90")
async def test_a_capture_that_outlives_its_call(tmp_path: Path) -> None:
    """Awaited by the retry, never repeated; a Commit joins it as well."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.owner.exports.hold()
        with pytest.raises(OutOfTime, match="capture"):
            await p.capture([A], timeout=0.8)
        assert (await p.status()).progress.operation == "capture"
        async with running(p.capture([A])) as retry, running(p.commit([A])) as commit:
            await p.until("COMMITTING")
            p.owner.exports.open.set()
            assert (await retry).record_count == 1
            assert (await commit).record_count == 1
        assert p.owner.exports.count == 1


@pytest.mark.behaviour("C90")
async def test_calls_that_are_cancelled_leave_the_work(tmp_path: Path) -> None:
    """A client that went away is no reason to capture or write twice."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.owner.exports.hold()
        async with running(p.commit([A])):
            await p.owner.exports.entered.wait()
        p.owner.exports.open.set()
        await p.until("COMMITTED")
        assert (await p.commit([A])).replayed
        assert p.owner.exports.count == 1


@pytest.mark.behaviour("C91", "P13")
@pytest.mark.parametrize("operation", ["capture", "commit"])
async def test_a_failed_export(tmp_path: Path, operation: str) -> None:
    """EXPORT_FAILED naming the episode, phase PREPARED; a retry exports again, also with another scope."""
    async with Participant(tmp_path) as p:
        p.add("a", "b")
        await p.prepare()
        p.owner.exports.error = HookFailed("the author's text", A)
        call = getattr(p, operation)
        with pytest.raises(ExportFailed, match="the author's text") as caught:
            await call([A, B])
        assert caught.value.episodes == (A,)
        assert await p.phase() == "PREPARED"
        p.owner.exports.error = None
        assert (await call([B])).record_count == 1


async def test_an_export_that_fails_in_an_unknown_way_leaks_nothing(tmp_path: Path) -> None:
    """The text of an unknown exception stays in the log, under an incident id."""
    async with Participant(tmp_path) as p:
        await p.prepare()
        p.owner.exports.error = KeyError("a secret")
        with pytest.raises(ExportFailed, match=r"incident [0-9a-f]{12} ") as caught:
            await p.capture()
        assert "secret" not in str(caught.value)


@pytest.mark.behaviour("C91")
async def test_an_export_that_cancels_itself_has_failed(tmp_path: Path) -> None:
    """Nobody resumed: a task that the hook awaited was cancelled. It may be asked again."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.owner.exports.error = asyncio.CancelledError()
        with pytest.raises(ExportFailed, match="cancel"):
            await p.capture([A])
        assert await p.phase() == "PREPARED"
        p.owner.exports.error = None
        assert (await p.capture([A])).record_count == 1


async def test_an_export_outside_the_scope_fails(tmp_path: Path) -> None:
    """The owner's fault; nothing of it is written."""

    class Greedy(ScriptedOwner):
        def export(self, scope: object) -> object:  # type: ignore[override]
            return super().export(EpisodeScope.all())

    async with Participant(tmp_path, owner=Greedy()) as p:
        p.add("a", "b")
        await p.prepare()
        with pytest.raises(ExportFailed) as caught:
            await p.commit([A])
        assert caught.value.episodes == (B,)
        assert p.written() == []


@pytest.mark.behaviour("C99", "C100", "C41")
async def test_restarts_in_the_scope(tmp_path: Path) -> None:
    """Refused listing them with the exact count, phase PREPARED; without them it commits what is captured."""
    async with Participant(tmp_path) as p:
        p.add("a", "b")
        p.owner.restarts = {EpisodeId(f"restart-{i:04}") for i in range(3000)}
        await p.prepare()
        with pytest.raises(RestartInScope) as caught:
            await p.commit([A, *p.owner.restarts])
        assert caught.value.episode_count == 3000
        assert 1 < len(caught.value.episodes) < 1000
        assert await p.phase() == "PREPARED"
        reply = await p.commit([A])
        assert (reply.record_count, reply.restart_count) == (1, 3000)
        assert stored(p) == {A: {"name": "a"}}


@pytest.mark.behaviour("C102", "C79")
async def test_left_out_episodes_are_named(tmp_path: Path) -> None:
    """In Capture, in Commit, and the same in both replays."""
    async with Participant(tmp_path) as p:
        p.add("a", "b")
        p.owner.left_out = [B]
        await p.prepare()
        for reply in (await p.capture([A, B]), await p.capture([A, B])):
            assert (list(reply.left_out.rollout_ids), reply.left_out_count, reply.record_count) == (["b"], 1, 1)
        p.owner.left_out = []
        for commit in (await p.commit([A, B]), await p.commit([A, B])):
            assert (list(commit.left_out.rollout_ids), commit.left_out_count, commit.record_count) == (["b"], 1, 1)


@pytest.mark.behaviour("C41", "C102")
async def test_left_out_is_cut(tmp_path: Path) -> None:
    """Lists at 1,000 entries, counts exact, under 1 MiB."""
    async with Participant(tmp_path) as p:
        p.owner.left_out = [EpisodeId(f"{i:04}" + "x" * 252) for i in range(1500)]
        await p.prepare()
        reply = await p.commit()
        assert (len(reply.left_out.rollout_ids), reply.left_out_count) == (1000, 1500)
        assert reply.ByteSize() < 1 << 20


@pytest.mark.behaviour("C25")
async def test_a_pinned_incarnation(tmp_path: Path) -> None:
    """Capture and Commit for another process are refused whatever the phase; nothing changes."""
    async with Participant(tmp_path) as p:
        for prepared in (False, True):
            if prepared:
                await p.prepare()
            for call in (p.capture(incarnation="other"), p.commit(incarnation="other")):
                with pytest.raises(IncarnationChanged):
                    await call
        assert await p.phase() == "PREPARED"
        assert (await p.commit(incarnation=p.identity.incarnation_id)).record_count == 0


async def pending(p: Participant) -> list[EpisodeId]:
    """Restore three episodes and resume: all three are pending next attempts."""
    p.add("a", "b", "c")
    await p.prepare("c0")
    await p.commit(id="c0")
    await p.resume("c0")
    p.owner.live.clear()
    await p.restore([A, B, EpisodeId("c")], source="c0")
    await p.resume("r1")
    return sorted(p.owner.pending)


@pytest.mark.behaviour("C93", "C94", "C95", "C97", "C98")
async def test_pending_state_outside_the_scope_is_deleted(tmp_path: Path) -> None:
    """Once durable, without a mark, by the delete hook, once each; what is inside stays, and live episodes too."""
    async with Participant(tmp_path) as p:
        a, b, c = await pending(p)
        p.add("live")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit([a])) as call:
            await p.files.wait_entered()
            assert p.owner.deletes.count == 0
            p.files.release()
            assert (await call).deleting == 0
        assert p.owner.pending == {a}
        assert set(p.owner.live) == {a, EpisodeId("live")}
        assert (p.owner.deletes.count, p.owner.retires.count) == (2, 0)
        assert (await p.status()).marks_held == 0
        assert not p.plane._core.marks.refuses(b)
        assert set(stored(p)) == {a}
        assert (await p.commit([a])).replayed
        assert p.owner.deletes.count == 2
        assert c not in p.owner.live


@pytest.mark.behaviour("C94")
@pytest.mark.parametrize(("scope", "left"), [(None, 3), ([], 0)])
async def test_all_deletes_nothing_and_an_empty_list_everything(
    tmp_path: Path, scope: list[EpisodeId] | None, left: int
) -> None:
    """`all` and an empty list are different arguments."""
    async with Participant(tmp_path) as p:
        await pending(p)
        await p.prepare()
        await p.commit(scope)
        assert len(p.owner.pending) == left


@pytest.mark.behaviour("C96")
async def test_a_failed_deletion_leaves_the_commit_retryable(tmp_path: Path) -> None:
    """The retry begins anew only what failed, and replies with the same manifest."""
    async with Participant(tmp_path) as p:
        a, b, c = await pending(p)
        await p.prepare()
        original = p.owner.delete_restored

        async def delete(episode: EpisodeId) -> None:
            if episode == b:
                p.owner.deletes.count += 1
                raise HookFailed("no", b)
            await original(episode)

        p.owner.delete_restored = delete  # type: ignore[method-assign]
        with pytest.raises(ControlError):
            await p.commit([a])
        assert await p.phase() == "CAPTURED"
        assert p.owner.pending == {a, b}
        p.owner.delete_restored = original  # type: ignore[method-assign]
        reply = await p.commit([a])
        assert (reply.record_count, reply.deleting) == (1, 0)
        assert p.owner.pending == {a}
        assert p.owner.deletes.count == 3
        assert c not in p.owner.pending


@pytest.mark.behaviour("C97")
async def test_a_deletion_that_hangs_holds_the_reply_for_a_moment_only(tmp_path: Path) -> None:
    """It is counted in the reply and goes on."""
    async with Participant(tmp_path, settings=ControlSettings(deletion_wait=0.05)) as p:
        a, b, c = await pending(p)
        await p.prepare()
        p.owner.deletes.hold()
        async with asyncio.timeout(1):
            assert (await p.commit([a])).deleting == 2
        p.owner.deletes.open.set()
        await p.resume()
        assert p.owner.pending == {a}
        assert {b, c}.isdisjoint(p.owner.live)


@pytest.mark.behaviour("C103", "C104")
async def test_stop_frees_compute_once_durable(tmp_path: Path) -> None:
    """Exactly what was exported, after the write; not when the write failed; never failing the Commit."""
    async with Participant(tmp_path, settings=ControlSettings(deletion_wait=0.05)) as p:
        p.add("a", "b")
        await p.prepare()
        p.files.fail("publish", StateUnwritable("full"))
        with pytest.raises(StateUnwritable):
            await p.commit([A], stop=True)
        assert p.owner.releases.count == 0
        p.files.fail("publish", None)
        assert (await p.commit([A], stop=True)).release_problem == ""
        assert p.owner.released == [A]
        assert (await p.commit([A], stop=True)).replayed
        assert p.owner.releases.count == 1
    for slow in (True, False):
        async with Participant(tmp_path / str(slow), settings=ControlSettings(deletion_wait=0.05)) as p:
            p.add("a")
            await p.prepare()
            if slow:
                p.owner.releases.hold()
            else:
                p.owner.releases.error = HookFailed("no")
            async with asyncio.timeout(1):
                reply = await p.commit([A], stop=True)
            assert reply.record_count == 1
            assert ("had not ended" if slow else "incident") in reply.release_problem
            assert await p.phase() == "COMMITTED"


@pytest.mark.behaviour("C104", "C115")
async def test_stop_frees_nothing_when_resume_came_first(tmp_path: Path) -> None:
    """The episodes of a kept write go on: their compute must stay."""
    async with Participant(tmp_path) as p:
        p.add("a")
        await p.prepare()
        p.files.hold("create")
        async with running(p.commit([A], stop=True)) as call:
            await p.files.wait_entered()
            await p.resume(keep_write=True)
            p.files.release()
            assert (await call).record_count == 1
        assert p.owner.releases.count == 0


@pytest.mark.behaviour("C186")
@pytest.mark.parametrize("uri", ["file:///elsewhere/checkpoints/c1", "http://h/c1", "file:///a/../checkpoints/c1"])
async def test_a_destination_outside_the_roots(tmp_path: Path, uri: str) -> None:
    """INVALID_ARGUMENT naming the field; nothing is captured, nothing created."""
    async with Participant(tmp_path) as p:
        await p.prepare()
        for field, call in (("storage_uri", p.commit(uri=uri)),):
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert [violation.field for violation in caught.value.violations] == [field]
        with pytest.raises(InvalidArgument, match="names checkpoint c2, not c1"):
            await p.commit(uri=p.uri("c2"))
        assert p.owner.exports.count == 0
        assert p.files.calls == []


async def test_progress_of_a_write(tmp_path: Path) -> None:
    """Records done and in all, and bytes, are in the status."""
    async with Participant(tmp_path) as p:
        p.add(*(f"r{i}" for i in range(20)))
        await p.prepare()
        p.files.hold("publish", "manifest.json")
        async with running(p.commit()):
            await p.files.wait_entered()
            progress = (await p.status()).progress
            assert (progress.records_done, progress.records_total) == (20, 20)
            assert progress.bytes_done == progress.bytes_total > 0
            p.files.release()
