"""Errors on the wire: one form, cut to what fits, and nothing that leaks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from gym_ckpt_grpc.control import error_from, wire
from gym_ckpt_grpc.control.error_details import MAX_DETAILS, MAX_TEXT, cut, from_message, status_of
from gym_ckpt_grpc.protocol.errors import (
    CheckpointConflict,
    ControlError,
    StateCorrupt,
    Violation,
)
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import episode_pb2, errors_pb2
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import (
    Participant,
    ScriptedOwner,
    context,
    failure,
)

A = EpisodeId("a")


@pytest.mark.behaviour("C39", "C24")
async def test_the_form_of_an_error(tmp_path: Path) -> None:
    """One Status with one ControlError and one ErrorInfo, and the participant that refused."""
    async with Participant(tmp_path) as p:
        await p.prepare("c1")
        error = await failure(p.stub.Prepare(pb.PrepareRequest(context=context("c2")), timeout=5))
        assert error.code() is grpc.StatusCode.ABORTED
        (raw,) = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
        assert isinstance(raw, bytes)
        status = status_pb2.Status.FromString(raw)
        assert (status.code, status.message) == (10, error.details())
        control, info = errors_pb2.ControlError(), error_details_pb2.ErrorInfo()
        assert len(status.details) == 2
        assert status.details[0].Unpack(control)
        assert status.details[1].Unpack(info)
        assert (info.reason, info.domain) == ("CHECKPOINT_CONFLICT", "gymckpt")
        assert control.participant.incarnation_id == p.identity.incarnation_id
        assert (control.phase, control.active_checkpoint_id) == (pb.PHASE_PREPARED, "c1")


@pytest.mark.behaviour("C24")
async def test_every_reply_tells_who_answers(tmp_path: Path) -> None:
    """The same incarnation within a process, another one in the next."""
    async with Participant(tmp_path) as p:
        p.add("a")
        replies: list[Any] = [
            await p.prepare(),
            await p.capture(),
            await p.commit(),
            await p.renew(),
            await p.resume(),
            await p.retire([EpisodeId("z")]),
            await p.forget({"z": 0}),
            await p.restore([A]),
            await p.status(),
        ]
        async for message in p.stub.ListEpisodes(
            pb.ListEpisodesRequest(kind=pb.EPISODE_LIST_KIND_RESTORED_PENDING), timeout=5
        ):
            replies.append(message)
        assert len(replies) == 10
        assert {reply.participant.incarnation_id for reply in replies} == {p.identity.incarnation_id}
        assert wire.identity_from(replies[0].participant) == p.identity
    assert ParticipantIdentity(ParticipantKind.AGENT, "x").incarnation_id != p.identity.incarnation_id


def big_error(text: str) -> ControlError:
    return CheckpointConflict(
        text,
        phase="PREPARED",
        active_checkpoint_id="c" * 128,
        episodes=[EpisodeId(f"{i:04}" + "x" * 252, 2**31) for i in range(5000)],
        episode_count=5000,
        violations=[Violation("f" * 500, "d" * 500)] * 50,
    )


@pytest.mark.behaviour("C41")
@pytest.mark.parametrize("text", ["t" * 9000, "\u00e9" * 9000, "\U0001f600" * 9000, "\x01\n" * 5000])
async def test_big_errors_fit(tmp_path: Path, text: str) -> None:
    """6 KiB of details and 1 KiB of text, exact counts; the worst of them still arrives as itself."""
    who = ParticipantIdentity(ParticipantKind.AGENT, "s" * 128, "i" * 128)
    status = status_of(big_error(text), who)
    assert status.ByteSize() <= MAX_DETAILS
    assert len(status.message.encode()) <= MAX_TEXT

    class Failing(ScriptedOwner):
        async def close_admission(self, closing: object) -> None:
            raise big_error(text)

    async with Participant(tmp_path, owner=Failing()) as p:
        with pytest.raises(CheckpointConflict) as caught:
            await p.prepare()
        assert caught.value.episode_count == 5000
        assert 1 <= len(caught.value.episodes) < 5000
        assert len(caught.value.message.encode()) <= MAX_TEXT
        assert caught.value.violations


def test_text_without_a_form_in_utf8() -> None:
    """An odd file name in an error must not turn the error into another one."""
    status = status_of(StateCorrupt("cannot read '/x/\udcff'"), None)
    assert status.message == "cannot read '/x/?'"
    assert cut("abcdefgh", 6) == "ab ..."
    assert cut("\u00e9" * 4, 7) == "\u00e9 ..."


def test_errors_of_a_newer_version_are_not_lost() -> None:
    """Unknown code, kind, phase and ids: an error all the same."""
    message = errors_pb2.ControlError(
        code=999,  # type: ignore[arg-type]
        message="from the future",
        participant=pb.ParticipantIdentity(kind=77, service="s", instance="0"),  # type: ignore[arg-type]
        phase=88,  # type: ignore[arg-type]
        episodes=episode_pb2.EpisodeList(rollout_ids=["no id"], attempts=[0]),
        episode_count=1,
        retry_after=Duration(seconds=2),
    )
    error = from_message(message)
    assert (error.code.name, error.message, error.participant) == ("INTERNAL", "from the future", "77/s/0")
    assert (error.episodes, error.episode_count, error.retry_after) == ((), 1, 2.0)


async def test_damaged_trailers_are_no_typed_error() -> None:
    """A foreign status stays what it was."""
    for value in (b"\xff\xff", status_pb2.Status(code=1, details=[any_pb2.Any(type_url="x/y")]).SerializeToString()):
        failed = grpc.aio.AioRpcError(
            grpc.StatusCode.ABORTED,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(("grpc-status-details-bin", value)),
        )
        assert error_from(failed) is None


async def test_unknown_exceptions_never_leak(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """INTERNAL with an opaque id that the log has too; unary and streaming."""

    class Broken(ScriptedOwner):
        def restored_pending(self) -> frozenset[EpisodeId]:
            raise ZeroDivisionError("a secret")

        def list_episodes(self, which: object) -> Any:
            raise ZeroDivisionError("a secret")

    async with Participant(tmp_path, owner=Broken()) as p:
        kind = pb.ListEpisodesRequest(kind=pb.EPISODE_LIST_KIND_RESTART)
        stream = p.stub.ListEpisodes(kind, timeout=5)
        watch = p.stub.WatchStatus(pb.WatchStatusRequest(), timeout=5)
        for call in (p.stub.GetStatus(pb.GetStatusRequest(), timeout=5), anext(aiter(stream)), anext(aiter(watch))):
            error = await failure(call)
            assert error.code() is grpc.StatusCode.INTERNAL
            known = error_from(error)
            assert known is not None
            assert "secret" not in repr(error.trailing_metadata()) + str(error)
            incident = known.message.rpartition(" ")[2]
            assert any(incident in record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)


async def test_what_the_core_refuses_has_its_bare_status(tmp_path: Path) -> None:
    """An unknown method; a message over the limit, with the limit in its text. The server keeps serving."""
    async with Participant(tmp_path) as p:
        assert p.channel is not None
        unknown: Any = p.channel.unary_unary("/gymckpt.v1.ParticipantService/Nothing")
        assert (await failure(unknown(b"", timeout=5))).code() is grpc.StatusCode.UNIMPLEMENTED
        garbage: Any = p.channel.unary_unary("/gymckpt.v1.ParticipantService/Prepare")
        assert (await failure(garbage(b"\xff\xff\xff", timeout=5))).code() is not grpc.StatusCode.OK
        wide = grpc.aio.insecure_channel(
            p.server.address, options=[("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        )
        huge: Any = wide.unary_unary("/gymckpt.v1.ParticipantService/Prepare")
        error = await failure(huge(b"\x00" * (64 * 1024 * 1024 + 1), timeout=20))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(64 * 1024 * 1024) in (error.details() or "")
        await wide.close()
        assert await p.phase() == "IDLE"


async def test_a_million_ids_are_accepted(tmp_path: Path) -> None:
    """Requests up to 64 MiB; ids are columns."""
    async with Participant(tmp_path) as p:
        await p.prepare()
        ids = [EpisodeId(f"rollout-{i:07}") for i in range(200_000)]
        assert (await p.commit(ids, timeout=30)).without_record_count == 200_000
