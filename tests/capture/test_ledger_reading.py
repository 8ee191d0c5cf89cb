"""Reading a ledger while another process retires it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from tests.capture.ledger_rig import R0, R1, SpyFiles, calls, made

READS: dict[str, Callable[[CaptureLedger], Any]] = {
    "manifest": lambda ledger: ledger.manifest(R0),
    "export": lambda ledger: ledger.export([R1, R0]),
}


@pytest.mark.behaviour("P240", "P243")
@pytest.mark.parametrize("read", READS)
def test_what_is_retired_while_it_is_read_is_stale_and_never_empty(tmp_path: Path, read: str) -> None:
    """A checkpoint would have no rows for it, and a training framework a rollout without a call."""
    files = SpyFiles()
    ledger, another = CaptureLedger(tmp_path, files=files), CaptureLedger(tmp_path)
    made(ledger, R0, "one")
    made(ledger, R1, "two")
    retired: list[str] = []

    def retire(action: str, name: str) -> None:
        if (action, name) == ("open", "r.rows") and not retired:
            retired.append(name)
            another.retire([R0])

    files.before = retire
    with pytest.raises(StaleAttempt) as caught:
        READS[read](ledger)
    assert (caught.value.episodes, retired) == ((R0,), ["r.rows"])
    assert calls(ledger, R1) == ["two"]
