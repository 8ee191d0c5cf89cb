"""States that servers encode themselves: stored as they are, back as bytes; and states that nobody can store."""

from __future__ import annotations

import asyncio
import enum
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import ControlSettings
from gym_ckpt_grpc.control.ports import HookFailed
from gym_ckpt_grpc.participants import EnvironmentOwner, EpisodeContext, RestoredSession, RestoredState
from gym_ckpt_grpc.participants.records import AgentRecord, EnvironmentRecord, ResourcesRecord
from gym_ckpt_grpc.protocol.errors import ExportFailed
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Codec, Payload, Record, encode, raw
from gym_ckpt_grpc.testing import serve
from tests.control.scripted import eventually
from tests.participants.agent_rig import AgentRig
from tests.participants.fakes import R1, FakeClock, FakePort, R, close, exported, reopen, restore, spin
from tests.participants.legacy_rig import LegacyRig
from tests.participants.precopy_rig import PrecopyRig, RevisedServer
from tests.participants.served_kinds import restored, served, started

TYPE = "application/x-snapshot"
SNAPSHOT = raw(b"\x00\xff snapshot", TYPE)


def raw_payload(record: Record, name: str) -> tuple[bytes, str]:
    payload = record.payloads[name]
    assert payload.codec is Codec.RAW
    return payload.data, payload.content_type


