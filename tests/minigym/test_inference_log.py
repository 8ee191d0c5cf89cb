"""The inference worker's log: lines survive a death, a torn one is tolerated, sums are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from gym_ckpt_grpc.minigym.inference_log import (
    Call,
    InferenceLog,
    by_rollout,
    calls_of,
    ids_digest,
    read_log,
    read_rows,
)

_CALL = {"call_id": "c1", "rollout_id": "0-0", "attempt": 0, "turn": 2}
_START = {**_CALL, "messages": 5, "context_digest": "ab", "continued_from": "", "reused": 0}
_END = {**_CALL, "tokens": 20, "ids_digest": "cd", "finish_reason": "stop"}


def _log(path: Path, *events: tuple[str, dict[str, Any]], life: int = 1) -> None:
    log = InferenceLog(path, life=life)
    for event, fields in events:
        log.write(event, **fields)  # type: ignore[arg-type]
    log.close()


def test_rows_come_back_typed_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "inference.jsonl"
    _log(path, ("start", _START), ("tokens", {**_CALL, "tokens": 16}), ("end", _END))
    life, start, tokens, end = read_rows(path)
    assert (life.event, life.life) == ("life", 1)
    assert (start.event, start.messages, start.context_digest, start.turn) == ("start", 5, "ab", 2)
    assert (tokens.event, tokens.tokens) == ("tokens", 16)
    assert (end.event, end.tokens, end.ids_digest, end.finish_reason) == ("end", 20, "cd", "stop")


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    """At every byte of the last line."""
    path = tmp_path / "inference.jsonl"
    _log(path, ("start", _START), ("end", _END))
    whole = path.read_bytes()
    for cut in range(whole[:-1].rindex(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert [row.event for row in read_rows(path)] == ["life", "start"]


def test_the_next_life_closes_off_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "inference.jsonl"
    _log(path, ("start", _START), ("end", _END))
    path.write_bytes(path.read_bytes()[:-7])
    _log(path, ("start", {**_START, "attempt": 1}), life=2)
    assert [(row.event, row.life) for row in read_rows(path)] == [
        ("life", 1),
        ("start", 1),
        ("life", 2),
        ("start", 2),
    ]


def test_an_empty_log_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "inference.jsonl"
    path.touch()
    assert read_log(path) == {}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{", "line 2: "),
        (b"[]", "line 2: no known event"),
        (b'{"event":"pause","life":1}', "line 2: no known event"),
        (b'{"event":"tokens","life":1}', "line 2: fields"),
        (
            orjson.dumps({"event": "end", "life": 1, **_END, "tokens": "20"}),
            "line 2: tokens is '20', not int",
        ),
        (
            orjson.dumps({"event": "end", "life": 1, **_END, "ids_digest": 1}),
            "line 2: ids_digest is 1, not str",
        ),
    ],
)
def test_damage_elsewhere_is_an_error_naming_the_line(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "inference.jsonl"
    _log(path, ("start", _START))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n" + second)
    with pytest.raises(ValueError, match=fault):
        read_rows(path)


def test_calls_are_matched_within_their_life_and_show_how_they_ended(tmp_path: Path) -> None:
    path = tmp_path / "inference.jsonl"
    other = {"call_id": "c2"}
    _log(
        path,
        ("start", _START),
        ("start", {**_START, **other}),
        ("tokens", {**_CALL, "tokens": 16}),
        ("cancelled", {**_CALL, **other, "tokens": 3, "ids_digest": "ef"}),
    )
    cut = {"attempt": 1, "continued_from": "c0", "reused": 7}
    _log(path, ("start", {**_START, **cut}), ("end", {**_END, "attempt": 1}), life=2)
    assert calls_of(read_rows(path)) == [
        Call(1, "c1", "0-0", 0, 2, 5, "ab", tokens=16),
        Call(1, "c2", "0-0", 0, 2, 5, "ab", tokens=3, outcome="cancelled", ids_digest="ef"),
        Call(2, "c1", "0-0", 1, 2, 5, "ab", tokens=20, outcome="end", ids_digest="cd", continued_from="c0", reused=7),
    ]


@pytest.mark.parametrize(
    ("events", "fault"),
    [([("end", _END)], "has end before its start"), ([("start", _START)] * 2, "began twice")],
)
def test_calls_out_of_order_are_an_error(tmp_path: Path, events: list[tuple[str, dict[str, Any]]], fault: str) -> None:
    path = tmp_path / "inference.jsonl"
    _log(path, *events)
    with pytest.raises(ValueError, match=fault):
        read_log(path)


def test_sums_per_rollout_show_continued_restarted_and_repeated_work() -> None:
    def call(rollout: str, attempt: int, turn: int, tokens: int, outcome: Any = "end", life: int = 1) -> Call:
        return Call(life, "c", rollout, attempt, turn, 2 * turn + 1, "d", tokens=tokens, outcome=outcome)

    logs = by_rollout(
        [
            call("continued", 0, 0, 20),
            call("continued", 0, 1, 16, "unfinished"),
            call("continued", 1, 1, 30, life=2),
            call("restarted", 0, 0, 20),
            call("restarted", 1, 0, 20, life=2),
            call("twice", 0, 0, 20),
            call("twice", 0, 0, 20),
        ]
    )
    continued, restarted, twice = logs["continued"], logs["restarted"], logs["twice"]
    assert continued.turns == [0, 1]
    assert continued.tokens == {(0, 0): 20, (0, 1): 16, (1, 1): 30}
    assert continued.first_turn == {0: 0, 1: 1}
    assert (restarted.turns, restarted.first_turn) == ([0, 0], {0: 0, 1: 0})
    assert (twice.turns, twice.tokens) == ([0, 0], {(0, 0): 40})


def test_the_digest_of_ids_counts_order_and_boundaries() -> None:
    assert len({ids_digest(ids) for ids in ([], [1], [1, 2], [2, 1], [258], [1, 0, 2])}) == 6
