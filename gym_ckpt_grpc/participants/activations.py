"""The activation index: how a repeated invocation of an agent session is told from a new one.

Source: participants section 9.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation


class Invocation(enum.Enum):
    """What an invocation is."""

    RUN = "run"
    JOIN = "join"
    """The same is running: wait for its reply."""
    RECORDED = "recorded"
    """The same was completed: its recorded reply is the answer, and nothing runs."""


@dataclass(slots=True)
class ActivationIndex:
    """completed: index of the last completed activation, 0 for none. reply: its reply. running: index or None."""

    completed: int = 0
    reply: Any = None
    running: int | None = None

    def judge(self, header: str | None, *, busy: bool) -> tuple[Invocation, int | None]:
        """Say what an invocation is, and its index. header: value of the activation header, or None.

        Without the header every invocation is a new one. Raises InvalidArgument naming the legal values.
        """
        if header is None:
            if busy:
                raise InvalidArgument("the session is busy, and the invocation has no activation index")
            return Invocation.RUN, None
        index = int(header) if header.isascii() and header.isdigit() and len(header) <= 9 else 0
        if index >= 1 and index == self.running:
            return Invocation.JOIN, index
        if index >= 1 and index == self.completed:
            return Invocation.RECORDED, index
        if index == self.completed + 1 and not busy:
            return Invocation.RUN, index
        raise self._illegal(header, busy=busy)

    def complete(self, index: int | None, reply: Any) -> None:
        """Record the reply of an activation that ended well; one without an index is not remembered."""
        if index is not None:
            self.completed, self.reply = index, reply

    def _illegal(self, header: str, *, busy: bool) -> InvalidArgument:
        legal = [self.running] if self.running is not None else [self.completed + 1]
        if self.completed:
            legal.insert(0, self.completed)
        text = " or ".join(str(index) for index in legal)
        if busy and self.running is None:
            text += ", once the activation that keeps the session busy has ended"
        problem = Violation("activation", f"is {header[:40]!r}; legal are {text}")
        return InvalidArgument(f"activation index {header[:40]!r}: legal are {text}", violations=[problem])
