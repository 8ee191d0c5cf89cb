"""The commands that look at a root: what they print, for people and for programs."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from gym_ckpt_grpc.cli import operator_commands, root_commands  # noqa: F401 - they register their commands
from gym_ckpt_grpc.cli.app import app
from gym_ckpt_grpc.cli.conversation import model_calls, turns_of
from gym_ckpt_grpc.cli.output import print_json, printable
from gym_ckpt_grpc.cli.state_text import LINES, raw_lines, state_lines
from gym_ckpt_grpc.participants.policy_records import PolicyModelRecord
from gym_ckpt_grpc.participants.records import AgentRecord
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot, Codec, EpisodeLists, Payload, Record, decode, encode, raw
from gym_ckpt_grpc.storage.episode_view import view_rollout
from gym_ckpt_grpc.storage.viewing import view_checkpoint
from tests.golden.scenes import VALUES
from tests.golden.test_golden import same
from tests.storage.damaged import (
    AGENT,
    COUNTER,
    EVIL,
    LATE,
    MAIL,
    MEMBERS,
    POLICY,
    ROLLOUTS,
    CountingFiles,
    copy_of_part,
    flip_payload,
    make_checkpoint,
    make_root,
    records_of,
    unsynced,
)

__all__ = ["unsynced"]
pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "root")
    return tmp_path / "root"


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--root", str(root)])


def told(root: Path, *arguments: str, exits: int = 0) -> dict[str, Any]:
    """What a command tells programs."""
    result = run(root, *arguments, "--json")
    assert result.exit_code == exits, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def said(root: Path, *arguments: str, exits: int = 0) -> str:
    """What a command tells people."""
    result = run(root, *arguments)
    assert result.exit_code == exits, result.output
    return result.stdout


# ---- ls


def test_ls_lists_the_newest_first_with_what_each_needs(root: Path) -> None:
    opened = CheckpointRoot(str(root))
    opened.pin("one", epoch=1)
    opened.hold("two", "eval")
    newest, oldest = told(root, "ls")["published"]
    assert (newest["number"], newest["checkpoint_id"], newest["chain"], newest["bases"]) == (3, "two", 1, ["one"])
    assert (oldest["number"], oldest["checkpoint_id"], oldest["chain"], oldest["bases"]) == (2, "one", 0, [])
    assert (newest["continued"], newest["restarts"], newest["members"]) == (len(ROLLOUTS), 1, len(MEMBERS))
    assert newest["written_bytes"] < oldest["written_bytes"]
    assert newest["state_bytes"] == pytest.approx(oldest["state_bytes"], rel=0.1)
    assert (newest["held_by"], oldest["held_by"]) == (["eval"], ["restore of epoch 1"])
    text = said(root, "ls")
    assert text.index("two") < text.index("+1 on one")
    assert "eval" in text


def test_ls_names_what_is_not_published_in_words(root: Path) -> None:
    opened = CheckpointRoot(str(root))
    make_checkpoint(opened, "complete", published=False)
    make_checkpoint(opened, "unfinished", published=False)
    (root / "checkpoints/unfinished/checkpoint.json").unlink()
    (root / "checkpoints/whose").mkdir()
    (root / "checkpoints/.deleted-old").mkdir()
    kinds = {each["name"]: each["kind"] for each in told(root, "ls")["unpublished"]}
    assert kinds == {
        "complete": "complete",
        "unfinished": "unfinished",
        "whose": "foreign",
        ".deleted-old": "tombstone",
    }
    text = said(root, "ls")
    assert "unfinished: epoch 1 by ctl: unfinished" in text
    assert "whose: none of this project's" in text


def test_ls_looks_into_the_newest_twenty_unless_told_otherwise(tmp_path: Path) -> None:
    opened = CheckpointRoot(str(tmp_path / "root"))
    opened.sequence.claim("ctl", "run")
    for number in range(22):
        make_checkpoint(opened, f"c{number}", records=lambda who: [])
    newest = told(tmp_path / "root", "ls")
    assert [row["checkpoint_id"] for row in newest["published"]] == [f"c{number}" for number in range(21, 1, -1)]
    assert newest["published_count"] == 22
    assert "2 older ones are published" in said(tmp_path / "root", "ls")
    assert len(told(tmp_path / "root", "ls", "--all")["published"]) == 22


def test_a_root_may_be_named_as_people_name_directories(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    for name in ("root", "./root/", "../" + root.parent.name + "/root", root.as_uri()):
        result = CliRunner().invoke(app, ["ls", "--root", name, "--json"])
        assert result.exit_code == 0, result.output


# ---- show and verify


def test_show_tells_all_of_a_checkpoint(root: Path) -> None:
    answer = told(root, "show", "two")
    assert (answer["published"], answer["complete"], answer["sequence_number"]) == (True, True, 3)
    assert (answer["chain"], answer["bases"]) == (1, ["one"])
    assert answer["trainer"]["codec"] == "MSGPACK"
    assert answer["trainer"]["bytes"] > 0
    assert (answer["frontier"], answer["policy_versions"]) == (None, {"policy_model": "v3"})
    assert answer["restarts"] == {str(LATE): "straggler"}
    assert answer["problems"] == []
    by_name = {member["participant"]: member for member in answer["members"]}
    assert by_name[str(POLICY)]["documents"] == ["staging_keys"]
    mail = by_name[str(MAIL)]
    assert mail["state_bytes"] > mail["bytes"], "it is all in the base"
    assert [base["checkpoint_id"] for base in mail["base_files"]] == ["one"]
    text = said(root, "show", "two")
    for part in (
        f"{MAIL} needs records-",
        " of one ",
        "trainer's own state: ",
        "staging_keys",
        "1 start over: straggler",
    ):
        assert part in text


def test_verify_all_tells_of_each(root: Path) -> None:
    assert told(root, "verify", "--all")["intact"]
    flip_payload(CheckpointRoot(str(root)), "one", AGENT.place, ROLLOUTS[1])
    answer = told(root, "verify", "--all", exits=1)
    assert {each["checkpoint_id"]: each["intact"] for each in answer["checkpoints"]} == {"one": False, "two": True}
    text = said(root, "verify", "--all", exits=1)
    assert "one: damaged: 1 faults" in text
    assert "two: intact" in text
    assert run(root, "verify", "two", "--all").exit_code == 2


# ---- episode


def test_a_rollout_at_every_participant(root: Path) -> None:
    """Where it stands, whose records it has, and where their bytes are."""
    answer = told(root, "episode", ROLLOUTS[1].rollout_id)
    assert answer["attempts"] == [{"episode": "roll-1-a1", "attempt": 1, "standing": "continued", "reason": ""}]
    by_name = {record["participant"]: record for record in answer["records"]}
    assert set(by_name) == {str(who) for who in MEMBERS if who is not MAIL}
    agent = {payload["name"]: payload for payload in by_name[str(AGENT)]["payloads"]}
    assert agent["session"]["stored_in"] == "one", "it did not change"
    assert agent["boundary"]["stored_in"] == "two"
    assert by_name[str(AGENT)]["fields"]["session_key"] == "agent-1"


def test_the_conversation_is_told_as_turns(root: Path) -> None:
    answer = told(root, "episode", ROLLOUTS[1].rollout_id)
    assert [(turn["role"], turn["text"]) for turn in answer["conversation"]] == [
        ("user", f"begin 1{EVIL}"),
        ("assistant", "answer 1"),
    ]
    assert [call["kind"] for call in answer["model_calls"]] == ["staged", "staged", "cut"]
    text = said(root, "episode", ROLLOUTS[1].rollout_id)
    assert "assistant: answer 1" in text
    assert "cut after 7 of at most 256 tokens" in text


def test_state_never_commands_a_terminal(root: Path) -> None:
    """Neither for people nor as JSON, whatever a server put into it."""
    for more in ([], ["--json"], ["--raw"], ["--full"]):
        text = run(root, "episode", ROLLOUTS[1].rollout_id, *more).stdout
        assert not set(EVIL) - {*"]0;owned2J"} & set(text), more
        assert "owned" in text


@pytest.mark.parametrize(
    ("rollout", "standing", "exits"),
    [(LATE.rollout_id, "restart", 0), ("nobody", "absent", 1), (ROLLOUTS[2].capture_key, "continued", 0)],
)
def test_where_a_rollout_stands(root: Path, rollout: str, standing: str, exits: int) -> None:
    """It starts over, it is unknown, or it is named with its attempt."""
    [attempt] = told(root, "episode", rollout, exits=exits)["attempts"]
    assert attempt["standing"] == standing
    assert attempt["reason"] == ("straggler" if standing == "restart" else "")


def test_a_record_outside_the_lists_is_told(tmp_path: Path) -> None:
    """A participant had state of it, and another left it out."""
    make_root(tmp_path / "root", lists=EpisodeLists(ROLLOUTS[1:]))
    [attempt] = told(tmp_path / "root", "episode", ROLLOUTS[0].rollout_id)["attempts"]
    assert attempt["standing"] == "not_in_scope"


def test_only_this_attempt(root: Path) -> None:
    assert told(root, "episode", "roll-1", "--attempt", "1")["records"]
    assert told(root, "episode", "roll-1", "--attempt", "0", exits=1)["records"] == []
    assert run(root, "episode", "roll-1-a1", "--attempt", "0").exit_code == 2
    assert run(root, "episode", "../roll").exit_code == 2


def test_only_what_holds_the_rollout_is_read(tmp_path: Path) -> None:
    """Of a hundred rollouts of 100 KB each, one's state, and the indexes."""
    opened = CheckpointRoot(str(tmp_path))
    opened.sequence.claim("ctl", "run")

    def records(who: object) -> list[Record]:
        episodes = [EpisodeId(f"r{number}") for number in range(100)] if who is COUNTER else []
        return [Record(each, "s", payloads={"state": encode("x" * 100_000)}) for each in episodes]

    make_checkpoint(opened, "big", records=records, lists=EpisodeLists())
    files = CountingFiles()
    found = view_rollout(view_checkpoint(CheckpointRoot(str(tmp_path), files)), "r7")
    assert found.records[0].record is not None
    assert 100_000 < files.read < 200_000


