"""The holder's own count of each lease. Source: coordination section 7.

Counted on the monotonic clock from the *sending* of the last call accepted; after `ttl` the lease is taken as
lost, whatever the participant says later. Safe to use from several threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gym_ckpt_grpc.coordinator.deadlines import Clock
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.protocol.errors import ControlError, LeaseLost


@dataclass(slots=True, eq=False)
class Hold:
    """One lease at one participant for one checkpoint.

    accepted: whether the participant has accepted a call of it; before that, a refused renewal is no loss, but it
    is heard. counted_from: monotonic seconds of the sending of the last accepted call, or before the first one, of
    the last call that was answered at all: a Prepare that waits behind a cable that was cut must not wait for ever.
    lost: why it is gone.
    """

    member: Member
    checkpoint_id: str
    ttl: float
    begun: float
    counted_from: float
    accepted: bool = False
    released: bool = False
    lost: ControlError | None = None

    @property
    def expires(self) -> float:
        return self.counted_from + self.ttl


class Holds:
    """All leases of one coordinator. on_lost is called once per lost hold, on whatever thread found it."""

    def __init__(self, on_lost: Callable[[Hold], None] | None = None, clock: Clock = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._holds: dict[tuple[str, str], Hold] = {}
        self._on_lost = on_lost
        self.clock = clock

    def begin(self, member: Member, checkpoint_id: str, ttl: float) -> Hold:
        """A Prepare or Restore is about to be sent; a hold there already goes on."""
        with self._lock:
            key = (member.name, checkpoint_id)
            known = self._holds.get(key)
            if known is not None and not known.released:
                return known
            now = self.clock()
            hold = self._holds[key] = Hold(member, checkpoint_id, ttl, begun=now, counted_from=now)
            return hold

    def get(self, member: Member, checkpoint_id: str) -> Hold | None:
        with self._lock:
            return self._holds.get((member.name, checkpoint_id))

    def count(self, hold: Hold, sent_at: float) -> None:
        """A call sent at `sent_at` was accepted. A lease that was lost stays lost."""
        with self._lock:
            hold.counted_from = max(hold.counted_from, sent_at) if hold.accepted else sent_at
            hold.accepted = True
        self.check(hold)

    def hear(self, hold: Hold, sent_at: float) -> None:
        """A call sent at `sent_at` was refused before the first one was accepted: the participant is there."""
        with self._lock:
            if not hold.accepted:
                hold.counted_from = max(hold.counted_from, sent_at)

    def check(self, hold: Hold) -> bool:
        """Whether the lease is held, by the count alone; marks it lost if it is not."""
        now = self.clock()
        if not hold.released and hold.lost is None and now >= hold.expires:
            what = "accepted" if hold.accepted else "answered"
            text = f"no call was {what} for {now - hold.counted_from:.1f} s, the lease is {hold.ttl:.1f} s"
            self.lose(hold, LeaseLost(text, participant=hold.member.name))
        return hold.lost is None

    def lose(self, hold: Hold, why: ControlError) -> None:
        """Mark it lost, unless it was released: a renewal refused after that is no loss."""
        with self._lock:
            if hold.released or hold.lost is not None:
                return
            hold.lost = why
        if self._on_lost:
            self._on_lost(hold)

    def release(self, member: Member, checkpoint_id: str) -> None:
        """The participant's own Resume is about to be sent: the lease is not ours to watch any more."""
        with self._lock:
            hold = self._holds.pop((member.name, checkpoint_id), None)
            if hold:
                hold.released = True

    def of(self, checkpoint_id: str) -> list[Hold]:
        """The holds of a checkpoint, each counted anew."""
        with self._lock:
            holds = [hold for hold in self._holds.values() if hold.checkpoint_id == checkpoint_id]
        for hold in holds:
            self.check(hold)
        return holds
