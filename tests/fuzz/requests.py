"""Requests as nobody should send them: random bytes, and valid messages bent in one or several places."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from gymckpt.v1 import participant_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["ParticipantService"]
METHODS = [method.name for method in SERVICE.methods]
STREAMS = {method.name for method in SERVICE.methods if method.server_streaming}
READS = {"GetStatus", "WatchStatus", "ListEpisodes"}
TOKEN = "fuzz-controller-token-0123456789"

ODD_IDS = [
    *("", ".", "..", "-a1", "x-a1", "x-a01", "../x", "x/../y", "x\n", "x\0", " x", "é" * 60, "\U0001f600", "x" * 128),
    *("x" * 129, "x" * 257, "x" * 5000, "%2e%2e", "CON", "x\\y", "x\u202e", "'; drop", "${x}", "a" * 60_000),
]
ODD_NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
ODD_SECONDS = [0, -1, 1, 600, 601, 2**31, 315_576_000_000, 315_576_000_001, 2**63 - 1, -(2**63)]
ODD_NANOS = [0, 1, -1, 999_999_999, 1_000_000_000, -1_000_000_000, 2**31 - 1, -(2**31)]
DEADLINES = [None, None, 0.001, 0.02, 0.2, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 86_400.0, 1e8]
BIG = 20_000
SOURCE = "source"
"""A checkpoint that there is, to be restored from."""


@dataclass(frozen=True)
class Request:
    """One call. body: as sent. timeout: of the call, None for none. valid: whether its credentials are."""

    method: str
    body: bytes
    timeout: float | None
    metadata: tuple[tuple[str, str | bytes], ...]
    valid: bool


class Fuzzer:
    """Makes requests from a seed. root: the checkpoint root of the server. current: the id that most are about."""

    def __init__(self, seed: str, root: Path) -> None:
        self.random = random.Random(seed)
        self.root = root
        self.current = "f0"

    def request(self, method: str, number: int) -> Request:
        """The request of this number; every few hundredth is a huge one."""
        kind = self.random.random()
        if kind < 0.2:
            body = self.random.randbytes(self.random.choice([0, 1, 3, 20, 200, 4000]))
        else:
            message = self._valid(method)
            for _ in range(self.random.choice([0, 1, 1, 1, 2, 4])):
                self._bend(message)
            if number % 250 == 249:
                self._swell(message)
            body = message.SerializeToString()
            if kind < 0.4:
                body = self._damage(body)
        metadata, valid = self._metadata()
        return Request(method, body, self.random.choice(DEADLINES), metadata, valid)

    # ---- messages

    def _id(self) -> str:
        return self.current if self.random.random() < 0.7 else f"f{self.random.randrange(12)}"

    def _valid(self, method: str) -> Message:
        """A request that means well; ids are drawn from so few that many belong together."""
        request: Any = getattr(pb, f"{method}Request")()
        checkpoint = self._id()
        if hasattr(request, "context"):
            request.context.CopyFrom(pb.ControlContext(checkpoint_id=checkpoint, controller_id="fuzz", epoch=1))
        if hasattr(request, "ready_within"):
            request.ready_within.FromMilliseconds(self.random.choice([0, 10, 50]))
        if hasattr(request, "lease_ttl"):
            request.lease_ttl.FromSeconds(self.random.choice([1, 30]))
        if hasattr(request, "source_checkpoint_id"):
            checkpoint = request.source_checkpoint_id = SOURCE
            request.context.checkpoint_id = f"x{self.random.randrange(10**6)}"
        if hasattr(request, "storage_uri"):
            request.storage_uri = (self.root / "checkpoints" / checkpoint).as_uri()
        self._fill(request, method)
        return request  # type: ignore[no-any-return]

    def _fill(self, request: Any, method: str) -> None:
        count = self.random.randrange(1, 4)
        rollouts = self.random.sample([f"r{number}" for number in range(8)], count)
        if method in ("Capture", "Commit"):
            if self.random.random() < 0.5:
                request.scope.all = True
            else:
                request.scope.episodes.rollout_ids.extend(rollouts)
                request.scope.episodes.attempts.extend([0] * count)
        elif method == "Restore":
            request.scope.rollout_ids.extend(f"z{rollout}" for rollout in rollouts)
            request.scope.attempts.extend([0] * count)
        elif method == "Retire":
            request.episodes.rollout_ids.extend(rollouts)
            request.episodes.attempts.extend([0] * count)
        elif method == "Forget":
            for rollout in rollouts:
                request.rollouts.add(rollout_id=rollout)
        elif method == "ListEpisodes":
            request.kind, request.checkpoint_id = self.random.randrange(7), self._id()
        if method in ("Retire", "Forget") and self.random.random() < 0.5:
            request.context.checkpoint_id = ""

    # ---- bending

    def _bend(self, message: Any) -> None:
        """Change one field somewhere in the message."""
        fields = list(message.DESCRIPTOR.fields)
        if not fields:
            return
        field = self.random.choice(fields)
        if self.random.random() < 0.15:
            message.ClearField(field.name)
        elif field.is_repeated:
            self._bend_list(message, field)
        elif field.message_type is not None:
            self._bend_inner(getattr(message, field.name), field)
        else:
            setattr(message, field.name, self._odd(field))

    def _bend_inner(self, inner: Any, field: Any) -> None:
        if field.message_type.full_name == "google.protobuf.Duration":
            inner.seconds, inner.nanos = self.random.choice(ODD_SECONDS), self.random.choice(ODD_NANOS)
        else:
            inner.SetInParent()
            self._bend(inner)

    def _bend_list(self, message: Any, field: Any) -> None:
        values = getattr(message, field.name)
        if field.message_type is not None:
            entry = values.add()
            self._bend(entry)
        elif values and self.random.random() < 0.5:
            values.append(values[0])
        else:
            values.append(self._odd(field))

    def _odd(self, field: Any) -> Any:
        if field.cpp_type == field.CPPTYPE_STRING:
            return self._odd_uri() if field.name.endswith("_uri") else self.random.choice(ODD_IDS)
        if field.cpp_type == field.CPPTYPE_BOOL:
            return self.random.random() < 0.5
        if field.cpp_type == field.CPPTYPE_ENUM:
            return self.random.choice([0, 1, 6, 2**31 - 1, -1])
        limit = 2**32 if field.cpp_type == field.CPPTYPE_UINT32 else 2**64
        # The highest epoch would lock every later controller out, by design.
        numbers = ODD_NUMBERS[:3] if field.name == "epoch" else ODD_NUMBERS
        return self.random.choice([number for number in numbers if number < limit])

    def _odd_uri(self) -> str:
        inside = (self.root / "checkpoints").as_uri()
        escapes: list[Callable[[], str]] = [
            lambda: f"{inside}/../../../../etc",
            lambda: f"{inside}/f1/../f2",
            lambda: f"{inside}/%2e%2e/%2e%2e/f1",
            lambda: f"{inside}/f1%00",
            lambda: f"{inside}/link",
            lambda: f"{inside}//f1",
            lambda: inside,
            lambda: "file:///etc/passwd",
            lambda: "file://elsewhere/checkpoints/f1",
            lambda: "s3://bucket/checkpoints/f1",
            lambda: "/checkpoints/f1",
            lambda: "file:",
            lambda: f"{inside}/" + "x" * 5000,
            lambda: f"{inside}/f1?x=1#y",
            lambda: self.random.choice(ODD_IDS),
        ]
        return self.random.choice(escapes)()

    def _swell(self, message: Any) -> None:
        """Make the lists of a message very long."""
        for columns in (getattr(message, "episodes", None), getattr(message, "scope", None)):
            inner: Any = getattr(columns, "episodes", columns)
            if hasattr(inner, "rollout_ids"):
                inner.rollout_ids.extend(self.random.choice([f"big{n}", "", "same"]) for n in range(BIG))
                inner.attempts.extend([0] * (BIG - self.random.randrange(2)))
        if hasattr(message, "rollouts"):
            for number in range(BIG):
                message.rollouts.add(rollout_id=f"big{number}")

    def _damage(self, body: bytes) -> bytes:
        data = bytearray(body or b"\0")
        for _ in range(self.random.randrange(1, 4)):
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(data[: self.random.randrange(len(data) + 1)] if self.random.random() < 0.3 else data)

    # ---- metadata

    def _metadata(self) -> tuple[tuple[tuple[str, str | bytes], ...], bool]:
        good = ("authorization", f"Bearer {TOKEN}")
        if self.random.random() < 0.85:
            return (good,), True
        odd: list[tuple[tuple[tuple[str, str | bytes], ...], bool]] = [
            ((), False),
            ((("authorization", ""),), False),
            ((("authorization", TOKEN),), False),
            ((("authorization", f"Bearer {TOKEN}x"),), False),
            ((("authorization", f"Basic {TOKEN}"),), False),
            ((good, good), False),
            ((("authorization", "Bearer " + "x" * 4000),), False),
            ((good, ("x-odd-bin", self.random.randbytes(50))), True),
            ((good, *((f"x-{number}", "y" * 20) for number in range(50))), True),
        ]
        return self.random.choice(odd)
