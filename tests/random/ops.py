"""The operations of a sequence: plain values that print as Python and run again from a list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope

CALLS = ("prepare", "capture", "commit", "resume", "restore", "retire", "forget", "renew_lease")


@dataclass(frozen=True)
class Op:
    """One step. name: a call of CALLS, or what the test does to the server. args: plain values."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.args[key]

    def __repr__(self) -> str:
        return f"op({self.name!r}{''.join(f', {key}={value!r}' for key, value in self.args.items())})"

    @property
    def is_call(self) -> bool:
        return self.name in CALLS


def op(name: str, **args: Any) -> Op:
    """An operation, as a printed list of them is written."""
    return Op(name, args)


def episodes(keys: list[str]) -> tuple[EpisodeId, ...]:
    """The episodes of capture keys."""
    return tuple(EpisodeId.from_capture_key(key) for key in keys)


def scope_of(keys: list[str] | None) -> EpisodeScope:
    """The scope of capture keys; all for None."""
    return EpisodeScope.all() if keys is None else EpisodeScope.of(episodes(keys))
