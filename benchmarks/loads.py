"""A load: sessions of one size, the records that stand for them, and the check that they came back equal."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.plain import PlainRecord
from benchmarks.rounds import WrongResult
from benchmarks.sessions import changed, make_sessions, seal, session_id
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointLocation, LocalFiles, Payload, Record, encode, read_part

IDENTITY = ParticipantIdentity(ParticipantKind.RESOURCES, "office", "0", incarnation_id="benchmark")
SCHEMA = "session"
STATE = "state"

Sessions = Mapping[str, Any]
"""Session id -> state."""


class Load:
    """`count` sessions of about `size` bytes each as JSON.

    sessions: by id. share: of the sessions that `changing` changes, those that a checkpoint later would find changed.
    """

    def __init__(self, name: str, count: int, size: int, *, seed: int, share: float = 0.05) -> None:
        self.name = name
        made = make_sessions(count, size=size, seed=seed)
        self.sessions: dict[str, Any] = {each["session_id"]: each for each in made}
        self.episodes = {key: episode_of(key) for key in self.sessions}  # a server has them, whatever it writes
        self.seals = seals(self.sessions)
        rng = random.Random(f"changing {seed}")
        chosen = rng.sample(range(count), max(1, round(count * share)))
        self.changes: dict[str, Any] = {
            session_id(each): changed(self.sessions[session_id(each)], rng) for each in sorted(chosen)
        }
        self.later: dict[str, Any] = {**self.sessions, **self.changes}
        self.later_seals = {**self.seals, **seals(self.changes)}

    def forget(self) -> None:
        """Keep only what results are compared with: a process that restores does not hold the sessions already."""
        self.sessions, self.changes, self.later = {}, {}, {}

    def records(self, sessions: Sessions | None = None, ready: Mapping[str, Payload] | None = None) -> Iterator[Record]:
        """Our records, encoded one by one as they are asked for; `ready`: payloads that need no encoding."""
        known = ready or {}
        for key, state in (self.sessions if sessions is None else sessions).items():
            payload = known.get(key)
            yield Record(
                self.episodes[key],
                SCHEMA,
                fields={"session_id": key},
                payloads={STATE: encode(state) if payload is None else payload},
            )

    def plain_records(self) -> Iterator[PlainRecord]:
        """The plain writer's records."""
        return (PlainRecord(self.episodes[key], key, state) for key, state in self.sessions.items())

    def unchanged(self) -> dict[str, Payload]:
        """What a server with revisions has at hand of sessions that did not change: encoded and digested."""
        kept = {key: encode(state) for key, state in self.sessions.items() if key not in self.changes}
        for payload in kept.values():
            payload.digest()
        return kept

    def encode_all(self) -> int:
        """Encode every session and keep nothing: what no writer can be faster than. Gives the bytes."""
        return sum(len(encode(state).data) for state in self.sessions.values())


def episode_of(key: str) -> EpisodeId:
    """The episode that a session belongs to."""
    return EpisodeId(f"rollout-{key}")


def seals(sessions: Sessions) -> dict[str, bytes]:
    """Digests by which sessions are compared."""
    return {key: hashlib.sha256(seal(state)).digest() for key, state in sessions.items()}


def check_part(location: CheckpointLocation, wanted: Mapping[str, bytes]) -> None:
    """Read the only part of a checkpoint back, and compare it. Raises WrongResult."""
    part = read_part(LocalFiles(), location, IDENTITY.place, checkpoint_id=location.checkpoint_id, decoded=True)
    check(((each.episode, each.fields["session_id"], each.decode(STATE)) for each in part.records), wanted)


def check(found: Iterable[tuple[EpisodeId, Any, Any]], wanted: Mapping[str, bytes]) -> None:
    """Compare (episode, session id, state) with what was written. Raises WrongResult."""
    keys = iter(wanted)
    count = 0
    for episode, key, state in found:
        expected = next(keys, None)
        if key != expected or episode != episode_of(key) or hashlib.sha256(seal(state)).digest() != wanted[key]:
            raise WrongResult(f"read back as {key} of {episode}, which is not {expected} as it was written")
        count += 1
    if count != len(wanted):
        raise WrongResult(f"{count} of {len(wanted)} sessions were read back")
