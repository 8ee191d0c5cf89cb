"""What `watch` shows of a participant: where it is, what it waits for and how long, how far it is, its lease."""

from __future__ import annotations

from gym_ckpt_grpc.cli.watch import COLUMNS, _cells, _line, described
from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator import Finding, Server, Sighting
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import Blocker, BlockerReason, PrepareReport
from gymckpt.v1 import participant_pb2 as pb

SERVER = Server(kind="agent", service="a", address="h:1")
WHO = ParticipantIdentity(ParticipantKind.AGENT, "a", "0")


def sighting(**status: object) -> Sighting:
    return Sighting(SERVER, "h:1", Finding.OK, WHO, pb.ParticipantStatus(**status))  # type: ignore[arg-type]


def shown(seen: Sighting) -> dict[str, str]:
    return {name: cell for name, cell in zip(COLUMNS, _cells(seen), strict=True) if cell}


def test_a_prepare_shows_its_blockers_with_the_oldest_ones_age() -> None:
    young, old = (
        Blocker(BlockerReason.RUNNING, age, episode=EpisodeId(name), place="step")
        for age, name in ((0.5, "7-0"), (12.25, "8-1"))
    )
    seen = sighting(
        phase=pb.PHASE_PREPARING,
        active_checkpoint_id="x",
        lease_remaining=wire.duration(25.5),
        report=wire.report_to(PrepareReport((young, old), 2000, (), 0, {})),
    )
    assert shown(seen) == {
        "participant": "agent/a/0",
        "phase": "PREPARING",
        "checkpoint": "x",
        "lease s": "25.5",
        "blockers": "2000",
        "oldest": "8-1 RUNNING 12.2 s step",
    }


def test_a_commit_shows_records_and_bytes() -> None:
    progress = pb.Progress(
        operation="commit", records_done=3, records_total=10, bytes_done=5 << 20, bytes_total=9 << 20
    )
    seen = sighting(phase=pb.PHASE_COMMITTING, active_checkpoint_id="x", progress=progress)
    found = shown(seen)
    assert (found["records"], found["bytes"]) == ("3/10", "5.0 MiB")
    assert "bytes=5.0 MiB" in _line(seen)
    assert (described(seen)["bytes_done"], described(seen)["bytes_total"]) == (5 << 20, 9 << 20)
    assert described(seen)["lease_remaining"] is None
