"""One line of what `gym-ckpt doctor` found."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """subject: what was looked at. advice: what to do about it. unreachable: not reached, or credentials refused."""

    level: Level
    subject: str
    message: str
    advice: str = ""
    unreachable: bool = False

    def described(self) -> dict[str, Any]:
        """For programs."""
        return {
            "level": self.level.name,
            "subject": self.subject,
            "message": self.message,
            "advice": self.advice if self.level is not Level.OK else "",
        }
