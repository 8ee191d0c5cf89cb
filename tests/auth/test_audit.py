"""The audit log: one line per mutating call, however it ended, and never a call that fails by it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue, audit
from gym_ckpt_grpc.auth.audit import AuditLog, CallNote, line_of
from gym_ckpt_grpc.control import open_channel
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import participant_pb2 as pb
from tests.auth.secured import Pki, Secured, by_certificates, code_of
from tests.control.scripted import Participant, context, eventually

PREPARE = "/gymckpt.v1.ParticipantService/Prepare"
SECRET, SEE = "marker-controller", "marker-observer"
TOKENS = {Role.CONTROLLER: TokenValue(SECRET), Role.OBSERVER: TokenValue(SEE)}
TRACE = "0af7651916cd43dd8448eb211c80319c"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def served(tmp_path: Path, log: Path, **serving: Any) -> Participant:
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    serving |= {"authenticator": Authenticator(TOKENS), "token": TOKENS[Role.CONTROLLER], "audit_log": log}
    return Participant(root, **serving)


async def test_a_line_per_mutating_call(tmp_path: Path) -> None:
    """Who, what, of how many episodes, how it ended and how long it took; reads are not told of."""
    log = tmp_path / "audit"
    async with served(tmp_path, log) as p:
        p.add("a", "b")
        await p.prepare("k1")
        await p.phase()
        await p.commit([EpisodeId("a"), EpisodeId("b")], "k1")
        await p.resume("k1")
        request = pb.RenewLeaseRequest(context=context("k1"))
        with pytest.raises(grpc.aio.AioRpcError):
            await p.stub.RenewLease(request, timeout=5, metadata=(("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),))
    told = lines(log)
    assert [(line["method"].rpartition("/")[2], line["checkpoint_id"]) for line in told] == [
        ("Prepare", "k1"),
        ("Commit", "k1"),
        ("Resume", "k1"),
        ("RenewLease", "k1"),
    ]
    assert [line["code"] for line in told[:3]] == ["OK", "OK", "OK"]
    assert told[3]["code"] != "OK"
    assert [line["episodes"] for line in told] == [None, 2, None, None]
    assert {(line["role"], line["by"], line["certificate"]) for line in told} == {("controller", "token", "")}
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") and 0 < line["seconds"] < 60 for line in told)
    assert [line["trace_id"] for line in told] == ["", "", "", TRACE]
    names = "time method code role by certificate peer checkpoint_id episodes seconds trace_id"
    assert set(told[0]) == set(names.split())
    assert "marker" not in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


async def test_refused_callers(tmp_path: Path) -> None:
    """Method, peer and code of an unknown one, and nothing of its request; a denied one has its role besides."""
    log = tmp_path / "audit"
    body = pb.PrepareRequest(context=context("guessed")).SerializeToString()
    wrong = [("authorization", "Bearer marker-wrong"), ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")]
    async with served(tmp_path, log) as p, open_channel(p.server.address) as channel:
        assert await code_of(channel, PREPARE, body, wrong) == "UNAUTHENTICATED"
        assert await code_of(channel, "/a.B/C", body) == "UNAUTHENTICATED"
        assert await code_of(channel, PREPARE, body, [("authorization", f"Bearer {SEE}")]) == "PERMISSION_DENIED"
        trace = [("authorization", f"Bearer {SECRET}"), ("traceparent", "marker")]
        assert await code_of(channel, PREPARE, b"\xff", trace) == "INVALID_ARGUMENT"
    told = lines(log)
    assert [(line["method"], line["code"], line["role"]) for line in told] == [
        (PREPARE, "UNAUTHENTICATED", ""),
        ("/a.B/C", "UNAUTHENTICATED", ""),
        (PREPARE, "PERMISSION_DENIED", "observer"),
        (PREPARE, "INVALID_ARGUMENT", "controller"),
    ]
    assert {(line["checkpoint_id"], line["episodes"], line["trace_id"]) for line in told} == {("", None, "")}
    assert all(line["peer"] for line in told)
    assert "marker" not in log.read_text()


async def test_names_of_certificates(tmp_path: Path, pki: Pki) -> None:
    """The name that gave the role; of a stranger, none."""
    log = tmp_path / "audit"
    async with Secured(tmp_path / "root", pki, authenticator=by_certificates(), audit_log=log) as p:
        await p.prepare("k1")
        body = pb.ResumeRequest(context=context("k1")).SerializeToString()
        for name in ("observer", "stranger"):
            async with p.as_(name) as channel:
                await code_of(channel, "/gymckpt.v1.ParticipantService/Resume", body)
    told = lines(log)
    assert [(line["role"], line["by"], line["certificate"], line["checkpoint_id"]) for line in told] == [
        ("controller", "certificate", "URI:spiffe://gym.example/controller", "k1"),
        ("observer", "certificate", "URI:spiffe://gym.example/observer", ""),
        ("", "", "", ""),
    ]
    assert [line["code"] for line in told] == ["OK", "PERMISSION_DENIED", "UNAUTHENTICATED"]


async def test_a_cancelled_call_has_its_line(tmp_path: Path) -> None:
    """One, with CANCELLED, or with DEADLINE_EXCEEDED where the time was up."""
    log = tmp_path / "audit"
    async with served(tmp_path, log) as p:
        p.owner.closes.hold()
        call = p.stub.Prepare(pb.PrepareRequest(context=context("k1")), timeout=30)
        await asyncio.wait_for(p.owner.closes.entered.wait(), 10)
        call.cancel()
        await eventually(lambda: len(log.read_text().splitlines()) == 1)
        short = pb.PrepareRequest(context=context("k1"))
        with pytest.raises(grpc.aio.AioRpcError):
            await p.stub.Prepare(short, timeout=0.2)
        await eventually(lambda: len(log.read_text().splitlines()) == 2)
        p.owner.closes.open.set()
    told = lines(log)
    assert told[0]["code"] == "CANCELLED"
    assert told[1]["code"] in ("DEADLINE_EXCEEDED", "ABORTED"), "by the clock, or by the plane just before it"
    assert {(line["checkpoint_id"], line["role"]) for line in told} == {("k1", "controller")}


async def test_a_log_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    """Naming it; the address is free for another start."""
    for log in (tmp_path / "missing" / "audit", tmp_path):
        with pytest.raises(UsageError, match="audit log") as caught:
            await served(tmp_path, log).server.start()
        assert str(log) in str(caught.value)


async def test_a_log_that_fails_later_fails_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warned of once, counted, and gone on with when there is room again."""
    log = tmp_path / "audit"
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    async with served(tmp_path, log) as p:
        monkeypatch.setattr(os, "write", full)
        for number in range(3):
            await p.prepare(f"k{number}")
            await p.resume(f"k{number}")
        assert p.server._host._audit is not None
        await eventually(lambda: p.server._host._audit.lost == 6)  # type: ignore[union-attr]
        monkeypatch.setattr(os, "write", real)
        await p.prepare("after")
    assert [line["checkpoint_id"] for line in lines(log)] == ["after"]
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warned] == [
        f"lines are missing in audit log {log}: No space left on device"
    ]


