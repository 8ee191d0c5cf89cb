"""A released model server as a policy: its gate, and its calls across a checkpoint and a restore."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.token_id_capture.staging.rebuild import ReceiptVerificationError, verify_and_linearize
from nemo_gym.token_id_capture.staging.records import RolloutManifest, RolloutReceipt

from gym_ckpt_grpc.integrations.nemo_gym.carried import carried_over
from gym_ckpt_grpc.integrations.nemo_gym.names import UNTAGGED_HEADER
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.nemo_gym.model_rig import ASK, CONTROL_TOKEN, FakeWorker, capture_block, living, made

R0 = EpisodeId("7-0")


@pytest.fixture(autouse=True)
def _control_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_TOKEN_CAPTURE_CONTROL_TOKEN", CONTROL_TOKEN)


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


# ---- capture across a restore ------------------------------------------------------------------------------------


async def test_calls_after_a_restore_find_their_parents_and_the_manifest_lists_both_lives(
    tmp_path: Path, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """In another process with a ledger directory of its own; the worker's staged tokens are all that stays."""
    talk: list[dict[str, Any]] = [ASK]
    async with living(tmp_path, worker, capture_block(tmp_path / "first")) as server:
        await server.talk("7-0", talk)
        await server.talk("7-0", talk)
        async with server.coordinator(tmp_path / "root") as coordinator, coordinator.checkpoint() as checkpoint:
            report = await checkpoint.prepare(ready_within=10)
            await checkpoint.commit(report.continued([R0]))
            await checkpoint.publish()
        await server.talk("7-0", list(talk))  # lost with the crash

    async with living(tmp_path, worker, capture_block(tmp_path / "second")) as server:
        async with server.coordinator(tmp_path / "root") as coordinator, coordinator.restoring("latest") as restored:
            assert [str(each) for each in restored.continued] == ["7-0-a1"]
        await server.talk("7-0-a1", talk)
        first, second, _, third = worker.admissions
        assert first is not None
        assert second is not None
        assert third is not None
        assert (third.rollout_id, third.mode, third.parent_call_id) == ("7-0-a1", "token_in", second.model_call_id)
        assert third.staging_chain == [f"7-0/{first.model_call_id}", f"7-0/{second.model_call_id}"]
        assert third.prev_len == 4
        response = await server.manifest("7-0-a1")
        assert response.status_code == 200, response.text
        manifest = RolloutManifest.model_validate(response.json())
        assert manifest.rollout_id == "7-0-a1"
        assert not manifest.failures
        assert [each.model_call_id for each in manifest.records] == [
            each.model_call_id for each in (first, second, third)
        ]
        assert (await server.manifest("7-0")).status_code == 409
        # What the dead attempt still records changes nothing: a root's row is dropped, a continuation is not captured.
        assert (await server.chat("7-0", [ASK])).status_code == 200
        assert (await server.chat("7-0", talk)).status_code == 200
        assert "of 7-0 was dropped" in caplog.text
        assert worker.admissions[-1] is None
        assert (await server.manifest("7-0")).status_code == 409
        assert (await server.manifest("7-0-a1")).json() == response.json()

    snapshots = [worker.staged[each.staging_key] for each in manifest.records]
    with pytest.raises(ReceiptVerificationError, match="belongs to 7-0"):
        verify_and_linearize(_receipt(manifest.rollout_id, manifest.records), snapshots)
    with pytest.raises(ValueError, match="is not call"):
        carried_over(manifest, [snapshots[1], snapshots[0], snapshots[2]])
    records, own = carried_over(manifest, snapshots)
    row = verify_and_linearize(_receipt("7-0-a1", records), own)
    assert row.token_ids == [10, 101, 20, 102, 40, 104]
    assert row.token_mask == [0.0, 1.0] * 3


def _receipt(rollout_id: str, records: Any) -> RolloutReceipt:
    terminal = records[-1].model_call_id
    return RolloutReceipt(
        rollout_id=rollout_id, manifest=list(records), terminal_model_call_id=terminal, terminal_selection="declared"
    )


