"""The policy model server with real workers behind it: capture, cuts and their continuation on every path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gym_ckpt_grpc.integrations import CheckpointMiddleware
from gym_ckpt_grpc.minigym.counter import TOOLS
from gym_ckpt_grpc.minigym.event_stream import event
from gym_ckpt_grpc.minigym.judge_server import HttpJudge, JudgeServer
from gym_ckpt_grpc.minigym.peers import cookie
from gym_ckpt_grpc.minigym.policy_calls import PATH
from gym_ckpt_grpc.minigym.ports import LOOPBACK, free_ports
from gym_ckpt_grpc.minigym.resources_server import install
from gym_ckpt_grpc.minigym.weather_server import WeatherServer
from gym_ckpt_grpc.minigym.worker_controls import HoldBody
from gym_ckpt_grpc.participants import VerifyMode
from gym_ckpt_grpc.protocol import EpisodeId
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.minigym.policy_rig import LIMIT, PolicyRig, policy_rig, served, until
from tests.participants.fakes import App, FakePort, close, retire

R, R1, R2 = (EpisodeId("r", attempt) for attempt in range(3))
OTHER = EpisodeId("other")
USER = {"role": "user", "content": "count to nine"}
CUT_AT = 5


async def _turn(rig: PolicyRig, episode: EpisodeId, **changes: Any) -> list[dict[str, Any]]:
    """A whole first turn; the conversation that the second one sends."""
    reply = await rig.ask(episode, messages=[USER], tools=TOOLS, seed=3, **changes)
    message = reply["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
    return [USER, message, result]


def _request(messages: list[dict[str, Any]], *, stream: bool = False) -> dict[str, Any]:
    return {"messages": messages, "tools": TOOLS, "seed": 4, "stream": stream, "request_id": "same"}


async def _cut_off(rig: PolicyRig, episode: EpisodeId, request: dict[str, Any]) -> asyncio.Task[dict[str, Any]]:
    """A call that is cut at CUT_AT tokens; admission stays closed."""
    rig.workers[0].controls.hold(HoldBody(after=CUT_AT))
    asking = asyncio.create_task(rig.ask(episode, **request))
    await rig.held()
    await rig.close()
    return asking


def _same(reply: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two replies are equal in everything a caller gets."""
    return reply == other and reply["status"] == 200


@pytest.mark.behaviour("P143")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("turn", ["text", "token_in"])
async def test_a_restored_cut_is_continued_on_every_capture_path(tmp_path: Path, stream: bool, turn: str) -> None:
    """It names source call and keys, and the reply equals that of a call nobody cut."""
    async with policy_rig(tmp_path) as rig:
        messages = await _turn(rig, R) if turn == "token_in" else [USER]
        request = _request(messages, stream=stream)
        uncut = await rig.ask(OTHER, **request)
        asking = await _cut_off(rig, R, request)
        cut_call = rig.calls()[-1]
        assert (rig.counts("inflight", "held", "cut", "cut_failed"), asking.done()) == ((1, 1, 1, 0), False)
        records = await rig.export(R)
        asking.cancel()
    async with policy_rig(tmp_path) as rig:
        await rig.restore(records)
        reply = await rig.ask(R1, **request)
        (call,) = rig.calls()
        assert call.staged is not None
        admission = call.staged.admission
        assert rig.ledger is not None
        manifest = rig.ledger.manifest(R1)
    assert _same(reply, uncut)
    assert (admission.mode, admission.capture_key) == (turn, R1.capture_key)
    assert admission.continuation is not None
    assert (admission.continuation.source_capture_key, admission.continuation.source_call_id) == (
        R.capture_key,
        cut_call.id,
    )
    assert admission.continuation.staging_keys[0].startswith(f"cuts/{R.capture_key}/{cut_call.id}/")
    assert (call.continued_from, call.reused, call.made) == (
        cut_call.id,
        CUT_AT,
        len(reply["token_ids"]) - CUT_AT,
    )
    assert [each["call_id"] for each in manifest["calls"]][-1] == call.id
    assert manifest["failures"] == []


@pytest.mark.behaviour("P146")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_reply_finished_while_held_is_given_after_a_restore_and_no_token_is_made(
    tmp_path: Path, stream: bool
) -> None:
    request = _request([USER], stream=stream)
    async with policy_rig(tmp_path) as rig:
        uncut = await rig.ask(OTHER, **request)
        asking = await _cut_off(rig, R, request)
        rig.workers[0].controls.release(None)
        await until(lambda: rig.calls()[-1].state == "end")
        cuts = rig.workers[0].cuts
        await until(lambda: len(cuts.released) == 1)  # the prefix cut, replaced by the whole
        records = await rig.export(R)
        assert not asking.done()
        asking.cancel()
    async with policy_rig(tmp_path) as rig:
        await rig.restore(records)
        rig.workers[0].engine.decode_once = _never  # type: ignore[method-assign]
        reply = await rig.ask(R1, **request)
        (call,) = rig.calls()
    assert _same(reply, uncut)
    assert (call.made, call.reused) == (0, len(reply["token_ids"]))


