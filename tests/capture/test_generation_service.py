"""GenerationService over a real server: sweeps, checks and releases."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.capture import CutOutcome, tokens_digest
from gym_ckpt_grpc.capture.cut_engine import CutSweep
from gym_ckpt_grpc.control import (
    Budget,
    Capability,
    CutAck,
    CutDisposition,
    CutEvidence,
    CutPresence,
    SweepHeader,
    open_channel,
)
from gym_ckpt_grpc.protocol.errors import (
    StateUnwritable,
)
from gymckpt.v1 import generation_pb2 as pb
from gymckpt.v1 import generation_pb2_grpc
from tests.capture.scripted_engine import INFO, Worker, identity, sweep_of, worker
from tests.capture.staging_rig import again, begin, generate, root, whole

READ = """
import sys
from gym_ckpt_grpc.capture import FileTokenStore, tokens_digest
found = FileTokenStore(sys.argv[1]).get_many(sys.argv[2:])
print(tokens_digest([token for key in sys.argv[2:] for token in found[key].generated_ids]))
"""


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Worker]:
    async with worker(tmp_path / "tokens") as served:
        yield served


def evidence_of(ack: CutAck) -> CutEvidence:
    assert ack.evidence is not None
    return ack.evidence


# ---- sweeps


@pytest.mark.behaviour("P157")
async def test_one_disposition_for_each_call(served: Worker) -> None:
    engine = served.engine
    await engine.running("running", 3)
    await engine.finished("finished", 4)
    engine.uncuttable["bent"] = "beam search"
    engine.raising["full"] = StateUnwritable("the disk is full")
    engine.raising["broken"] = RuntimeError("a secret")
    acks = await served.sweep(["running", "finished", "bent", "full", "broken", "unknown"])
    assert {name: ack.disposition.name for name, ack in acks.items()} == {
        "running": "CUT",
        "finished": "FINISHED",
        "bent": "UNCUTTABLE",
        "full": "FAILED",
        "broken": "FAILED",
        "unknown": "NOT_FOUND",
    }
    for name, ack in acks.items():
        assert ack.call == identity(name)
        assert (ack.evidence is not None) is (name in ("running", "finished"))
        assert bool(ack.reason) is (name in ("bent", "full", "broken"))
    assert (acks["bent"].reason, acks["full"].reason) == ("beam search", "the disk is full")
    assert "secret" not in acks["broken"].reason
    cut, finished = evidence_of(acks["running"]), evidence_of(acks["finished"])
    assert (cut.prefix_tokens, cut.finish_reason, cut.stop_reason) == (3, "", "")
    assert (finished.prefix_tokens, finished.finish_reason, finished.stop_reason) == (4, "stop", "end")
    assert finished.staging_keys == ("r1/finished",)
    assert sorted(engine.asked, key=str)[0] == (identity("bent"), 1.5)


@pytest.mark.behaviour("P157")
async def test_any_mix_in_batches(served: Worker, rng: random.Random) -> None:
    """Hundreds of calls of all kinds, some slow: a header, then batches of 1 to 256, each call once."""
    engine, expected = served.engine, dict[str, str]()
    for number in range(700):
        name = f"c{number}"
        kind = rng.choice(["CUT", "CUT", "FINISHED", "NOT_FOUND", "UNCUTTABLE", "FAILED"])
        expected[name] = kind
        if kind == "CUT":
            await engine.running(name, rng.randrange(5))
        elif kind == "FINISHED":
            await engine.finished(name, rng.randrange(5))
        elif kind == "UNCUTTABLE":
            engine.uncuttable[name] = "bent"
        elif kind == "FAILED":
            engine.raising[name] = RuntimeError("broken")
        if rng.random() < 0.3:
            engine.hanging[name] = asyncio.Event()
            asyncio.get_running_loop().call_later(rng.random() / 10, engine.hanging[name].set)
    names = list(expected)
    rng.shuffle(names)
    header, batches = await served.parts(names)
    assert (header.backend_id, header.incarnation_id) == (INFO.backend_id, INFO.incarnation_id)
    assert header.snapshot_id
    assert all(1 <= len(batch) <= 256 for batch in batches)
    acks = [ack for batch in batches for ack in batch]
    assert Counter(ack.call.ticket_id for ack in acks) == Counter(f"t-{name}" for name in names)
    assert {ack.call.model_call_id: ack.disposition.name for ack in acks} == expected


async def test_a_sweep_of_nothing_is_a_header(served: Worker) -> None:
    header, batches = await served.parts([])
    assert (header.backend_id, batches) == ("inference-0", [])
    assert header.snapshot_id != (await served.parts([]))[0].snapshot_id


@pytest.mark.behaviour("P157")
async def test_a_hanging_cut_holds_up_no_other(served: Worker) -> None:
    """The others are acknowledged while it hangs; at the deadline it is FAILED, inside the stream."""
    engine = served.engine
    for name in ("a", "b", "hangs"):
        await engine.running(name)
    engine.hanging["hangs"] = asyncio.Event()
    engine.hanging["b"] = asyncio.Event()
    seen: list[str] = []
    async with aclosing(served.backend.cut(sweep_of(["hangs", "a", "b"]), Budget(1.0))) as parts:
        async for part in parts:
            if not isinstance(part, SweepHeader):
                seen += [f"{ack.call.model_call_id} {ack.disposition.name}" for ack in part]
            if seen == ["a CUT"]:
                engine.hanging["b"].set()
            if seen == ["a CUT", "b CUT"]:
                assert engine.cancelled == []
    assert seen == ["a CUT", "b CUT", "hangs FAILED"]
    assert engine.cancelled == ["hangs"]


async def test_a_cut_that_comes_after_its_deadline_is_released(served: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine did not stop; what it staged is named by no acknowledgement."""
    engine = served.engine
    call = await engine.running("late")
    go, done = asyncio.Event(), CutOutcome.of(await call.cut())
    assert done.evidence is not None

    async def stubborn(asked: Any, age: float) -> CutOutcome:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        return done

    monkeypatch.setattr(engine, "cut", stubborn)
    acks = await served.sweep(["late"], seconds=0.5)
    assert acks["late"].disposition is CutDisposition.FAILED
    go.set()
    await engine.until(lambda: engine.released)
    assert engine.released == [done.evidence.cut_id]
    assert await engine.tokens.keys("cuts/") == []


