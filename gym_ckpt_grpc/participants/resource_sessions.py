"""Sessions of a resources server, the requests under way in them, and the visit of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from gym_ckpt_grpc.participants.admission import Admission, Cancellable, GateRequest, Reply, Visit
from gym_ckpt_grpc.participants.blocking import Blocking
from gym_ckpt_grpc.participants.names import header
from gym_ckpt_grpc.participants.reports import covers
from gym_ckpt_grpc.participants.rollout_index import RolloutIndex
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason

SessionOf = Callable[[GateRequest], str | None]
"""Finds the session id that a request carries, or None."""
SessionAfter = Callable[[GateRequest, Reply], str | None]
"""Finds the session id that a client has after a seed was answered, or None."""


@dataclass(slots=True, eq=False)
class ResourceSession:
    """One tracked session. episode: None if it was seeded without identity. requests: those under way in it."""

    key: str
    episode: EpisodeId | None
    requests: dict[int, Request] = field(default_factory=dict)
    retired: bool = False
    deleting: bool = False
    ends_at_open: bool = False
    """A replayable verify ended it while closed: it is still exported."""


class SeenSessions:
    """Session ids that this process gave out, or whose sessions it has ended: the last of them."""

    __slots__ = ("_keys", "_limit")

    def __init__(self, limit: int = 1 << 17) -> None:
        self._keys: dict[str, None] = {}
        self._limit = limit

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """Remember an id, and forget the oldest beyond the limit."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._limit:
            del self._keys[next(iter(self._keys))]


class RefusedSessions:
    """Freed sessions of retired attempts, until Forget: whose each was."""

    __slots__ = ("_episodes", "_index")

    def __init__(self) -> None:
        self._episodes: dict[str, EpisodeId] = {}
        self._index: RolloutIndex[str] = RolloutIndex()

    def __len__(self) -> int:
        return len(self._episodes)

    def get(self, key: str | None) -> EpisodeId | None:
        """The retired attempt whose session this was, or None."""
        return self._episodes.get(key) if key is not None else None

    def add(self, key: str, episode: EpisodeId) -> None:
        """Refuse a session from now on."""
        self.drop(key)
        self._episodes[key] = episode
        self._index.add(key, episode)

    def drop(self, key: str) -> None:
        """Refuse it no more; harmless if it was not."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            self._index.drop(key, episode)

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        """Drop those of a rollout's attempts up to this one."""
        for key in self._index.through(rollout_id, through_attempt):
            self.drop(key)


class RequestOwner(Protocol):
    """What a request tells its owner."""

    def answered(self, request: Request, reply: Reply) -> None:
        """The reply of a request is about to be sent."""

    def ended(self, request: Request) -> None:
        """A request is no longer counted."""


class Request(Visit):
    """One admitted request: counted from admission until it has ended, whatever ends it."""

    __slots__ = ("_owner", "asked", "closes", "done", "number", "runs", "seed", "session")

    def __init__(
        self,
        number: int,
        asked: GateRequest,
        session: ResourceSession | None,
        owner: RequestOwner,
        *,
        seed: bool,
        closes: bool,
    ) -> None:
        self.number = number
        self.asked = asked
        self.session = session
        self.seed = seed
        self.closes = closes
        self.runs = Cancellable()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner

    @property
    def episode(self) -> EpisodeId | None:
        """Whose it is: the session's, else what the path says."""
        return self.session.episode if self.session is not None else self.asked.episode

    async def starting(self, reply: Reply) -> None:
        self._owner.answered(self, reply)

    def absorbs(self) -> bool:
        return self.runs.absorb()

    def leave(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
            self._owner.ended(self)


class Requests:
    """The requests under way of one server. blocking: counted ones go there."""

    def __init__(self, admission: Admission, blocking: Blocking) -> None:
        self._admission = admission
        self._blocking = blocking
        self._numbers = count(1)
        self._seeds: dict[str, dict[int, Request]] = {}
        self._others: dict[str, dict[int, Request]] = {}
        self._inflight = 0

    @property
    def inflight(self) -> int:
        return self._inflight

    def begin(
        self,
        asked: GateRequest,
        session: ResourceSession | None,
        owner: RequestOwner,
        *,
        seed: bool,
        closes: bool,
        blocks: bool,
    ) -> Request:
        """Count a request: per session always, globally if it blocks."""
        request = Request(next(self._numbers), asked, session, owner, seed=seed, closes=closes)
        if session is not None:
            session.requests[request.number] = request
        index, episode = self._index(request)
        if episode is not None:
            index.setdefault(episode.rollout_id, {})[request.number] = request
        if blocks:
            self._inflight += 1
            place = f"{asked.path} session {session.key}" if session is not None else asked.path
            self._blocking.set(request.number, BlockerReason.IN_FLIGHT_REQUEST, request.episode, place)
            self._admission.changed()
        return request

    def end(self, request: Request) -> None:
        """Count it no more."""
        if request.session is not None:
            request.session.requests.pop(request.number, None)
        index, episode = self._index(request)
        if episode is not None:
            of_rollout = index.get(episode.rollout_id, {})
            of_rollout.pop(request.number, None)
            if not of_rollout:
                index.pop(episode.rollout_id, None)
        if request.number in self._blocking:
            self._inflight -= 1
            self._blocking.clear(request.number)
            self._admission.changed()

    def seeds_of(self, rollout_id: str) -> list[Request]:
        """Seeds under way of a rollout, any attempt."""
        return list(self._seeds.get(rollout_id, {}).values())

    def others_of(self, retired: EpisodeId) -> list[Request]:
        """Requests under way that a retire ends: no seeds and no closes; their session may be gone already."""
        of_rollout = self._others.get(retired.rollout_id, {}).values()
        return [each for each in of_rollout if each.episode is not None and covers(retired, each.episode)]

    def _index(self, request: Request) -> tuple[dict[str, dict[int, Request]], EpisodeId | None]:
        """Where a request is listed by its rollout, if it is: a seed under the attempt that it names."""
        if request.seed:
            return self._seeds, request.asked.episode
        return self._others, None if request.closes else request.episode


# ---- where a session id stands -----------------------------------------------------------------------------


def session_from_cookie(name: str) -> tuple[SessionOf, SessionAfter]:
    """Session ids that stand, readable, in a cookie; the seed's reply may set another."""

    def before(request: GateRequest) -> str | None:
        return _cookie(request.headers.get("cookie", "").split(";"), name)

    def after(request: GateRequest, reply: Reply) -> str | None:
        # Several such headers come joined by commas; the id in one of them has none.
        return _cookie(reply.headers.get("set-cookie", "").replace(",", ";").split(";"), name) or before(request)

    return before, after


def session_from_header(name: str) -> tuple[SessionOf, SessionAfter]:
    """Session ids in a header of each request; the seed's reply may give another in the same header."""

    def before(request: GateRequest) -> str | None:
        return header(request.headers, name)

    def after(request: GateRequest, reply: Reply) -> str | None:
        return header(reply.headers, name) or before(request)

    return before, after


def _cookie(parts: Sequence[str], name: str) -> str | None:
    for part in parts:
        key, _, value = part.strip().partition("=")
        if key == name and value:
            return value.strip('"')
    return None
