"""State as text for people: bounded, on lines that a terminal can show."""

from __future__ import annotations

import json
import pprint
from typing import Any

from gym_ckpt_grpc.cli.conversation import is_conversation
from gym_ckpt_grpc.cli.output import printable
from gym_ckpt_grpc.storage import Codec, Payload
from gym_ckpt_grpc.storage.payloads import tagged

LINES = 40
"""Lines of one payload."""
ITEMS = 30
"""Entries of one list or object."""
TEXT = 400
"""Characters of one text."""
DEPTH = 12
"""Levels of nesting."""
WIDTH = 120


class _Word:
    """Stands in a shortened value for what was left out."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def state_lines(value: Any, *, full: bool) -> list[str]:
    """A decoded value, pretty. full: all of it."""
    if full:
        try:
            text = pprint.pformat(value, width=WIDTH, sort_dicts=False, compact=True)
        except (RecursionError, ValueError):  # nested deeper, or an integer longer, than Python prints
            return json_lines(value)
    else:
        text = pprint.pformat(shortened(value), width=WIDTH, sort_dicts=False, compact=True)
    lines = [printable(line) for line in text.splitlines()]
    if full or len(lines) <= LINES:
        return lines
    return [*lines[:LINES], f"... {len(lines) - LINES:,} more lines; --full shows all"]


def shortened(value: Any, depth: int = 0) -> Any:
    """The value without what is too much: long texts, later entries, deep levels; and conversations, told apart."""
    if isinstance(value, str | bytes) and len(value) > TEXT:
        return _Word(f"{value[:TEXT]!r}... {len(value) - TEXT:,} more")
    if isinstance(value, int) and abs(value) >= 1 << 256:
        return _Word(f"<integer of {value.bit_length():,} bits>")
    if is_conversation(value):
        return _Word(f"<conversation of {len(value):,}>")
    if isinstance(value, list | dict) and value and depth >= DEPTH:
        return _Word(f"<{len(value):,} deeper>")
    if isinstance(value, list):
        kept = [shortened(item, depth + 1) for item in value[:ITEMS]]
        return [*kept, _Word(f"... {len(value) - ITEMS:,} more")] if len(value) > ITEMS else kept
    if isinstance(value, dict):
        pairs = list(value.items())
        found = {
            key if len(key) <= TEXT else _Word(repr(key[:TEXT])): shortened(each, depth + 1)
            for key, each in pairs[:ITEMS]
        }
        if len(pairs) > ITEMS:
            found[_Word("...")] = _Word(f"{len(pairs) - ITEMS:,} more")
        return found
    return value


def json_lines(value: Any) -> list[str]:
    """A decoded value as tagged JSON, in ASCII, which leaves nothing out (storage.proto)."""
    return [printable(line) for line in json.dumps(tagged(value), indent=2).splitlines()]


def raw_lines(payload: Payload, *, full: bool) -> list[str]:
    """Bytes that the server encoded itself: as text if their content type says so and they are, else in hex."""
    assert payload.codec is Codec.RAW
    data = payload.data
    if payload.content_type.startswith("text/") or payload.content_type.partition(";")[0].endswith("json"):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            text = ""
        if text:
            lines = [printable(line) for line in (text if full else text[: TEXT * 4]).splitlines()]
            shown = lines if full else lines[:LINES]
            cut = not full and (len(text) > TEXT * 4 or len(lines) > LINES)
            return [*shown, "... more; --full shows all"] if cut else shown
    kept = data if full else data[:256]
    lines = [kept[at : at + 32].hex(" ", 4) for at in range(0, len(kept), 32)]
    return lines if len(kept) == len(data) else [*lines, f"... {len(data) - len(kept):,} more bytes; --full shows all"]