async def test_a_cut_that_nobody_heard_of_is_released(served: Worker) -> None:
    """One that was done when the client left; those handed out are the client's."""
    engine, tasks = served.engine, set[asyncio.Task[Any]]()
    for name in ("a", "b"):
        await engine.running(name)
    engine.hanging["b"] = asyncio.Event()
    sweep = CutSweep(engine, [(identity("a"), 0.0), (identity("b"), 0.0)], tasks)
    async with aclosing(sweep.batches(Budget(10))) as batches:
        ((call, outcome),) = await anext(batches)
        assert (call, outcome.disposition) == (identity("a"), CutDisposition.CUT)
        engine.hanging["b"].set()
        await asyncio.wait(tasks, timeout=10)
    await engine.until(lambda: engine.released)
    (kept,) = await engine.tokens.keys("cuts/")
    assert outcome.evidence is not None
    assert outcome.evidence.staging_keys == (kept,)


async def test_cuts_under_way_end_with_a_client_that_leaves(served: Worker) -> None:
    engine = served.engine
    await engine.running("a")
    engine.hanging["a"] = asyncio.Event()
    async with aclosing(served.backend.cut(sweep_of(["a"]), Budget(30.0))) as parts:
        assert isinstance(await anext(parts), SweepHeader)
        await engine.until(lambda: engine.asked)
    await engine.until(lambda: engine.cancelled)
    assert await engine.tokens.keys("cuts/") == []


@pytest.mark.behaviour("P158")
async def test_a_new_process_reads_what_an_ack_names(served: Worker) -> None:
    """Prefix and finished cuts alike, while the worker goes on."""
    await served.engine.running("a", 5)
    await served.engine.finished("b", 6)
    for ack in (await served.sweep(["a", "b"])).values():
        evidence = evidence_of(ack)
        arguments = ("-c", READ, str(served.directory), *evidence.staging_keys)
        reader = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
        said, _ = await reader.communicate()
        assert said.decode().strip() == evidence.prefix_digest


@pytest.mark.behaviour("P159")
async def test_a_cut_changes_nothing_of_the_generation(served: Worker) -> None:
    """Tokens go on coming during sweeps, and the end is that of a call that was never cut."""
    expected = await whole(root("c"), served.engine.tokens, 12)
    call = await served.engine.running("c", 0)
    for number in range(1, 13):
        sweep = asyncio.create_task(served.sweep(["c"], number=number))
        generate(call, 1)
        await sweep
    assert await call.complete("stop") == expected


