"""Random checkpoints over random calls: what a durable checkpoint names stays, and nothing else does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.participants.fakes import Call, retire, spin
from tests.participants.policy_rig import FakeBackend, PolicyServer
from tests.participants.test_policy_records_export import read

EPISODES = [EpisodeId(f"r{number}") for number in range(4)]
NAME = "inference-0"


class Driver:
    """One server, its calls, and what durable records name. undecided: checkpoint -> cuts that its records name."""

    def __init__(self, server: PolicyServer, rng: random.Random) -> None:
        self.server = server
        self.backend = server.backends[NAME]
        self.rng = rng
        self.calls: list[Call] = []
        self.retired: set[EpisodeId] = set()
        self.durable: set[str] = set()
        self.undecided: dict[int, set[str]] = {}

    async def start_calls(self) -> None:
        for _ in range(self.rng.randint(1, 5)):
            alive = [episode for episode in EPISODES if episode not in self.retired]
            request = [{"role": "user", "content": self.rng.choice("ab")}]
            self.calls.append(await self.server.begin(self.rng.choice(alive or [EpisodeId("last")]), messages=request))
            if self.rng.random() < 0.2:
                self.backend.silent.add(self.server.call_ids[-1])

    async def disturb(self) -> None:
        """Something that happens while admission is closed."""
        happening = self.rng.random()
        if happening < 0.3:
            self.server.go.set()  # every call under way finishes
            await spin(10)
            self.server.go.clear()
        elif happening < 0.5 and self.calls:
            self.rng.choice(self.calls).task.cancel()  # a client leaves
            await spin(10)
        elif happening < 0.6 and len(self.retired) < 2:
            episode = self.rng.choice(EPISODES)
            await retire(self.server.owner, self.server.port, episode)
            self.retired.add(episode)

    async def freeze(self, number: int) -> None:
        alive = [episode for episode in EPISODES if episode not in self.retired]
        scope = self.rng.sample(alive, self.rng.randint(0, len(alive)))
        records = await self.server.export(*scope)
        named = {cut.cut_id for record in records for cut in read(record).cuts if not cut.finish_reason}
        self.undecided[number] = named
        assert named <= set(self.backend.cuts)

    def decide(self, number: int) -> None:
        durable = self.rng.random() < 0.5
        named = self.undecided.pop(number, set())
        if durable:
            self.durable |= named
        self.server.owner.write_ended(f"ckpt-{number}", durable)

    async def checkpoint(self, number: int) -> None:
        await self.server.close(number)
        await self.disturb()
        for _ in range(self.rng.randint(0, 2)):  # none: aborted; two: the first export failed late
            await self.freeze(number)
            await self.disturb()
        keeps = self.rng.random() < 0.3
        if not keeps:
            self.decide(number)
            await self.disturb()
        await self.server.open()
        await spin(10)
        undecided = set().union(*self.undecided.values())
        assert set(self.backend.cuts) == self.durable | undecided
        assert not set(self.backend.released) & (self.durable | undecided)

    async def end(self) -> None:
        for number in list(self.undecided):
            self.decide(number)
        self.server.go.set()
        for each in self.calls:
            if not each.task.cancelled():
                await each.end()
        await spin(20)
        assert set(self.backend.cuts) == self.durable
        assert self.server.counts("inflight", "held", "cuts_unreleased") == (0, 0, 0)
        assert self.server.owner._state.made._made == {}


@pytest.mark.behaviour("P153", "P154", "P155")
async def test_exactly_what_durable_records_name_is_left(tmp_path: Path, rng: random.Random) -> None:
    """Also with writes that end in later checkpoints, calls that finish or leave while closed, and retires."""
    driver = Driver(PolicyServer(tmp_path / "ledger", FakeBackend(NAME)), rng)
    for number in range(1, 31):
        await driver.start_calls()
        await driver.checkpoint(number)
        if driver.undecided and rng.random() < 0.5:
            driver.decide(rng.choice(list(driver.undecided)))
            await spin(10)
    await driver.end()
    await driver.server.end()
