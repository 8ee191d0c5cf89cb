"""What the golden checkpoints hold: rollouts of real deployments stopped in the middle, and values that are hard."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_ckpt_grpc.minigym.tasks import Task, make_tasks
from gym_ckpt_grpc.minigym.topology import Topology
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Payload, Record, encode, raw

HERE = Path(__file__).parent
FORMAT = HERE / "format-2"
"""The fixtures of today's format. A new format gets a directory of its own, and this one stays."""
FORMATS = sorted(HERE.glob("format-*"))
DIGESTS = HERE / "digests.json"
CHECKPOINT, LATER = "golden", "golden-later"
"""Of the values: a full one, and, from format 2 on, an incremental and compressed one that points into it."""

HELD_TURN, HELD_AFTER = 2, 7
"""The model call of each rollout that was running, and how many tokens it had."""


@dataclass(frozen=True)
class Scene:
    """A deployment whose rollouts stand in model call HELD_TURN when it is killed. call: calls until then."""

    name: str
    topology: Topology
    tasks: tuple[Task, ...]


def scenes() -> dict[str, Scene]:
    """By name. Each task is a rollout of its own."""
    native = make_tasks(5, 11, rollouts_per_task=1, kinds=("counter", "blackjack", "weather", "office", "inbox"))
    legacy = make_tasks(2, 12, rollouts_per_task=1, kinds=("counter", "blackjack"))
    resources = tuple(task.kind for task in native)
    found = [
        Scene("native", Topology(resources=resources, controls=True), tuple(native)),
        Scene("legacy", Topology(protocol="legacy", resources=("counter", "blackjack"), controls=True), tuple(legacy)),
    ]
    return {scene.name: scene for scene in found}


# ---- values ----------------------------------------------------------------------------------------------------

PLACE = (ParticipantKind.RESOURCES, "values", "0")
NAN = struct.unpack("<d", bytes.fromhex("0100000000f0ff7f"))[0]
"""A NaN with a payload: its bits are kept."""
VALUES: Mapping[str, Any] = {
    "order": {"z": 1, "a": 2, "m": {"y": 3, "b": 4}},
    "large": [2**64, -(2**63) - 1, 10**400],
    "floats": [0.1, -0.0, math.inf, -math.inf, NAN, 5e-324],
    "text": ["", "\x00", "\ud800 alone", "\U0001f600", "e\u0301"],
    "bytes": [b"", bytes(range(256))],
    "like-tags": {"$int": "ff", "$": {"$float": None}},
    "nested": [[[[[[[[{"deep": [None, True, False]}]]]]]]]],
}
RAW = b"\x89any bytes at all\n"
LONG = "the same words over and over, " * 200


def value_records() -> list[Record]:
    """One record for each value, one of the server's own bytes, and one of text that shrinks."""
    payloads: dict[str, Payload] = {name: encode(value) for name, value in VALUES.items()}
    payloads["raw"] = raw(RAW, "application/x-own")
    payloads["long"] = encode(LONG)
    return [
        Record(
            EpisodeId("v", number), "gymckpt.golden", 1, fields={"name": name, "number": number}, payloads={name: it}
        )
        for number, (name, it) in enumerate(payloads.items())
    ]
