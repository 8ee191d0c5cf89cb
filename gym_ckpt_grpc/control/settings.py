"""Settings of one participant's control plane. Unknown names are refused by name, with the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from gym_ckpt_grpc.control.budget import MAX_DEADLINE
from gym_ckpt_grpc.protocol.errors import UsageError

_DURATIONS = (
    "cleanup_limit",
    "deletion_wait",
    "watch_interval",
    "status_interval",
    "max_deadline",
    "precopy_interval",
    "slow_task_warn_seconds",
    "loop_lag_warn_seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """All durations in seconds, above 0.

    cleanup_limit: how long a Resume waits for a publication or deletion that hangs. deletion_wait: how long a
    Commit's reply waits for deletions. watch_interval: how often readiness is looked at while closed, in case an
    owner forgot to tell. status_interval: least time between two statuses of a watch. max_deadline: to what a
    call's longer deadline is clamped, at most an hour. max_concurrent_calls: of the control server, 0 for no limit.

    precopy_share: of one processor, 0 to 1, that encoding ahead may take while admission is open; 0 switches it off.
    precopy_interval: between two looks at the revisions of sessions that change. precopy_bytes: of encoded state that
    is kept, 0 and up; what does not fit is encoded at the cut. compress: the chunks of what a Commit writes (zstd),
    which costs more than the write itself on a local disk.

    slow_task_warn_seconds: an export, write, cleanup, install or reopening that runs longer is logged with its stack,
    once. loop_lag_warn_seconds: an event loop that stood still for so long while a checkpoint was open is logged, once.
    """

    cleanup_limit: float = 60.0
    deletion_wait: float = 1.0
    watch_interval: float = 0.5
    status_interval: float = 0.1
    max_deadline: float = MAX_DEADLINE
    max_concurrent_calls: int = 0
    precopy_share: float = 0.2
    precopy_interval: float = 0.25
    precopy_bytes: int = 4 << 30
    compress: bool = False
    slow_task_warn_seconds: float = 60.0
    loop_lag_warn_seconds: float = 0.25

    def __post_init__(self) -> None:
        for name in _DURATIONS:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be above 0")
        if self.max_deadline > MAX_DEADLINE:
            raise UsageError(f"max_deadline must be at most {MAX_DEADLINE:.0f} s")
        if self.max_concurrent_calls < 0:
            raise UsageError("max_concurrent_calls must not be negative; 0 means no limit")
        if not 0 <= self.precopy_share <= 1:
            raise UsageError("precopy_share must be from 0 to 1")
        if self.precopy_bytes < 0:
            raise UsageError("precopy_bytes must not be negative")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from a configuration file."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise UsageError(f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return cls(**values)