async def test_the_row_of_a_reply_that_a_checkpoint_holds_is_not_in_it(tmp_path: Path, worker: FakeWorker) -> None:
    """The call is made again after the restore: two rows of it would be two branches of one conversation."""
    talk: list[dict[str, Any]] = [ASK]
    async with living(tmp_path, worker, capture_block(tmp_path / "first")) as server:
        await server.talk("7-0", talk)
        await worker.entered.acquire()
        worker.held = asyncio.Event()
        asked = asyncio.create_task(server.chat("7-0", talk))
        await worker.entered.acquire()
        async with server.coordinator(tmp_path / "root") as coordinator:
            async with coordinator.checkpoint() as checkpoint:
                report = await checkpoint.prepare(ready_within=10)
                worker.held.set()
                await server.manifest_of("7-0", calls=2)
                assert not asked.done()
                await checkpoint.commit(report.continued([R0]))
                await checkpoint.publish()
            assert (await asked).status_code == 200  # the resumed deployment has it
        assert len((await server.manifest("7-0")).json()["records"]) == 2

    async with living(tmp_path, worker, capture_block(tmp_path / "second")) as server:
        async with server.coordinator(tmp_path / "root") as coordinator, coordinator.restoring("latest"):
            pass
        assert len((await server.manifest("7-0-a1")).json()["records"]) == 1
        await server.talk("7-0-a1", talk)
        manifest = (await server.manifest("7-0-a1")).json()
        assert len(manifest["records"]) == 2
        assert not manifest["failures"]


async def test_a_retired_attempt_captures_nothing_more(tmp_path: Path, worker: FakeWorker) -> None:
    async with living(tmp_path, worker, capture_block(tmp_path / "ledger")) as server:
        talk: list[dict[str, Any]] = [ASK]
        await server.talk("7-0", talk)
        async with server.coordinator(tmp_path / "root") as coordinator:
            await coordinator.retire([R0])
        assert (await server.chat("7-0", talk)).status_code == 409
        assert (await server.manifest("7-0")).status_code == 409
        assert len(worker.admissions) == 1


# ---- the gate ----------------------------------------------------------------------------------------------------


async def test_a_call_that_arrives_while_closed_is_held_and_a_judges_is_not(tmp_path: Path, worker: FakeWorker) -> None:
    async with living(tmp_path, worker, None) as server, server.coordinator(tmp_path / "root") as coordinator:
        async with coordinator.checkpoint() as checkpoint:
            await checkpoint.prepare(ready_within=10)
            held = asyncio.create_task(server.chat("7-0", [ASK]))
            judge = await server.chat("7-0", [ASK], **{UNTAGGED_HEADER: "1"})
            assert judge.status_code == 200
            bare = await server.http.post("/v1/chat/completions", json={"messages": [ASK]})
            assert bare.status_code == 200
            assert not held.done()
            assert len(worker.admissions) == 2
        assert (await held).status_code == 200


async def test_every_reply_names_the_gate_and_the_server_sees_the_path_as_it_came(
    tmp_path: Path, worker: FakeWorker
) -> None:
    async with living(tmp_path, worker, capture_block(tmp_path / "ledger")) as server:
        replies = [
            await server.chat("7-0", [ASK]),
            await server.http.post("/v1/chat/completions", json={"messages": [ASK]}),
            await server.http.get("/no-such-route"),
            await server.manifest("7-0"),
        ]
        assert [each.status_code for each in replies] == [200, 200, 404, 200]
        named = {each.headers.get("x-gymckpt-gate", "").partition("/")[0] for each in replies}
        assert named == {"policy_model"}
        # Only with the prefix in the path does the framework capture: the call has a row.
        assert len(replies[3].json()["records"]) == 1
        assert (await server.chat("-bad", [ASK])).status_code == 400


def test_the_gate_stands_in_front_of_the_frameworks_own_middlewares(tmp_path: Path, worker: FakeWorker) -> None:
    """A reply is held after everything, and a held call has no capture identity yet."""
    layer = made(tmp_path, worker, None).setup_webserver().build_middleware_stack()
    order = []
    while (layer := getattr(layer, "app", None) or getattr(layer, "_app", None)) is not None:
        order.append(type(layer).__name__)
    places = [order.index(name) for name in ("IdentityMiddleware", "CheckpointMiddleware", "_CaptureMiddleware")]
    assert places == sorted(places)


# ---- configurations ----------------------------------------------------------------------------------------------


def test_our_ledger_without_external_staging_is_refused(tmp_path: Path, worker: FakeWorker) -> None:
    block = {**capture_block(tmp_path / "ledger"), "external_staging": False, "dir": str(tmp_path / "tokens")}
    with pytest.raises(UsageError, match="external_staging"):
        made(tmp_path, worker, block).setup_webserver()


def test_capture_that_no_checkpoint_has_is_told(
    tmp_path: Path, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    block = {"enabled": True, "dir": str(tmp_path / "tokens")}
    with caplog.at_level(logging.WARNING, "gym_ckpt_grpc"):
        made(tmp_path, worker, block).setup_webserver()
    assert "no checkpoint will have the token capture of policy_model" in caplog.text


def test_several_workers_are_refused(tmp_path: Path, worker: FakeWorker) -> None:
    with pytest.raises(UsageError, match="num_workers"):
        made(tmp_path, worker, None, num_workers=2).setup_webserver()
