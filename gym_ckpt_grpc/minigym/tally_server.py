"""A counter that cannot be checkpointed: its rollouts start over, beside others that continue."""

from __future__ import annotations

from gym_ckpt_grpc.minigym.counter_server import CounterServer
from gym_ckpt_grpc.participants import ResourcesMode, VerifyMode


class TallyServer(CounterServer):
    """The counter, restart-only. Setup: `target`, at which the reward is 1."""

    checkpoint_mode = ResourcesMode.RESTART_ONLY
    checkpoint_verify = VerifyMode.WAIT
    name = "tally"
