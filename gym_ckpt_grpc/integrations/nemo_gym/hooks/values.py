"""What servers keep in sessions, as plain values and back: exactly, with types and with what is shared inside.

Plain values (None, bool, int, float, str, bytes, lists, dicts with str keys) stay as they are. What else is known is
written as a dict with the key "$" that names its kind: tuples, sets, dicts with other keys, `random.Random`, objects of
dataclasses that the caller lists. An object that stands in several places is written once and named from then on, so
it is one object again; that holds for cycles too. Anything else is refused with the path to it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Any, Final

SCALARS: Final = frozenset({NoneType, bool, int, float, str, bytes})
"""Types whose values are written as they are."""
TAG: Final = "$"
GENERATOR_VERSION: Final = 3
GENERATOR_WORDS: Final = 625

Classes = Mapping[str, type]
"""Dataclasses that may stand in a state, by the name that a record has for them."""


class StateRefused(ValueError):
    """A value that cannot be written, or a written one that cannot be read. path: where it stands in the state."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{path or 'it'} {problem}")
        self.problem = problem
        self.path = path

    def under(self, step: str) -> StateRefused:
        """The same, told from one level further out."""
        return StateRefused(self.problem, step + self.path)


@contextmanager
def under(step: str) -> Iterator[None]:
    """What is refused inside stands under this step."""
    try:
        yield
    except StateRefused as refused:
        raise refused.under(step) from None


class Writer:
    """Writes the state of one session. classes: the dataclasses that may stand in it."""

    def __init__(self, classes: Classes | None = None) -> None:
        self._names = {cls: name for name, cls in (classes or {}).items()}
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # an id means an object only while the object lives

    def write(self, value: Any) -> Any:
        """A plain value that shares nothing with `value`. Raises StateRefused."""
        try:
            return self._write(value)
        except RecursionError:
            raise StateRefused("is nested too deep") from None

    def _write(self, value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is tuple or kind is frozenset:
            return {TAG: kind.__name__, "items": self._items(value)}
        number = self._numbers.get(id(value))
        if number is not None:
            return {TAG: "same", "as": number}
        return self._write_object(kind, value)

    def _write_object(self, kind: type, value: Any) -> Any:
        """Of a kind that has an identity, and that is met for the first time."""
        if kind is list:
            self._meet(value)
            return self._items(value)
        if kind is dict:
            self._meet(value)
            if TAG not in value and all(type(key) is str for key in value):
                return self._entries(value)
            return {TAG: "dict", "keys": self._items(value), "values": self._items(value.values())}
        if kind is set:
            self._meet(value)
            return {TAG: "set", "items": self._items(value)}
        if kind is random.Random:
            self._meet(value)
            return {TAG: "random", **written_generator(value)}
        if kind in self._names:
            self._meet(value)
            if vars(value).keys() != field_names(kind):
                raise StateRefused(f"has other attributes than the fields of {kind.__qualname__}")
            return {TAG: "object", "class": self._names[kind], "fields": self._entries(vars(value))}
        return self.write_other(value)

    def write_other(self, value: Any) -> Any:
        """A value of any other type; for subclasses that know more."""
        kind = type(value)
        raise StateRefused(f"is of type {kind.__module__}.{kind.__qualname__}, which cannot be kept exactly")

    def _meet(self, value: Any) -> None:
        self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)

    def _items(self, values: Iterable[Any]) -> list[Any]:
        written: list[Any] = []
        try:
            for value in values:
                written.append(value if type(value) in SCALARS else self._write(value))
        except StateRefused as refused:
            raise refused.under(f"[{len(written)}]") from None
        return written

    def _entries(self, values: Mapping[str, Any]) -> dict[str, Any]:
        written: dict[str, Any] = {}
        key = ""
        try:
            for key, value in values.items():
                written[key] = value if type(value) in SCALARS else self._write(value)
        except StateRefused as refused:
            raise refused.under(f".{key}") from None
        return written


