"""Parents: which call a conversation goes on from, and what counts as the same turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.capture.parents import fingerprint, read_context
from gym_ckpt_grpc.capture.rows import line_of, read_rows
from gym_ckpt_grpc.protocol.errors import InvalidArgument
from tests.capture.ledger_rig import (
    ASK,
    R0,
    R1,
    S0,
    Message,
    SpyFiles,
    admitted,
    coordinates,
    made,
    said,
    talk,
    user,
)


@pytest.fixture
def ledger(tmp_path: Path) -> CaptureLedger:
    return CaptureLedger(tmp_path)


def parent_of(ledger: CaptureLedger, conversation: list[Message], call_id: str = "probe") -> str:
    """The parent of a new call, and that the admission is one or the other form, whole."""
    admission = admitted(ledger, R0, call_id, conversation)
    if admission.mode == "text":
        assert (admission.previous_length, admission.parent_chain_hash, admission.staging_chain) == (0, "", ())
    else:
        assert admission.previous_length > 0
        assert admission.parent_chain_hash
        assert admission.staging_chain
    return admission.parent_id


@pytest.mark.behaviour("P255")
def test_no_assistant_turn_is_a_root_and_no_match_is_unresolved(ledger: CaptureLedger) -> None:
    made(ledger, R0, "one", ASK, "a")
    assert parent_of(ledger, ASK) == ""
    assert parent_of(ledger, []) == ""
    assert parent_of(ledger, [*ASK, said("a"), user("more")]) == "one"
    assert parent_of(ledger, [*ASK, said("b"), user("more")]) == ""
    assert parent_of(ledger, [user("went"), said("a"), user("more")]) == ""
    assert parent_of(ledger, [user("went"), *ASK, said("a"), user("more")]) == ""
    assert parent_of(ledger, [*ASK, said("a"), said("a"), user("more")]) == ""
    assert ledger.admit(R1, "other", [*ASK, said("a"), user("more")]).mode == "text"  # type: ignore[union-attr]


@pytest.mark.behaviour("P255")
def test_the_parent_is_the_call_of_the_last_turn(ledger: CaptureLedger) -> None:
    conversation = talk(ledger, R0, 4)
    admission = admitted(ledger, R0, "next", conversation)
    assert (admission.parent_id, admission.previous_length, admission.number) == ("c3", 20, 5)
    assert admission.staging_chain == ("r/c0", "r/c1", "r/c2", "r/c3")
    assert parent_of(ledger, conversation[:-2]) == "c2"


@pytest.mark.behaviour("P255")
def test_equal_candidates_are_interchangeable_and_different_ones_unresolved(ledger: CaptureLedger) -> None:
    """Two calls with one request and one reply: the same tokens, or not."""
    for call_id in ("one", "two"):
        made(ledger, R0, call_id, ASK, "a")
    assert parent_of(ledger, [*ASK, said("a"), user("more")]) == "one"
    made(ledger, R0, "three", ASK, "a", total_length=6, added_length=6)
    assert parent_of(ledger, [*ASK, said("a"), user("more")]) == ""
    for call_id in ("four", "five"):
        made(ledger, R0, call_id, [user("else")], "b", cumulative_hash=call_id)
    assert parent_of(ledger, [user("else"), said("b"), user("more")]) == ""


@pytest.mark.behaviour("P255")
def test_parallel_calls_of_one_attempt_find_their_own_parents(ledger: CaptureLedger) -> None:
    """Sub-agents with equal turns and other contexts, also while a reply is still to come."""
    left, right = [user("left")], [user("right")]
    for name, ask in (("left", left), ("right", right)):
        made(ledger, R0, name, ask, "same")
    assert parent_of(ledger, [*left, said("same"), user("more")]) == "left"
    assert parent_of(ledger, [*right, said("same"), user("more")]) == "right"
    assert parent_of(ledger, [*left, said("same"), user("more"), said("not there yet"), user("x")]) == ""


@pytest.mark.parametrize(
    "changes", [{"cumulative_hash": ""}, {"chain_hash": ""}, {"added_length": 0, "total_length": 0}]
)
def test_a_row_that_cannot_carry_a_prefix_is_no_parent(ledger: CaptureLedger, changes: dict[str, Any]) -> None:
    made(ledger, R0, "one", ASK, "a", **changes)
    assert parent_of(ledger, [*ASK, said("a"), user("more")]) == ""


def test_rows_of_another_fingerprint_version_match_nothing(ledger: CaptureLedger, tmp_path: Path) -> None:
    made(ledger, R0, "one", ASK, "a")
    path = tmp_path / "rows" / "r.rows"
    path.write_bytes(path.read_bytes().replace(b'"fingerprint_version":1', b'"fingerprint_version":2'))
    assert parent_of(CaptureLedger(tmp_path), [*ASK, said("a"), user("more")]) == ""


def test_rows_of_other_processes_are_parents_at_once(tmp_path: Path) -> None:
    """Two ledgers on one directory, in turn: each builds upon what the other appended, and numbers go on."""
    ledgers = [CaptureLedger(tmp_path), CaptureLedger(tmp_path)]
    conversation = list(ASK)
    for turn in range(6):
        admission = made(ledgers[turn % 2], R0, f"c{turn}", conversation, f"a{turn}")
        assert (admission.parent_id, admission.number) == (f"c{turn - 1}" if turn else "", turn + 1)
        conversation += [said(f"a{turn}"), user("more")]


def test_only_what_was_appended_is_read_again(tmp_path: Path) -> None:
    """The parent's row, and the rows that came since: not all of the file for each call."""
    files = SpyFiles()
    ledger = CaptureLedger(tmp_path, files=files)
    conversation = talk(ledger, R0, 30)
    files.log.clear()
    admitted(ledger, R0, "next", conversation)
    assert files.count("open", "r.rows") == 1
    rows = read_rows(files, str(tmp_path / "rows" / "r.rows"), R0)
    lengths = [len(line_of(row)) for row in rows]
    assert sum(lengths) > 20 * lengths[0]
    index = ledger._indexes.get(R0)
    assert index is not None
    assert index._offset == sum(lengths)


