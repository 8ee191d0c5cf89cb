"""Which successes no call has been told of yet, so that each is recorded once. Source: telemetry section 3."""

from __future__ import annotations

from collections import OrderedDict

from gym_ckpt_grpc.protocol.machine import Call
from gym_ckpt_grpc.protocol.phases import Operation

ANSWERED_AGAIN = frozenset(
    {Operation.PREPARE, Operation.CAPTURE, Operation.COMMIT, Operation.RESUME, Operation.RESTORE}
)
"""Operations whose repeats are answered from what the first call began. Each call of the others does its own."""


class Untold:
    """Work that was begun, or joined, and whose success no call has been told of yet.

    A call that succeeds with work that is in here is the one that did it; any other one got what was done before.
    Bounded: what nobody asks for again is dropped, the oldest first.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._begun: OrderedDict[tuple[str, Operation], None] = OrderedDict()
        self._limit = limit

    def begun(self, call: Call) -> None:
        """This call began the work, or waits for it."""
        if call.operation in ANSWERED_AGAIN:
            self._begun[call.checkpoint_id, call.operation] = None
            while len(self._begun) > self._limit:
                self._begun.popitem(last=False)

    def first(self, call: Call) -> bool:
        """Whether the success that this call is told of is news. It is not any more afterwards."""
        if call.operation not in ANSWERED_AGAIN:
            return True
        return self._begun.pop((call.checkpoint_id, call.operation), self) is None