def _never() -> bool:
    raise AssertionError("no token may be made")


@pytest.mark.behaviour("P95")
async def test_a_stream_with_the_waiting_header_stands_still_while_closed_and_then_ends_as_ever(tmp_path: Path) -> None:
    """Its generation ends meanwhile; the bytes are those of a stream that nothing disturbed."""
    request = _request([USER], stream=True)
    headers = {"x-gymckpt-waiting": "1"}
    async with policy_rig(tmp_path) as rig:
        async with rig.http.post(rig.path(OTHER), json=request, headers=headers) as answer:
            undisturbed = await answer.read()
        rig.workers[0].controls.hold(HoldBody(after=CUT_AT))
        got = b""
        async with rig.http.post(rig.path(R), json=request, headers=headers) as answer:
            while got.count(b"\n\n") < CUT_AT:
                got += await answer.content.readany()
            await rig.close()
            assert rig.counts("inflight", "held", "cut") == (1, 1, 1)
            rig.workers[0].controls.release(None)
            await until(lambda: rig.calls()[-1].state == "end")
            await until(lambda: rig.counts("paused") == (1,))
            assert rig.owner.is_ready()
            assert answer.content.read_nowait() == b""
            await rig.open()
            got += await answer.read()
    assert got == undisturbed
    assert got.count(b"\n\n") > CUT_AT + 2


async def test_a_paused_stream_that_was_lost_is_continued_from_its_cut(tmp_path: Path) -> None:
    request = _request([USER], stream=True)
    async with policy_rig(tmp_path) as rig:
        uncut = await rig.ask(OTHER, **request)
        asking = await _cut_off(rig, R, request)
        records = await rig.export(R)
        asking.cancel()
    async with policy_rig(tmp_path) as rig:
        await rig.restore(records)
        # A caller that does not stream takes the cut as well: how the reply travels is no part of the request.
        reply = await rig.ask(R1, **{**request, "stream": False})
        assert reply["token_ids"] == uncut["token_ids"]
        assert rig.calls()[0].reused == CUT_AT


async def test_a_cut_of_a_continued_call_is_continued_in_the_next_attempt(tmp_path: Path) -> None:
    request = _request([USER])
    async with policy_rig(tmp_path) as rig:
        uncut = await rig.ask(OTHER, **request)
        asking = await _cut_off(rig, R, request)
        records = await rig.export(R)
        asking.cancel()
    async with policy_rig(tmp_path) as rig:
        await rig.restore(records)
        rig.workers[0].controls.hold(HoldBody(after=CUT_AT + 4))
        asking = asyncio.create_task(rig.ask(R1, **request))
        await rig.held()
        await rig.close(2)
        records = await rig.export(R1)
        asking.cancel()
    async with policy_rig(tmp_path) as rig:
        await rig.restore(records)
        reply = await rig.ask(R2, **request)
        assert rig.calls()[0].reused == CUT_AT + 4
    assert _same(reply, uncut)


async def test_without_a_crash_the_cut_call_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    request = _request([USER])
    async with policy_rig(tmp_path) as rig:
        uncut = await rig.ask(OTHER, **request)
        asking = await _cut_off(rig, R, request)
        await rig.open()
        rig.workers[0].controls.release(None)
        assert _same(await asking, uncut)
        assert len(rig.calls()) == 2
        assert rig.counts("inflight", "held", "cut") == (0, 0, 0)


async def test_rollouts_stay_with_their_worker_in_every_life_and_untagged_calls_take_turns(tmp_path: Path) -> None:
    names = [f"{number}-0" for number in range(12)]

    async def where() -> dict[str, str]:
        async with policy_rig(tmp_path, workers=2) as rig:
            for name in names:
                await rig.ask(EpisodeId(name), messages=[USER], max_tokens=1)
            for _ in range(2):
                await rig.ask(None, messages=[USER], seed=1, max_tokens=1)
            untagged = [[call.name.rollout_id for call in worker.calls].count("") for worker in rig.workers]
            assert untagged == [1, 1]
            return {
                call.name.rollout_id: str(number) for number, worker in enumerate(rig.workers) for call in worker.calls
            }

    first = await where()
    assert await where() == first
    assert {first[name] for name in names} == {"0", "1"}