class Reader:
    """Reads what a Writer with the same classes wrote. What it makes shares nothing with what it reads."""

    def __init__(self, classes: Classes | None = None) -> None:
        self._classes = classes or {}
        self._made: list[Any] = []

    def read(self, value: Any) -> Any:
        """The value, as it was. Raises StateRefused."""
        try:
            return self._read(value)
        except RecursionError:
            raise StateRefused("is nested too deep") from None

    def _read(self, value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is list:
            return self._fill_list(self._make([]), value)
        if kind is not dict:
            raise StateRefused(f"is of type {kind.__qualname__}, which no record holds")
        if TAG not in value:
            return self._fill_dict(self._make({}), value)
        read = _TAGS.get(value[TAG]) if type(value[TAG]) is str else None
        return read(self, value) if read is not None else self.read_other(value)

    def read_other(self, value: dict[str, Any]) -> Any:
        """A value of any other tag; for subclasses that know more."""
        raise StateRefused(f"has an unknown tag {value[TAG]!r:.40}")

    def _make(self, made: Any) -> Any:
        self._made.append(made)
        return made

    def _fill_list(self, made: list[Any], values: list[Any]) -> list[Any]:
        try:
            for value in values:
                made.append(value if type(value) in SCALARS else self._read(value))
        except StateRefused as refused:
            raise refused.under(f"[{len(made)}]") from None
        return made

    def _fill_dict(self, made: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        key = ""
        try:
            for key, value in values.items():
                if type(key) is not str:
                    raise StateRefused("is a key that is no text")
                made[key] = value if type(value) in SCALARS else self._read(value)
        except StateRefused as refused:
            raise refused.under(f".{key}") from None
        return made

    def _tuple(self, value: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self._fill_list([], _items_of(value)))

    def _frozenset(self, value: dict[str, Any]) -> frozenset[Any]:
        return frozenset(_distinct(self._fill_list([], _items_of(value))))

    def _set(self, value: dict[str, Any]) -> set[Any]:
        made: set[Any] = self._make(set())
        made.update(_distinct(self._fill_list([], _items_of(value))))
        return made

    def _dict(self, value: dict[str, Any]) -> dict[Any, Any]:
        exactly(value, {TAG, "keys", "values"})
        made: dict[Any, Any] = self._make({})
        if type(value["keys"]) is not list or type(value["values"]) is not list:
            raise StateRefused("has keys or values that are no list")
        keys = _distinct(self._fill_list([], value["keys"]))
        values = self._fill_list([], value["values"])
        if len(keys) != len(values):
            raise StateRefused(f"has {len(keys)} keys and {len(values)} values")
        made.update(zip(keys, values, strict=True))
        return made

    def _random(self, value: dict[str, Any]) -> random.Random:
        return read_generator({key: part for key, part in value.items() if key != TAG}, self._make(random.Random()))

    def _object(self, value: dict[str, Any]) -> Any:
        exactly(value, {TAG, "class", "fields"})
        cls = self._classes.get(value["class"]) if type(value["class"]) is str else None
        if cls is None or type(value["fields"]) is not dict:
            raise StateRefused(f"is of no known class: {value['class']!r:.40}")
        made = self._make(object.__new__(cls))
        fields = self._fill_dict({}, value["fields"])
        exactly(fields, field_names(cls))
        vars(made).update(fields)
        return made

    def _same(self, value: dict[str, Any]) -> Any:
        exactly(value, {TAG, "as"})
        number = value["as"]
        if type(number) is not int or not 0 <= number < len(self._made):
            raise StateRefused(f"is the same as {number!r:.40}, which is no object before it")
        return self._made[number]


_TAGS: Final[Mapping[str, Callable[[Reader, dict[str, Any]], Any]]] = {
    "tuple": Reader._tuple,
    "frozenset": Reader._frozenset,
    "set": Reader._set,
    "dict": Reader._dict,
    "random": Reader._random,
    "object": Reader._object,
    "same": Reader._same,
}


def written_generator(generator: random.Random) -> dict[str, Any]:
    """The state of a generator of the standard library: version, words, and the cached Gaussian number or None."""
    version, internal, gauss = generator.getstate()
    return {"version": version, "internal": list(internal), "gauss_next": gauss}


def read_generator(value: Mapping[str, Any], into: random.Random | None = None) -> random.Random:
    """The generator that `written_generator` took down. Raises StateRefused."""
    exactly(value, {"version", "internal", "gauss_next"})
    words, gauss = value["internal"], value["gauss_next"]
    if value["version"] != GENERATOR_VERSION:
        raise StateRefused(f"is {value['version']!r:.40}, not {GENERATOR_VERSION}", ".version")
    if type(words) is not list or len(words) != GENERATOR_WORDS:
        raise StateRefused(f"is no list of {GENERATOR_WORDS} words", ".internal")
    if not all(type(word) is int and 0 <= word < 2**32 for word in words) or not 0 <= words[-1] < GENERATOR_WORDS:
        raise StateRefused("has words out of range", ".internal")
    if gauss is not None and type(gauss) is not float:
        raise StateRefused(f"is {gauss!r:.40}, neither None nor a float", ".gauss_next")
    generator = into if into is not None else random.Random()
    generator.setstate((GENERATOR_VERSION, tuple(words), gauss))
    return generator


def field_names(cls: type) -> set[str]:
    """The names of a dataclass's fields."""
    return {each.name for each in dataclasses.fields(cls)}


def exactly(value: Any, names: Iterable[str]) -> None:
    """Raise StateRefused for what is no dict with exactly these keys."""
    if not isinstance(value, Mapping):
        raise StateRefused(f"is {type(value).__qualname__}, not an object")
    wanted = set(names)
    if missing := wanted - value.keys():
        raise StateRefused(f"lacks {', '.join(sorted(missing))}")
    if extra := value.keys() - wanted:
        raise StateRefused(f"has unknown fields: {', '.join(sorted(map(str, extra)))}")


def _items_of(value: dict[str, Any]) -> list[Any]:
    exactly(value, {TAG, "items"})
    if type(value["items"]) is not list:
        raise StateRefused("has items that are no list")
    items: list[Any] = value["items"]
    return items


def _distinct(items: list[Any]) -> list[Any]:
    try:
        count = len(set(items))
    except TypeError:
        raise StateRefused("has an item that cannot stand there") from None
    if count != len(items):
        raise StateRefused("has an item twice")
    return items