class RawServer(RevisedServer):
    """Its sessions are snapshots of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.restored: list[RestoredState] = []

    async def export_sessions(self, session_ids: Any) -> dict[str, Payload]:
        self.asked.append(list(session_ids))
        return {key: raw(str(self.sessions[key]["n"]).encode(), TYPE) for key in session_ids}

    async def restore_sessions(self, sessions: Any) -> None:
        self.restored += sessions
        for each in sessions:
            self.change(each.session_id, n=int(each.state))


@pytest.mark.behaviour("C168")
async def test_a_resources_servers_snapshot_comes_back_as_bytes_with_its_type() -> None:
    """Encoded ahead or at the cut; and again under the next attempt, though nothing has started."""
    for passes in (0, 2):
        first = PrecopyRig(RawServer())
        first.begin("a", n=7)
        await first.passes(passes)
        first.server.asked.clear()
        [record] = await first.checkpoint()
        assert first.server.asked == ([] if passes else [["a"]])
        assert raw_payload(record, "state") == (b"7", TYPE)
        server = RawServer()
        second = PrecopyRig(server)
        await restore(second.owner, [record])
        await reopen(second.owner)
        assert server.restored == [RestoredState("a", EpisodeId("r-a", 1), b"7", TYPE)]
        [again] = await second.checkpoint()
        assert raw_payload(again, "state") == (b"7", TYPE)


@pytest.mark.behaviour("C168")
async def test_an_agents_snapshot_and_its_loop_state() -> None:
    """The session by the hook, the boundary by the loop; both are RAW still when nobody has claimed them."""
    first, second, go = AgentRig(), AgentRig(), asyncio.Event()
    seen: list[Any] = []
    await first.seed()
    first.states["k"] = SNAPSHOT

    async def loop(session: Any, state: Any) -> Any:
        seen.append(state)
        await go.wait()
        await session.boundary(lambda: raw(b"loop", TYPE))

    first.loop = loop  # type: ignore[method-assign]
    first.invoke()
    await spin()
    await close(first.owner)
    go.set()
    await spin()
    records = await exported(first.owner)
    assert raw_payload(records[0], "session") == (SNAPSHOT.data, TYPE)
    assert raw_payload(records[0], "boundary") == (b"loop", TYPE)
    given: list[RestoredSession] = []

    async def restore_sessions(sessions: Any) -> None:
        given.extend(sessions)
        second.states |= {each.key: raw(each.state, each.content_type) for each in sessions}

    second.restore_sessions = restore_sessions  # type: ignore[method-assign]
    await restore(second.owner, records)
    await reopen(second.owner)
    assert given == [RestoredSession("k", R1, SNAPSHOT.data, content_type=TYPE)]
    [again] = await second.checkpoint()
    assert (raw_payload(again, "session"), raw_payload(again, "boundary")) == (
        (SNAPSHOT.data, TYPE),
        (b"loop", TYPE),
    )
    second.loop = loop  # type: ignore[method-assign]
    second.invoke(episode=R1)
    await spin()
    assert seen == [None, b"loop"]


@pytest.mark.behaviour("C168")
async def test_a_legacy_runs_snapshot_waits_as_it_is_for_its_claim() -> None:
    first = LegacyRig()
    first.states["run:r"] = SNAPSHOT
    record = await first.record_at("before verify")
    assert raw_payload(record, "session") == (SNAPSHOT.data, TYPE)
    second = LegacyRig()
    given: list[RestoredSession] = []

    async def restore_sessions(sessions: Any) -> None:
        given.extend(sessions)

    second.restore_sessions = restore_sessions  # type: ignore[method-assign]
    await restore(second.owner, [record])
    await reopen(second.owner)
    [again] = await second.checkpoint()
    assert raw_payload(again, "session") == (SNAPSHOT.data, TYPE)
    second.hold("before verify")
    second.run(R1)
    await spin()
    assert [(each.state, each.content_type) for each in given] == [(SNAPSHOT.data, TYPE)]


@pytest.mark.behaviour("C168")
async def test_an_environments_boundary_goes_on_as_bytes() -> None:
    seen: list[Any] = []
    owners = []

    async def protocol(ctx: EpisodeContext) -> None:
        seen.append(ctx.restored)
        await ctx.boundary(SNAPSHOT)
        async with ctx.step("wait", "replay"):
            await asyncio.Event().wait()

    for _ in range(2):
        owners.append(EnvironmentOwner(clock=FakeClock()))
        owners[-1].attach(FakePort())
    first, second = owners
    task = asyncio.create_task(first.run(R, {}, protocol))
    await spin()
    await close(first)
    [record] = await exported(first)
    assert raw_payload(record, "boundary") == (SNAPSHOT.data, TYPE)
    await restore(second, [record])
    await reopen(second)
    await close(second, 2)
    [again] = await exported(second)
    assert raw_payload(again, "boundary") == (SNAPSHOT.data, TYPE)
    await reopen(second)
    other = asyncio.create_task(second.run(R1, {}, protocol))
    await spin()
    assert seen == [None, SNAPSHOT.data]
    for each in (task, other):
        each.cancel()


@pytest.mark.behaviour("C168")
async def test_over_the_wire_and_a_disk(tmp_path: Path) -> None:
    async with served("resources", tmp_path) as kind:
        await started(kind, R)
        kind.rig.rig.export_sessions = _snapshots  # type: ignore[attr-defined]
        await kind.commit("source", R)
    async with served("resources", tmp_path) as kind:
        given: list[RestoredState] = []

        async def restore_sessions(sessions: Any) -> None:
            given.extend(sessions)

        kind.rig.rig.restore_sessions = restore_sessions  # type: ignore[attr-defined]
        await restored(kind, R)
        assert [(each.state, each.content_type) for each in given] == [(SNAPSHOT.data, TYPE)]


async def _snapshots(session_ids: Any) -> dict[str, Payload]:
    return dict.fromkeys(session_ids, SNAPSHOT)


@pytest.mark.parametrize("build", [EnvironmentRecord, AgentRecord, ResourcesRecord])
def test_only_what_raw_made_is_stored_as_it_is(build: Any) -> None:
    """A payload of another codec is no state, nor is RAW bytes inside of one."""
    for state in (encode({"x": 1}), {"inside": SNAPSHOT}, [SNAPSHOT]):
        args = (R, "digest", {}, state) if build is EnvironmentRecord else (R, "key", state)
        with pytest.raises(HookFailed, match="Payload"):
            build(*args).to_record()


# ---- what cannot be stored


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Card:
    rank: int


def nested(depth: int) -> Any:
    state: Any = []
    for _ in range(depth):
        state = [state]
    return state


UNSTORABLE: dict[str, Callable[[], Any]] = {
    "datetime": lambda: datetime(2026, 1, 2, tzinfo=UTC),
    "date": lambda: datetime(2026, 1, 2, tzinfo=UTC).date(),
    "uuid": lambda: uuid.UUID(int=7),
    "enum": lambda: Colour.RED,
    "int enum": lambda: Level.HIGH,
    "dataclass": lambda: Card(3),
    "object": object,
    "set": lambda: {1},
    "tuple": lambda: (1, 2),
}


@pytest.mark.behaviour("C164", "C163")
@pytest.mark.parametrize("name", list(UNSTORABLE))
async def test_over_the_wire_a_state_that_cannot_be_stored_names_episode_and_place(tmp_path: Path, name: str) -> None:
    """EXPORT_FAILED at the Capture, and nothing before it: not while it is met by a pass that encodes ahead."""
    settings = ControlSettings(watch_interval=0.02, status_interval=0.02, precopy_interval=0.001, precopy_share=1.0)
    rig = PrecopyRig()
    rig.owner.admission._port = None
    async with serve(rig.owner, roots=[tmp_path], settings=settings) as p:
        rig.begin("good", "bad")
        rig.server.change("bad", deep=[{}, {"when": UNSTORABLE[name]()}])
        await eventually(lambda: rig.ahead() == 1 and any("bad" in call for call in rig.server.asked))
        await p.client.prepare("c1")
        with pytest.raises(ExportFailed, match=r"\$\.deep\[1\]\.when is of type") as caught:
            await p.client.capture("c1", [EpisodeId("r-good"), EpisodeId("r-bad")])
        assert caught.value.episodes == (EpisodeId("r-bad"),)
        rig.server.change("bad", deep="well")
        assert (await p.client.commit("c1")).record_count == 2
        await p.client.resume("c1")


@pytest.mark.behaviour("C167")
@pytest.mark.parametrize("name", ["agent", "resources"])
@pytest.mark.parametrize("depth", [401, 5_000, 200_000])
async def test_over_the_wire_a_state_nested_beyond_all_limits(tmp_path: Path, name: str, depth: int) -> None:
    """Refused with its episode; the server lives and the next capture succeeds."""
    async with served(name, tmp_path) as kind:
        await started(kind, R)
        rig: Any = kind.rig.rig  # type: ignore[attr-defined]
        good = rig.export_sessions

        async def export_sessions(keys: Any) -> Any:
            return {key: {"deep": nested(depth)} for key in keys}

        rig.export_sessions = export_sessions
        await kind.p.client.prepare("c1")
        with pytest.raises(ExportFailed, match="nested") as caught:
            await kind.p.client.capture("c1", [R])
        assert caught.value.episodes == (R,)
        rig.export_sessions = good
        assert (await kind.p.client.commit("c1", [R])).record_count == 1
