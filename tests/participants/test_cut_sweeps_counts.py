"""Random mixes of calls and answers: every call ends with exactly one disposition, and the counts add up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import CutAck, CutDisposition, Sweep
from gym_ckpt_grpc.participants.policy_settings import PolicyModelSettings
from gym_ckpt_grpc.participants.tickets import Ticket
from gym_ckpt_grpc.protocol.errors import WorkerUnavailable
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.participants.cuts_rig import (
    READY,
    STREAM,
    WAITING,
    CutsRig,
    FakeBackend,
    Generation,
    Part,
    ack,
    evidence,
    finished,
    settle,
    virtual,
)

SAID = [each for each in CutDisposition if each is not CutDisposition.UNSPECIFIED]
FINAL = {CutDisposition.CUT, CutDisposition.FINISHED, CutDisposition.UNCUTTABLE, CutDisposition.FAILED}
SEEDS = 40


class Play:
    """One random run, and what a hand count of it says."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = CutsRig(
            *(FakeBackend(name, self.script) for name in ("b", "c")),
            settings=PolicyModelSettings(cut_tries=self.random.randint(1, 3)),
        )
        self.calls: list[Generation] = []
        self.made_before = 0
        """Cuts of earlier closings."""

    async def script(self, sweep: Sweep, budget: Budget) -> AsyncIterator[Part]:
        """Batches of acks in any order; some late, bad, twice or left out, and an end that breaks or hangs."""
        order = list(range(len(sweep.calls)))
        self.random.shuffle(order)
        while order:
            if self.random.random() < 0.5:
                await asyncio.sleep(self.random.choice((0, 0.1, 3.0)))
            batch, order = order[:3], order[3:]
            yield [each for at in batch for each in self.acks(sweep, at)]
        ending = self.random.random()
        if ending < 0.2:
            raise WorkerUnavailable("gone")
        if ending < 0.3:
            await asyncio.Event().wait()

    def acks(self, sweep: Sweep, at: int) -> list[CutAck]:
        said = ack(sweep, at, self.random.choice(SAID), f"{sweep.service}-{sweep.number}-{self.random.random()}")
        fate = self.random.random()
        if fate < 0.1:
            return []
        if fate < 0.2:
            return [replace(said, call=replace(said.call, request_digest="0" * 64))]
        if fate < 0.25:
            return [said, said]
        if fate < 0.3:
            return [replace(said, evidence=None if said.evidence else evidence("bad"))]
        return [said]

    async def arrive(self) -> None:
        """Calls of all kinds: streams, constrained, unfinished beginnings, untagged ones."""
        for number in range(self.random.randint(1, 12)):
            episode = None if self.random.random() < 0.1 else EpisodeId(f"r{number % 5}", self.random.randint(0, 1))
            body = {"n": 2} if self.random.random() < 0.2 else None
            stream = self.random.random() < 0.2
            generation = self.rig.arrive(
                episode,
                body,
                backend=self.random.choice("bc"),
                path=STREAM if stream else "/v1/responses",
                headers=WAITING,
            )
            self.calls.append(generation)
            if self.random.random() < 0.8:
                generation.begin.set()
                if self.random.random() < 0.8:
                    generation.send.set()
        await settle()

    def act(self) -> None:
        """Something happens to a call while closed."""
        generation = self.random.choice(self.calls)
        what = self.random.random()
        if what < 0.3:
            generation.begin.set()
        elif what < 0.6:
            generation.send.set()
        elif what < 0.7 and generation.client is not None:
            generation.client.task.cancel()
        elif what < 0.9:
            generation.status = self.random.choice((200, 200, 500))
            generation.finish(finished(f"own-{id(generation)}") if self.random.random() < 0.7 else None)
        else:
            generation.pieces.put_nowait(b"data: 1\n\n")

    def check_sum(self) -> None:
        """At every moment: of the undelivered calls, each is counted once, by what it has."""
        open_now = list(self.rig.gate.undelivered())
        held, cut, failed, skipped = self.rig.cuts()
        assert held == len(open_now) == cut + failed + skipped
        assert cut == sum(ticket.cut is not None for ticket in open_now)
        assert skipped == sum(bool(ticket.restart_reason) for ticket in open_now)
        blocking = [each.episode for each in self.rig.blocking.oldest(100) if each.place == "generation_cut"]
        assert len(blocking) == sum(ticket.owed for ticket in open_now)

    def check_settled(self) -> None:
        """When the checkpoint is ready: one final disposition for each eligible call, evidence with it or not."""
        for ticket in self.rig.gate.undelivered():
            if ticket.restart_reason:
                assert (ticket.cut, ticket.disposition) == (None, CutDisposition.UNSPECIFIED)
                continue
            assert ticket.disposition in FINAL
            assert (ticket.cut is not None) is (ticket.disposition in (CutDisposition.CUT, CutDisposition.FINISHED))

    def check_cuts(self) -> None:
        """Every cut that was taken is on its call, was released, or left with its call; none is two of these."""
        made = {cut_id: call_id for _, cut_id, call_id in self.rig.hooks.made[self.made_before :]}
        kept = {self.named(ticket) for ticket in self.rig.gate.undelivered() if ticket.cut and not ticket.cut.own}
        released = {cut_id for _, cut_id in self.rig.hooks.released}
        ended = {call_id for call_id, _ in self.rig.hooks.ended}
        assert kept <= set(made)
        assert not kept & released
        assert {made[cut_id] for cut_id in made if cut_id not in kept | released} <= ended
        assert not any(cut_id.startswith("own-") for cut_id in released)

    @staticmethod
    def named(ticket: Ticket) -> str:
        assert ticket.cut is not None
        return ticket.cut.evidence.cut_id


@pytest.mark.behaviour("P128", "P105")
@virtual
async def test_every_eligible_call_ends_with_one_disposition_and_the_counts_are_the_undelivered_calls(
    rng: random.Random,
) -> None:
    seeds = [rng.randrange(2**32) for _ in range(SEEDS)]
    seen: Counter[CutDisposition] = Counter()
    for seed in seeds:
        print(f"seed {seed}")
        play = Play(seed)
        for _ in range(2):
            await play.arrive()
            play.made_before = len(play.rig.hooks.made)
            play.rig.close()
            await settle()
            play.check_sum()
            for _ in range(play.random.randint(0, 20)):
                play.act()
                await asyncio.sleep(play.random.choice((0.0, 0.05, 0.4)))
                play.check_sum()
                play.check_cuts()
            await asyncio.sleep(READY / 2)
            assert not [each for each in play.rig.blocking.oldest(100) if each.place == "generation_cut"]
            play.check_sum()
            play.check_settled()
            play.check_cuts()
            seen.update(ticket.disposition for ticket in play.rig.gate.undelivered() if not ticket.restart_reason)
            play.rig.open()
            assert play.rig.cuts() == (0, 0, 0, 0)
        for generation in play.calls:
            generation.pieces.put_nowait(None)
            generation.begin.set()
            generation.send.set()
            generation.go.set()
        tasks = [generation.client.task for generation in play.calls if generation.client]
        await asyncio.wait(tasks)
        assert play.rig.counts("inflight", "held", "paused", "held_bytes", "untagged") == (0, 0, 0, 0, 0)
    assert set(seen) == FINAL, seen
