"""The record of a policy model server, and the index of its staging keys."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.control import HookFailed, InvalidState
from gym_ckpt_grpc.participants import CutRecord, PolicyModelRecord
from gym_ckpt_grpc.participants.policy_records import staging_index
from gym_ckpt_grpc.storage import Record, encode
from tests.participants.fakes import R1, R, S, spin
from tests.participants.policy_rig import FakeBackend, PolicyServer, digest_of

CUT = CutRecord(
    request_digest=digest_of("request"),
    service="policy",
    model="minigym",
    backend="inference-0",
    incarnation_id="life",
    snapshot_id="snap",
    source_capture_key="r",
    source_call_id="c1",
    cut_id="c1-1",
    staging_keys=("cuts/r/c1/c1-1",),
    prefix_tokens=3,
    prefix_digest=digest_of("tokens"),
    output_limit=64,
    weight_version=2,
)
FINISHED = replace(CUT, request_digest=digest_of("other"), cut_id="c2", finish_reason="stop", stop_reason="eos")
ROW = {"kind": "staged", "big": 2**63, "z": None, "a": [1, {"b": "c"}]}


def with_cuts(*cuts: Any) -> Record:
    return Record(R, PolicyModelRecord.SCHEMA, payloads={"rows": encode([]), "cuts": encode(list(cuts))})


@pytest.mark.behaviour("P18", "P139")
def test_a_record_comes_back_as_it_was_made() -> None:
    """Rows with their key order and wide integers; a cut with all that it names."""
    made = PolicyModelRecord(R, [ROW], [CUT, FINISHED])
    back = PolicyModelRecord.from_record(made.to_record())
    assert back == made
    assert list(back.rows[0]) == list(ROW)
    assert set(CUT.to_json()) >= {
        "cut_id",
        "backend",
        "snapshot_id",
        "source_capture_key",
        "source_call_id",
        "staging_keys",
        "prefix_digest",
        "request_digest",
        "output_limit",
        "weight_version",
    }


def test_a_cut_gives_evidence_and_continuation_of_the_same_prefix() -> None:
    assert FINISHED.evidence.cut_id == "c2"
    going_on = FINISHED.continuation()
    assert (going_on.source_capture_key, going_on.source_call_id) == ("r", "c1")
    for name in ("staging_keys", "prefix_tokens", "prefix_digest", "output_limit", "weight_version", "finish_reason"):
        assert getattr(going_on, name) == getattr(FINISHED.evidence, name) == getattr(FINISHED, name)


def test_a_row_that_json_cannot_carry_fails_the_export_and_names_the_episode() -> None:
    with pytest.raises(HookFailed, match="rows of r") as caught:
        PolicyModelRecord(R, [{"bad": object()}]).to_record()
    assert caught.value.episode == R


@pytest.mark.behaviour("P17")
@pytest.mark.parametrize(
    "record",
    [
        Record(R, "gymckpt.resources"),
        Record(R, PolicyModelRecord.SCHEMA, 99),
        Record(R, PolicyModelRecord.SCHEMA, payloads={"rows": encode([])}),
        structs.replace(with_cuts(), fields={"more": 1}),
        structs.replace(with_cuts(), payloads={"rows": encode({}), "cuts": encode([])}),
        structs.replace(with_cuts(), payloads={"rows": encode([1]), "cuts": encode([])}),
        structs.replace(with_cuts(), payloads={"rows": encode([]), "cuts": encode({})}),
        with_cuts("cut"),
        with_cuts({**CUT.to_json(), "more": 1}),
        with_cuts({name: value for name, value in CUT.to_json().items() if name != "model"}),
        with_cuts({**CUT.to_json(), "weight_version": True}),
        with_cuts({**CUT.to_json(), "prefix_tokens": "3"}),
        with_cuts({**CUT.to_json(), "staging_keys": "key"}),
        with_cuts({**CUT.to_json(), "staging_keys": []}),
        with_cuts({**CUT.to_json(), "staging_keys": ["a", "a"]}),
        with_cuts({**CUT.to_json(), "service": ""}),
        with_cuts({**CUT.to_json(), "prefix_digest": "abc"}),
        with_cuts({**CUT.to_json(), "output_limit": 0}),
        with_cuts({**CUT.to_json(), "finish_reason": "tool_calls"}),
        with_cuts({**CUT.to_json(), "stop_reason": "eos"}),
    ],
)
def test_what_is_not_as_written_is_refused_and_names_the_episode(record: Record) -> None:
    with pytest.raises(InvalidState, match="r") as caught:
        PolicyModelRecord.from_record(record)
    assert caught.value.episode == R


@pytest.mark.behaviour("P122")
def test_two_cuts_of_one_request_are_refused() -> None:
    with pytest.raises(InvalidState, match="two cuts"):
        PolicyModelRecord.from_record(with_cuts(CUT.to_json(), replace(CUT, cut_id="c1-2").to_json()))


def lines(keys: list[str]) -> str:
    return hashlib.sha256("".join(f"{key}\n" for key in keys).encode()).hexdigest()


@pytest.mark.behaviour("P111")
async def test_the_index_lists_exactly_the_keys_of_rows_and_cuts(tmp_path: Path) -> None:
    """Per capture key; its count and digest agree; a failure has no key."""
    server = PolicyServer(tmp_path, FakeBackend())
    await server.turns(R, 2)
    server.fail = True
    await server.turns(S, 1)
    server.fail = False
    running = await server.begin(S)
    records = await server.checkpoint(R, S)
    extra = server.owner.commit_extra(records)
    of_r = [f"r/{call_id}" for call_id in server.call_ids[:2]]
    of_s = [f"cuts/s/{server.call_ids[3]}/{server.call_ids[3]}-1"]
    assert extra.documents == {"staging_keys": {"r": sorted(of_r), "s": of_s}}
    every = sorted(of_r + of_s)
    assert extra.manifest == {"staging_keys": {"count": 3, "digest": lines(every)}}
    keys = extra.staging_keys
    assert keys is not None
    assert (keys.count, keys.digest, list(keys.first)) == (3, lines(every), every)
    await server.end()
    await running.end()


@pytest.mark.behaviour("P111")
def test_the_reply_lists_a_thousand_keys_and_counts_all(tmp_path: Path) -> None:
    ledger = CaptureLedger(tmp_path)
    cuts = [replace(CUT, request_digest=f"{n:064x}", staging_keys=(f"k{n:05d}", "shared")) for n in range(1500)]
    extra = staging_index([PolicyModelRecord(R, [], cuts).to_record()], ledger.staging_keys)
    every = sorted(["shared", *(f"k{n:05d}" for n in range(1500))])
    assert extra.staging_keys is not None
    assert (extra.staging_keys.count, list(extra.staging_keys.first)) == (1501, every[:1000])
    assert extra.staging_keys.digest == lines(every)
    assert extra.documents["staging_keys"] == {"r": every}


@pytest.mark.behaviour("P112")
async def test_a_cuts_keys_stand_under_the_records_episode_and_a_carried_key_under_two(tmp_path: Path) -> None:
    """After a restore the row stands under who staged it, and a finished cut of the same call under its new attempt."""
    first = PolicyServer(tmp_path / "a", FakeBackend())
    await first.turns(R, 1)
    held = await first.begin(R, messages=[{"role": "user", "content": "again"}])
    await first.close()
    first.go.set()
    await held_back(first)
    records = await first.export(R)
    key, finished = (f"r/{call_id}" for call_id in first.call_ids)
    assert first.owner.commit_extra(records).documents == {"staging_keys": {"r": sorted([key, finished])}}
    await first.end()
    await held.end()
    second = PolicyServer(tmp_path / "b", FakeBackend())
    await second.restore(records)
    again = await second.checkpoint(R1)
    assert second.owner.commit_extra(again).documents == {"staging_keys": {"r": [key], "r-a1": [finished]}}
    rows = [{"kind": "staged", "staging_key": finished, "capture_key": "r"}]
    both = PolicyModelRecord(R1, rows, PolicyModelRecord.from_record(again[0]).cuts).to_record()
    extra = second.owner.commit_extra([both])
    assert extra.documents == {"staging_keys": {"r": [finished], "r-a1": [finished]}}
    assert extra.staging_keys is not None
    assert extra.staging_keys.count == 1
    await second.end()


async def held_back(server: PolicyServer) -> None:
    """Wait until the one call under way has a reply that is held."""
    await spin(20)
    assert server.counts("inflight", "held", "cut") == (1, 1, 1)


def test_without_a_ledger_a_commit_has_no_index() -> None:
    extra = PolicyServer(None).owner.commit_extra([])
    assert (extra.manifest, extra.documents, extra.staging_keys) == ({}, {}, None)
