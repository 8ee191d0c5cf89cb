"""The framework's capture ledger on our files and fences: both of its faces."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextvars import copy_context
from pathlib import Path
from typing import Any

import orjson
import pytest
from nemo_gym.token_id_capture import FileLineageStore, TokenCaptureStore, TokenEntry, trajectories_from_source
from nemo_gym.token_id_capture.config import token_id_capture_config
from nemo_gym.token_id_capture.lineage import stamp_continuation
from nemo_gym.token_id_capture.protocols import CaptureLedger
from nemo_gym.token_id_capture.records import ParentResolutionStatus, stamp_lineage
from nemo_gym.token_id_capture.staging.records import CallRecord, CaptureLedgerCommit

from gym_ckpt_grpc.control import Ledger, Row
from gym_ckpt_grpc.integrations.nemo_gym.ledger import CALL_NAMED, NemoLedger, ledger_at
from gym_ckpt_grpc.protocol.errors import StaleAttempt, StateCorrupt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.nemo_gym.model_rig import capture_block

R0 = EpisodeId("r")
R1 = R0.next()
R2 = R1.next()
ROOT, RESOLVED, UNRESOLVED = (
    ParentResolutionStatus.ROOT,
    ParentResolutionStatus.RESOLVED,
    ParentResolutionStatus.UNRESOLVED,
)

Item = dict[str, Any]


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def said(text: str) -> Item:
    return {"role": "assistant", "content": text}


ASK = [user("go")]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def commit_of(
    key: str,
    call_id: str,
    request: list[Item],
    reply: str,
    *,
    parent: CaptureLedgerCommit | None = None,
    **changes: Any,
) -> CaptureLedgerCommit:
    """What the framework hands over for a call whose tokens are staged: five more than its parent."""
    before = parent.record.cum_len if parent else 0
    values: dict[str, Any] = {
        "model_call_id": call_id,
        "parent_call_id": parent.record.model_call_id if parent else None,
        "prev_len": before,
        "delta_len": 5,
        "cum_len": before + 5,
        "weight_version": 7,
        "digest": sha(f"staged {call_id}"),
        "extras_digest": sha("extras"),
        "staging_key": f"{key}/{call_id}",
        "mode": "token_in" if parent else "text",
        "chain_hash": sha(f"chain {call_id}"),
        "cumulative_hash": sha(f"all {call_id}"),
        "response_id": f"resp-{call_id}",
        "admitted_at": 1795999999.123456,
        "fingerprint_version": 2,
    }
    return CaptureLedgerCommit(
        rollout_id=key,
        record=CallRecord(**{**values, **changes}),
        staging_chain=((*parent.staging_chain, f"{key}/{call_id}") if parent else (f"{key}/{call_id}",)),
        request_items=request,
        response_items=[said(reply)],
    )


@pytest.fixture
def ledger(tmp_path: Path) -> NemoLedger:
    return NemoLedger(tmp_path, sync_rows=False)


async def talked(ledger: NemoLedger, key: str = "r", prefix: str = "c") -> tuple[list[Item], list[CaptureLedgerCommit]]:
    """Two calls, the second upon the first; and the conversation with its next question."""
    first = commit_of(key, f"{prefix}0", ASK, "a0")
    await ledger.record(first)
    request = [*ASK, said("a0"), user("q1")]
    second = commit_of(key, f"{prefix}1", request, "a1", parent=first)
    await ledger.record(second)
    return [*request, said("a1"), user("q2")], [first, second]


def stored(rows: Any) -> Any:
    """Rows as a record gives them back: through JSON."""
    return orjson.loads(orjson.dumps(rows))


def restore(ledger: NemoLedger, rows: dict[EpisodeId, list[Row]]) -> None:
    """What a Restore does with the rows of its records."""
    stamped = {each.next(): [ledger.stamped(row, each) for row in of] for each, of in rows.items()}
    ledger.activate(ledger.stage(stamped))


async def calls(ledger: NemoLedger, key: str) -> list[str]:
    return [record["model_call_id"] for record in (await ledger.manifest(key))["records"]]


# ---- as the framework's ----------------------------------------------------------------------------------------------


def test_the_framework_makes_it_by_configuration_and_this_process_finds_it(tmp_path: Path) -> None:
    made = token_id_capture_config({"token_id_capture": capture_block(tmp_path / "state")}).build_lineage_store()
    assert isinstance(made, NemoLedger)
    port: Ledger = made
    assert port.export([R0]) == {R0: []}
    assert isinstance(made, CaptureLedger)
    assert made.is_process_shared()
    assert ledger_at(tmp_path / "state" / ".." / "state") is made
    assert ledger_at(tmp_path) is None


async def test_parents_are_found_by_the_conversation_and_confirmed_by_its_context(ledger: NemoLedger) -> None:
    conversation, (first, second) = await talked(ledger)
    assert (await ledger.resolve("r", ASK)).status == ROOT
    found = await ledger.resolve("r", conversation)
    assert found.status == RESOLVED
    assert found.match is not None
    assert found.match.model_call_id == "c1"
    assert found.match.staging_chain == ("r/c0", "r/c1")
    assert (found.match.prev_len, found.match.chain_hash) == (10, second.record.chain_hash)
    assert (found.match.digest, found.match.cumulative_token_ids) == (second.record.cumulative_hash, ())
    changed = [user("something else"), *conversation[1:]]
    assert (await ledger.resolve("r", changed)).status == UNRESOLVED
    assert (await ledger.resolve("r", [*ASK, said("never said"), user("q")])).status == UNRESOLVED
    assert (await ledger.resolve("other", conversation)).status == UNRESOLVED
    assert await calls(ledger, "r") == ["c0", "c1"]
    assert (await ledger.manifest("r"))["records"][0] == first.record.model_dump(mode="json")


async def test_of_several_parents_equal_ones_are_one_and_different_ones_none(ledger: NemoLedger) -> None:
    same = {"cumulative_hash": sha("same")}
    for call_id in ("b", "a"):
        await ledger.record(commit_of("r", call_id, ASK, "ok", **same))
    follow = [*ASK, said("ok"), user("q")]
    found = await ledger.resolve("r", follow)
    assert found.match is not None
    assert found.match.model_call_id == "a"
    await ledger.record(commit_of("r", "c", ASK, "ok", cumulative_hash=sha("other")))
    assert (await ledger.resolve("r", follow)).status == UNRESOLVED


async def test_a_row_of_another_fingerprint_version_matches_nothing(ledger: NemoLedger) -> None:
    await ledger.record(commit_of("r", "c0", ASK, "a0", fingerprint_version=1))
    assert (await ledger.resolve("r", [*ASK, said("a0"), user("q")])).status == UNRESOLVED


async def test_a_call_is_recorded_once_and_another_row_of_it_is_refused(ledger: NemoLedger) -> None:
    commit = commit_of("r", "c0", ASK, "a0")
    await asyncio.gather(*(ledger.record(commit) for _ in range(8)))
    assert await calls(ledger, "r") == ["c0"]
    assert len(ledger.lines_of(R0)) == 1
    with pytest.raises(ValueError, match="c0"):
        await ledger.record(commit_of("r", "c0", ASK, "a0", weight_version=8))
    assert await calls(ledger, "r") == ["c0"]


async def test_a_chain_that_is_not_that_of_the_parent_is_refused(ledger: NemoLedger) -> None:
    first = commit_of("r", "c0", ASK, "a0")
    lost = commit_of("r", "c1", [*ASK, said("a0"), user("q")], "a1", parent=first)
    with pytest.raises(ValueError, match="staging chain"):
        await ledger.record(lost)
    assert await calls(ledger, "r") == []
    assert not await ledger.has_rows("r")


async def test_failures_stand_in_the_manifest_and_are_no_parents(ledger: NemoLedger) -> None:
    await ledger.record_failure("r", "c0", "lost")
    await ledger.record_failure("r", "c0", "lost")
    assert await ledger.has_rows("r")
    manifest = await ledger.manifest("r")
    assert [(each["model_call_id"], each["reason"]) for each in manifest["failures"]] == [("c0", "lost")]
    assert manifest["records"] == []


async def test_another_process_sees_a_row_at_once(ledger: NemoLedger, tmp_path: Path) -> None:
    other = NemoLedger(tmp_path)
    conversation, _ = await talked(ledger)
    found = await other.resolve("r", conversation)
    assert found.match is not None
    assert found.match.model_call_id == "c1"


async def test_an_illegal_capture_key_is_a_value_error(ledger: NemoLedger) -> None:
    with pytest.raises(ValueError, match="-no"):
        await ledger.manifest("-no")


# ---- across restores -------------------------------------------------------------------------------------------------


async def test_the_next_attempt_resolves_its_parents_in_the_rows_of_the_one_before(tmp_path: Path) -> None:
    """In a directory that never saw that one, twice over: each call keeps the key that staged it."""
    source = NemoLedger(tmp_path / "0")
    conversation, (_, second) = await talked(source)
    await source.record_failure("r", "f", "lost")
    rows = stored(source.export([R0])[R0])
    target = NemoLedger(tmp_path / "1")
    restore(target, {R0: rows})
    found = await target.resolve("r-a1", conversation)
    assert found.match is not None
    assert found.match.staging_chain == ("r/c0", "r/c1")
    third = commit_of("r-a1", "c2", conversation, "a2", parent=second)
    await target.record(third)
    assert await calls(target, "r-a1") == ["c0", "c1", "c2"]
    assert [each["model_call_id"] for each in (await target.manifest("r-a1"))["failures"]] == ["f"]

    last = NemoLedger(tmp_path / "2")
    restore(last, {R1: stored(target.export([R1])[R1])})
    (exported,) = last.export([R2]).values()
    assert [last.staging_keys(row) for row in exported] == [
        ("r", "r/c0"),
        ("r", "r/c1"),
        None,
        ("r-a1", "r-a1/c2"),
    ]
    assert [last.call_id(row) for row in exported] == ["c0", "c1", "f", "c2"]
    assert [last.tokens(row) for row in exported] == [5, 5, 0, 5]
    after = await last.resolve("r-a2", [*conversation, said("a2"), user("q3")])
    assert after.match is not None
    assert after.match.staging_chain == ("r/c0", "r/c1", "r-a1/c2")
    # A carried row is the same row: recording it again changes nothing.
    again = commit_of("r-a2", "c2", conversation, "a2", parent=second, staging_key="r-a1/c2")
    await last.record(again.model_copy(update={"staging_chain": third.staging_chain}))
    assert len(last.export([R2])[R2]) == 4


async def test_what_a_fenced_attempt_records_late_is_dropped_and_told(
    ledger: NemoLedger, caplog: pytest.LogCaptureFixture
) -> None:
    conversation, (_, second) = await talked(ledger)
    restore(ledger, {R0: stored(ledger.export([R0])[R0])})
    with caplog.at_level(logging.WARNING):
        await ledger.record(commit_of("r", "late", conversation, "a2", parent=second))
        await ledger.record_failure("r", "late-too", "lost")
    assert "call late of r was dropped" in caplog.text
    assert "staged under r/late" in caplog.text
    assert "call late-too of r was dropped" in caplog.text
    assert await calls(ledger, "r-a1") == ["c0", "c1"]
    assert (await ledger.resolve("r", conversation)).status == UNRESOLVED
    assert await ledger.has_rows("r")
    with pytest.raises(StaleAttempt):
        await ledger.manifest("r")
    with pytest.raises(StaleAttempt):
        ledger.export([R0])


async def test_a_retire_fences_and_a_delete_lets_the_id_be_used_again(ledger: NemoLedger) -> None:
    await talked(ledger)
    removed = ledger.retire([R0])
    assert removed.removed == (R0,)
    with pytest.raises(StaleAttempt):
        await ledger.manifest("r")
    ledger.delete(["r"])
    assert await calls(ledger, "r") == []
    await talked(ledger)
    assert await calls(ledger, "r") == ["c0", "c1"]


async def test_bad_rows_of_a_record_are_refused_before_anything_is_installed(ledger: NemoLedger) -> None:
    await talked(ledger)
    good = stored(ledger.export([R0])[R0])
    ledger.check_rows(good)
    other = {**good[1]["record"], "cum_len": 3}
    for bad in (
        [*good, good[0]],
        [{**good[0], "record": other}],
        [{**good[0], "context_length": "1"}],
        [{**good[0], "unknown": 1}],
        [{**good[0], "capture_key": "-"}],
        [{"model_call_id": "x"}],
        [{name: value for name, value in good[0].items() if name != "fingerprint"}],
    ):
        with pytest.raises(ValueError, match=r"^rows\[\d\]: "):
            ledger.check_rows(bad)
        with pytest.raises(ValueError, match=r"^r-a1: rows"):
            ledger.stage({R1: bad})
    assert await calls(ledger, "r-a1") == []


async def test_a_bad_line_is_told_and_a_torn_one_left_out(ledger: NemoLedger, tmp_path: Path) -> None:
    await talked(ledger)
    (rows,) = (tmp_path / "rows").iterdir()
    rows.write_bytes(rows.read_bytes() + b'{"record":')
    assert await calls(ledger, "r") == ["c0", "c1"]
    await ledger.record(commit_of("r", "d0", ASK, "other"))
    assert await calls(ledger, "r") == ["c0", "c1", "d0"]
    rows.write_bytes(b"no json\n" + rows.read_bytes())
    with pytest.raises(StateCorrupt, match="ledger of r"):
        await ledger.manifest("r")


async def test_a_row_that_a_failed_append_has_left_counts_once(ledger: NemoLedger, tmp_path: Path) -> None:
    await talked(ledger)
    await ledger.record_failure("r", "f", "lost")
    (rows,) = (tmp_path / "rows").iterdir()
    rows.write_bytes(rows.read_bytes() * 2)
    assert [ledger.call_id(row) for row in ledger.export([R0])[R0]] == ["c0", "c1", "f"]
    ledger.check_rows(ledger.export([R0])[R0])


async def test_the_call_is_named_before_its_row_can_be_seen(ledger: NemoLedger) -> None:
    seen: list[tuple[str, int]] = []

    async def record() -> None:
        CALL_NAMED.set(lambda call_id: seen.append((call_id, len(ledger.lines_of(R0)))))
        await ledger.record(commit_of("r", "c0", ASK, "a0"))
        await ledger.record_failure("r", "f0", "lost")

    await asyncio.create_task(record(), context=copy_context())
    assert seen == [("c0", 0), ("f0", 1)]


# ---- the internal path -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "masked"), [("r", False), ("r-a1", True)])
async def test_on_the_internal_path_the_next_attempt_is_masked(tmp_path: Path, key: str, masked: bool) -> None:
    """What the module says of token arrays: going on under the same key they train, under the next one they do not."""
    store = TokenCaptureStore(tmp_path)
    lineage = FileLineageStore(tmp_path)

    async def call(rollout: str, call_id: str, request: list[Item], prompt: list[int], reply: str) -> None:
        resolution = await lineage.resolve(rollout, request)
        entry = TokenEntry(
            rollout_id=rollout,
            model_call_id=call_id,
            model="scripted",
            prompt_token_ids=prompt,
            generation_token_ids=[len(prompt) + 100],
            generation_log_probs=[-0.1],
            output_items=[{"type": "message", "content": [{"type": "output_text", "text": reply}], **said(reply)}],
            token_item_index=0,
            created_at=0.0,
        )
        stamp_continuation(entry, request)
        parent = resolution.match.model_call_id if resolution.match else None
        stamp_lineage(entry, parent, parent_resolution=resolution.status)
        await store.put(entry)

    await call("r", "c0", ASK, [1, 2], "a0")
    await call(key, "c1", [*ASK, said("a0"), user("q")], [1, 2, 102, 3], "a1")
    built = await trajectories_from_source(key, store)
    assert built is not None
    assert built["mask_sample"] is masked
