"""`storage_uri`: inside a configured root, or refused before anything is opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gym_ckpt_grpc.protocol.errors import InvalidArgument
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles, path_to_uri, resolve_checkpoint, uri_to_path
from tests.storage.builders import AGENT, make_records, write


def _resolve(uri: str, *roots: Path) -> str:
    return resolve_checkpoint(uri, [path_to_uri(str(root)) for root in roots], files=LocalFiles()).directory


def test_a_checkpoint_of_a_configured_root_is_found_whether_or_not_it_exists(tmp_path: Path) -> None:
    other = tmp_path / "other root"
    for root in (tmp_path, other):
        uri = CheckpointRoot(str(root)).location("ck-1").uri
        assert _resolve(uri, tmp_path, other) == f"{root}/checkpoints/ck-1"
        assert _resolve(uri.replace("file://", "file://localhost"), tmp_path, other)
        assert _resolve(uri_to_path(uri), tmp_path, other)
        assert _resolve(uri + "/", tmp_path, other)
    assert not os.listdir(tmp_path)


@pytest.mark.behaviour("C185")
@pytest.mark.parametrize(
    "tail",
    [
        "",
        "/checkpoints",
        "/checkpoints/",
        "/checkpoints/..",
        "/checkpoints/../checkpoints/ck",
        "/checkpoints/%2e%2e",
        "/checkpoints/a%2Fb",
        "/checkpoints//ck",
        "/checkpoints/./ck",
        "/checkpoints/.hidden",
        "/checkpoints/ck%00",
        "/checkpoints/ck%0a",
        "/checkpoints/ck\n",
        "/checkpoints/c\tk",
        "/checkpoints/ck/participants",
        "/checkpoints/" + "x" * 129,
        "/checkpoints/ck?x=1",
        "/checkpoints/ck#x",
        "/checkpoints/%ff",
        "/other/ck",
        "x/checkpoints/ck",
        "/../checkpoints/ck",
        "/checkpoints/😀",
    ],
)
def test_what_names_no_checkpoint_of_the_root_is_refused(tmp_path: Path, tail: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for uri in (path_to_uri(str(root)) + tail, path_to_uri(str(root)).replace("//", "", 1)[:5] + str(root) + tail):
        with pytest.raises(InvalidArgument) as caught:
            _resolve(uri, root)
        assert [violation.field for violation in caught.value.violations] == ["storage_uri"]
    assert not os.listdir(root)


@pytest.mark.parametrize(
    "uri",
    ["", "file://", "file:///", "s3://b/checkpoints/ck", "http://x/checkpoints/ck", "checkpoints/ck", "file:ck",
     "file://host/x/checkpoints/ck", "file:///elsewhere/checkpoints/ck", "/dev/null", "file://[/x", "\x00"],
)  # fmt: skip
def test_other_places_and_schemes_are_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(InvalidArgument):
        _resolve(uri, tmp_path)


@pytest.mark.behaviour("C185")
def test_links_out_of_the_root_are_refused_and_nothing_outside_is_touched(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "checkpoints").mkdir(parents=True)
    outside.mkdir()
    (root / "checkpoints" / "ck").symlink_to(outside)
    with pytest.raises(InvalidArgument, match="link"):
        _resolve(path_to_uri(f"{root}/checkpoints/ck"), root)
    (root / "checkpoints" / "ck2" / "participants").mkdir(parents=True)
    (root / "checkpoints" / "ck2" / "participants" / "agent").symlink_to(outside)
    with pytest.raises(InvalidArgument, match="link"):
        write(LocalFiles(), CheckpointRoot(str(root)), "ck2", records=make_records())
    assert not os.listdir(outside)


def test_a_root_that_is_itself_a_link_is_followed_once(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    root = CheckpointRoot(str(tmp_path / "link"))
    assert root.path == str(real)
    assert _resolve(f"file://{tmp_path}/link/checkpoints/ck", tmp_path / "link") == f"{real}/checkpoints/ck"
    assert _resolve(f"file://{real}/checkpoints/ck", tmp_path / "link") == f"{real}/checkpoints/ck"


def test_services_of_any_name_have_places_of_their_own(tmp_path: Path) -> None:
    location = CheckpointRoot(str(tmp_path)).location("ck")
    names = ["a", "A", "..", "a/b", "a=2fb", "é", "x" * 300, "x" * 301]
    parts = {location.part((ParticipantKind.AGENT, name, "0")).directory for name in names}
    assert len(parts) == len(names)
    for part in parts:
        assert os.path.dirname(os.path.dirname(part)) == f"{location.directory}/participants/agent"
    with pytest.raises(InvalidArgument):
        location.part((ParticipantKind.AGENT, "", "0"))


def test_a_part_of_an_odd_service_is_written_and_read(tmp_path: Path) -> None:
    root = CheckpointRoot(str(tmp_path))
    odd = ParticipantIdentity(AGENT.kind, "../" + "é" * 150, "\n", incarnation_id="i")
    info = write(root.files, root, "ck", identity=odd)
    assert info.record_count == 4
