"""What a checkpoint heard of its participants: the last outcome of each operation, and when each was under way.

The times make the event log beside the manifest, which nobody needs: it is written once the fleet is open, in the
background, and whatever goes wrong with it is a line in the log of this process. Source: telemetry section 5.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.coordinator.member import Member
from gym_ckpt_grpc.coordinator.outcomes import Outcome, in_listing_order
from gym_ckpt_grpc.coordinator.timing import Timing
from gym_ckpt_grpc.protocol.phases import Phase
from gym_ckpt_grpc.storage import CheckpointRoot
from gym_ckpt_grpc.storage.event_log import MAX_STEPS, MOMENTS, EventLog, LoggedStep, write_event_log

STEPS = ("Prepare", "Capture", "Commit", "Resume")
"""Operations of which the event log tells."""
PATIENCE = 1.0
"""Seconds that leaving the coordinator waits for an event log that is being written."""

log = logging.getLogger("gym_ckpt_grpc.coordinator")


class Hearing:
    """Of one checkpoint. began: seconds since 1970 of its first closing; 0 while that is not known."""

    def __init__(self) -> None:
        self.began = 0.0
        self._zero = 0.0  # the same instant on this process's monotonic clock
        self._last: dict[str, dict[str, Outcome[Any]]] = {}
        self._steps: dict[tuple[str, str, float], LoggedStep] = {}
        self._moments: dict[str, float] = {}
        self._left_out = 0

    def begin(self) -> None:
        """The first Prepare is about to be sent."""
        self.began, self._zero = time.time(), time.monotonic()

    def go_on(self, began: float, steps: Sequence[LoggedStep], moments: Mapping[str, float]) -> None:
        """What another process of the checkpoint heard. Its clock may have been another one: times are for people."""
        self.begin()
        if began:
            self._zero -= max(0.0, self.began - began)
            self.began = began
        for step in steps:
            self._steps[step.participant, step.step, step.start] = step
        self._moments.update(moments)

    # ---- outcomes

    def hear(self, outcome: Outcome[Any]) -> None:
        """One participant's outcome of one operation."""
        self._last.setdefault(outcome.operation, {})[outcome.name] = outcome
        if outcome.operation not in STEPS or not self.began:
            return
        start = max(0.0, outcome.begun - self._zero)
        where = (outcome.name, outcome.operation, round(start, 6))
        if len(self._steps) >= MAX_STEPS and where not in self._steps:
            self._left_out += 1
            return
        self._steps[where] = LoggedStep(
            participant=outcome.name,
            step=outcome.operation,
            start=where[2],
            end=round(start + outcome.duration, 6),
            outcome=_outcome(outcome),
            tries=outcome.tries,
            records=getattr(outcome.reply, "record_count", 0),
            bytes=getattr(outcome.reply, "bytes", 0),
        )

    @property
    def outcomes(self) -> Mapping[str, list[Outcome[Any]]]:
        """Operation -> outcomes in listing order, such as `outcomes["Commit"]`."""
        return {operation: in_listing_order(by_name.values()) for operation, by_name in self._last.items()}

    def has(self, operation: str) -> bool:
        """Whether any outcome of it was heard."""
        return operation in self._last

    def of(self, operation: str, members: Sequence[Member]) -> list[Outcome[Any]]:
        """The last outcome of each of these members, as far as it was heard."""
        heard = self._last.get(operation, {})
        return [heard[member.name] for member in members if member.name in heard]

    # ---- times

    @property
    def steps(self) -> tuple[LoggedStep, ...]:
        """Every step so far, those that other processes heard too."""
        return tuple(self._steps.values())

    def moments(self, timing: Timing) -> dict[str, float]:
        """The moments that are known, in seconds from the first closing."""
        seen = {name: getattr(timing, f"{name}_at") for name in MOMENTS}
        return self._moments | {name: round(at - self._zero, 6) for name, at in seen.items() if at is not None}

    def event_log(self, checkpoint_id: str, timing: Timing) -> EventLog:
        """The event log as of now."""
        return EventLog(
            checkpoint_id=checkpoint_id,
            began=round(self.began, 3),
            steps=self.steps,
            moments=self.moments(timing),
            left_out=self._left_out,
        )


def _outcome(outcome: Outcome[Any]) -> str:
    if outcome.error is not None:
        return outcome.error.code.name
    if outcome.operation == "Prepare" and wire.phase_from(outcome.answer.phase) is not Phase.PREPARED:
        return "not_ready"
    return "ok"


class EventLogs:
    """The event logs that one session writes, each in a thread of its own that no exit waits for for long."""

    def __init__(self, root: CheckpointRoot) -> None:
        self._root = root
        self._writing: set[asyncio.Future[None]] = set()

    def keep(self, kept: EventLog) -> None:
        """Begin to write one, in place of an earlier one of the checkpoint. Never raises, never waits."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._writing.add(written)
        written.add_done_callback(self._writing.discard)

        def end() -> None:
            if not written.done():
                written.set_result(None)

        def run() -> None:
            try:
                write_event_log(self._root.files, self._root.location(kept.checkpoint_id), kept)
            except Exception as error:
                log.warning("the event log of %s was not written: %s", kept.checkpoint_id, error)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(end)

        try:
            threading.Thread(target=run, name="gymckpt-event-log", daemon=True).start()
        except RuntimeError as error:  # no thread to be had
            log.warning("the event log of %s was not written: %s", kept.checkpoint_id, error)
            end()

    async def close(self) -> None:
        """Give what is being written a moment; what hangs in the storage has no part in anything else."""
        if self._writing:
            await asyncio.wait(self._writing, timeout=PATIENCE)
