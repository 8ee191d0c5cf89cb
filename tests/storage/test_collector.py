"""The pause of the garbage collector: counted, ended however a block ends, and nobody else's setting lost."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from gym_ckpt_grpc.storage import collector
from gym_ckpt_grpc.storage.collector import paused_collector
from gym_ckpt_grpc.storage.record_reader import RecordFile
from tests.storage.assembling import PATH, write_file
from tests.storage.builders import make_records


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    assert gc.isenabled()
    yield
    assert gc.isenabled()
    assert collector._pauses._count == 0


def test_it_is_off_inside_and_on_after_the_last_of_nested_blocks() -> None:
    with paused_collector():
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error_and_after_a_generator_that_was_left() -> None:
    with pytest.raises(ZeroDivisionError), paused_collector():
        1 / 0  # noqa: B018
    assert gc.isenabled()

    def reading() -> Iterator[int]:
        with paused_collector():
            yield 1

    left = reading()
    next(left)
    assert not gc.isenabled()
    del left
    assert gc.isenabled()


def test_where_the_user_has_it_off_it_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector(), paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pauses_of_several_threads_overlap_in_any_order() -> None:
    inside = threading.Barrier(5)
    leave = [threading.Event() for _ in range(4)]
    left = [threading.Event() for _ in range(4)]

    def work(number: int) -> None:
        with paused_collector():
            inside.wait(10)
            assert leave[number].wait(10)
        left[number].set()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    for number in (2, 0, 3, 1):
        assert not gc.isenabled()
        leave[number].set()
        assert left[number].wait(10)
    for thread in threads:
        thread.join(10)
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_it_on() -> None:
    """Of the threads that paused, none may be there to end it."""
    with paused_collector():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() and collector._pauses._count == 0 else 1)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_a_long_pause_made_is_not_walked_over_by_the_next_small_collection() -> None:
    """It is old at once, like everything else that was there before."""
    gc.collect()
    with paused_collector():
        kept = [[] for _ in range(200_000)]  # type: ignore[var-annotated]
    assert len(gc.get_objects(generation=0)) < 50_000
    assert gc.is_tracked(kept[0])
    loop: list[object] = []
    loop.append(loop)
    found = id(loop)
    del loop
    gc.collect()
    assert found not in map(id, gc.get_objects())


def test_what_the_process_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        assert before > 0
        with paused_collector():
            kept = [[] for _ in range(200_000)]  # type: ignore[var-annotated]
        assert gc.get_freeze_count() >= before - 1000  # a few of them may have ended
        assert kept
    finally:
        gc.unfreeze()


def test_a_bulk_read_pauses_it_and_lets_it_go_on_after_an_error_too() -> None:
    files, data = write_file(make_records(20), chunk_size=1000)
    seen: list[bool] = []
    read = type(files.open(PATH)).read

    def watched(self: object, offset: int, length: int) -> bytes:
        seen.append(gc.isenabled())
        return read(self, offset, length)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, RecordFile(files, PATH) as file:
        patch.setattr(type(file._source), "read", watched)
        file.read(decoded=True)
        assert seen
        assert not any(seen)
        assert gc.isenabled()
        files.damage(PATH, data)
        file._source.close()
        patch.setattr(type(file._source), "read", lambda *where: b"")
        with pytest.raises(Exception, match="damaged"):
            file.read()
    assert gc.isenabled()
