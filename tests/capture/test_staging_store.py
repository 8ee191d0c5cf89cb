"""The token store on disk: durable before it answers, shared by processes, whole after a kill."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gym_ckpt_grpc.capture import AsyncTokenStore, FileTokenStore, TokenRecord, cut_key, staging_key
from gym_ckpt_grpc.capture.token_records import build, encode
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateCorrupt, StateUnwritable, UsageError
from gym_ckpt_grpc.protocol.ids import MAX_ATTEMPT, MAX_ROLLOUT_ID, EpisodeId

READ = """
import sys
from gym_ckpt_grpc.capture import FileTokenStore
record = FileTokenStore(sys.argv[1]).get(sys.argv[2])
print(record and (record.ids, record.logprobs, record.chain_hash))
"""
WRITE = """
import os, signal, sys
from gym_ckpt_grpc.capture import FileTokenStore
from tests.capture.test_staging_store import record
FileTokenStore(sys.argv[1]).put([record("killed", 5), record("too", 5)])
os.kill(os.getpid(), signal.SIGKILL)
"""
BUSY = """
import sys
from gym_ckpt_grpc.capture import FileTokenStore
from tests.capture.test_staging_store import record
name, store = sys.argv[2], FileTokenStore(sys.argv[1], log_bytes=3000)
for number in range(120):
    store.put([record(f"{name}{number}", 3 + number % 7), record("shared", 9)])
    if number % 3:
        assert store.delete([f"r1/{name}{number}"]) == {f"r1/{name}{number}"}
    if number % 40 == 39:
        store.close()
        store = FileTokenStore(sys.argv[1], log_bytes=3000)
"""


def record(call_id: str, count: int = 3, *, capture_key: str = "r1", cut_id: str = "") -> TokenRecord:
    return build(
        kind="cut" if cut_id else "completion",
        capture_key=capture_key,
        call_id=call_id,
        cut_id=cut_id,
        mode="text",
        parent_id="",
        before=(),
        ids=range(count),
        generated=count - 1,
        logprobs=[-0.1 * position for position in range(count - 1)],
        weight_version=1,
        output_limit=50,
        finish_reason="" if cut_id else "stop",
        chain="",
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileTokenStore]:
    store = FileTokenStore(tmp_path / "tokens")
    yield store
    store.close()


def logs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "tokens").glob("*.tokens"))


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """File handles that were synced from here on."""
    real, synced = os.fsync, list[int]()

    def fsync(handle: int) -> None:
        real(handle)
        synced.append(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


@pytest.mark.behaviour("P158")
def test_a_new_process_reads_what_was_put(store: FileTokenStore, tmp_path: Path) -> None:
    """At once: while the writer lives and has closed nothing."""
    one = record("c1")
    store.put([one, record("c2")])
    store.put([record("c3")])
    for wanted in ("c1", "c3"):
        key = staging_key("r1", wanted)
        said = subprocess.run(
            [sys.executable, "-c", READ, str(tmp_path / "tokens"), key], capture_output=True, text=True, check=True
        )
        assert said.stdout.strip() == str((one.ids, one.logprobs, one.chain_hash))


@pytest.mark.behaviour("P158")
def test_what_a_killed_process_had_put_is_there(store: FileTokenStore, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", WRITE, str(tmp_path / "tokens")], check=False)
    assert ended.returncode == -9
    assert store.get("r1/killed") == record("killed", 5)
    assert store.keys() == ["r1/killed", "r1/too"]


@pytest.mark.behaviour("P265")
def test_a_put_is_synced_before_it_returns(
    store: FileTokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are in the file when it is synced, and nothing is written afterwards."""
    store.put([record("c0")])
    (log,) = logs(tmp_path)
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    store.put([record("c1"), record("c2")])
    assert sizes == [log.stat().st_size]


