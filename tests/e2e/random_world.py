"""A controller that does random things to a minigym of real processes, and what it knows must hold.

Every rollout takes two calls of the model, each held after a few tokens until the controller lets it go on. A crash
takes the controller's memory with it, back to the newest checkpoint: only which attempts were ever used is kept.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from gym_ckpt_grpc.coordinator.transaction import Checkpoint
from gym_ckpt_grpc.minigym.trainer import Result
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import participant_pb2 as pb
from tests.e2e.plays import counting, play
from tests.e2e.rig import HELD_AFTER, Rig, until

CALLS = 2
"""Calls of the model that one uninterrupted rollout makes."""
MOST_ROLLOUTS = 8


@dataclass(frozen=True)
class Kept:
    """What a checkpoint has of a rollout. calls: replies that were delivered. cut: tokens of a cut of the next one."""

    calls: int
    cut: int


@dataclass(frozen=True)
class Saved:
    """The controller's memory as of a checkpoint. let_go: (rollout, call) pairs that are not held any more."""

    results: dict[str, Result] = field(default_factory=dict)
    let_go: frozenset[tuple[str, int]] = frozenset()
    kept: dict[str, Kept] = field(default_factory=dict)
    checkpoint_id: str = ""


@dataclass
class World:
    """The sequence so far. highest: attempt of each rollout that was sent last. retired: what was given up."""

    gym: Rig
    rng: random.Random
    results: dict[str, Result] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)
    let_go: set[tuple[str, int]] = field(default_factory=set)
    retired: set[EpisodeId] = field(default_factory=set)
    saved: Saved = field(default_factory=Saved)
    restored: dict[tuple[int, EpisodeId], Kept] = field(default_factory=dict)
    published: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    _holds: dict[tuple[str, int], int] = field(default_factory=dict)

    # ---- the operations

    async def run(self, operations: int) -> None:
        """Do so many random things, then let everything finish."""
        await self.gym.start()
        chances = Counter(start=5, release=6, checkpoint=3, start_and_checkpoint=2, start_closed=1, retire=2, crash=2)
        names = self.rng.choices(list(chances), weights=list(chances.values()), k=operations)
        # At least one of what matters most, in this order, whatever was drawn.
        for name in ["start", *names, "start", "checkpoint", "crash"]:
            await self._do(name)
        await self.finish()

    async def _do(self, name: str) -> None:
        self.log.append(name)
        print(name, end=" ", flush=True)
        await getattr(self, name)()
        self.collect()

    async def start(self) -> None:
        """Send a rollout that was never sent."""
        if len(self.highest) < MOST_ROLLOUTS:
            await self._send(f"r{len(self.highest)}", 0)

    async def release(self) -> None:
        """Let a call go on, or every call of a rollout."""
        if held := self._held():
            rollout = self.rng.choice(held)
            for call in self._calls_held(rollout)[: self.rng.choice([1, 1, CALLS])]:
                await self._let_go(rollout, call)

    async def checkpoint(self) -> None:
        """Take and publish one, of what is in flight."""
        async with self.gym.prepared() as checkpoint:
            await self._commit(checkpoint)

    async def start_and_checkpoint(self) -> None:
        """Take one while a rollout is somewhere in its first steps."""
        await self.start()
        await self.checkpoint()

    async def start_closed(self) -> None:
        """Send a rollout while all is closed; it runs afterwards."""
        async with self.gym.prepared() as checkpoint:
            before = len(self.highest)
            await self.start()
            new = len(self.highest) - before
            await self.gym.until("environment", lambda status: status.report.counts["waiting"] >= new)
            await self._commit(checkpoint)

    async def retire(self) -> None:
        """Give an attempt up and send the next one, which starts over."""
        if held := self._held():
            rollout = self.rng.choice(held)
            await self._give_up(rollout)
            await until(lambda: rollout in self.gym.trainer.failures)
            reason = self.gym.trainer.failures.pop(rollout)
            assert "STALE_ATTEMPT" in reason, reason
            await self._send(rollout, self.highest[rollout] + 1)

    async def crash(self) -> None:
        """SIGKILL of everything, the controller's memory included; then on from the newest checkpoint."""
        await self.gym.crash()
        self.results, self.let_go = dict(self.saved.results), set(self.saved.let_go)
        self._holds.clear()
        await self.gym.start()
        continued: dict[str, int] = {}
        if self.saved.checkpoint_id:
            restored = await self.gym.restore_here()
            continued = {episode.rollout_id: episode.attempt for episode in restored.continued}
            assert set(continued) == set(self.saved.kept), "what was committed is what is restored"
        for rollout in list(self.highest):
            if rollout in continued:
                episode = EpisodeId(rollout, continued[rollout])
                self.restored[self.gym.life, episode] = self.saved.kept[rollout]
                await self._send(rollout, continued[rollout], afresh=False)
            elif rollout not in self.results:
                await self._give_up(rollout)
                await self._send(rollout, self.highest[rollout] + 1)

    async def finish(self) -> None:
        """Let everything go on to its end, and forget what was given up."""
        await self.gym.release_tokens()
        await self.gym.finish()
        self.collect()
        async with self.gym.coordinator() as coordinator:
            await coordinator.forget(self.retired)

    def collect(self) -> None:
        """Take the results that have come; a failure that the controller did not cause fails the test."""
        assert not self.gym.trainer.failures, self.gym.trainer.failures
        self.results.update(self.gym.trainer.results)

    # ---- inside

    async def _send(self, rollout: str, attempt: int, *, afresh: bool = True) -> None:
        """Send an attempt, each of its calls held; one that goes on keeps what was let go before its checkpoint."""
        if afresh:
            self.let_go -= {(rollout, call) for call in range(CALLS)}
        self.highest[rollout] = attempt
        for call in self._calls_held(rollout):
            self._holds[rollout, call] = await self.gym.hold_tokens(HELD_AFTER, rollout_id=rollout, turn=call)
        self.gym.send([counting(rollout)], {rollout: attempt})

    async def _let_go(self, rollout: str, call: int) -> None:
        self.let_go.add((rollout, call))
        await self.gym.release_tokens(self._holds.pop((rollout, call)))

    async def _give_up(self, rollout: str) -> None:
        episode = EpisodeId(rollout, self.highest[rollout])
        self.retired.add(episode)
        await self.gym.retire([episode])
        for call in self._calls_held(rollout):
            if number := self._holds.pop((rollout, call), None):
                await self.gym.release_tokens(number)

    def _calls_held(self, rollout: str) -> list[int]:
        return [call for call in range(CALLS) if (rollout, call) not in self.let_go]

    def _held(self) -> list[str]:
        """Rollouts that cannot finish, since a call of theirs is held."""
        return [rollout for rollout in self.gym.trainer.in_flight if self._calls_held(rollout)]

    async def _commit(self, checkpoint: Checkpoint) -> None:
        await self.gym.settled()
        self.collect()
        results, let_go = dict(self.results), frozenset(self.let_go)
        number = len(self.published)
        await self.gym.commit(checkpoint, incremental=number % 2 == 1, released=number % 3 > 0)
        kept = {episode.rollout_id: self._kept(episode, checkpoint.id) for episode in checkpoint.continued}
        self.saved = Saved(results, let_go, kept, checkpoint.id)
        self.published.append(checkpoint.id)

    def _kept(self, episode: EpisodeId, checkpoint_id: str) -> Kept:
        """Read from the records how far a rollout has come."""
        key = episode.capture_key
        step = self.gym.boundary(episode.rollout_id, checkpoint_id)
        if step in (None, "seed"):
            return Kept(0, 0)
        if step != "invoke_agent":
            return Kept(CALLS, 0)
        agent = self.gym.records("agent", checkpoint_id)[key]
        messages = agent.decode("boundary")["messages"] if "boundary" in agent.payloads else []
        replies = agent.decode("kept_replies") if "kept_replies" in agent.payloads else {}
        calls = sum(message["role"] == "assistant" for message in messages) + len(replies)
        policy = self.gym.records("policy_model", checkpoint_id).get(key)
        cuts = policy.decode("cuts") if policy and "cuts" in policy.payloads else []
        return Kept(calls, max((cut["prefix_tokens"] for cut in cuts), default=0))

    # ---- what must hold at the end

    async def check(self) -> None:
        """Every reward right, nothing repeated, every checkpoint intact, every server idle and empty."""
        plays = {rollout: play(counting(rollout)).result for rollout in self.highest}
        assert self.results == plays, (self.results, plays)
        assert {result.reward for result in self.results.values()} == {1.0}
        self._check_calls()
        damaged = [fault for name in self.published for fault in self.gym.faults(name)]
        assert not damaged, damaged
        # A policy model whose rollout came back after its last call learns at the next checkpoint that it is over.
        silent = sum(kept.calls == CALLS for (life, _), kept in self.restored.items() if life == self.gym.life)
        left = await self._left()
        assert left == ([f"policy_model: restored_pending {silent}"] if silent else []), left
        await self.gym.checkpoint([])
        left = await self._left()
        assert not left, left

    async def _left(self) -> list[str]:
        """What servers have that have nothing to do any more."""
        statuses = await self.gym.statuses()
        return [f"{name}: {problem}" for name, status in statuses.items() for problem in problems(status)]

    def _check_calls(self) -> None:
        """By the worker's own log: calls of each attempt in each life, and what they generated again."""
        calls = self.gym.calls()
        made = Counter((call.life, call.rollout_id, call.attempt) for call in calls)
        assert max(made.values()) <= CALLS, made
        for call in calls:
            if kept := self.restored.get((call.life, EpisodeId(call.rollout_id, call.attempt))):
                assert call.turn >= kept.calls, f"{call} was delivered before the checkpoint: {kept}"
                assert call.reused == (kept.cut if call.turn == kept.calls else 0), f"{call}: {kept}"


def problems(status: pb.ParticipantStatus) -> Iterator[str]:
    """What a server that has nothing to do should not have."""
    if status.phase != pb.PHASE_IDLE:
        yield f"phase {status.phase}"
    yield from (f"{count} {name}" for name, count in status.report.counts.items() if count)
    for name in ("marks_held", "restored_pending", "writes_under_way", "active_checkpoint_id"):
        if value := getattr(status, name):
            yield f"{name} {value}"
    if status.report.blocker_count or status.report.restart_count:
        yield "blockers or restarts"
