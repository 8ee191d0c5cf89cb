"""The catalogue: every name once, declared, and with nothing in it that a metric must not have."""

from __future__ import annotations

import ast
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gym_ckpt_grpc
from gym_ckpt_grpc.protocol.errors import ControlError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.catalogue import Instrument, Kind, SpanType
from tests.control.scripted import Participant
from tests.telemetry.kept import Kept

PACKAGE = Path(gym_ckpt_grpc.__path__[0])
UNITS = {"1", "By", "s", "ms"}


@pytest.mark.parametrize("each", [*catalogue.SPANS, *catalogue.INSTRUMENTS], ids=lambda each: each.name)
def test_attributes_are_declared(each: Any) -> None:
    """Each attribute is in the one list, once, and a metric's is none with an id."""
    assert set(each.attributes) <= set(at.ATTRIBUTES)
    assert len(set(each.attributes)) == len(each.attributes)
    if isinstance(each, Instrument):
        assert not set(each.attributes) & at.SPANS_ONLY
    assert each.meaning


def test_names_of_attributes() -> None:
    """None that a helper of NeMo Gym would redact, none without a use, none in two spellings."""
    for name, attribute in at.ATTRIBUTES.items():
        assert attribute.name == name
        assert "key" not in name
        assert "token" not in name
        assert re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name)
        assert attribute.meaning
    every: list[SpanType | Instrument] = [*catalogue.SPANS, *catalogue.INSTRUMENTS]
    used = {name for each in every for name in each.attributes}
    assert set(at.ATTRIBUTES) == used
    constants = [
        value for name, value in vars(at).items() if name.isupper() and name != "PREFIX" and isinstance(value, str)
    ]
    assert sorted(constants) == sorted(at.ATTRIBUTES)
    last = Counter(name.rpartition(".")[2].replace("_", "") for name in at.ATTRIBUTES)
    assert [word for word, times in last.items() if times > 1] == []


def test_names_of_spans_and_instruments() -> None:
    """Unique, and of one pattern; RPC spans are named by their method."""
    spans = Counter(span.name for span in catalogue.SPANS if span not in (catalogue.RPC_CLIENT, catalogue.RPC_SERVER))
    instruments = Counter(instrument.name for instrument in catalogue.INSTRUMENTS)
    assert set(spans.values()) == set(instruments.values()) == {1}
    assert all(name.startswith("gym.checkpoint.") for name in spans)
    for span in catalogue.SPANS:
        assert span.parent == "" or span.parent in spans, span.name
    every = {each for each in vars(catalogue).values() if isinstance(each, Instrument)}
    assert every | set(catalogue.RPC_DURATION.values()) == set(catalogue.INSTRUMENTS)


@pytest.mark.parametrize("each", catalogue.INSTRUMENTS, ids=lambda each: each.name)
def test_kinds_of_instruments(each: Instrument) -> None:
    """The name says the unit or that it only grows; bounds rise."""
    assert each.unit in UNITS
    assert each.name.endswith("_total") == (each.kind is Kind.COUNTER)
    assert bool(each.buckets) == (each.kind is Kind.HISTOGRAM)
    assert list(each.buckets) == sorted(set(each.buckets))
    if each.unit == "ms":
        assert each.name.endswith("_ms")


def literals(path: Path) -> Iterator[str]:
    """Every string of a module that is no docstring."""
    tree = ast.parse(path.read_text())
    told = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def test_names_are_spelled_in_one_place() -> None:
    """No module but these two has the name of an attribute, a span or an instrument in it."""
    sources = {PACKAGE / "telemetry" / "attributes.py", PACKAGE / "telemetry" / "catalogue.py"}
    pattern = re.compile(r"(nemo\.)?gym\.checkpoint\.|rpc\.(system|method|response|server|client)|error\.type$")
    found = [
        (str(path.relative_to(PACKAGE)), text)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in sources
        for text in literals(path)
        if pattern.match(text)
    ]
    assert found == []


# ---- what is emitted -------------------------------------------------------------------------------------------


async def lives(p: Participant, rollouts: list[str], id: str) -> None:
    """Rollouts come and are retired; some are checkpointed and restored; a call is refused."""
    episodes = p.add(*rollouts[:500])
    await p.prepare(id, timeout=30)
    await p.commit(None, id, timeout=30)
    await p.resume(id)
    p.owner.live.clear()
    await p.restore(episodes[:2], "r" + id, source=id, timeout=30)
    with pytest.raises(ControlError):
        await p.prepare("other" + id)
    await p.resume("r" + id)
    p.owner.live.clear()
    p.owner.pending.clear()
    for start in range(0, len(rollouts), 1000):
        some = rollouts[start : start + 1000]
        await p.retire([EpisodeId(rollout, 9) for rollout in some], timeout=30)
        await p.forget(dict.fromkeys(some, 9), timeout=30)
    p.owner.retired.clear()


@pytest.mark.behaviour("C310")
async def test_no_label_holds_an_id(tmp_path: Path) -> None:
    """What a participant really emits is declared, and no id of its rollouts or checkpoints is in a label."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await lives(p, ["rollout-1", "rollout-2"], "checkpoint-1")
        series = kept._series()
        incarnation = p.identity.incarnation_id
    kept.check_declared()
    assert len({name for name, _, _ in series}) >= 10
    for name, attributes, _ in series:
        for value in attributes.values():
            text = str(value)
            assert "rollout-" not in text, name
            assert "checkpoint-1" not in text, name
            assert incarnation not in text, name
            assert str(tmp_path) not in text, name
    assert "checkpoint-1" in str([span.attributes for span in kept.spans])


@pytest.mark.timeout(240)
@pytest.mark.behaviour("C310")
async def test_a_hundred_thousand_rollouts_make_no_series(tmp_path: Path) -> None:
    """Field case 147: neither series nor memory of telemetry grow with them."""
    kept = Kept("none")
    ours = [tracemalloc.Filter(True, "*opentelemetry*"), tracemalloc.Filter(True, "*gym_ckpt_grpc/telemetry*")]

    def size() -> int:
        return sum(found.size for found in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))

    async with Participant(tmp_path, telemetry=kept.telemetry) as p:

        async def rounds(*numbers: int) -> set[tuple[str, str]]:
            for number in numbers:
                await lives(p, [f"{number}-{index}" for index in range(10_000)], f"c{number}")
            return {(name, str(attributes)) for name, attributes, _ in kept._series()}

        before = await rounds(0, 1)
        await rounds(2, 3, 4, 5, 6)
        tracemalloc.start()
        try:
            await rounds(7)
            began = size()
            after = await rounds(8, 9)
            assert size() - began < 50_000
        finally:
            tracemalloc.stop()
    assert after == before
    assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 5_000
