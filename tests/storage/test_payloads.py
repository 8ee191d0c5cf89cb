"""Payloads come back equal in type, value and key order, or are refused with the path to the culprit."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import hashlib
import importlib.util
import json
import math
import os
import pickle
import struct
import types
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import ormsgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.storage import Codec, Payload, PayloadRefused, decode, encode, raw
from gym_ckpt_grpc.storage import payloads as module
from gym_ckpt_grpc.storage.payloads import MAX_DEPTH
from tests.storage.builders import same

EXAMPLES = int(os.environ.get("GYMCKPT_PAYLOAD_EXAMPLES", "2000"))


def _floats() -> st.SearchStrategy[float]:
    bits = st.integers(0, 2**64 - 1).map(lambda number: struct.unpack(">d", struct.pack(">Q", number))[0])
    return st.one_of(st.floats(), bits)


_TEXTS = st.one_of(
    st.text(max_size=8),
    st.text(st.characters(), max_size=4),
    st.text(st.characters(categories=["Cs"]), min_size=1, max_size=4),
    st.sampled_from(["$int", "$dict", "$text", "$", "$x", "a", "", "\x00", "é", "e\u0301", "\ud83d\ude00", "😀"]),
)
_INTS = st.one_of(
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**70, -(10**4000)]),
)
_SCALARS = st.one_of(st.none(), st.booleans(), _INTS, _floats(), _TEXTS, st.binary(max_size=8))
VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(_TEXTS, inner, max_size=5),
        st.tuples(_TEXTS, inner).map(lambda pair: {pair[0]: pair[1]}),
    ),
    max_leaves=20,
)


@pytest.mark.timeout(300)
@pytest.mark.behaviour("C165", "C166")
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(VALUES)
def test_any_structure_comes_back_equal_through_the_codec_it_needs(value: Any) -> None:
    payload = encode(value)
    assert payload.codec in (Codec.MSGPACK, Codec.JSON)
    assert same(decode(payload), value)
    assert encode(value) == payload
    if payload.codec is Codec.JSON:
        json.loads(payload.data, parse_constant=pytest.fail)
        orjson.loads(payload.data)


@pytest.mark.timeout(300)
@settings(max_examples=EXAMPLES // 4, deadline=None, suppress_health_check=list(HealthCheck))
@given(VALUES)
def test_tagged_json_carries_every_structure(value: Any) -> None:
    # Next to an integer of 70 bits nothing can go through MessagePack.
    payload = encode([value, 2**70])
    assert payload.codec is Codec.JSON
    assert same(decode(payload), [value, 2**70])


@pytest.mark.behaviour("C155", "C162", "C166")
@pytest.mark.parametrize(
    ("value", "codec"),
    [
        ({"z": 1, "a": {"y": 1, "b": 2}, "m": []}, Codec.MSGPACK),
        (2**64 - 1, Codec.MSGPACK),
        (-(2**63), Codec.MSGPACK),
        (2**70, Codec.JSON),
        ([10**4000], Codec.JSON),
        ([math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1], Codec.MSGPACK),
        ([math.inf, 2**64], Codec.JSON),
        ([-math.nan, struct.unpack(">d", bytes.fromhex("7ff0000000000abc"))[0], 2**64], Codec.JSON),
        (["\ud83d\ude00", "\ud800"], Codec.JSON),
        ({"\ud800": 1, "b": 2}, Codec.JSON),
        ({"$int": "10", "x": 2**64}, Codec.JSON),
        ({"$int": 2**64}, Codec.JSON),
        ({"b": b"\x00\xff", "a": [b""]}, Codec.MSGPACK),
        ([-0.0, 0.0, 0, False, [], {}, b"", ""], Codec.MSGPACK),
        ([-0.0, 2**64], Codec.JSON),
        ([struct.unpack(">d", bytes.fromhex("7ff0000000000abc"))[0], -math.nan], Codec.MSGPACK),
        ({"a": {"$bytes": "00"}, "b": b"\x00"}, Codec.MSGPACK),
        ([{"$bytes": "00"}, b"\x00", 2**70], Codec.JSON),
        ([b"\x00\xff", 2**64], Codec.JSON),
        ("é e\u0301 \x00 \u2028", Codec.MSGPACK),
        (None, Codec.MSGPACK),
        ([6.0, 1e-7, 1e20, 6], Codec.MSGPACK),
    ],
)
def test_what_each_codec_carries(value: Any, codec: Codec) -> None:
    payload = encode(value)
    assert payload.codec is codec
    assert same(decode(payload), value)


@pytest.mark.behaviour("C166")
def test_an_integer_too_long_for_python_to_print_comes_back() -> None:
    value = [-(10**6000), 10**6000]
    assert same(decode(encode(value)), value)


class _Text(str):
    pass


class _Number(int):
    pass


class _Map(dict[str, Any]):
    pass


class _Float(float):
    """What a numpy float64 is: a float by every question but its type."""


class _Bytes(bytes):
    pass


class _List(list[int]):
    pass


class _Scalar:
    """What a numpy int64 is: converts to everything, and is nothing."""

    dtype = "int64"

    def __index__(self) -> int:
        return 3

    def __float__(self) -> float:
        return 3.0

    def item(self) -> int:
        return 3


class _Colour(enum.Enum):
    RED = 1


class _Word(enum.StrEnum):
    A = "a"


class _Rank(enum.IntEnum):
    FIRST = 1


@dataclasses.dataclass
class _Point:
    x: int


_Pair = collections.namedtuple("_Pair", "a b")


def _numpy() -> list[Any]:
    numpy = pytest.importorskip("numpy") if importlib.util.find_spec("numpy") else None
    if numpy is None:
        return []
    return [numpy.float64(1.5), numpy.float32(1.5), numpy.int64(3), numpy.bool_(True), numpy.str_("x"), numpy.zeros(2)]


@pytest.mark.behaviour("C163", "C164", "C165")
@pytest.mark.parametrize(
    "culprit",
    [
        *_numpy(),
        _Float(1.5),
        _Bytes(b"x"),
        _List([1]),
        _Scalar(),
        decimal.Decimal("1.10"),
        fractions.Fraction(1, 3),
        datetime.time(1),
        datetime.timedelta(1),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        array.array("i", [1]),
        collections.deque([1]),
        collections.Counter("a"),
        collections.UserDict(),
        types.MappingProxyType({}),
        ormsgpack.Ext(1, b"x"),
        iter([1]),
        NotImplemented,
        ...,
        int,
        object(),
        (1, 2),
        _Pair(1, 2),
        {1},
        frozenset(),
        bytearray(b"x"),
        memoryview(b"x"),
        datetime.datetime(2026, 1, 1),
        datetime.date(2026, 1, 1),
        uuid.UUID(int=1),
        _Colour.RED,
        _Word.A,
        _Rank.FIRST,
        _Point(1),
        _Text("x"),
        _Number(1),
        _Map(a=1),
        collections.OrderedDict(a=1),
        collections.defaultdict(int),
        1 + 2j,
        orjson.Fragment(b"1"),
        range(3),
        Exception("x"),
        len,
    ],
    ids=lambda culprit: type(culprit).__name__,
)
@pytest.mark.parametrize("companion", [1, 2**70, b"x", "\ud800"], ids=["fast", "big", "bytes", "surrogate"])
def test_what_cannot_be_kept_is_refused_with_the_path_to_it(culprit: Any, companion: Any) -> None:
    with pytest.raises(PayloadRefused) as caught:
        encode({"first": companion, "messages": [{}, {"when": culprit}]}, where="roll-1")
    assert caught.value.path == "$.messages[1].when"
    assert caught.value.where == "roll-1"
    assert "roll-1" in str(caught.value)
    assert "$.messages[1].when" in str(caught.value)


@pytest.mark.behaviour("C168")
def test_bytes_need_no_walk_through_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_encode_carefully", lambda *_: pytest.fail("the fast pair refused bytes"))
    value = {"state": [b"", b"\x00" * 1000], "deep": {"er": [b"\xff", None, math.nan]}}
    assert same(decode(encode(value)), value)


# ---- values that change while they are encoded


def _changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None], at: str, after: int = 0) -> None:
    """Change a value in the middle of its encoding, once: at a call of a function of the module, which then goes on."""
    real = getattr(module, at)
    calls = 0

    def hooked(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            change()
        return real(*arguments)

    monkeypatch.setattr(module, at, hooked)


@pytest.mark.behaviour("C165")
@pytest.mark.parametrize("put", [bytearray(b"x"), object(), (1, 2), math.nan, {"a": object()}], ids=repr)
@pytest.mark.parametrize("after", [1, 3, 6])
def test_what_is_put_in_during_the_careful_walk_is_refused_or_kept_and_never_unreadable(
    monkeypatch: pytest.MonkeyPatch, put: Any, after: int
) -> None:
    inner: list[Any] = [1, 2, 3, 4]
    value = {"a": [2**70, inner], "b": {"c": inner}}
    before = pickle.loads(pickle.dumps(value))

    def change() -> None:
        inner[3] = put

    _changing(monkeypatch, change, "_copy", after)
    found: Any = None
    with suppress(PayloadRefused):
        found = decode(encode(value))
    if found is None:
        return
    assert json.dumps(found["a"][0]) == json.dumps(before["a"][0])
    assert {type(item) for item in (*found["a"][1], *found["b"]["c"])} <= {int, float}


@pytest.mark.behaviour("C165")
@pytest.mark.parametrize("put", [bytearray(b"x"), object(), (1, 2)], ids=repr)
def test_what_is_put_in_after_the_careful_walk_is_not_stored(monkeypatch: pytest.MonkeyPatch, put: Any) -> None:
    value: dict[str, Any] = {"a": [[2**70, 1], {"b": 2}]}

    def change() -> None:
        value["a"][0][1] = value["a"][1]["b"] = value["c"] = put

    _changing(monkeypatch, change, "_pack")
    assert decode(encode(value)) == {"a": [[2**70, 1], {"b": 2}]}


@pytest.mark.behaviour("C165")
def test_a_dict_that_grows_while_it_is_walked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    value: dict[str, Any] = {"a": 2**70, "b": 1, "c": 2}
    _changing(monkeypatch, lambda: value.update(more=1), "_copy", after=1)
    with pytest.raises(PayloadRefused, match="was changed while it was encoded") as caught:
        encode(value, where="roll-3")
    assert caught.value.where == "roll-3"


def test_a_digest_is_computed_once_and_does_not_count_in_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encode({"a": 1})
    digest = payload.digest()
    assert digest == hashlib.sha256(payload.data).digest()
    monkeypatch.setattr(hashlib, "sha256", lambda *_: pytest.fail("digested twice"))
    assert payload.digest() == digest
    again = Payload(payload.codec, payload.data)
    assert again == payload
    assert hash(again) == hash(payload)
    assert again != Payload(Codec.JSON, payload.data)
    assert again != payload.data
    assert pickle.loads(pickle.dumps(payload)) == payload
    with pytest.raises(AttributeError):
        payload.data = b""  # type: ignore[misc]
    assert len(repr(raw(b"x" * 10_000_000, "a/b"))) < 200


@pytest.mark.behaviour("C163")
@pytest.mark.parametrize("key", [1, None, True, 1.5, b"x", (1,), _Text("x"), _Word.A], ids=repr)
def test_keys_that_are_no_text_are_refused(key: Any) -> None:
    with pytest.raises(PayloadRefused) as caught:
        encode({"a": {"b": 1, key: 2}})
    assert caught.value.path == "$.a"
    assert "keys must be str" in str(caught.value)


def _nested(depth: int, *, key: str | None = None) -> Any:
    value: Any = {} if key else []
    for _ in range(depth - 1):
        value = {key: value} if key else [value]
    return value


@pytest.mark.behaviour("C166")
@pytest.mark.parametrize("depth", [200, 253, 254, 255, MAX_DEPTH])
@pytest.mark.parametrize("key", [None, "k"])
def test_deep_nesting_comes_back(depth: int, key: str | None) -> None:
    value = _nested(depth, key=key)
    assert same(decode(encode(value)), value)


@pytest.mark.behaviour("C167")
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5_000, 200_000])
@pytest.mark.parametrize("key", [None, "k", "$k"])
def test_nesting_beyond_the_limit_is_refused_with_its_place(depth: int, key: str | None) -> None:
    with pytest.raises(PayloadRefused, match="nested deeper") as caught:
        encode({"state": _nested(depth, key=key)}, where="roll-7")
    assert caught.value.path.startswith("$.state")
    assert caught.value.where == "roll-7"


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(PayloadRefused, match="nested deeper"):
        encode({"a": loop})


@pytest.mark.behaviour("C168")
def test_raw_bytes_keep_their_bytes_and_content_type() -> None:
    payload = raw(b"\x00\x93NUMPY", "application/x-npy")
    assert (payload.codec, payload.content_type) == (Codec.RAW, "application/x-npy")
    assert decode(payload) == b"\x00\x93NUMPY"


@pytest.mark.parametrize(("data", "kind"), [("text", "a/b"), (bytearray(b"x"), "a/b"), (b"x", ""), (b"x", "a\nb")])
def test_raw_refuses_what_is_no_bytes_or_has_no_content_type(data: Any, kind: str) -> None:
    with pytest.raises(PayloadRefused):
        raw(data, kind)


@pytest.mark.behaviour("C168")
def test_the_decoder_is_chosen_by_the_tag() -> None:
    text = b'{"$int":"46"}'
    assert decode(Payload(Codec.JSON, text)) == 70
    assert decode(Payload(Codec.RAW, text)) == text
    with pytest.raises(StateCorrupt, match="MSGPACK"):
        decode(Payload(Codec.MSGPACK, text))


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was run",))


_MARKED = pickle.dumps(_Bomb())


@pytest.mark.behaviour("C160")
@pytest.mark.parametrize(
    ("codec", "data"),
    [
        (Codec.MSGPACK, b""),
        (Codec.MSGPACK, b"\xc1"),
        (Codec.MSGPACK, b"\x01\x01"),
        (Codec.MSGPACK, b"\xdd\xff\xff\xff\xff"),
        (Codec.MSGPACK, b"\xdf\xff\xff\xff\xff\xa1a"),
        (Codec.MSGPACK, b"\xc6\xff\xff\xff\xff"),
        (Codec.MSGPACK, b"\x91" * 100_000),
        (Codec.MSGPACK, b"\xd4\x01x"),
        (Codec.MSGPACK, b"\x91\xc7\x03\x05abc"),
        (Codec.MSGPACK, _MARKED),
        (Codec.JSON, b""),
        (Codec.JSON, b"NaN"),
        (Codec.JSON, b'{"a":1,"a":2}'),
        (Codec.JSON, b'{"$int":5}'),
        (Codec.JSON, b'{"$float":"00"}'),
        (Codec.JSON, b'{"$dict":[["a",1],["a",2]]}'),
        (Codec.JSON, b'{"$dict":[[1,1]]}'),
        (Codec.JSON, b'{"$eval":"1"}'),
        (Codec.JSON, b'{"$int":"1","a":1}'),
        (Codec.JSON, "é".encode("latin-1")),
        (Codec.JSON, b"[" * 100_000),
        (Codec.JSON, _MARKED),
        (99, b""),
    ],
)
def test_what_cannot_be_decoded_is_corrupt_and_says_where(codec: Any, data: bytes) -> None:
    with pytest.raises(StateCorrupt, match=r"records-x\.gck, record 3"):
        decode(Payload(codec, data), where="records-x.gck, record 3")
    with pytest.raises(StateCorrupt, match="a payload"):
        decode(Payload(codec, data))


def test_a_refusal_survives_pickling() -> None:
    with pytest.raises(PayloadRefused) as caught:
        encode({"a": object()}, where="x")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.where, again.path, str(again)) == ("x", "$.a", str(caught.value))
