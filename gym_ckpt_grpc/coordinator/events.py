"""What the coordinator tells about its work: numbered events, the last ones remembered. Never what is decided."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from gym_ckpt_grpc.coordinator.result import CheckpointState

log = logging.getLogger("gym_ckpt_grpc.coordinator")


class EventKind(enum.IntEnum):
    """Mirror of `gymckpt.v1.EventKind`, without its prefix."""

    UNSPECIFIED = 0
    FINDING = 1
    STAGE = 2
    STRAGGLER = 3
    COMMIT = 4
    PUBLICATION = 5
    RESUME = 6
    LEASE = 7
    TAKE_OVER = 8
    RETENTION = 9
    RESTORE = 10


@dataclass(frozen=True, slots=True)
class Event:
    """One event. number rises by one. participant: `kind/service/instance`, or empty. at: monotonic seconds.

    state: what the checkpoint came to by it; UNSPECIFIED for an event that is no such moment.
    """

    number: int
    kind: EventKind
    message: str
    checkpoint_id: str = ""
    participant: str = ""
    at: float = 0.0
    state: CheckpointState = CheckpointState.UNSPECIFIED


class Events:
    """The last `limit` events, and a listener. The listener is called on the coordinator's loop; it must not block."""

    def __init__(self, listener: Callable[[Event], None] | None = None, *, limit: int = 1000) -> None:
        self._listener = listener
        self._kept: deque[Event] = deque(maxlen=limit)
        self._number = 0
        self._followers: set[asyncio.Event] = set()

    def __iter__(self) -> Iterator[Event]:
        return iter(list(self._kept))

    def __len__(self) -> int:
        return len(self._kept)

    def since(self, number: int) -> list[Event]:
        """The remembered events from this number on."""
        return [event for event in self._kept if event.number >= number]

    @property
    def last(self) -> int:
        """The number of the last one; 0 if there was none."""
        return self._number

    async def follow(self, number: int = 0) -> AsyncIterator[Event]:
        """The remembered events from this number on, then each as it happens, for ever.

        One that is forgotten before a slow reader comes to it is left out.
        """
        news = asyncio.Event()
        self._followers.add(news)
        try:
            while True:
                news.clear()
                for event in self.since(number):
                    number = event.number + 1
                    yield event
                await news.wait()
        finally:
            self._followers.discard(news)

    def add(
        self,
        kind: EventKind,
        message: str,
        *,
        checkpoint_id: str = "",
        participant: str = "",
        state: CheckpointState = CheckpointState.UNSPECIFIED,
    ) -> None:
        """Append one; what the listener raises is logged and goes no further."""
        self._number += 1
        event = Event(self._number, kind, message, checkpoint_id, participant, time.monotonic(), state)
        self._kept.append(event)
        for news in self._followers:
            news.set()
        log.info("%s %s%s %s", kind.name.lower(), checkpoint_id, f" {participant}" if participant else "", message)
        if self._listener:
            try:
                self._listener(event)
            except Exception:
                log.exception("the listener of events failed")
