"""Which call is the first to be told of a success."""

from __future__ import annotations

import pytest

from gym_ckpt_grpc.control.untold import Untold
from gym_ckpt_grpc.protocol.machine import Call
from gym_ckpt_grpc.protocol.phases import Operation


def call(operation: Operation, id: str = "c1") -> Call:
    return Call(operation, id, "t", 1)


@pytest.mark.behaviour("C307")
def test_one_success_for_what_was_begun() -> None:
    """However many calls began or joined it; anew once more is begun; each operation and id by itself."""
    untold, commit = Untold(), call(Operation.COMMIT)
    assert not untold.first(commit)
    for _ in range(2):
        untold.begun(commit)
    assert not untold.first(call(Operation.PREPARE))
    assert not untold.first(call(Operation.COMMIT, "c2"))
    assert [untold.first(commit) for _ in range(3)] == [True, False, False]
    untold.begun(commit)
    assert untold.first(commit)


@pytest.mark.parametrize("operation", [Operation.RETIRE, Operation.FORGET])
def test_calls_that_each_do_their_own(operation: Operation) -> None:
    """Many at once have one id, or none: none of them is a repeat."""
    untold = Untold()
    untold.begun(call(operation, ""))
    assert [untold.first(call(operation, "")) for _ in range(2)] == [True, True]


def test_it_is_bounded() -> None:
    """The oldest is dropped: its success is no news any more."""
    untold = Untold(limit=2)
    for id in ("a", "b", "c"):
        untold.begun(call(Operation.RESUME, id))
    assert [untold.first(call(Operation.RESUME, id)) for id in ("a", "b", "c")] == [False, True, True]