async def test_constrained_calls_are_served_and_neither_cut_nor_continued(tmp_path: Path) -> None:
    async with policy_rig(tmp_path) as rig:
        rig.workers[0].controls.hold(HoldBody(after=CUT_AT))
        calls = [
            asyncio.create_task(rig.ask(R, messages=[USER], tools=TOOLS, **constraint))
            for constraint in ({"tool_choice": "required"}, {"n": 2})
        ]
        await rig.held(2)
        await rig.close()
        assert rig.counts("inflight", "cut", "cut_failed", "cut_skipped") == (2, 0, 0, 2)
        await rig.open()
        rig.workers[0].controls.release(None)
        required, two = await asyncio.gather(*calls)
    assert required["choices"][0]["finish_reason"] == "tool_calls"
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["choices"][0]["message"] != two["choices"][1]["message"]


async def test_a_fenced_attempt_is_refused_and_generates_nothing(tmp_path: Path) -> None:
    async with policy_rig(tmp_path) as rig:
        assert rig.ledger is not None
        rig.ledger.retire([R])
        for stream in (False, True):
            refused = await rig.ask(R, messages=[USER], stream=stream)
            assert (refused["status"], refused["error"]["code"]) == (409, "STALE_ATTEMPT")
        assert rig.calls() == []


async def _failures(rig: PolicyRig) -> list[str]:
    assert rig.ledger is not None
    manifest = rig.ledger.manifest(R)
    assert manifest["calls"] == []
    assert rig.counts("inflight") == (0,)
    return [each["reason"] for each in manifest["failures"]]


async def test_a_dead_worker_is_a_failure_row_and_a_refusal(tmp_path: Path) -> None:
    async with policy_rig(tmp_path, impostor=f"http://{LOOPBACK}:{free_ports(1)[0]}") as rig:
        for stream in (False, True):
            refused = await rig.ask(R, messages=[USER], stream=stream)
            assert (refused["status"], refused["error"]["code"]) == (503, "WORKER_UNAVAILABLE")
        gone, broke = await _failures(rig)
    assert "is gone" in gone
    assert "broke" in broke


async def test_what_a_worker_refuses_is_passed_on_and_a_failure_row(tmp_path: Path) -> None:
    async def refuse(scope: Any, body: bytes) -> tuple[int, dict[str, str], Any]:
        return 507, {"content-type": "application/json"}, {"error": {"code": "FULL", "detail": "no room"}}

    async with served(App({PATH: refuse})) as url, policy_rig(tmp_path, impostor=url) as rig:
        for stream in (False, True):
            refused = await rig.ask(R, messages=[USER], stream=stream)
            assert (refused["status"], refused["error"]["code"]) == (507, "FULL")
        assert await _failures(rig) == ["the worker answered 507"] * 2


async def test_a_stream_that_breaks_breaks_for_the_caller_and_is_a_failure_row(tmp_path: Path) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "The"}, "finish_reason": None}]}

    async def tear(scope: Any, body: bytes) -> tuple[int, dict[str, str], Any]:
        async def events() -> AsyncIterator[bytes]:
            yield event(chunk)
            yield event(chunk)[:-1]

        return 200, {"content-type": "text/event-stream"}, events()

    async with served(App({PATH: tear})) as url, policy_rig(tmp_path, impostor=url) as rig:
        with pytest.raises(aiohttp.ClientPayloadError):
            await rig.ask(R, messages=[USER], stream=True)
        await until(lambda: rig.counts("inflight") == (0,))
        (reason,) = await _failures(rig)
    assert "ends within an event" in reason


async def test_a_worker_that_stages_nothing_is_a_failure_row_beside_a_good_reply(tmp_path: Path) -> None:
    async def plain(scope: Any, body: bytes) -> tuple[int, dict[str, str], Any]:
        message = {"role": "assistant", "content": "no tokens kept"}
        return 200, {"content-type": "application/json"}, {"id": "x", "choices": [{"index": 0, "message": message}]}

    async with served(App({PATH: plain})) as url, policy_rig(tmp_path, impostor=url) as rig:
        reply = await rig.ask(R, messages=[USER])
        assert reply["choices"][0]["message"]["content"] == "no tokens kept"
        assert await _failures(rig) == ["the worker staged nothing"]


@pytest.mark.parametrize("bad", [{"colour": 1}, {"response_format": {"type": "json_object"}}, {"messages": 1}])
async def test_requests_that_the_model_does_not_understand_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    async with policy_rig(tmp_path) as rig:
        refused = await rig.ask(R, **{"messages": [USER], **bad})
        assert (refused["status"], refused["error"]["code"]) == (400, "INVALID_ARGUMENT")
        assert rig.calls() == []