def opened(path: Path, **options: Any) -> AuditLog:
    log = AuditLog(path, **options)
    log.open()
    return log


def entry(name: str) -> bytes:
    return line_of(CallNote(f"/m/{name}"), peer="p", code="OK")


def methods(path: Path) -> list[str]:
    return [line["method"] for line in lines(path)]


def test_rotation_by_renaming(tmp_path: Path) -> None:
    """Lines before the renaming are in the old file, later ones in a new one; a removed file comes back."""
    path = tmp_path / "audit"
    log = opened(path)
    written = threading.Event()
    real = log._append

    def append(lines: list[bytes]) -> None:
        real(lines)
        written.set()

    log._append = append  # type: ignore[method-assign]

    def write(name: str) -> None:
        written.clear()
        log.write(entry(name))
        assert written.wait(10)

    write("1")
    path.rename(tmp_path / "audit.1")
    write("2")
    path.unlink()
    write("3")
    log.close()
    assert methods(tmp_path / "audit.1") == ["/m/1"]
    assert methods(path) == ["/m/3"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_waits_is_bounded_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that hangs: writing returns at once, and further lines are lost, not kept for ever."""
    monkeypatch.setattr(audit, "MAX_WAITING", 5)
    hangs, lost = threading.Event(), list[int]()
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        assert hangs.wait(10)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    log = opened(tmp_path / "audit", on_lost=lost.append)
    for number in range(8):
        log.write(entry(str(number)))
    assert (log.lost, sum(lost)) == (3, 3)
    hangs.set()
    log.close()
    assert methods(tmp_path / "audit") == [f"/m/{number}" for number in range(5)]
    assert len([r for r in caplog.records if "too many" in r.getMessage()]) == 1


def test_closing_waits_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk hangs for ever: the end of the server does not."""
    monkeypatch.setattr(audit, "FLUSH_SECONDS", 0.05)
    hangs = threading.Event()
    monkeypatch.setattr(os, "write", lambda descriptor, data: hangs.wait(10) and len(data))
    log = opened(tmp_path / "audit")
    log.write(entry("1"))
    log.close()
    assert log.lost == 1
    assert "hangs" in caplog.text
    log.write(entry("2"))
    assert log.lost == 2
    hangs.set()


def test_a_torn_line_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes half of a line and then nothing: the next line begins at the begin of a line."""
    real = os.write
    answers: list[Any] = [lambda d, data: real(d, data[:10]), OSError(28, "full")]
    torn = threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        if not answers:
            return real(descriptor, data)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            torn.set()
            raise answer
        return int(answer(descriptor, data))

    monkeypatch.setattr(os, "write", write)
    log = opened(tmp_path / "audit")
    log.write(entry("1"))
    assert torn.wait(10)
    log.write(entry("2"))
    log.close()
    first, second = (tmp_path / "audit").read_text().splitlines()
    assert len(first) == 10
    assert json.loads(second)["method"] == "/m/2"
    assert log.lost == 1


def test_a_line_that_was_torn_before_the_start(tmp_path: Path) -> None:
    """By a process that is gone: the first line of the next one is its own; a whole last line gets no empty one."""
    path = tmp_path / "audit"
    path.write_bytes(entry("0") + entry("1")[:20])
    for name in ("2", "3"):
        log = opened(path)
        log.write(entry(name))
        log.close()
    whole, torn, *others = path.read_text().splitlines()
    assert (json.loads(whole)["method"], len(torn)) == ("/m/0", 20)
    assert [json.loads(line)["method"] for line in others] == ["/m/2", "/m/3"]


def test_what_callers_send_stays_on_its_line(tmp_path: Path) -> None:
    """Line ends, very long ids and text without a UTF-8 form."""
    path = tmp_path / "audit"
    log = opened(path)
    for text in ("a\nb", "x" * 100_000, "\udcff"):
        note = CallNote("/m/1", checkpoint_id=text)
        log.write(line_of(note, peer="p", code="OK"))
    log.close()
    told = lines(path)
    assert [len(line["checkpoint_id"]) for line in told] == [3, 256, 8]


def test_several_logs_share_a_file(tmp_path: Path) -> None:
    """Each appends whole lines."""
    path = tmp_path / "audit"
    logs = [opened(path) for _ in range(4)]
    for number in range(200):
        for log in logs:
            log.write(entry(str(number)))
    for log in logs:
        log.close()
    assert len(lines(path)) == 800