def test_json_loses_nothing_of_a_value(tmp_path: Path) -> None:
    """Read back by the rule of storage.proto, every golden value is equal in type, bits and key order."""
    opened = CheckpointRoot(str(tmp_path))
    opened.sequence.claim("ctl", "run")
    payloads = {name: encode(value) for name, value in VALUES.items()} | {"raw": raw(b"\x00\xff", "image/png")}
    chosen = {COUNTER: [Record(ROLLOUTS[0], "mine", 4, "worker-1", 9, {"f": 1}, payloads)]}
    make_checkpoint(opened, "values", records=lambda who: chosen.get(who, []))
    [record] = told(tmp_path, "episode", "roll-0", "--checkpoint", "values")["records"]
    assert (record["schema"], record["schema_version"], record["owner"], record["revision"]) == (
        "mine",
        4,
        "worker-1",
        9,
    )
    by_name = {payload["name"]: payload for payload in record["payloads"]}
    for name, value in VALUES.items():
        text = json.dumps(by_name[name]["value"]).encode("ascii")
        assert same(decode(Payload(Codec.JSON, text)), value), name
    assert base64.b64decode(by_name["raw"]["base64"]) == b"\x00\xff"
    assert by_name["raw"]["content_type"] == "image/png"
    for more in ([], ["--full"], ["--raw"]):
        assert "image/png" in said(tmp_path, "episode", "roll-0", "--checkpoint", "values", *more)


