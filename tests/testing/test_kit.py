"""The fakes: a clock, gates, an owner, a network, and serving."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from gym_ckpt_grpc.control import EpisodeListKind, open_channel
from gym_ckpt_grpc.protocol import EpisodeId, Phase
from gym_ckpt_grpc.protocol.errors import (
    ExportFailed,
    InvalidPhase,
    StaleAttempt,
    StaleCheckpoint,
    Unauthenticated,
    UsageError,
)
from gym_ckpt_grpc.testing import Cable, FakeClock, FakeOwner, Gate, Network, ParticipantClient, serve, unreplayed
from gym_ckpt_grpc.testing.network import open_address


def test_the_clock_moves_only_by_hand() -> None:
    """And never back."""
    clock = FakeClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    assert clock.advance(2.5) == clock() == 7.5
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1)


async def test_a_gate_holds_and_fails() -> None:
    """A held step goes on after release, and raises what it was told to."""
    gate = Gate()
    await gate.step()
    gate.hold()
    step = asyncio.create_task(gate.step())
    await gate.reached(2)
    assert not step.done()
    gate.fail(LookupError("told"))
    gate.release()
    with pytest.raises(LookupError, match="told"):
        await step
    with pytest.raises(TimeoutError):
        await gate.reached(3, within=0.01)


async def test_the_fake_owner_goes_through_a_checkpoint(tmp_path: Path) -> None:
    """Blockers, a hook that fails once, a commit, and a restore into a second one under later attempts."""
    owner = FakeOwner()
    async with serve(owner, roots=[tmp_path]) as served:
        client = served.client
        a, b = owner.add("a", "b-a2", state={"n": 1})
        [busy] = owner.add("busy", running=True)
        reply = await client.prepare("c1", within=0.0)
        assert [blocker.episode.rollout_id for blocker in reply.report.blockers] == ["busy"]
        owner.park(busy)
        await client.prepare("c1", within=5)
        owner.left_out.append(busy)
        owner.exports.fail(RuntimeError("once"))
        with pytest.raises(ExportFailed):
            await client.capture("c1")
        owner.exports.fail(None)
        committed = await client.commit("c1")
        assert (committed.record_count, committed.left_out_count) == (2, 1)
        assert unreplayed(await client.commit("c1")) == unreplayed(committed)
        assert await client.listed(EpisodeListKind.COMMITTED, "c1") == [a, b]
        await client.resume("c1")
        with pytest.raises(InvalidPhase) as caught:
            await client.restore("r0", [a], source="c1")
        assert caught.value.episodes == (a,)
    again = FakeOwner()
    async with serve(again, roots=[tmp_path]) as served:
        await served.client.restore("r1", [a, b], source="c1", digest=committed.manifest_digest)
        assert again.pending == {a.next(), b.next()}
        await served.client.resume("r1")
        assert again.start(b.next()) == {"n": 1}
        assert again.pending == {a.next()}
        await served.client.retire([a.next()])
        with pytest.raises(StaleAttempt):
            again.start(a.next())
        again.finish(b.next())
        assert again.live == {}


async def test_a_fake_clock_ends_a_lease() -> None:
    """The lease counts on the clock that was given: nothing ends before it is moved."""
    clock = FakeClock()
    async with serve(FakeOwner(), clock=clock) as served:
        await served.client.prepare("c1", within=5, ttl=30)
        clock.advance(29)
        assert await served.client.phase() is Phase.PREPARED
        clock.advance(2)
        await served.client.until(Phase.IDLE)
        with pytest.raises(StaleCheckpoint):
            await served.client.renew("c1")


async def test_serving_asks_for_its_token(tmp_path: Path) -> None:
    """Over a Unix socket too; an observer's token needs a controller's beside it."""
    async with serve(FakeOwner(), token="good", address=f"unix:{tmp_path}/s") as served:
        assert await served.client.phase() is Phase.IDLE
        async with open_channel(served.address) as channel:
            with pytest.raises(Unauthenticated):
                await ParticipantClient(channel).status()
    with pytest.raises(UsageError, match="observer"):
        async with serve(FakeOwner(), observer_token="lonely"):
            pass


class Cabled:
    """A client behind a cable."""

    def __init__(self, cable: Cable, client: ParticipantClient, owner: FakeOwner) -> None:
        self.cable, self.client, self.owner = cable, client, owner


async def test_one_reply_is_lost_and_asked_for_again() -> None:
    """The server carried the call out once; the client heard nothing, and the retry is the recorded reply."""
    owner = FakeOwner()
    async with serve(owner) as served, Network() as network:
        cable = await network.cable(served.address)
        async with open_channel(cable.address) as channel:
            client = ParticipantClient(channel)
            await client.prepare("c1", within=5)
            cable.lose_reply()
            with pytest.raises(grpc.aio.AioRpcError):
                await client.capture("c1")
            assert cable.lost.is_set()
            assert (await served.client.capture("c1")).replayed
            assert owner.exports.count == 1
            await served.client.resume("c1")


async def test_a_cut_cable_refuses_until_it_is_mended() -> None:
    """Connections break at once; new ones come after `mend`."""
    async with serve(FakeOwner()) as served, Network() as network:
        cable = await network.cable(served.address)
        async with open_channel(cable.address) as channel:
            client = ParticipantClient(channel)
            await client.status()
            assert cable.connected == 1
            cable.cut()
            await cable.until(lambda: cable.connected == 0)
            with pytest.raises(grpc.aio.AioRpcError):
                await client.status()
            cable.mend()
        async with open_channel(cable.address, dedicated=True) as channel:
            assert await ParticipantClient(channel).phase() is Phase.IDLE


async def test_a_stalled_cable_carries_nothing() -> None:
    """The connection stays, a call runs out of time, and the same connection works again after `mend`."""
    async with serve(FakeOwner()) as served, Network() as network:
        cable = await network.cable(served.address)
        async with open_channel(cable.address) as channel:
            client = ParticipantClient(channel)
            await client.status()
            cable.stall()
            client.timeout = 0.2
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.status()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert cable.connected == 1
            cable.mend()
            client.timeout = 10.0
            assert await client.phase() is Phase.IDLE


async def test_a_delayed_cable_is_slow() -> None:
    """Each piece of data waits, so that a short deadline passes and a long one does not."""
    async with serve(FakeOwner()) as served, Network() as network:
        cable = await network.cable(served.address)
        async with open_channel(cable.address) as channel:
            client = ParticipantClient(channel)
            await client.status()
            cable.delay(0.2)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await client.status()
            assert loop.time() - began >= 0.4


async def test_a_cable_needs_a_plain_address() -> None:
    """`host:port` or `unix:path`."""
    with pytest.raises(ValueError, match="neither"):
        await open_address("dns:///somewhere")


def test_fake_episodes_are_named_by_capture_keys() -> None:
    """`-a2` is attempt 2; nothing needs a control plane yet."""
    owner = FakeOwner()
    assert owner.add("x-a2", "y", restart=True) == [EpisodeId("x", 2), EpisodeId("y")]
    assert owner.restarts == {EpisodeId("x", 2), EpisodeId("y")}
