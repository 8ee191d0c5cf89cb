"""Counts of the policy model's gate against a count by hand of what callers have received."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.participants.cuts_rig import RESPONSES, STREAM, WAITING, CutsRig, Generation, settle, virtual
from tests.participants.fakes import R, S

STEPS = 400


@dataclass
class Sent:
    """One call, and what its server has sent. put: events of a stream, in order. ended: the server has sent all."""

    generation: Generation
    streams: bool
    waits: bool
    put: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def done(self) -> bool:
        assert self.generation.client is not None
        return self.generation.client.task.done()

    @property
    def runs(self) -> bool:
        """Whether its handler was entered and it has not ended."""
        return self.generation.ticket is not None and not self.done

    @property
    def begun(self) -> bool:
        """Whether the caller has the head of the reply."""
        assert self.generation.client is not None
        return self.generation.client.answer.status != 0

    @property
    def stopped(self) -> bytes | None:
        """The event that was sent and did not arrive."""
        assert self.generation.client is not None
        arrived = [piece for piece in self.generation.client.answer.pieces if piece]
        return self.put[len(arrived)] if len(self.put) > len(arrived) else None


def by_hand(calls: list[Sent], closed: bool) -> dict[str, int]:
    """inflight, waiting, held, paused and held_bytes as callers see them."""
    running = [each for each in calls if each.runs]
    paused = [each for each in running if each.begun and each.waits and each.stopped is not None] if closed else []
    replies = [each for each in running if not each.streams and each.ended and not each.begun]
    return {
        "inflight": len(running),
        "waiting": sum(each.generation.ticket is None and not each.done for each in calls),
        "held": sum(not each.begun or (each.streams and each.waits) for each in running) if closed else 0,
        "paused": len(paused),
        "held_bytes": 4 * len(replies) + sum(len(each.stopped or b"") for each in paused) if closed else 0,
    }


@pytest.mark.behaviour("P105")
@virtual
async def test_counts_are_exact_at_every_moment_of_random_arrivals(rng: random.Random) -> None:
    """Replies and streams of callers that wait and that do not, through closes and opens, with callers that leave."""
    rig = CutsRig()
    calls: list[Sent] = []
    closed, seen = False, set()
    for _ in range(STEPS):
        action = rng.random()
        live = [each for each in calls if each.runs and not each.ended]
        if action < 0.3:
            streams, waits = rng.random() < 0.6, rng.random() < 0.6
            generation = rig.arrive(
                rng.choice((R, S)), path=STREAM if streams else RESPONSES, headers=WAITING if waits else {}
            )
            generation.begin.set()
            generation.send.set()
            calls.append(Sent(generation, streams, waits))
        elif action < 0.4:
            closed = not closed
            rig.close() if closed else rig.open()
        elif action < 0.45 and live:
            client = rng.choice(live).generation.client
            assert client is not None
            client.task.cancel()
        elif live:
            sent = rng.choice(live)
            if not sent.streams or rng.random() < 0.2:
                sent.ended = True
                sent.generation.go.set()
                sent.generation.pieces.put_nowait(None)
            else:
                event = b"data: %s\n\n" % (b"x" * rng.randrange(9))
                sent.put.append(event)
                sent.generation.pieces.put_nowait(event)
        await settle()
        expected = by_hand(calls, closed)
        counts = {**rig.gate.counts(), **rig.admission.counts()}
        assert {name: counts[name] for name in expected} == expected
        seen |= {name for name, value in expected.items() if value}
    assert seen == {"inflight", "waiting", "held", "paused", "held_bytes"}
    rig.open()
    await settle()
    for sent in calls:
        sent.generation.go.set()
        sent.generation.pieces.put_nowait(None)
    await settle()
    counts = {**rig.gate.counts(), **rig.admission.counts()}
    assert not any(counts.values()), counts
    assert all(
        each.stopped is None for each in calls if each.generation.client and not each.generation.client.task.cancelled()
    )