@pytest.mark.behaviour("P160")
async def test_every_cut_of_repeated_sweeps_can_be_continued(served: Worker) -> None:
    tokens = served.engine.tokens
    expected = await whole(root("whole"), tokens, 8)
    call = await served.engine.running("c", 0)
    cuts: list[CutEvidence] = []
    for number, more in enumerate((0, 0, 3, 1, 0, 4), start=1):
        generate(call, more)
        cuts.append(evidence_of((await served.sweep(["c"], number=number))["c"]))
    await call.complete("stop")
    cuts.append(evidence_of((await served.sweep(["c"], number=9))["c"]))
    counts = [cut.prefix_tokens for cut in cuts]
    assert counts == [0, 0, 3, 4, 4, 8, 8]
    assert len({cut.cut_id for cut in cuts}) == len(cuts)
    for cut in cuts:
        continued = await begin(again(root("c"), cut), tokens)
        assert continued.reused == cut.prefix_tokens
        generate(continued, 8 - cut.prefix_tokens)
        ended = await continued.complete("stop")
        assert (ended.cumulative_hash, ended.chain_hash) == (expected.cumulative_hash, expected.chain_hash)


# ---- checks and releases


@pytest.mark.behaviour("P161")
async def test_present_missing_and_changed(served: Worker) -> None:
    for name in ("a", "b", "c"):
        await served.engine.running(name)
    await served.engine.finished("d", 3)
    acks = await served.sweep(["a", "b", "c", "d"])
    a, b, c, d = (evidence_of(acks[name]) for name in ("a", "b", "c", "d"))
    await served.backend.release([b.cut_id], Budget(5))
    asked = [
        a,
        b,
        replace(c, prefix_tokens=3),
        replace(c, prefix_digest=tokens_digest([9])),
        replace(c, cut_id="another"),
        replace(c, staging_keys=a.staging_keys),
        replace(a, staging_keys=(*a.staging_keys, *b.staging_keys)),
        d,
        c,
    ]
    P, M, C = CutPresence.PRESENT, CutPresence.MISSING, CutPresence.CHANGED
    assert await served.backend.check(asked, Budget(5)) == [P, M, C, C, C, C, M, P, P]


@pytest.mark.behaviour("P161")
async def test_a_damaged_cut_is_changed(served: Worker) -> None:
    """And costs the others nothing."""
    for name in ("a", "b"):
        await served.engine.running(name, 9)
    acks = await served.sweep(["a", "b"])
    (log,) = served.directory.glob("*.tokens")
    data = bytearray(log.read_bytes())
    evidence = evidence_of(acks["a"])
    data[data.index(evidence.staging_keys[0].encode()) + 120] ^= 1
    log.write_bytes(data)
    presences = await served.backend.check([evidence, evidence_of(acks["b"])], Budget(5))
    assert presences == [CutPresence.CHANGED, CutPresence.PRESENT]


async def test_a_finished_cut_given_up_keeps_its_tokens(served: Worker) -> None:
    """They are the call's: its reply is yet to be delivered."""
    await served.engine.finished("a", 3)
    evidence = evidence_of((await served.sweep(["a"]))["a"])
    await served.backend.release([evidence.cut_id], Budget(5))
    assert await served.backend.check([evidence], Budget(5)) == [CutPresence.PRESENT]


async def test_release_says_what_it_knew(served: Worker) -> None:
    await served.engine.running("a")
    cut = evidence_of((await served.sweep(["a"]))["a"])
    async with open_channel(served.server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        request = pb.ReleaseCutsRequest(cut_ids=[cut.cut_id, "unknown", cut.cut_id])
        for expected in ([1, 2, 2], [2, 2, 2]):
            assert (await stub.ReleaseCuts(request, timeout=5)).states == expected
    assert await served.engine.tokens.keys() == []


async def test_more_cuts_than_one_call_may_name(served: Worker) -> None:
    await served.engine.running("a")
    cut = evidence_of((await served.sweep(["a"]))["a"])
    presences = await served.backend.check([*([replace(cut, staging_keys=("none",))] * 5000), cut], Budget(20))
    assert Counter(presences) == {CutPresence.MISSING: 5000, CutPresence.PRESENT: 1}
    await served.backend.release([*(f"none-{number}" for number in range(5000)), cut.cut_id], Budget(20))
    assert await served.backend.check([cut], Budget(5)) == [CutPresence.MISSING]


@pytest.mark.behaviour("P133")
@pytest.mark.parametrize("capabilities", [frozenset[Capability](), frozenset({Capability.CONTINUE}), INFO.capabilities])
async def test_a_backend_says_what_it_can_do(
    served: Worker, capabilities: frozenset[Capability], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = replace(INFO, capabilities=capabilities)
    monkeypatch.setattr(served.engine, "describe", lambda: info)
    assert await served.backend.describe(Budget(5)) == info
