"""Values that servers keep in sessions come back as they were, and what cannot is refused with its place."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import (
    Reader,
    StateRefused,
    Writer,
    read_generator,
    written_generator,
)
from gym_ckpt_grpc.storage import decode, encode


@dataclass
class Game:
    turn: int
    letters: set[str] = field(default_factory=set)


CLASSES = {"Game": Game}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
HASHABLE = st.recursive(
    SCALARS.filter(lambda value: value == value), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4
)
# "$" is the key that marks what is not plain: states may have it all the same.
KEYS = st.sampled_from(["$", "items", "as", ""]) | st.text()


def games(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Game]:
    return st.builds(Game, inner, st.sets(st.sampled_from(string.ascii_letters)))


VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(HASHABLE, max_size=3)
        | st.frozensets(HASHABLE, max_size=3)
        | games(inner)
        | st.integers().map(random.Random)
    ),
    max_leaves=12,
)


def through_storage(value: Any) -> Any:
    return Reader(CLASSES).read(decode(encode(Writer(CLASSES).write(value))))


def shown(value: Any) -> Any:
    """A value with the types of all that is in it, comparable also where it holds NaN or -0.0."""
    if type(value) in (list, tuple):
        return type(value), [shown(each) for each in value]
    if type(value) is dict:
        return dict, [(shown(key), shown(each)) for key, each in value.items()]
    if type(value) in (set, frozenset):
        return type(value), sorted(map(repr, value))
    if type(value) is Game:
        return Game, shown(vars(value))
    if type(value) is random.Random:
        return random.Random, value.getstate()
    return type(value), repr(value)


@given(VALUES)
def test_values_come_back_with_types_and_order(value: Any) -> None:
    before = shown(value)
    back = through_storage(value)
    assert shown(back) == before
    assert shown(value) == before


def test_an_object_in_two_places_is_one_object_again() -> None:
    item = {"stock": 1}
    state = {"items": [item], "cart": {"first": item}, "seen": ({1},)}
    state["self"] = state
    back = through_storage(state)
    assert back["self"] is back
    assert back["cart"]["first"] is back["items"][0]
    back["cart"]["first"]["stock"] = 0
    assert back["items"] == [{"stock": 0}]


def test_equal_objects_stay_apart() -> None:
    back = through_storage([[], [], {}, {}])
    back[0].append(1)
    back[2]["a"] = 1
    assert back == [[1], [], {"a": 1}, {}]


def test_what_is_written_shares_nothing_with_the_state() -> None:
    state = {"calls": [{"city": "Paris"}]}
    written = Writer().write(state)
    state["calls"][0]["city"] = "Rome"
    state["calls"].append({"city": "Oslo"})
    assert written == {"calls": [{"city": "Paris"}]}
    back = Reader().read(written)
    back["calls"].clear()
    assert written == {"calls": [{"city": "Paris"}]}


def test_a_generator_goes_on_where_it_was() -> None:
    generator = random.Random(4)
    generator.gauss(0, 1)  # half a pair is kept for the next call
    back = read_generator(decode(encode(written_generator(generator))))
    assert [back.gauss(0, 1), back.random(), back.choice("abc")] == [
        generator.gauss(0, 1),
        generator.random(),
        generator.choice("abc"),
    ]


class Text(str):
    pass


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [1, {"b": object()}]}, ".a[1].b is of type builtins.object"),
        ({"a": Text("x")}, ".a is of type"),
        ({"a": random.SystemRandom()}, ".a is of type random.SystemRandom"),
        ([bytearray(b"x")], "[0] is of type builtins.bytearray"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(state: Any, where: str) -> None:
    with pytest.raises(StateRefused) as refused:
        Writer().write(state)
    assert where in str(refused.value)


def test_an_attribute_beside_the_fields_is_refused() -> None:
    game = Game(1)
    game.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(StateRefused, match="other attributes"):
        Writer(CLASSES).write(game)


def test_too_deep_nesting_is_refused() -> None:
    state: list[Any] = []
    for _ in range(100_000):
        state = [state]
    with pytest.raises(StateRefused, match="too deep"):
        Writer().write(state)


@pytest.mark.parametrize(
    ("record", "where"),
    [
        ({"a": [{"$": "nothing"}]}, ".a[0] has an unknown tag"),
        ({"a": {"$": "same", "as": 7}}, ".a is the same as 7"),
        ({"a": {"$": "same", "as": True}}, ".a is the same as True"),
        ({"a": {"$": "tuple"}}, ".a lacks items"),
        ({"a": {"$": "tuple", "items": [], "more": 1}}, ".a has unknown fields: more"),
        ({"a": {"$": "set", "items": [1, 1]}}, ".a has an item twice"),
        ({"a": {"$": "set", "items": [[]]}}, ".a has an item that cannot stand there"),
        ({"a": {"$": "dict", "keys": [1], "values": []}}, ".a has 1 keys and 0 values"),
        ({"a": {"$": "object", "class": "Other", "fields": {}}}, ".a is of no known class"),
        ({"a": {"$": "object", "class": "Game", "fields": {"turn": 1}}}, ".a lacks letters"),
        ({"a": {"$": 3}}, ".a has an unknown tag 3"),
        ({"a": (1,)}, ".a is of type tuple"),
    ],
)
def test_a_record_that_is_none_is_refused_with_its_place(record: Any, where: str) -> None:
    with pytest.raises(StateRefused) as refused:
        Reader(CLASSES).read(record)
    assert where in str(refused.value)


GOOD = written_generator(random.Random(1))


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"version": 2}, ".version"),
        ({"internal": GOOD["internal"][:-1]}, ".internal"),
        ({"internal": [*GOOD["internal"][:-1], 700]}, ".internal"),
        ({"internal": [True, *GOOD["internal"][1:]]}, ".internal"),
        ({"internal": [2**32, *GOOD["internal"][1:]]}, ".internal"),
        ({"gauss_next": 1}, ".gauss_next"),
        ({"extra": 1}, "unknown fields: extra"),
    ],
)
def test_a_generator_of_another_kind_is_refused(part: dict[str, Any], where: str) -> None:
    with pytest.raises(StateRefused) as refused:
        read_generator({**GOOD, **part})
    assert where in str(refused.value)
