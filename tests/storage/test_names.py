"""File names made from ids cannot collide, leave the directory, or be too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_ckpt_grpc.storage.names import MAX_NAME, TEMPORARY_PREFIX, escape, is_temporary, temporary_name, unescape

ODD = [
    "..", ".", "a/b", "../x", "/etc", "a\x00b", "a\nb", ".hidden", "dot.", "=2e", "é", "😀", " ", "a b", "~", "-x",
    "con", "A", "a", "x" * 256, "x" * 257, "é" * 200, TEMPORARY_PREFIX + "x", "a=h" + "0" * 64, "*", "%2e%2e",
]  # fmt: skip


def _is_safe(name: str) -> bool:
    return (
        0 < len(name.encode()) <= MAX_NAME
        and name.isascii()
        and name.isprintable()
        and not set(name) & set("/\\\0 ~*?\"'<>|:")
        and name[0] != "."
        and name[-1] != "."
    )


@pytest.mark.parametrize("text", ODD)
def test_odd_ids_have_safe_names(text: str) -> None:
    name = escape(text)
    assert _is_safe(name)
    assert not is_temporary(name)


def test_no_two_odd_ids_share_a_name() -> None:
    assert len({escape(text) for text in ODD}) == len(ODD)
    assert len({escape(escape(text)) for text in ODD}) == len(ODD)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80), unique=True, max_size=6))
def test_different_texts_have_different_safe_names(texts: list[str]) -> None:
    names = [escape(text) for text in texts]
    assert len(set(names)) == len(names)
    assert all(map(_is_safe, names))


@pytest.mark.parametrize("text", ODD)
def test_a_name_tells_its_text_unless_it_was_cut(text: str) -> None:
    name = escape(text)
    assert unescape(name) == (None if "=h" in name and len(name) == MAX_NAME else text)


@pytest.mark.parametrize("name", ["", ".", "a b", "=2E", "=41", "=", "=h", "=ff", "=c3", "é"])
def test_what_is_no_name_has_no_text(name: str) -> None:
    """Neither odd bytes nor another way to write a text that has a name."""
    assert unescape(name) is None


@pytest.mark.parametrize("text", ["roll-1", "A.b_c-9", "x" * MAX_NAME])
def test_plain_ids_stand_for_themselves(text: str) -> None:
    assert escape(text) == text


@pytest.mark.parametrize("text", ["", "\ud800"])
def test_what_has_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        escape(text)


def test_temporary_names_differ_and_are_known() -> None:
    assert temporary_name() != temporary_name()
    assert is_temporary(temporary_name())
