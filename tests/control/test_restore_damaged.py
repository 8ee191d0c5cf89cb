"""Restore of what is damaged, hostile or not there: a typed refusal, nothing installed, open as before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gym_ckpt_grpc.control import RecordBatch
from gym_ckpt_grpc.protocol.errors import ControlError, InvalidArgument, StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.storage import Codec, Payload, Record, payloads
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import Participant, ScriptedOwner

A, B = EpisodeId("a"), EpisodeId("b")
A1, B1 = EpisodeId("a", 1), EpisodeId("b", 1)


@pytest.fixture
async def digest(tmp_path: Path) -> str:
    """A checkpoint c1 of a and b."""
    async with Participant(tmp_path) as p:
        p.add("a", "b")
        await p.prepare()
        return (await p.commit()).manifest_digest


def part(tmp_path: Path) -> Path:
    (manifest,) = (tmp_path / "checkpoints" / "c1").rglob("manifest.json")
    return manifest.parent


async def refused(p: Participant, kind: type[ControlError], **more: Any) -> ControlError:
    """The error of a Restore, after which this participant is as if nobody had called."""
    p.files.calls.clear()
    with pytest.raises(kind) as caught:
        await p.restore([A, B], **more)
    status = await p.status()
    assert (status.phase, status.active_checkpoint_id) == (pb.PHASE_IDLE, "")
    assert (status.marks_held, status.restored_pending) == (0, 0)
    assert p.is_open()
    assert p.owner.live == {}
    assert (p.owner.activates.count, p.owner.pending) == (0, set())
    return caught.value


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        document = msgspec.json.decode(data)
        change(document)
        return msgspec.json.encode(document)

    return edit


def named(name: str, **more: Any) -> Callable[[bytes], bytes]:
    return edited(lambda document: document["files"][0].update(name=name, **more))


OUTSIDE = {
    "parent": "../../../../outside.gck",
    "absolute": "/etc/passwd",
    "device": "/dev/zero",
    "NUL": "records-\x00.gck",
    "newline": "records-\n.gck",
    "empty": "",
    "dot": ".",
    "directory": "../0",
    "of another digest": f"records-{'a' * 64}.gck",
}
FAULTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "not JSON": lambda data: data[:-20],
    "not text": lambda data: b"\xff\xfe" + data,
    "a list": lambda data: b"[" + data + b"]",
    "a number": lambda data: b"1",
    "null": lambda data: b"null",
    "nested without end": lambda data: b"[" * 200_000,
    "nested in extra": edited(lambda document: document.update(extra=None)),
    "deep extra": lambda data: data.replace(b'"extra": {}', b'"extra": {"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "not a number": lambda data: data.replace(b'"records": 2', b'"records": NaN'),
    "without records": edited(lambda document: document.pop("records")),
    "without files": edited(lambda document: document.update(files=[])),
    "without digest": edited(lambda document: document["files"][0].pop("digest")),
    "a digest that is none": edited(lambda document: document["files"][0].update(digest="x")),
    "text as a count": edited(lambda document: document.update(records="2")),
    "a negative count": edited(lambda document: document.update(records=-2)),
    "a broken count": edited(lambda document: document.update(records=2.5)),
    "a huge count": edited(lambda document: document.update(records=2**63)),
    "another count": edited(lambda document: document.update(records=3)),
    "another size": edited(lambda document: document["files"][0].update(size=1)),
    "no checkpoint id": edited(lambda document: document.pop("checkpoint_id")),
    "an empty checkpoint id": edited(lambda document: document.update(checkpoint_id="")),
    "another checkpoint": edited(lambda document: document.update(checkpoint_id="c2")),
    "another participant": edited(lambda document: document["participant"].update(instance="7")),
    "a kind that is none": edited(lambda document: document["participant"].update(kind="x")),
    "an unknown field": edited(lambda document: document.update(more=1)),
    "a role that is none": edited(lambda document: document["files"][0].update(role="script")),
    "two records files": edited(lambda document: document["files"].append(dict(document["files"][0], digest="b" * 64))),
    "too long": lambda data: data + b" " * (4 << 20),
    **{f"a file outside: {name}": named(value) for name, value in OUTSIDE.items()},
}


@pytest.mark.behaviour("C169", "C170", "C185")
@pytest.mark.parametrize("fault", FAULTS, ids=list(FAULTS))
async def test_a_manifest_that_is_none(tmp_path: Path, digest: str, fault: str) -> None:
    """STATE_CORRUPT, and no file was opened but this one; with the whole one again the same call works."""
    manifest = part(tmp_path) / "manifest.json"
    whole = manifest.read_bytes()
    bad = FAULTS[fault](whole)
    assert bad != whole
    manifest.write_bytes(bad)
    async with Participant(tmp_path) as p:
        error = await refused(p, StateCorrupt)
        assert error.participant == "resources/scripted/0"
        opened = [call.removeprefix("open ") for call in p.files.calls if call.startswith("open ")]
        assert all(Path(path).parent == manifest.parent for path in opened)
        if fault.startswith("a file outside"):
            assert opened == [str(manifest)]
        manifest.write_bytes(whole)
        assert (await p.restore([A, B], "r2", digest=digest)).record_count == 2


@pytest.mark.behaviour("C171", "C170")
async def test_no_manifest_or_one_of_another_version(tmp_path: Path, digest: str) -> None:
    manifest = part(tmp_path) / "manifest.json"
    whole = manifest.read_bytes()
    async with Participant(tmp_path) as p:
        for version in (0, 3, 99):
            manifest.write_bytes(edited(lambda document: document.update(schema_version=version))(whole))  # noqa: B023
            error = await refused(p, StateCorrupt)
            assert f"schema_version {version}; readable here: 1, 2" in error.message
        manifest.unlink()
        assert str(manifest) in (await refused(p, StateNotFound)).message


@pytest.mark.behaviour("C170")
@pytest.mark.parametrize("harm", ["gone", "cut", "long", "flipped", "empty", "a link", "a directory", "a device"])
async def test_a_records_file_that_is_not_as_it_was_written(tmp_path: Path, digest: str, harm: str) -> None:
    (records,) = part(tmp_path).glob("records-*.gck")
    data = records.read_bytes()
    records.unlink()
    if harm in ("cut", "long", "flipped", "empty"):
        changed = {
            "cut": data[:-9],
            "long": data + b"\x00",
            "empty": b"",
            "flipped": data[:20] + b"\xff" + data[21:],
        }
        records.write_bytes(changed[harm])
    elif harm == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        records.symlink_to(tmp_path / "elsewhere")
    elif harm == "a directory":
        records.mkdir()
    elif harm == "a device":
        records.symlink_to("/dev/zero")
    async with Participant(tmp_path) as p:
        error = await refused(p, StateCorrupt)
        assert (records.name in error.message, error.participant) == (True, "resources/scripted/0")
        if harm == "flipped":
            assert set(error.episodes) <= {A, B}
            assert error.episodes


class Spoiled(ScriptedOwner):
    """Hands over bytes for b that are no MessagePack, as a disk or an author may spoil them."""

    async def export(self, scope: EpisodeScope) -> Any:
        async for batch in super().export(scope):
            bad = Record(B, "scripted", payloads={"state": Payload(Codec.MSGPACK, b"\xc1")})
            yield RecordBatch([each for each in batch.records if each.episode != B] + [bad], [])


@pytest.mark.behaviour("C160", "C170")
async def test_a_record_that_cannot_be_decoded(tmp_path: Path) -> None:
    """STATE_CORRUPT naming file, position and episode, before the owner is asked for anything."""
    async with Participant(tmp_path, owner=Spoiled()) as p:
        p.add("a", "b")
        await p.prepare()
        await p.commit()
    (records,) = part(tmp_path).glob("records-*.gck")
    async with Participant(tmp_path) as p:
        error = await refused(p, StateCorrupt)
        assert (error.episodes, error.participant) == ((B,), "resources/scripted/0")
        for text in (records.name, "record 1", "'state'"):
            assert text in error.message
        assert p.owner.stages.count == 0
        assert (await p.restore([A], "r2")).record_count == 1


@pytest.mark.behaviour("C184", "C170")
async def test_a_damaged_chunk_fails_who_needs_it_and_no_other(tmp_path: Path) -> None:
    async with Participant(tmp_path) as p:
        p.add("a", "b")
        for name, episode in (("a", A), ("b", B)):  # each in a chunk of its own
            p.owner.live[episode] = {"name": name, "text": name * 100_000}
        await p.prepare()
        await p.commit()
    (records,) = part(tmp_path).glob("records-*.gck")
    data = records.read_bytes()
    at = data.index(b"b" * 1000)
    records.write_bytes(data[:at] + b"x" + data[at + 1 :])
    async with Participant(tmp_path) as p:
        assert (await refused(p, StateCorrupt)).episodes == (B,)
        assert (await p.restore([A], "r2")).record_count == 1
        assert set(p.owner.live) == {A1}


@pytest.mark.behaviour("C185")
async def test_a_part_behind_a_link_is_refused_before_anything_is_opened(tmp_path: Path, digest: str) -> None:
    directory = part(tmp_path)
    directory.rename(tmp_path / "aside")
    directory.symlink_to(tmp_path / "aside")
    async with Participant(tmp_path) as p:
        error = await refused(p, InvalidArgument)
        assert "link" in error.message
        assert not [call for call in p.files.calls if call.startswith("open ")]


async def test_state_is_decoded_off_the_loop(tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that other calls are answered while a gigabyte of it is decoded; once each, if the owner wants it once."""
    threads: list[str] = []
    decode = payloads.decode

    def watched(payload: Payload, *, where: str = "") -> Any:
        if type(payload) is not payloads.DecodedPayload:  # that one is only handed out
            threads.append(threading.current_thread().name)
        return decode(payload, where=where)

    monkeypatch.setattr("gym_ckpt_grpc.storage.records.decode", watched)
    async with Participant(tmp_path) as p:
        await p.restore([A, B], digest=digest)
        assert p.owner.live == {A1: {"name": "a"}, B1: {"name": "b"}}
    assert len(threads) == 2
    assert all(name.startswith("gymckpt-io") for name in threads)
