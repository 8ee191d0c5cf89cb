"""Settings of one participant's control plane. Unknown names are refused by name, with the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from gym_ckpt_grpc.control.budget import MAX_DEADLINE
from gym_ckpt_grpc.protocol.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """All durations in seconds, above 0.

    cleanup_limit: how long a Resume waits for a publication or deletion that hangs. deletion_wait: how long a
    Commit's reply waits for deletions. watch_interval: how often readiness is looked at while closed, in case an
    owner forgot to tell. status_interval: least time between two statuses of a watch. max_deadline: to what a
    call's longer deadline is clamped, at most an hour. max_concurrent_calls: of the control server, 0 for no limit.
    """

    cleanup_limit: float = 60.0
    deletion_wait: float = 1.0
    watch_interval: float = 0.5
    status_interval: float = 0.1
    max_deadline: float = MAX_DEADLINE
    max_concurrent_calls: int = 0

    def __post_init__(self) -> None:
        for name in ("cleanup_limit", "deletion_wait", "watch_interval", "status_interval", "max_deadline"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be above 0")
        if self.max_deadline > MAX_DEADLINE:
            raise UsageError(f"max_deadline must be at most {MAX_DEADLINE:.0f} s")
        if self.max_concurrent_calls < 0:
            raise UsageError("max_concurrent_calls must not be negative; 0 means no limit")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from a configuration file."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise UsageError(f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return cls(**values)