def test_numbers_go_on_while_no_row_is_there_yet(ledger: CaptureLedger) -> None:
    assert [admitted(ledger, R0, f"c{at}").number for at in range(3)] == [1, 2, 3]
    assert admitted(ledger, R1, "other").number == 1


def test_a_copy_of_an_admission_will_do(ledger: CaptureLedger) -> None:
    admission = admitted(ledger, R0, "one")
    ledger.append_staged(admission.fresh(), coordinates(admission), "resp", said("a"))
    assert parent_of(ledger, [*ASK, said("a")]) == "one"


# ---- fingerprints ------------------------------------------------------------------------------------------

CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"n":1}'}}
PLAIN = {"role": "assistant", "content": "a", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "echo",
    [
        {**PLAIN, "refusal": None, "audio": None, "name": None},
        {**PLAIN, "prompt_token_ids": [1, 2], "generation_log_probs": [-0.5]},
        {**PLAIN, "content": [{"type": "text", "text": "a"}]},
        {**PLAIN, "tool_calls": [{**CALL, "id": "renamed", "index": 0}]},
        {**PLAIN, "reasoning_content": ""},
    ],
    ids=["nulls", "token fields", "parts", "ids", "no reasoning"],
)
def test_what_servers_and_clients_reshape_is_the_same_turn(echo: Message) -> None:
    assert fingerprint(echo) == fingerprint(PLAIN)
    assert read_context([*ASK, echo]) == read_context([*ASK, PLAIN])


@pytest.mark.parametrize(
    "other",
    [
        {**PLAIN, "content": "b"},
        {**PLAIN, "content": ""},
        {**PLAIN, "tool_calls": []},
        {**PLAIN, "tool_calls": 7},
        {**PLAIN, "tool_calls": ["odd"]},
        {**PLAIN, "tool_calls": [CALL, CALL]},
        {**PLAIN, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"n":2}'}}]},
        {**PLAIN, "reasoning_content": "hm"},
        {**PLAIN, "refusal": "no"},
        {**PLAIN, "function_call": {"name": "add", "arguments": '{"n":1}'}},
        {**PLAIN, "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}]},
    ],
)
def test_what_the_model_authored_tells_turns_apart(other: Message) -> None:
    assert fingerprint(other) != fingerprint(PLAIN)


def test_no_content_and_empty_content_are_the_same() -> None:
    bare = {"role": "assistant", "tool_calls": [CALL]}
    assert fingerprint(bare) == fingerprint({**bare, "content": None}) == fingerprint({**bare, "content": ""})


def test_contexts_differ_where_any_other_message_does() -> None:
    asks: list[list[Message]] = [
        [user("a"), user("b")],
        [user("ab")],
        [user("b"), user("a")],
        [user("a"), {**user("b"), "name": "x"}],
        [user("a"), {"role": "tool", "content": "b", "tool_call_id": "1"}],
        [user("a"), {"role": "tool", "content": "b", "tool_call_id": "2"}],
        [user("a")],
        [],
    ]
    assert len({read_context(each).digest for each in asks}) == len(asks)
    assert read_context([{**user("a"), "name": None}]) == read_context([user("a")])


@pytest.mark.parametrize(
    "message", ["text", None, 3, {"role": "user", "content": {1, 2}}, {"role": "assistant", "content": object()}]
)
def test_what_is_no_message_is_refused(ledger: CaptureLedger, message: Any) -> None:
    with pytest.raises(InvalidArgument, match="message"):
        ledger.admit(S0, "call", [*ASK, message])


def test_odd_text_is_digested_all_the_same() -> None:
    for text in ("\udc80", "\x00", "e\u0301", "é", "\u2028"):
        assert len(read_context([user(text), said(text)]).turns) == 64
