"""A running fleet for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.coordinator.fleet_of_nodes import Nodes
from tests.telemetry.kept import Kept


@pytest_asyncio.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    """One node of each kind."""
    fleet = await Nodes(tmp_path / "root").start()
    try:
        yield fleet
    finally:
        await fleet.stop()


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What each test emits is in the catalogue, with the attributes that stand there."""
    kept = Kept()
    yield kept
    kept.check_declared()
