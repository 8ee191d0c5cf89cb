"""Sessions of an office, as an environment would hold them: mails, a calendar, and tables by column.

Made from a seed alone. A session is never changed in place: `changed` gives another one that shares what is equal,
so that what was exported stays as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

SESSION_SIZE = 350_000
"""Bytes of a session as compact JSON."""
RECORD_SIZE = 2_000
"""Bytes of a small record as compact JSON."""

BUDGET = 40_000_000
"""Bytes made value by value; further sessions are copies of these with a few values of their own. Copies stand far
enough from each other that no chunk has two of them: they would compress as nothing real does."""
_PEOPLE = "ada.byron zoë.müller 山田.太郎 josé.garcía li.wei øyvind.næss ravi.kumar anna.kowalska".split()
_WORDS = (
    "the quarterly report is attached and needs your review before friday please check numbers in table two "
    "customer asked again about delivery of order we should move meeting to next week because budget is not "
    "final yet thanks for quick answer invoice contract server outage resolved follow up with team on open tasks"
).split()
_FOREIGN = (
    [*_WORDS, *"grüße naïve café façade über straße señor déjà".split()],
    [*_WORDS, *"会議 資料 確認 обзор отчёт встреча".split()],
    [*_WORDS, "👍", "✓", "🎉"],
)
_FOREIGN_SHARE = 0.15
"""Of all texts: with words beyond ASCII, and so of another width in memory."""
_SOURCES = ("direct", "referral", "search engine", "social media")
_STATES = ("Backlog", "In Progress", "In Review", "Completed")

_ANALYTICS = {
    "visitor": "int64",
    "date": "datetime64[ns]",
    "views": "int64",
    "seconds": "float64",
    "source": "object",
    "engaged": "bool",
}
_PROJECTS = {"task": "object", "assigned": "object", "state": "object", "due": "datetime64[ns]", "estimate": "float64"}
_LEAST_ROOM = 12_000  # for tables; a smaller session has none
_COLUMN_HEADS = 600  # bytes of the names and types of all columns, and of their index

_SHORT, _LONG = (15, 60), (40, 320)  # words of a mail's body: some 200 bytes in a small record, else some 1.1 KB

Part = Callable[[random.Random, int], Any]


def make_sessions(count: int, *, size: int = SESSION_SIZE, seed: int = 0) -> list[dict[str, Any]]:
    """So many sessions of about `size` bytes as JSON (within some per cent), no two equal, no two sharing an object."""
    return list(iterate_sessions(count, size=size, seed=seed))


def iterate_sessions(count: int, *, size: int = SESSION_SIZE, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The sessions of `make_sessions`, one by one."""
    rng = random.Random(f"sessions {seed} {size}")
    texts: list[bytes] = []
    distinct = max(1, BUDGET // size)
    for number in range(count):
        if number < distinct:
            session = _session(rng, size)
            texts.append(orjson.dumps(session))
        else:
            session = orjson.loads(texts[number % distinct])
        session["session_id"] = session_id(number)
        session["seed"] = rng.getrandbits(48)
        yield session


def session_id(number: int) -> str:
    """The id of a session."""
    return f"office-{number:06d}"


def changed(session: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The session after one tool call: a mail sent, or a cell of a table changed where there is one."""
    if not session["tables"] or rng.random() < 0.5:
        mails: list[Any] = session["mails"]
        at = rng.randrange(len(mails))
        return {
            **session,
            "mails": [*mails[:at], _mail(rng, len(mails), small=not session["tables"]), *mails[at + 1 :]],
        }
    table = session["tables"]["analytics"]
    values = table["columns"][3]["values"]
    at = rng.randrange(len(values))
    column = {**table["columns"][3], "values": [*values[:at], rng.random() * 600, *values[at + 1 :]]}
    columns = [*table["columns"][:3], column, *table["columns"][4:]]
    return {**session, "tables": {**session["tables"], "analytics": {**table, "columns": columns}}}


def seal(value: Any) -> bytes:
    """What two values have in common if and only if they are equal in type, value and key order (of JSON values)."""
    return orjson.dumps(value)


def _session(rng: random.Random, size: int) -> dict[str, Any]:
    """Grown from a small one until it has its size: three fifths mails, a sixth calendar, the rest tables."""
    empty: dict[str, Any] = {
        "session_id": "office-000000",
        "seed": 1 << 47,
        "version": 3,
        "clock": "2026-03-02T09:00:00+01:00",
        "rewards": [rng.random() for _ in range(4)],
        "mails": [],
        "calendar": [],
        "tables": {},
    }
    room = max(0, size - len(orjson.dumps(empty)))
    small = room < _LEAST_ROOM
    mails = _as_many(partial(_mail, small=small), rng, room * 3 // 4 if small else room * 3 // 5)
    left = room - len(orjson.dumps(mails))
    events = _as_many(_event, rng, left if small else room // 6)
    tables = {} if small else _tables(rng, left - len(orjson.dumps(events)))
    return {**empty, "mails": mails, "calendar": events, "tables": tables}


def _as_many(part: Part, rng: random.Random, room: int) -> list[Any]:
    """Parts until the room is taken, to within half a part; at least one."""
    parts = [part(rng, 0)]
    taken = mean = len(orjson.dumps(parts[0]))
    while taken + mean // 2 < room:
        parts.append(part(rng, len(parts)))
        taken += len(orjson.dumps(parts[-1])) + 1
        mean = taken // len(parts)
    return parts


def _text(rng: random.Random, words: int) -> str:
    vocabulary = rng.choice(_FOREIGN) if rng.random() < _FOREIGN_SHARE else _WORDS
    return " ".join(rng.choices(vocabulary, k=words))


def _time(rng: random.Random) -> str:
    day = f"2026-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"
    return f"{day}T{rng.randrange(24):02d}:{rng.randrange(60):02d}:00"


def _mail(rng: random.Random, number: int, *, small: bool = False) -> dict[str, Any]:
    return {
        "id": f"{number:08d}",
        "folder": rng.choice(("inbox", "outbox")),
        "from": f"{rng.choice(_PEOPLE)}@atlas.com",
        "to": [f"{name}@atlas.com" for name in rng.sample(_PEOPLE, rng.randrange(1, 3))],
        "subject": _text(rng, 5),
        "sent": _time(rng),
        "read": rng.random() < 0.7,
        "body": _text(rng, rng.randrange(*(_SHORT if small else _LONG))),
    }


def _event(rng: random.Random, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "name": _text(rng, 3),
        "with": [f"{name}@atlas.com" for name in rng.sample(_PEOPLE, 2)],
        "start": _time(rng),
        "hours": rng.choice((0.5, 1.0, 1.5, None)),
        "room": None if rng.random() < 0.5 else {"building": rng.choice("ABC"), "number": rng.randrange(400)},
    }


def _tables(rng: random.Random, room: int) -> dict[str, Any]:
    """Two tables by column, two thirds and one third of the room."""
    return {
        "analytics": _table(_ANALYTICS, _as_many(_visit, rng, room * 2 // 3)),
        "projects": _table(_PROJECTS, _as_many(_task, rng, room // 3 - _COLUMN_HEADS)),
    }


def _visit(rng: random.Random, number: int) -> list[Any]:
    visitor, source = rng.randrange(10**6), rng.choice(_SOURCES)
    return [visitor, _time(rng), rng.randrange(40), rng.random() * 600, source, rng.random() < 0.4]


def _task(rng: random.Random, number: int) -> list[Any]:
    estimate = rng.choice((None, 0.5, 3.25, rng.random()))
    return [_text(rng, 4), f"{rng.choice(_PEOPLE)}@atlas.com", rng.choice(_STATES), _time(rng), estimate]


def _table(columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    made = [
        {"name": name, "dtype": dtype, "values": [row[at] for row in rows]}
        for at, (name, dtype) in enumerate(columns.items())
    ]
    return {"index": list(range(len(rows))), "columns": made}