@pytest.mark.behaviour("P100")
async def test_a_verification_that_asks_a_judge_through_the_closed_policy_server_completes(tmp_path: Path) -> None:
    """The judge's call is in the middle of its generation at the close; resources become ready all the same."""
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(policy_rig(tmp_path))
        judge = await stack.enter_async_context(served(JudgeServer(rig.peers, rig.url).build_app()))
        weather = WeatherServer(HttpJudge(rig.peers, judge))
        owner = install(weather, verify=VerifyMode.WAIT)
        owner.attach(FakePort(ParticipantKind.RESOURCES))
        url = await stack.enter_async_context(served(CheckpointMiddleware(weather.build_app(), owner.gate())))
        seeded = f"{url}/rollout/{R.capture_key}"
        await rig.peers.post(f"{seeded}/seed_session", {"cities": 1}, headers=cookie("s"))
        rig.workers[0].controls.hold(HoldBody(after=CUT_AT))
        transcript = {"cities": 1, "messages": [USER]}
        verifying = asyncio.create_task(rig.peers.post(f"{seeded}/verify", transcript, headers=cookie("s")))
        await rig.held()
        await rig.close()
        await close(owner)
        (blocker,) = owner.report(9).blockers
        assert (blocker.reason, blocker.episode) == (BlockerReason.IN_FLIGHT_REQUEST, R)
        assert rig.counts("inflight", "untagged", "cut", "held") == (0, 1, 0, 0)
        rig.workers[0].controls.release(None)
        assert 0 <= (await verifying).body["reward"] <= 1
        await until(owner.is_ready)
        assert rig.owner.admission.closed


async def test_without_capture_calls_pass_and_leave_nothing_staged(tmp_path: Path) -> None:
    async with policy_rig(tmp_path, capture=False) as rig:
        for stream in (False, True):
            reply = await rig.ask(R, messages=[USER], stream=stream)
            assert reply["status"] == 200
            assert "capture" not in reply
    assert not (tmp_path / "staged").exists()


async def test_a_caller_that_leaves_ends_its_call_and_leaves_no_row(tmp_path: Path) -> None:
    async with policy_rig(tmp_path) as rig:
        rig.workers[0].controls.hold(HoldBody(after=CUT_AT))
        for stream in (False, True):
            asking = asyncio.create_task(rig.ask(R, messages=[USER], stream=stream))
            await rig.held()
            asking.cancel()
            await until(lambda: rig.counts("inflight") == (0,))
            await until(lambda: rig.calls()[-1].state == "cancelled")
        assert rig.ledger is not None
        assert rig.ledger.manifest(R) == {"capture_key": R.capture_key, "calls": [], "failures": []}


async def test_a_retire_in_an_open_checkpoint_answers_every_caller_and_stops_every_token(tmp_path: Path) -> None:
    """Fifty calls, held whole ones and paused streams: each caller hears of it, and no worker goes on for nobody."""
    async with policy_rig(tmp_path) as rig:
        rig.workers[0].controls.hold(HoldBody(after=CUT_AT))
        asking = [
            asyncio.create_task(rig.ask(R, messages=[USER], seed=number, stream=number % 2 == 1))
            for number in range(50)
        ]
        await rig.held(50)
        await rig.close()
        assert rig.counts("inflight", "held", "cut") == (50, 50, 50)
        await retire(rig.owner, rig.port, R, LIMIT)
        assert rig.counts("inflight", "held", "paused", "cut", "held_bytes") == (0, 0, 0, 0, 0)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        whole, streams = answers[::2], answers[1::2]
        assert {(each["status"], each["error"]["code"]) for each in whole if isinstance(each, dict)} == {
            (409, "STALE_ATTEMPT")
        }
        assert all(isinstance(each, dict) for each in whole)
        assert all(isinstance(each, aiohttp.ClientPayloadError) for each in streams)  # their replies had begun
        await until(lambda: rig.workers[0].engine.active == 0)
        assert {call.state for call in rig.calls()} == {"cancelled"}
        late = await rig.ask(R, messages=[USER])
        assert (late["status"], late["error"]["code"]) == (409, "STALE_ATTEMPT")


async def test_the_ledgers_own_routes_read_while_closed_and_remove_only_while_open(tmp_path: Path) -> None:
    async with policy_rig(tmp_path) as rig:
        await rig.ask(R, messages=[USER])
        await rig.close()
        manifest = await rig.peers.request("GET", f"{rig.url}/ledger/manifest/{R.capture_key}")
        assert [call["call_id"] for call in manifest.body["calls"]] == [rig.calls()[0].id]
        refused = await rig.peers.request("POST", f"{rig.url}/ledger/retire", {"capture_keys": [R.capture_key]})
        assert (refused.status, refused.body["error"]["code"]) == (503, "ADMISSION_CLOSED")
        await rig.open()
        done = await rig.peers.request("POST", f"{rig.url}/ledger/retire", {"capture_keys": [R.capture_key]})
        assert done.body == {"removed": [R.capture_key], "absent": []}
        assert (await rig.ask(R, messages=[USER]))["status"] == 409
