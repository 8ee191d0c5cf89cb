"""`CallLog`: the outside calls of one handler and the replies they got, recorded, and replayed after a restore.

The handlers of an audited server are coroutines whose only effects are awaited calls of other servers. So the list of
the replies so far is where such a handler is: called again with the same request, and given these replies without any
I/O, it arrives there again. A call that the replay does not find recorded is never made: see ReplayDiverged.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gym_ckpt_grpc.integrations.nemo_gym.recorded import ReplyRecord
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId

PATIENCE = 50
"""Turns of the loop that a call waits for those beside it to take their recorded replies, before it has diverged."""

_UUID4 = re.compile(
    rb"(?<![0-9A-Za-z])[0-9a-f]{8}(-?)[0-9a-f]{4}\1[4][0-9a-f]{3}\1[89ab][0-9a-f]{3}\1[0-9a-f]{12}(?![0-9A-Za-z])"
)


class ReplayDiverged(StateCorrupt):
    """A restored handler made another call than the recorded one, or fewer: its rollout must start over.

    It goes through as a STATE_CORRUPT refusal, and never as a result.
    """


@dataclass(frozen=True, slots=True)
class CallKey:
    """What a call asks for: equal keys mean the same call, whatever the attempt. ids: the fresh ids in its body."""

    text: str
    ids: tuple[str, ...] = ()


def key_of(
    method: str,
    server: str,
    path: str,
    kwargs: Mapping[str, Any],
    *,
    fresh_ids: bool = False,
    portable: Callable[[bytes], bytes] = lambda said: said,
) -> CallKey:
    """The key of a call as the framework's client is given it. path: without the rollout prefix.

    kwargs: of which `json`, `data` and `params` count. fresh_ids: uuid4 texts in the JSON are told by their order only.
    portable: takes out of the JSON what differs where the servers have other addresses.
    """
    body = kwargs.get("json")
    data = kwargs.get("data")
    if body is not None:
        said = portable(orjson.dumps(_lasting(body), option=orjson.OPT_SORT_KEYS))
    else:
        said = data.encode() if isinstance(data, str) else data if isinstance(data, bytes) else b""
    ids: tuple[str, ...] = ()
    if fresh_ids:
        said, ids = _without_ids(said)
    if kwargs.get("params"):
        said += f"?{kwargs['params']!r}".encode()
    return CallKey(f"{method} {server}{path} {hashlib.sha256(said).hexdigest()[:32]}", ids)


def _lasting(body: Any) -> Any:
    """A body without what names the attempt."""
    if not isinstance(body, dict):
        return body
    kept = {name: value for name, value in body.items() if name != "_ng_attempt_index"}
    episode = kept.get("episode_id")
    if isinstance(episode, dict):
        kept["episode_id"] = {name: value for name, value in episode.items() if name != "attempt"}
    return kept


def _without_ids(said: bytes) -> tuple[bytes, tuple[str, ...]]:
    numbers: dict[bytes, int] = {}
    said = _UUID4.sub(lambda found: b"id-%d" % numbers.setdefault(found[0], len(numbers)), said)
    return said, tuple(each.decode() for each in numbers)


class CallLog:
    """The calls of one handler, in the order their replies came. restored: what `pinned` gave, or None."""

    def __init__(self, episode: EpisodeId, restored: Any, *, fresh_ids: bool = False) -> None:
        self._episode = episode
        self.fresh_ids = fresh_ids
        self._calls: list[ReplyRecord] = _calls_of(restored, episode)
        self._left = len(self._calls)
        self._unread: dict[str, deque[ReplyRecord]] = {}
        for call in self._calls:
            self._unread.setdefault(call["key"], deque()).append(call)
        self._recorded_ids: dict[str, str] = {}
        """Ids that this process made -> those that stand for them outside."""

    def pinned(self) -> Callable[[], Mapping[str, Any]]:
        """A boundary as of now: the length is pinned, and nothing is copied unless a checkpoint asks."""
        length = len(self._calls)
        return lambda: {"calls": self._calls[:length]}

    async def recorded(self, key: CallKey) -> ReplyRecord | None:
        """The recorded reply to a call; None once all were handed out, and the call is to be made.

        Equal calls get their replies in the order these came. Raises ReplayDiverged for a call that was not recorded;
        one beside others waits a little for these to take theirs.
        """
        for _ in range(PATIENCE):
            if not self._left:
                return None
            waiting = self._unread.get(key.text)
            if waiting:
                self._left -= 1
                found = waiting.popleft()
                self._learn(key.ids, found.get("ids", ()))
                return found
            await asyncio.sleep(0)
        raise self._diverged(f"it called {key.text}, with {self._left} of {len(self._calls)} recorded calls to come")

    def add(self, key: CallKey, record: ReplyRecord) -> ReplyRecord:
        """Record the reply to a call that was made."""
        record = {**record, "key": key.text}
        if key.ids:
            record["ids"] = list(key.ids)
        self._calls.append(record)
        return record

    def check_spent(self) -> None:
        """Raise ReplayDiverged if the handler has ended without all that was recorded."""
        if self._left:
            raise self._diverged(f"it ended with {self._left} of {len(self._calls)} recorded calls to come")

    # ---- fresh ids

    def outward(self, text: str) -> str:
        """Text for the outside: the ids that this process made are replaced by those known there."""
        for mine, known in self._recorded_ids.items():
            text = text.replace(mine, known)
        return text

    def outward_json(self, body: Any) -> Any:
        """A JSON body for the outside."""
        if not self._recorded_ids or body is None:
            return body
        return orjson.loads(self.outward(orjson.dumps(body).decode()))

    def inward(self, record: ReplyRecord) -> ReplyRecord:
        """A reply as the handler is to see it, with the ids that it made itself."""
        body = record["body"]
        if not self._recorded_ids or not isinstance(body, str):
            return record
        for mine, known in self._recorded_ids.items():
            body = body.replace(known, mine)
        return {**record, "body": body}

    def _learn(self, made: Sequence[str], recorded: Sequence[str]) -> None:
        if len(made) != len(recorded):
            raise self._diverged("the recorded call has other ids")
        for mine, known in zip(made, recorded, strict=True):
            if mine == known:
                continue
            if not {mine, known}.isdisjoint(self._recorded_ids.values()):
                raise self._diverged("it used its ids in another order")
            self._recorded_ids[mine] = known

    def _diverged(self, problem: str) -> ReplayDiverged:
        return ReplayDiverged(f"the replay of {self._episode} diverged: {problem}", episodes=[self._episode])


def _calls_of(restored: Any, episode: EpisodeId) -> list[ReplyRecord]:
    if restored is None:
        return []
    calls = restored.get("calls") if isinstance(restored, Mapping) else None
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise StateCorrupt(f"the boundary of {episode} is no list of recorded calls", episodes=[episode])
    return list(calls)


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("key"), str)
