"""What must not change between an attempt and its replacement: the identity of the task."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.ids import EpisodeId

IdentityOf = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Task -> the part of it that must not change."""


def digest_of(value: Any) -> str:
    """SHA-256, in hex, of a value's canonical JSON: sorted keys, no spaces. Raises TypeError for no JSON."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


@dataclass(frozen=True, slots=True)
class TaskDigests:
    """Digest of the whole identity, and one per top-level field so that a refusal can name what differs."""

    whole: str
    fields: Mapping[str, str]

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> TaskDigests:
        try:
            whole = digest_of(dict(identity))
        except TypeError as error:
            raise InvalidArgument(f"the task is no JSON object: {error}") from None
        return cls(whole, {name: digest_of(value) for name, value in identity.items()})

    def check(self, episode: EpisodeId, expected: TaskDigests) -> None:
        """Raise InvalidArgument with one violation per field in which this is not the expected task."""
        if self.whole == expected.whole:
            return
        names = sorted({*self.fields, *expected.fields})
        violations = [
            Violation(f"task.{name}", _difference(name in self.fields, name in expected.fields))
            for name in names
            if self.fields.get(name) != expected.fields.get(name)
        ]
        raise InvalidArgument(
            f"{episode} continues another task: {len(violations)} fields differ",
            episodes=[episode],
            violations=violations,
        )


def _difference(here: bool, there: bool) -> str:
    if here and there:
        return "differs from the task that was checkpointed"
    return "was not in the task that was checkpointed" if here else "was in the task that was checkpointed"