def test_large_state_is_bounded_unless_all_is_asked_for(tmp_path: Path) -> None:
    opened = CheckpointRoot(str(tmp_path))
    opened.sequence.claim("ctl", "run")
    state = {f"key-{number}": ["text " * 50] * 100 for number in range(100)}
    chosen = {COUNTER: [Record(ROLLOUTS[0], "mine", payloads={"state": encode(state)})]}
    make_checkpoint(opened, "large", records=lambda who: chosen.get(who, []))
    short = said(tmp_path, "episode", "roll-0", "--checkpoint", "large")
    assert len(short.splitlines()) < 2 * LINES
    assert "--full shows all" in short
    assert len(said(tmp_path, "episode", "roll-0", "--checkpoint", "large", "--full")) > 1_000_000


# ---- diff and salvage


def test_diff_tells_what_changed(root: Path) -> None:
    answer = told(root, "diff", "one", "two")
    by_name = {part["participant"]: part for part in answer["participants"]}
    assert (by_name[str(COUNTER)]["changed"], by_name[str(MAIL)]["changed"]) == (3, 0)
    assert by_name[str(COUNTER)]["changed_bytes"] > 0
    assert set(answer["rollouts"]["both"]) == {episode.rollout_id for episode in ROLLOUTS}
    assert f"records differ at {COUNTER}: roll-1, roll-3, roll-5" in said(root, "diff", "one", "two", "--rollouts")
    assert "records differ" not in said(root, "diff", "one", "two")
    assert "nothing differs" in said(root, "diff", "two", "two")
    assert told(root, "diff", "two")["same"]


