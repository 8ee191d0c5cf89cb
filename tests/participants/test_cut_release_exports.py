"""Cuts over several exports of one checkpoint."""

from __future__ import annotations

import pytest

from tests.participants.test_cut_release import Book


@pytest.mark.behaviour("P154")
@pytest.mark.parametrize("durable", [True, False])
def test_a_cut_that_only_a_failed_export_named_goes_at_the_opening(durable: bool) -> None:
    """Its episode was retired, or is outside the scope of the export that did not fail."""
    book = Book()
    book.begin("c1")
    book.make("gone", "kept")
    book.freeze("gone", "kept")
    book.freeze("kept")
    assert book.taken() == []
    book.opened()
    assert book.taken() == ["b:gone"]
    book.ended("c1", durable)
    assert book.taken() == ([] if durable else ["b:kept"])
