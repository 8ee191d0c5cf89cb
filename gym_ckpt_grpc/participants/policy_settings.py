"""Settings of a policy model server's part in a checkpoint. Source: participants section 16."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModelSettings:
    """sweep_interval: seconds between two sweeps of a backend, above 0. cut_tries: how often a call whose cut failed
    is asked for one, 1 and up. cut_share: part of the time left at the close that sweeps may take, 0 (no cuts) to
    0.9. release_retry_for: seconds for which giving a cut up is tried again, 0 and up.

    Raises UsageError naming the option.
    """

    sweep_interval: float = 0.25
    cut_tries: int = 2
    cut_share: float = 0.5
    release_retry_for: float = 600.0

    def __post_init__(self) -> None:
        if not (self.sweep_interval > 0 and math.isfinite(self.sweep_interval)):
            raise UsageError(f"sweep_interval is {self.sweep_interval}, it must be above 0")
        if type(self.cut_tries) is not int or self.cut_tries < 1:
            raise UsageError(f"cut_tries is {self.cut_tries}, it must be at least 1")
        if not 0 <= self.cut_share <= 0.9:
            raise UsageError(f"cut_share is {self.cut_share}, it must be from 0 (no cuts) to 0.9")
        if not (self.release_retry_for >= 0 and math.isfinite(self.release_retry_for)):
            raise UsageError(f"release_retry_for is {self.release_retry_for}, it must be 0 or more")
