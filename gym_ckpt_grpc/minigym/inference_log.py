"""The inference worker's own log: what was generated, by whom, in which life. JSON lines on disk.

It outlives SIGKILL because every line is handed to the kernel in one write before generation goes on. The
demo and the end-to-end tests count turns and tokens from here, never from what a coordinator believes.

    life       a worker process began; the first line of each
    start      a call began: turn, message count, context digest
    tokens     `tokens` made so far; every PROGRESS_EVERY tokens, so that killed calls can be counted
    end        the call was completed: token count, digest of the ids, finish reason
    cancelled  its caller went away: tokens made until then
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson

PROGRESS_EVERY = 16
"""Tokens between two progress lines: a killed call is undercounted by less than this."""

Event = Literal["life", "start", "tokens", "end", "cancelled"]
Outcome = Literal["unfinished", "end", "cancelled"]

_COMMON = ("call_id", "rollout_id", "attempt", "turn")
_FIELDS: dict[str, tuple[str, ...]] = {
    "life": ("pid",),
    "start": (*_COMMON, "messages", "context_digest"),
    "tokens": (*_COMMON, "tokens"),
    "end": (*_COMMON, "tokens", "ids_digest", "finish_reason"),
    "cancelled": (*_COMMON, "tokens", "ids_digest"),
}
_TEXT = frozenset({"call_id", "rollout_id", "context_digest", "ids_digest", "finish_reason"})


def ids_digest(ids: Sequence[int]) -> str:
    """SHA-256 in hex of token ids, two bytes each, big-endian."""
    return hashlib.sha256(struct.pack(f">{len(ids)}H", *ids)).hexdigest()


class InferenceLog:
    """Appends lines to the log, over all lives of a worker. Opening closes off a line that a death tore."""

    def __init__(self, path: Path, *, life: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._life = life
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
        self.write("life", pid=os.getpid())

    def write(self, event: Event, **fields: Any) -> None:
        """Append one line. Not in a thread: order matters, and it is a copy into the page cache."""
        line = orjson.dumps({"event": event, "life": self._life, **fields}) + b"\n"
        if os.write(self._fd, line) != len(line):
            raise OSError("short write to the inference log")

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Row:
    """One line. Fields that its event does not have are empty, 0 or -1 (`turn`, `attempt`)."""

    event: Event
    life: int
    call_id: str = ""
    rollout_id: str = ""
    attempt: int = -1
    turn: int = -1
    messages: int = 0
    context_digest: str = ""
    tokens: int = 0
    ids_digest: str = ""
    finish_reason: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One generation call: who asked, how far it came and how it ended.

    turn: number of assistant messages in its context. tokens: exact if it ended or was cancelled, else the
    last progress line's. outcome `unfinished`: still running when the log was read, or killed.
    """

    life: int
    call_id: str
    rollout_id: str
    attempt: int
    turn: int
    messages: int
    context_digest: str
    tokens: int = 0
    outcome: Outcome = "unfinished"
    ids_digest: str = ""


@dataclass(slots=True)
class RolloutLog:
    """What was generated for one rollout over all lives.

    calls: in the order they began. turns: the turns generated to their end, each as often as it was.
    tokens: made per (attempt, turn), calls made twice summed. first_turn: per attempt, of its first call:
    0 means that the attempt started over, more that it continued.
    """

    calls: list[Call] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    first_turn: dict[int, int] = field(default_factory=dict)


def read_rows(path: Path) -> list[Row]:
    """All rows of a log. A torn line is skipped where a death tears it: at the end and before a new life.

    Raises ValueError naming the line for anything else that is no row.
    """
    lines = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    torn: tuple[int, ValueError] | None = None
    for number, line in enumerate(lines[:-1], start=1):
        if torn and b'"event":"life"' not in line:
            raise ValueError(f"{path.name} line {torn[0]}: {torn[1]}") from torn[1]
        torn = None
        try:
            rows.append(_row(line))
        except ValueError as error:
            torn = (number, error)
    return rows


def _row(line: bytes) -> Row:
    entry = orjson.loads(line)
    names = _FIELDS.get(entry.get("event", "")) if isinstance(entry, dict) else None
    if names is None:
        raise ValueError("no known event")
    if set(entry) != {"event", "life", *names}:
        raise ValueError(f"fields {sorted(entry)} are not those of {entry['event']}")
    for name in ("life", *names):
        wanted = str if name in _TEXT else int
        if type(entry[name]) is not wanted:
            raise ValueError(f"{name} is {entry[name]!r}, not {wanted.__name__}")
    return Row(**entry)


def calls_of(rows: Iterable[Row]) -> list[Call]:
    """The calls of a log, in the order they began. Raises ValueError for a row whose call never began."""
    calls: dict[tuple[int, str], Call] = {}
    for row in rows:
        if row.event == "life":
            continue
        key = (row.life, row.call_id)
        if row.event == "start":
            if key in calls:
                raise ValueError(f"call {row.call_id} of life {row.life} began twice")
            calls[key] = Call(*key, row.rollout_id, row.attempt, row.turn, row.messages, row.context_digest)
            continue
        if key not in calls:
            raise ValueError(f"call {row.call_id} of life {row.life} has {row.event} before its start")
        calls[key] = _moved(calls[key], row)
    return list(calls.values())


def _moved(call: Call, row: Row) -> Call:
    outcome: Outcome = "unfinished"
    if row.event == "end" or row.event == "cancelled":
        outcome = row.event
    return replace(call, tokens=row.tokens, outcome=outcome, ids_digest=row.ids_digest)


def by_rollout(calls: Iterable[Call]) -> dict[str, RolloutLog]:
    """Sum the calls up per rollout id."""
    logs: defaultdict[str, RolloutLog] = defaultdict(RolloutLog)
    for call in calls:
        log = logs[call.rollout_id]
        log.calls.append(call)
        if call.outcome == "end":
            log.turns.append(call.turn)
        key = (call.attempt, call.turn)
        log.tokens[key] = log.tokens.get(key, 0) + call.tokens
        log.first_turn.setdefault(call.attempt, call.turn)
    return dict(logs)


def read_log(path: Path) -> dict[str, RolloutLog]:
    """Read a log and sum it up per rollout id. Raises what `read_rows` and `calls_of` raise."""
    return by_rollout(calls_of(read_rows(path)))