@pytest.mark.behaviour("P265")
def test_a_put_whose_sync_fails_is_refused(
    store: FileTokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed; the log is given up, and what was durable before and is put afterwards stands."""
    store.put([record("c1")])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(StateUnwritable, match="No space left"):
            store.put([record("c2")])
        with pytest.raises(StateUnwritable):
            store.put([record("c2")])
    store.put([record("c3")])
    assert FileTokenStore(tmp_path / "tokens").keys() == ["r1/c1", "r1/c3"]


@pytest.mark.behaviour("P265")
def test_what_a_failed_write_leaves_hides_no_later_record(
    store: FileTokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk in trouble may refuse to take it back as well; nothing may be written behind it."""
    store.put([record("c1")])
    real = os.write

    def short(handle: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(handle, data[: len(data) - 10])

    def refuse(handle: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", short)
        broken.setattr(os, "ftruncate", refuse)
        with pytest.raises(StateUnwritable):
            store.put([record("c2")])
    store.put([record("c3")])
    for each in (store, FileTokenStore(tmp_path / "tokens")):
        assert each.keys() == ["r1/c1", "r1/c3"]


async def test_cuts_of_one_moment_share_their_syncs(store: FileTokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put([record("first")])
    synced = counting(monkeypatch)
    tokens = AsyncTokenStore(store)
    await asyncio.gather(*(tokens.put([record("c", cut_id=f"k{number}")]) for number in range(500)))
    assert len(synced) <= 2
    assert len(store.keys("cuts/")) == 500
    await tokens.close()
    with pytest.raises(UsageError):
        await tokens.put([record("late")])


async def test_writes_under_way_are_finished_by_close(store: FileTokenStore) -> None:
    tokens = AsyncTokenStore(store)
    puts = [asyncio.create_task(tokens.put([record(f"c{number}")])) for number in range(5)]
    await asyncio.sleep(0)
    tokens.discard(["r1/c3"])
    await tokens.close()
    await asyncio.gather(*puts)
    assert store.keys() == [f"r1/c{number}" for number in (0, 1, 2, 4)]


async def test_a_failed_write_fails_those_that_shared_it(
    store: FileTokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(records: object) -> None:
        raise StateUnwritable("the disk is full")

    tokens = AsyncTokenStore(store)
    with monkeypatch.context() as broken:
        broken.setattr(store, "put", refuse)
        answers = await asyncio.gather(
            *(tokens.put([record(f"c{number}")]) for number in range(3)), return_exceptions=True
        )
    assert [str(answer) for answer in answers] == ["STATE_UNWRITABLE: the disk is full"] * 3
    await tokens.put([record("c1")])
    assert store.keys() == ["r1/c1"]
    await tokens.close()


def test_an_earlier_record_of_a_key_is_replaced(store: FileTokenStore, tmp_path: Path) -> None:
    """For everybody, whatever order the logs are read in."""
    others = [FileTokenStore(tmp_path / "tokens") for _ in range(3)]
    for number, writer in enumerate([store, *others]):
        writer.put([record("c1", 3 + number)])
    for reader in (store, *others, FileTokenStore(tmp_path / "tokens")):
        assert reader.get("r1/c1") == record("c1", 6)
        reader.close()


def test_deleted_records_are_gone_for_everybody(store: FileTokenStore, tmp_path: Path) -> None:
    store.put([record("c1"), record("c2")])
    with_other = FileTokenStore(tmp_path / "tokens")
    assert with_other.delete(["r1/c1", "r1/c9"]) == {"r1/c1"}
    assert (store.get("r1/c1"), store.delete(["r1/c1"])) == (None, frozenset())
    assert FileTokenStore(tmp_path / "tokens").keys() == ["r1/c2"]
    store.put([record("c1", 4)])
    assert with_other.get("r1/c1") == record("c1", 4)
    with_other.close()


def test_deleted_records_leave_nothing_in_memory(store: FileTokenStore, tmp_path: Path) -> None:
    """A worker lives long, and each checkpoint deletes cuts; its logs stay, since completed calls stand in them."""
    reader = FileTokenStore(tmp_path / "tokens")
    other = FileTokenStore(tmp_path / "tokens")
    for number in range(20):
        store.put([record(f"done{number}"), record(f"cut{number}", cut_id="x")])
        (store, other)[number % 2].delete([cut_key("r1", f"cut{number}", "x")])
    late = FileTokenStore(tmp_path / "tokens")
    for each in (store, other, reader, late):
        assert len(each.keys()) == 20
        assert each._deleted == set()
    for each in (other, reader, late):
        each.close()


def test_spent_logs_are_removed(tmp_path: Path) -> None:
    """Once nothing in them counts, and never while their writer lives."""
    store = FileTokenStore(tmp_path / "tokens", log_bytes=1)  # a log of its own for each put
    for number in range(4):
        store.put([record(f"c{number}")])
    assert len(logs(tmp_path)) == 4
    store.delete(["r1/c0", "r1/c2"])
    # The deletions stand in a log of their own; that of c0 and c2 names logs that are gone by now.
    assert len(logs(tmp_path)) <= 3
    living = FileTokenStore(tmp_path / "tokens")
    living.put([record("alive")])
    assert store.delete(["r1/alive", "r1/c1", "r1/c3"]) == {"r1/alive", "r1/c1", "r1/c3"}
    living.put([record("again")])
    assert store.keys() == FileTokenStore(tmp_path / "tokens").keys() == ["r1/again"]
    living.close()
    store.delete(["r1/again"])
    assert len(logs(tmp_path)) <= 2  # what holds the last deletions
    assert FileTokenStore(tmp_path / "tokens").keys() == []


def test_a_torn_end_is_no_record(store: FileTokenStore, tmp_path: Path) -> None:
    """Cut at any byte, filled with zeros or with noise: the records before it stand and others can be put."""
    store.put([record("c1")])
    (log,) = logs(tmp_path)
    kept = log.stat().st_size
    store.put([record("c2")])
    data = log.read_bytes()
    for size, tail in itertools.product(
        (kept, kept + 1, kept + 13, kept + 20, len(data) - 1), (b"", bytes(64), b"x" * 64)
    ):
        if size == len(data) - 1 and tail:
            continue
        directory = tmp_path / f"torn-{size}-{len(tail)}-{tail[:1].hex()}"
        directory.mkdir()
        (directory / log.name).write_bytes(data[:size] + tail)
        torn = FileTokenStore(directory)
        assert torn.keys() == ["r1/c1"]
        torn.put([record("c3")])
        assert torn.get("r1/c1") == record("c1")
        assert FileTokenStore(directory).keys() == ["r1/c1", "r1/c3"]
        torn.close()


def test_a_damaged_record_is_corrupt(store: FileTokenStore, tmp_path: Path, rng: random.Random) -> None:
    """Wherever in it a bit is wrong; the record after it is read."""
    one, other = record("c1", 40), record("c2")
    store.put([one, other])
    (log,) = logs(tmp_path)
    data = log.read_bytes()
    begin = data.index(b"r1/c1") + len("r1/c1") + 4
    for at in range(begin, begin + len(encode(one)), 11):
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        log.write_bytes(damaged)
        reader = FileTokenStore(tmp_path / "tokens")
        with pytest.raises(StateCorrupt, match="r1/c1"):
            reader.get("r1/c1")
        assert reader.get("r1/c2") == other
        reader.close()


def test_a_file_of_another_kind_is_named(store: FileTokenStore, tmp_path: Path) -> None:
    (tmp_path / "tokens" / "other.tokens").write_bytes(b"gymckpt tokens 2\n and more")
    with pytest.raises(StateCorrupt, match=r"other\.tokens"):
        store.get("r1/c1")


def test_the_longest_ids_have_a_key(store: FileTokenStore) -> None:
    key = EpisodeId("x" * MAX_ROLLOUT_ID, MAX_ATTEMPT).capture_key
    longest = record("c" * 128, capture_key=key, cut_id="k" * 128)
    store.put([longest])
    assert store.get(cut_key(key, "c" * 128, "k" * 128)) == longest


@pytest.mark.parametrize("bad", ["", "..", "../x", "a/b", "/a", "a\n", "a\0", "é", "x" * 129])
def test_no_id_leaves_its_place_in_a_key(bad: str) -> None:
    makes: list[tuple[Callable[[], str], str]] = [
        (lambda: staging_key("r1", bad), "call_id"),
        (lambda: cut_key("r1", bad, "k"), "call_id"),
        (lambda: cut_key("r1", "c", bad), "cut_id"),
        (lambda: staging_key(bad * 3, "c"), "capture_key"),
    ]
    for make, field in makes:
        with pytest.raises(InvalidArgument) as caught:
            make()
        assert [violation.field for violation in caught.value.violations] == [field]


def test_a_record_stands_under_its_own_key(store: FileTokenStore, tmp_path: Path) -> None:
    for key in ("r2/c1", "../../c1", "cuts/r1/c1/k"):
        with pytest.raises(InvalidArgument) as caught:
            store.put([record("c2"), replace(record("c1"), key=key)])
        assert [violation.field for violation in caught.value.violations] == ["key"]
    assert store.keys() == []


def test_random_work_of_several_stores(tmp_path: Path, rng: random.Random) -> None:
    """Whatever three of them do on one directory, each sees what a dictionary would hold."""
    stores = [FileTokenStore(tmp_path / "tokens", log_bytes=4000) for _ in range(3)]
    model: dict[str, TokenRecord] = {}
    for _ in range(300):
        at = rng.randrange(3)
        names = [f"c{rng.randrange(12)}" for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.6:
            records = {name: record(name, rng.randrange(1, 30)) for name in names}
            stores[at].put(list(records.values()))
            model.update((one.key, one) for one in records.values())
        elif rng.random() < 0.9:
            keys = [f"r1/{name}" for name in names]
            assert stores[at].delete(keys) == {key for key in keys if model.pop(key, None)}
        else:
            stores[at].close()
            stores[at] = FileTokenStore(tmp_path / "tokens", log_bytes=4000)
        reader = rng.choice(stores)
        assert reader.get_many(list(model)) == model
        assert reader.keys() == sorted(model)
    assert len(logs(tmp_path)) < 100
    for one in stores:
        one.close()


def test_processes_share_a_directory(tmp_path: Path) -> None:
    """Three write, delete and remove logs side by side; a reader meets nothing but whole records, and none is lost."""
    reader = FileTokenStore(tmp_path / "tokens")
    names = ("a", "b", "c")
    writers = [subprocess.Popen([sys.executable, "-c", BUSY, str(reader.directory), name]) for name in names]
    while any(writer.poll() is None for writer in writers):
        for key, found in reader.get_many(reader.keys()).items():
            assert found.key == key
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    expected = {f"r1/{name}{number}": 3 + number % 7 for name in names for number in range(0, 120, 3)} | {
        "r1/shared": 9
    }
    for store in (reader, FileTokenStore(tmp_path / "tokens")):
        assert {key: len(one.ids) for key, one in store.get_many(store.keys()).items()} == expected
        store.close()