def test_diff_over_two_roots(root: Path, tmp_path: Path) -> None:
    said(root, "salvage", "two", "--to", str(tmp_path / "new"))
    assert told(root, "diff", "two", "two", "--other-root", str(tmp_path / "new"))["same"]


def test_salvage_tells_what_is_lost_and_what_restores(root: Path, tmp_path: Path) -> None:
    flip_payload(CheckpointRoot(str(root)), "two", AGENT.place, ROLLOUTS[3])
    text = said(root, "salvage", "two", "--to", str(tmp_path / "new"), exits=1)
    assert f"lost: {AGENT} {ROLLOUTS[3]}: " in text
    assert "5 rollouts continue, 2 start over" in text
    assert f"1 start over: salvage: its record at {AGENT} is damaged" in text
    (root / copy_of_part(COUNTER, "two") / "manifest.json").unlink()
    (root / "checkpoints/two/checkpoint.json").unlink()
    answer = told(root, "salvage", "two", "--to", str(tmp_path / "again"), exits=1)
    assert not answer["restorable"]
    assert str(COUNTER) in answer["refused"]


# ---- texts


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\x9b", "\u202eabc", "\ud800", "\x7f", "\u2028"])
def test_what_a_terminal_would_obey_is_escaped(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printable(text)
    assert shown.isprintable()
    print_json({"text": text})
    printed = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in printed)
    assert json.loads(printed) == {"text": text}, "JSON keeps it all the same"


def test_ordinary_text_is_shown_as_it_is() -> None:
    assert printable("Ünïcode 漢字 😀 [x]") == "Ünïcode 漢字 😀 [x]"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [nested(390), 10**6000, {"k" * 5000: 1}, "x" * 10**6, b"\x00" * 10**6, None],
    ids=["deep", "long integer", "long key", "long text", "many bytes", "nothing"],
)
def test_any_state_has_lines(value: Any) -> None:
    """Bounded ones, and all of it if asked for: neither depth nor length is too much."""
    short = state_lines(decode(encode(value)), full=False)
    assert len(short) <= LINES + 1
    assert sum(map(len, short)) < 20_000
    assert state_lines(value, full=True)


def test_what_people_are_shown_is_bounded_however_much_there_is(tmp_path: Path) -> None:
    """Turns, calls, facts, and reasons of their own of rollouts that start over; --full and --json have all."""
    root = CheckpointRoot(str(tmp_path / "root"))
    root.sequence.claim("ctl", "run")
    first, many = ROLLOUTS[0], 3000
    messages = [{"role": "user", "content": f"{at} {'x' * 5000}", "tool_calls": [{"name": "f"}]} for at in range(many)]
    rows = [{"call_id": f"c{at}", "reason": "x" * 5000} for at in range(many)]

    def records(who: object) -> list[Record]:
        if who is AGENT:
            record = AgentRecord(first, "k", {"seed": 1}, {"messages": messages}).to_record()
            return [msgspec.structs.replace(record, fields={**record.fields, "fact": "x" * 60_000})]
        return [PolicyModelRecord(first, rows).to_record()] if who is POLICY else []

    lists = EpisodeLists((first,), {EpisodeId(f"r{at}"): f"incident {at}" for at in range(many)})
    make_checkpoint(root, "one", lists=lists, records=records)
    for arguments in (["show"], ["episode", first.rollout_id]):
        short = run(tmp_path / "root", *arguments)
        assert short.exit_code == 0, short.output
        assert len(short.output) < 300_000
        assert len(short.output.splitlines()) < 500
    assert f"incident {many - 1}" in run(tmp_path / "root", "show", "--json").output
    everything = run(tmp_path / "root", "episode", first.rollout_id, "--full").output
    assert all(text in everything for text in ("user: 0 x", f"user: {many - 1} x", "x" * 60_000, f"c{many - 1}"))


