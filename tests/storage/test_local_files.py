"""`LocalFiles` on a real file system, and with system calls that fail."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles, NameTaken, read_part
from gym_ckpt_grpc.storage import local_files as module
from tests.storage.builders import AGENT, commit, faults, make_records, write


def _failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def _modes(root: Path) -> tuple[set[int], set[int]]:
    files = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
    directories = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_dir()}
    return files, directories


@pytest.mark.behaviour("C180")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize(("file_mode", "dir_mode"), [(0o600, 0o700), (0o640, 0o2750), (0o666, 0o777)])
@pytest.mark.usefixtures("open_umask")
def test_modes_are_the_configured_ones_whatever_the_umask(
    tmp_path: Path, umask: int, file_mode: int, dir_mode: int
) -> None:
    os.umask(umask)
    root = CheckpointRoot(str(tmp_path), LocalFiles(file_mode=file_mode, dir_mode=dir_mode))
    root.preflight()
    root.sequence.claim("ctl", "run")
    commit(root, "ck", epoch=1)
    assert _modes(tmp_path) == ({file_mode}, {dir_mode})


@pytest.mark.behaviour("C180")
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS])
def test_publication_works_where_hard_links_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", _failing(code))
    root = CheckpointRoot(str(tmp_path))
    assert any("renameat2" in note for note in root.preflight().notes)
    root.sequence.claim("ctl", "run")
    commit(root, "ck", epoch=1)
    assert faults(root, "ck") == []
    assert root.sequence.claim("ctl", "run").epoch == 2
    assert not list(tmp_path.rglob(".*"))


def test_a_root_with_neither_way_to_create_exclusively_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", _failing(errno.EPERM))
    monkeypatch.setattr(module, "_rename_no_replace", _failing(errno.EINVAL))
    with pytest.raises(StateUnwritable, match="renameat2") as caught:
        CheckpointRoot(str(tmp_path)).preflight()
    assert str(tmp_path) in caught.value.message
    assert os.listdir(tmp_path) == []


def test_a_root_where_a_taken_name_is_given_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda source, target, **_: Path(target).write_bytes(Path(source).read_bytes()))
    with pytest.raises(StateUnwritable, match="not exclusive"):
        CheckpointRoot(str(tmp_path)).preflight()
    assert os.listdir(tmp_path) == []


def _make(files: LocalFiles, path: Path, data: bytes = b"x") -> str:
    sink = files.create(str(path))
    sink.write(data)
    sink.sync()
    sink.close()
    sink.close()
    return str(path)


@pytest.mark.parametrize("links", [True, False])
def test_a_taken_name_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", _failing(errno.EPERM))
    files = LocalFiles()
    first, second = _make(files, tmp_path / "a", b"1"), _make(files, tmp_path / "b", b"2")
    files.publish(first, str(tmp_path / "name"))
    with pytest.raises(NameTaken):
        files.publish(second, str(tmp_path / "name"))
    assert (tmp_path / "name").read_bytes() == b"1"
    assert sorted(os.listdir(tmp_path)) == ["b", "name"]


def test_a_link_that_was_made_although_its_reply_was_lost_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def repeated(source: str, target: str, **more: Any) -> None:
        real(source, target, **more)
        real(source, target, **more)

    monkeypatch.setattr(os, "link", repeated)
    files = LocalFiles()
    files.publish(_make(files, tmp_path / "a"), str(tmp_path / "name"))
    assert os.listdir(tmp_path) == ["name"]


def test_replacing_shows_the_old_file_or_the_new_one_whole(tmp_path: Path) -> None:
    files = LocalFiles()
    target = str(tmp_path / "LATEST")
    files.replace(_make(files, tmp_path / "t", b"a" * 5000), target)
    stop = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not stop.is_set():
            source = files.open(target)
            seen.add(source.read(0, source.size))
            source.close()

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        files.replace(_make(files, tmp_path / "t", bytes([98 + number % 2]) * (4000 + number)), target)
    stop.set()
    reader.join(10)
    assert seen
    assert all(len(set(data)) == 1 and len(data) >= 4000 for data in seen)


def test_many_may_make_one_directory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LocalFiles()
    real = os.mkdir

    def raced(path: str, mode: int = 0o777) -> None:
        real(path, mode)
        raise FileExistsError(errno.EEXIST, "File exists", path)

    monkeypatch.setattr(os, "mkdir", raced)
    files.make_dirs(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.undo()
    errors: list[Exception] = []

    def make() -> None:
        try:
            files.make_dirs(str(tmp_path / "x" / "y" / "z"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert errors == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_where_directories_cannot_be_synced_names_are_trusted_and_the_preflight_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    _fail_directory_sync(monkeypatch, code)
    root = CheckpointRoot(str(tmp_path))
    assert any("cannot sync a directory" in note for note in root.preflight().notes)
    write(root.files, root, "ck")


def test_a_directory_sync_that_fails_otherwise_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_directory_sync(monkeypatch, errno.EIO)
    root = CheckpointRoot(str(tmp_path))
    with pytest.raises(StateUnwritable, match="EIO"):
        root.preflight()
    with pytest.raises(StateUnwritable, match="EIO"):
        write(root.files, root, "ck")
    monkeypatch.undo()
    write(root.files, root, "ck")


def _fail_directory_sync(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.behaviour("C178")
def test_each_file_is_synced_through_the_handle_that_wrote_it_then_named_then_its_directory_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "close", "link", "replace")}

    def opened(path: str, *more: Any, **other: Any) -> int:
        handle: int = real["open"](path, *more, **other)
        names[handle] = path
        return handle

    def noted(kind: str) -> Callable[..., Any]:
        def call(handle: int, *more: Any) -> Any:
            calls.append((kind, names.get(handle, "?")))
            return real[kind](handle, *more)

        return call

    def named(kind: str) -> Callable[..., Any]:
        def call(source: str, target: str, **more: Any) -> None:
            calls.append((kind, source))
            real[kind](source, target, **more)
            calls.append(("named", os.path.dirname(target)))

        return call

    root = CheckpointRoot(str(tmp_path))
    monkeypatch.setattr(os, "open", opened)
    for kind in ("write", "fsync", "close"):
        monkeypatch.setattr(os, kind, noted(kind))
    for kind in ("link", "replace"):
        monkeypatch.setattr(os, kind, named(kind))
    write(root.files, root, "ck")
    monkeypatch.undo()
    for at, (kind, path) in enumerate(calls):
        if kind in ("link", "replace"):
            of_file = [earlier for earlier, name in calls[:at] if name == path]
            assert of_file == ["write"] * (len(of_file) - 2) + ["fsync", "close"]
            assert len(of_file) > 2
            following = calls[at + 2 :]
            assert ("fsync", os.path.dirname(path)) in following
    assert sum(kind in ("link", "replace") for kind, _ in calls) == 2
    last_named = max(at for at, (kind, _) in enumerate(calls) if kind == "named")
    synced = {path for kind, path in calls[last_named:] if kind == "fsync"}
    directory = root.location("ck").part(AGENT.place).directory
    while directory != os.path.dirname(root.path):
        assert directory in synced
        directory = os.path.dirname(directory)


@pytest.mark.behaviour("C185")
def test_links_pipes_sockets_directories_and_devices_are_never_read(tmp_path: Path) -> None:
    files = LocalFiles()
    target = tmp_path / "target"
    target.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("link", "pipe", "directory", "socket"):
            with pytest.raises(StateCorrupt, match=name):
                files.open(str(tmp_path / name))
    with pytest.raises(StateCorrupt):
        files.open("/dev/zero")


@pytest.mark.behaviour("C185")
@pytest.mark.parametrize("what", ["manifest", "records"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_part_with_a_link_or_a_pipe_for_a_file_is_refused(tmp_path: Path, what: str, kind: str) -> None:
    root = CheckpointRoot(str(tmp_path / "root"))
    info = write(root.files, root, "ck")
    part = root.location("ck").part(AGENT.place)
    path = Path(part.manifest if what == "manifest" else part.file(info.files[0].name))
    moved = path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(moved)
    else:
        os.mkfifo(path)
    with pytest.raises(StateCorrupt, match=path.name):
        read_part(root.files, root.location("ck"), AGENT.place, checkpoint_id="ck")


def test_reads_and_writes_that_fail_name_path_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LocalFiles()
    with pytest.raises(StateNotFound, match="nothing"):
        files.open(str(tmp_path / "nothing"))
    with pytest.raises(StateCorrupt, match="null"):
        files.open(str(tmp_path / "a\0b"))
    with pytest.raises(StateUnwritable, match="null"):
        files.create(str(tmp_path / "a\0b"))
    path = _make(files, tmp_path / "a", b"12345")
    with pytest.raises(StateUnwritable, match="EEXIST"):
        files.create(path)
    source = files.open(path)
    assert source.read(1, 3) == b"234"
    for offset, length in ((3, 3), (-1, 2), (0, -1), (6, 0)):
        with pytest.raises(StateCorrupt, match="are not in it"):
            source.read(offset, length)
    os.truncate(path, 2)
    with pytest.raises(StateCorrupt, match="shorter"):
        source.read(0, 5)
    source.close()
    source.close()
    monkeypatch.setattr(os, "pread", _failing(errno.EIO))
    source = files.open(path)
    with pytest.raises(StateCorrupt, match="EIO"):
        source.read(0, 1)
    source.close()


@pytest.mark.behaviour("C173")
@pytest.mark.parametrize("call", ["write", "fsync", "link", "replace", "mkdir", "fchmod", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_system_call_that_fails_is_typed_leaves_no_temporary_file_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    root = CheckpointRoot(str(tmp_path))
    root.sequence.claim("ctl", "run")
    commit(root, "old", epoch=1)
    monkeypatch.setattr(os, call, _failing(code))
    with pytest.raises(StateUnwritable, match=errno.errorcode[code]) as caught:
        write(root.files, root, "ck")
    assert str(tmp_path) in caught.value.message
    monkeypatch.undo()
    assert not list(tmp_path.rglob(".tmp-*"))
    assert faults(root, "old") == []
    write(root.files, root, "ck")
    part = read_part(root.files, root.location("ck"), AGENT.place, checkpoint_id="ck")
    assert list(part.records) == make_records()


@pytest.mark.behaviour("C173")
def test_a_directory_without_permission_is_unwritable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:  # root may write anywhere
        os.seteuid(65534)
    try:
        with pytest.raises(StateUnwritable, match="EACCES"):
            CheckpointRoot(str(tmp_path)).preflight()
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
