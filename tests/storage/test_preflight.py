"""A preflight says before a checkpoint whether it can be written, names the path, and leaves nothing."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.protocol.errors import StateUnwritable
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles, preflight
from gym_ckpt_grpc.storage import local_files as module
from gym_ckpt_grpc.storage.names import is_temporary


def _failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_root_is_made_checked_and_left_empty(tmp_path: Path) -> None:
    root = str(tmp_path / "a" / "b")
    found = preflight(LocalFiles(), root, expected_bytes=1)
    assert found.free_bytes is not None
    assert found.free_bytes > 0
    assert found.notes == ()
    assert os.listdir(root) == []
    assert CheckpointRoot(root).preflight(expected_bytes=1).notes == ()


@pytest.mark.behaviour("C172")
@pytest.mark.parametrize("below", ["", "/root", "/root/deeper"])
def test_a_root_that_is_or_is_below_a_file_is_refused_by_name(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(StateUnwritable, match="file"):
        preflight(LocalFiles(), f"{tmp_path}/file{below}")
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_bytes_that_do_not_fit_are_refused_by_name_and_number(tmp_path: Path) -> None:
    with pytest.raises(StateUnwritable, match="bytes left") as caught:
        preflight(LocalFiles(), str(tmp_path), expected_bytes=1 << 60)
    assert str(tmp_path) in caught.value.message
    assert str((1 << 60) + (16 << 20)) in caught.value.message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "link", "unlink", "fchmod", "statvfs", "close"])
def test_each_call_that_fails_is_unwritable_by_path_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    if call == "link":  # where links are refused there is another way, which has to fail as well
        monkeypatch.setattr(module, "_rename_no_replace", _failing(code))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _failing(code))
        with pytest.raises(StateUnwritable, match=errno.errorcode[code]) as caught:
            preflight(LocalFiles(), str(tmp_path))
    assert str(tmp_path) in caught.value.message
    if call != "unlink":
        assert os.listdir(tmp_path) == []


@pytest.mark.behaviour("C172")
def test_it_takes_for_good_what_a_publication_does_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a hard link is refused: where the commit would fail in the end, the preflight fails before it begins."""
    answers = set()
    for code in sorted(errno.errorcode):
        if code == errno.EEXIST:
            continue
        monkeypatch.setattr(os, "link", _failing(code))
        root = tmp_path / str(code)
        found = _succeeds(_ask, root)
        assert found == _succeeds(_publish, root), errno.errorcode[code]
        answers.add(found)
    assert answers == {True, False}


def _ask(root: Path) -> None:
    preflight(LocalFiles(), str(root))


def _publish(root: Path) -> None:
    files = LocalFiles()
    sink = files.create(str(root / "temporary"))
    sink.close()
    files.publish(str(root / "temporary"), str(root / "final"))


def _succeeds(call: Callable[[Path], None], root: Path) -> bool:
    try:
        call(root)
    except StateUnwritable:
        return False
    return True


def test_what_it_leaves_when_it_is_killed_is_collected_as_any_unfinished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFiles, "remove", lambda *_: None)
    preflight(LocalFiles(), str(tmp_path))
    left = os.listdir(tmp_path)
    assert left
    assert all(map(is_temporary, left))


def test_it_costs_two_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(handle)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    preflight(LocalFiles(), str(tmp_path))
    assert len(synced) == 2


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_the_umask_does_not_matter(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert preflight(LocalFiles(), str(tmp_path / "root")).notes == ()
    finally:
        os.umask(before)


def test_another_user_is_told_which_path() -> None:
    """Field case 87: whoever will write has to be asked."""
    with tempfile.TemporaryDirectory() as root:  # not below a directory that only its owner may enter
        os.chmod(root, 0o555)
        user = os.geteuid()
        if user == 0:  # root may write anywhere
            os.seteuid(65534)
        try:
            for path in (root, f"{root}/below"):
                with pytest.raises(StateUnwritable, match="EACCES") as caught:
                    preflight(LocalFiles(), path)
                assert root in caught.value.message
        finally:
            os.seteuid(user)
            os.chmod(root, 0o700)
        assert os.listdir(root) == []
