"""One port for the metrics of each process of a deployment, and the file in which Prometheus finds them.

`GYM_CKPT_TELEMETRY=prometheus:9464` of the process that starts the others is one port for many: it keeps that one,
and each server has the next, on the same one in every life.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from gym_ckpt_grpc.minigym.ports import LOOPBACK, free_ports
from gym_ckpt_grpc.telemetry.configuring import VARIABLE

TARGETS = "prometheus-targets.json"
"""For `file_sd_configs` of a Prometheus."""


class MetricsPorts:
    """Ports by the names of servers. directory: where the file of targets is written, at the first server."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / TARGETS
        self.targets: dict[str, str] = {}

    def env(self, name: str) -> Mapping[str, str]:
        """What is to be set for a server: nothing unless this process's variable names `prometheus`."""
        words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",")]
        shown = next((word for word in words if word.startswith("prometheus:")), None)
        if shown is None:
            return {}
        if name not in self.targets:
            host, _, port = shown.removeprefix("prometheus:").rpartition(":")
            self.targets[name] = f"{host or LOOPBACK}:{self._port(port)}"
            self._write()
        words[words.index(shown)] = f"prometheus:{self.targets[name]}"
        return {VARIABLE: ",".join(words)}

    def _port(self, first: str) -> int | str:
        if not first.isdecimal():
            return first  # the server says what is wrong with it
        return int(first) + 1 + len(self.targets) if int(first) else free_ports(1)[0]

    def _write(self) -> None:
        groups = [{"targets": [target], "labels": {"server": name}} for name, target in self.targets.items()]
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps(groups, indent=1) + "\n")
        temporary.replace(self.file)
