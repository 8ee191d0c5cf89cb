"""Random structures through every codec, and through real parts: equal in type, value and key order, or refused.

GYM_CKPT_FUZZ_STRUCTURES: how many structures; GYM_CKPT_FUZZ_MINUTES: how long the search of hypothesis is, in soak.
"""

from __future__ import annotations

import collections
import os
import random
import time

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from gym_ckpt_grpc.protocol.ids import EpisodeId, rollout_id_problem
from gym_ckpt_grpc.storage import CheckpointRoot, Codec, PayloadRefused, Record, decode, encode, raw, read_part
from tests.fuzz.store_values import FOREIGN, Values, record, spoiled
from tests.storage.builders import AGENT, same, write
from tests.storage.recording_files import ROOT, RecordingFiles

STRUCTURES = int(os.environ.get("GYM_CKPT_FUZZ_STRUCTURES", "5000"))
SOAK_STRUCTURES = int(os.environ.get("GYM_CKPT_FUZZ_STRUCTURES", "100000"))
MINUTES = float(os.environ.get("GYM_CKPT_FUZZ_MINUTES", "30"))
BATCH = 250  # records of one part


def check_codecs(rng: random.Random, count: int) -> None:
    """Each structure through the codec it needs, and beside an integer that forces tagged JSON."""
    values, seen = Values(rng), collections.Counter[Codec]()
    for number in range(count):
        value = values.value()
        payload = encode(value)
        seen[payload.codec] += 1
        assert same(decode(payload), value), f"structure {number}"
        assert encode(value) == payload
        if number % 4 == 0:
            forced = encode([value, 2**70])
            assert forced.codec is Codec.JSON
            assert same(decode(forced), [value, 2**70]), f"structure {number}, as JSON"
        if number % 20 == 0:
            foreign = rng.choice(FOREIGN)()
            with pytest.raises(PayloadRefused) as refused:
                encode(spoiled(value, foreign, rng))
            assert refused.value.path.startswith("$")
    assert min(seen[Codec.MSGPACK], seen[Codec.JSON]) > count // 20, seen


def check_parts(rng: random.Random, count: int) -> None:
    """Structures in records of real parts, one on the other, every second one compressed."""
    values = Values(rng)
    files = RecordingFiles()
    root = CheckpointRoot(ROOT, files)
    made = [record(values, number) for number in range(BATCH)]
    structures, number = 0, 0
    while structures < count:
        base = root.location(f"ck-{number - 1}") if number % 4 else None
        for at in range(BATCH):
            if rng.random() < 0.5:
                made[at] = record(values, at)
        structures += sum(len(state) for _, state in made)
        records = [one for one, _ in made]
        chunk_size = rng.choice((64, 1000, 1 << 20))
        write(files, root, f"ck-{number}", records=records, chunk_size=chunk_size, base=base, compress=number % 2 == 0)
        part = read_part(files, root.location(f"ck-{number}"), AGENT.place, checkpoint_id=f"ck-{number}")
        assert list(part.records) == records
        for (_, state), back in zip(made, part.records, strict=True):
            assert list(back.payloads) == list(state)
            assert all(same(back.decode(name), value) for name, value in state.items())
        number += 1
    assert number > 2


@pytest.mark.behaviour("C155", "C162", "C165", "C166", "C168")
@pytest.mark.timeout(300)
def test_random_structures_through_every_codec(rng: random.Random) -> None:
    check_codecs(rng, STRUCTURES)


@pytest.mark.behaviour("C155", "C168", "C182", "C183")
@pytest.mark.timeout(300)
def test_random_structures_through_real_parts(rng: random.Random) -> None:
    check_parts(rng, STRUCTURES)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.behaviour("C165")
def test_a_hundred_thousand_structures_through_every_codec(rng: random.Random) -> None:
    check_codecs(rng, SOAK_STRUCTURES)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.behaviour("C182", "C183")
def test_a_hundred_thousand_structures_through_real_parts(rng: random.Random) -> None:
    check_parts(rng, SOAK_STRUCTURES)


# ---- hypothesis on the writer: what it finds, it makes small

_TEXT = st.one_of(st.text(max_size=6), st.text(st.characters(categories=["Cs", "Lu"]), min_size=1, max_size=3))
_LABEL = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)
_SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXT, st.binary(max_size=80))
VALUES = st.recursive(
    _SCALAR,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXT, inner, max_size=4)),
    max_leaves=12,
)
_FIELD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    _LABEL,
)
_PAYLOAD = st.one_of(VALUES.map(encode), st.binary(max_size=200).map(lambda data: raw(data, "text/plain")))
_EPISODE = st.builds(
    EpisodeId,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,19}", fullmatch=True).filter(lambda text: not rollout_id_problem(text)),
    st.integers(0, 2**31 - 1),
)
RECORDS = st.lists(
    st.builds(
        Record,
        _EPISODE,
        _LABEL,
        st.integers(1, 2**32 - 1),
        owner=st.one_of(st.just(""), _LABEL),
        revision=st.one_of(st.none(), st.integers(0, 2**64 - 2)),
        fields=st.dictionaries(_LABEL, st.one_of(_FIELD, st.lists(_FIELD, max_size=3)), max_size=3),
        payloads=st.dictionaries(_LABEL, _PAYLOAD, max_size=3),
    ),
    max_size=8,
)
CHUNK_SIZES = st.sampled_from([1, 7, 64, 300, 1 << 20])


def check_writer(records: list[Record], others: list[Record], chunk_size: int, compress: bool) -> None:
    """A part, and one on top of it that keeps some of its records, come back as they were written."""
    files = RecordingFiles()
    root = CheckpointRoot(ROOT, files)
    mixed = [*others, *records[::2], *others[:1]]
    for name, written, base in (("one", records, None), ("two", mixed, root.location("one"))):
        for _ in range(2):  # a repeated write is accepted, so its bytes are the same
            write(files, root, name, records=written, chunk_size=chunk_size, compress=compress, base=base)
        part = read_part(files, root.location(name), AGENT.place, checkpoint_id=name)
        assert list(part.records) == written
        assert [list(record.fields) for record in part.records] == [list(record.fields) for record in written]
        chosen = {record.episode for record in written[:2]}
        some = read_part(files, root.location(name), AGENT.place, checkpoint_id=name, scope=chosen)
        assert list(some.records) == [record for record in written if record.episode in chosen]


def search(examples: int, start: int) -> None:
    """Let hypothesis try so many examples from a seed."""

    @seed(start)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(RECORDS, RECORDS, CHUNK_SIZES, st.booleans())
    def attempt(records: list[Record], others: list[Record], chunk_size: int, compress: bool) -> None:
        check_writer(records, others, chunk_size, compress)

    attempt()


@pytest.mark.behaviour("C156", "C161", "C183")
@pytest.mark.timeout(300)
def test_whatever_records_are_written_come_back(rng: random.Random) -> None:
    search(200, rng.randrange(2**32))


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 900)
def test_half_an_hour_of_records(rng: random.Random) -> None:
    until = time.monotonic() + MINUTES * 60
    while time.monotonic() < until:
        start = rng.randrange(2**32)
        print(f"hypothesis from seed {start}", flush=True)
        search(500, start)
