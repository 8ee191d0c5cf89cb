"""Comes to a span site and a metric site, and kills itself. Run by `benchmarks.telemetry_counts`."""

from __future__ import annotations

import os
import signal

from gym_ckpt_grpc.telemetry import Recorder

if __name__ == "__main__":
    with Recorder("agent").operation("prepare"):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