@pytest.mark.parametrize("kind", ["application/json", "text/plain; charset=utf-8", "application/octet-stream"])
@pytest.mark.parametrize("data", [b"", b'{"a": 1}', b"\xff" * 4000, b"line\x1b[2J\n" * 4000])
def test_raw_bytes_have_lines(kind: str, data: bytes) -> None:
    for full in (False, True):
        lines = raw_lines(raw(data, kind), full=full)
        assert all(line.isprintable() for line in lines)
        assert full or len(lines) <= LINES + 1


def test_messages_of_the_responses_api_are_turns() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "image"}]},
        {"type": "function_call", "name": "step", "arguments": '{"by":1}', "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}, 3]},
    ]
    turns = turns_of(AgentRecord(EpisodeId("r"), "k", {"deep": {"input": items}}).to_record())
    assert [(turn.role, turn.text, turn.calls) for turn in turns] == [
        ("user", "hi[image]", ()),
        ("assistant", "", ('step({"by":1})',)),
        ("tool", "done", ()),
        ("assistant", "", ('f({"a": 1})',)),
    ]


KEYS = st.sampled_from(["role", "type", "content", "text", "tool_calls", "function", "name", "arguments", "output"])
ROW_KEYS = st.sampled_from(["kind", "call_id", "total_length", "previous_length", "added_length", "mode", "parent_id"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("function_call")


def shapes(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Values with the names that are looked at, and anything behind them."""
    return st.recursive(
        LEAVES | st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(st.dictionaries(KEYS, shapes(KEYS), max_size=4), max_size=3))
@example(messages=[{"type": ["string", "null"]}])
@example(messages=[{"role": "user", "tool_calls": 5}])
def test_whatever_an_authors_state_looks_like_it_can_be_shown(messages: list[Any]) -> None:
    """What has the look of a message and is none: a part of a JSON schema, such as {"type": ["string", "null"]}."""
    record = AgentRecord(EpisodeId("r"), "k", {"seed": 1}, {"messages": messages}).to_record()
    for turn in turns_of(record):
        assert all(isinstance(text, str) for text in (turn.role, turn.text, *turn.calls))
    assert state_lines({"messages": messages}, full=False)


@given(row=st.dictionaries(ROW_KEYS, shapes(ROW_KEYS), max_size=4))
@example(row={"total_length": "many"})
def test_whatever_a_ledgers_row_looks_like_it_can_be_told(row: dict[str, Any]) -> None:
    [call] = model_calls("policy_model/p/0", PolicyModelRecord(EpisodeId("r"), [row]).to_record())
    assert isinstance(call.kind, str)
    assert isinstance(call.text, str)


def test_a_policy_models_record_that_is_none_has_no_calls() -> None:
    for rows, cuts in ((5, []), ([], 5), ([5], []), ([], [{}])):
        payloads = {"rows": encode(rows), "cuts": encode(cuts)}
        assert model_calls("p", Record(EpisodeId("r"), PolicyModelRecord.SCHEMA, payloads=payloads)) == []


def test_records_that_are_of_no_known_kind_have_no_turns() -> None:
    assert turns_of(Record(EpisodeId("r"), "mine", payloads={"a": encode([{"role": "user"}])})) == []
    assert records_of(COUNTER, turn=0)[0].schema == "gymckpt.resources"
    assert turns_of(records_of(COUNTER, turn=0)[0]) == []
