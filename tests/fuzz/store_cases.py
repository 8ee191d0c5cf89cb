"""Checkpoints with changed files, read the ways they are read: right, or refused with a typed error.

Run as a program, `python -m tests.fuzz.store_cases SEED COUNT`, it tries so many cases in a process of its own, whose
memory is watched; a case that fails is named by its number.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import resource
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    AggregateManifest,
    CheckpointRoot,
    EpisodeLists,
    Level,
    Member,
    Record,
    check_members,
    encode,
    read_episodes,
    read_part,
    verify_checkpoint,
    write_aggregate,
)
from tests.fuzz.store_mutants import changed_json, changed_records, parted, scrambled
from tests.fuzz.store_values import Values, record
from tests.storage.builders import AGENT, write
from tests.storage.recording_files import ROOT, RecordingFiles

IDS = ("full", "small", "zstd", "on-full", "on-zstd")
SPARE = 64 << 20
"""Bytes that reading may take beyond what the file declares."""
ADDRESS_SPACE = 4 << 30
"""Bytes of address space that a case may add; less than any wild length asks for."""
PATIENCE = 30.0
"""Seconds for one case before the process ends with a stack."""


@dataclass
class Case:
    """One changed checkpoint. exact: nothing but what was written may be read from it."""

    number: int
    checkpoint_id: str
    files: RecordingFiles
    exact: bool
    what: str


@dataclass
class Corpus:
    """Published checkpoints of one participant: plain, compressed, and incremental on each, from a seed."""

    seed: str
    files: RecordingFiles = field(default_factory=RecordingFiles)
    records: dict[str, list[Record]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.seed} corpus")
        values, root = Values(rng), self.root
        epoch = root.sequence.claim("ctl", "run").epoch
        for name in IDS:
            base = name.removeprefix("on-") if name.startswith("on-") else ""
            if base:
                made = [new if number % 3 == 0 else old for number, (old, new) in enumerate(self._pairs(values, base))]
            else:
                made = [_record(values, number) for number in range(0 if name == "small" else 12)] + _plain()
            self.records[name] = made
            self._save(name, made, base, compress="zstd" in name, epoch=epoch)

    @cached_property
    def root(self) -> CheckpointRoot:
        return CheckpointRoot(ROOT, self.files)

    def _pairs(self, values: Values, base: str) -> list[tuple[Record, Record]]:
        return [(old, _record(values, number)) for number, old in enumerate(self.records[base])]

    def _save(self, name: str, made: list[Record], base: str, *, compress: bool, epoch: int) -> None:
        location = self.root.location(name)
        info = write(
            self.files,
            self.root,
            name,
            records=made,
            chunk_size=400,
            base=self.root.location(base) if base else None,
            compress=compress,
            documents={"keys": {"a": [1, "b"]}},
        )
        manifest = AggregateManifest(
            checkpoint_id=name,
            run_id="run",
            controller_id="ctl",
            epoch=epoch,
            members=(Member.of(AGENT, info),),
        )
        lists = EpisodeLists(info.episodes, {EpisodeId("late"): "straggler"})
        _, digest = write_aggregate(self.files, location, manifest, episodes=lists)
        self.root.publish(name, digest, epoch=epoch)

    # ---- files of a checkpoint

    def manifest_path(self, name: str) -> str:
        return self.root.location(name).part(AGENT.place).manifest

    def manifest(self, name: str) -> dict[str, Any]:
        """The part's manifest as it was written."""
        document: dict[str, Any] = json.loads(self.data(self.manifest_path(name)))
        return document

    def records_path(self, name: str) -> str:
        own = next(
            entry for entry in self.manifest(name)["files"] if entry["role"] == "records" and not entry["checkpoint"]
        )
        return self.root.location(name).part(AGENT.place).file(own["name"])

    def data(self, path: str) -> bytes:
        return self.all_files[path]

    @cached_property
    def all_files(self) -> dict[str, bytes]:
        return self.files.all_files()

    @cached_property
    def records_files(self) -> list[bytes]:
        """The bytes of every records file."""
        return [self.data(self.records_path(name)) for name in IDS]


def _record(values: Values, number: int) -> Record:
    return record(values, number)[0]


def _plain() -> list[Record]:
    """Records that compress well, and one without payloads."""
    text = "the same words again and again " * 40
    made = [
        Record(EpisodeId(f"plain-{at}"), "s", payloads={"state": encode({"at": at, "text": text})}) for at in range(3)
    ]
    return [*made, Record(EpisodeId("empty"), "s")]


def with_records(corpus: Corpus, name: str, data: bytes) -> RecordingFiles:
    """The root in which a checkpoint has other bytes as its records file, and all that names it put right."""
    files = corpus.files.copy()
    part = corpus.root.location(name).part(AGENT.place)
    parts = parted(data)
    digest = hashlib.sha256(parts[1].SerializeToString() if parts else data).hexdigest()
    if parts is not None:  # of the bytes themselves: serializing again may differ
        digest = hashlib.sha256(data[len(parts[0]) : len(data) - 56]).hexdigest()
    document = corpus.manifest(name)
    for entry in document["files"]:
        if entry["role"] == "records" and not entry["checkpoint"]:
            document["bytes"] += len(data) - entry["size"]
            entry.update(name=f"records-{digest}.gck", size=len(data), digest=digest)
    if parts is not None:
        document["records"] = len(parts[1].records.attempts)
        document["state_bytes"] = min(sum(parts[1].payloads.lengths), 2**63)
    files.put(part.file(f"records-{digest}.gck"), data)
    with_manifest(corpus, name, files, json.dumps(document).encode())
    return files


def with_manifest(corpus: Corpus, name: str, files: RecordingFiles, data: bytes) -> None:
    """Other bytes as the part's manifest, and all that names it put right."""
    files.damage(corpus.manifest_path(name), data)
    path = corpus.root.location(name).aggregate
    document = json.loads(corpus.data(path))
    member = document["members"][0]
    member["manifest_digest"] = hashlib.sha256(data).hexdigest()
    try:
        changed = json.loads(data)
        member.update(files=changed["files"], bytes=changed["bytes"], record_count=changed["records"])
        member.update(state_bytes=changed["state_bytes"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    with_aggregate(corpus, name, files, json.dumps(document).encode("utf-8", "surrogatepass"))


def with_aggregate(corpus: Corpus, name: str, files: RecordingFiles, data: bytes) -> None:
    """Other bytes as the aggregate manifest, published as such."""
    files.damage(corpus.root.location(name).aggregate, data)
    number = next(entry.number for entry in corpus.root.sequence.publications() if entry.checkpoint_id == name)
    path = corpus.root.sequence.path(number)
    document = json.loads(corpus.data(path))
    files.damage(path, json.dumps(document | {"manifest_digest": hashlib.sha256(data).hexdigest()}).encode())


def make_case(corpus: Corpus, number: int) -> Case:
    """The case of a number: one file of one checkpoint changed in one way or a few."""
    rng = random.Random(f"{corpus.seed} {number}")
    name = rng.choice(IDS)
    location, kind = corpus.root.location(name), rng.randrange(12)
    data = corpus.data(corpus.records_path(name))
    if kind <= 6:
        return Case(number, name, with_records(corpus, name, _changed(rng, data, corpus)), False, "records, sealed")
    files = corpus.files.copy()
    if kind == 7:
        files.damage(corpus.records_path(name), scrambled(rng, data, corpus.records_files))
        return Case(number, name, files, True, "records")
    if kind == 8:  # another checkpoint's, whole: swapped parts
        other = rng.choice([other for other in IDS if other != name])
        files.damage(corpus.records_path(name), corpus.data(corpus.records_path(other)))
        if rng.random() < 0.5:
            files.damage(corpus.manifest_path(name), corpus.data(corpus.manifest_path(other)))
        return Case(number, name, files, True, f"swapped with {other}")
    if kind == 9:
        with_manifest(corpus, name, files, changed_json(rng, corpus.data(corpus.manifest_path(name))))
        return Case(number, name, files, False, "manifest, sealed")
    if kind == 10:
        with_aggregate(corpus, name, files, changed_json(rng, corpus.data(location.aggregate)))
        return Case(number, name, files, False, "aggregate, sealed")
    path = rng.choice([path for path in corpus.all_files if "/checkpoints/" in path and not path.endswith(".gck")])
    files.damage(path, changed_json(rng, corpus.data(path)))
    return Case(number, name, files, True, path)


def _changed(rng: random.Random, data: bytes, corpus: Corpus) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = changed_records(rng, data, corpus.records_files)
    return data


# ---- reading


def read_all_ways(corpus: Corpus, case: Case) -> list[str]:
    """Read a case as a restore does, and as `verify` does; what each came to. Raises AssertionError, or what it met."""
    root = CheckpointRoot(ROOT, case.files)
    found = [_read_records(corpus, case, root, scope) for scope in (None, {EpisodeId("plain-1"), EpisodeId("roll-0")})]
    assert not [each for each in found if each.startswith("nameless")], found
    location = root.location(case.checkpoint_id)
    try:
        manifest = root.find(case.checkpoint_id).manifest
        check_members(case.files, location, manifest)
        read_episodes(case.files, location, manifest)
    except (StateCorrupt, StateNotFound) as error:
        found.append(type(error).__name__)
    findings = list(verify_checkpoint(root, case.checkpoint_id))
    assert findings[-1].level in (Level.PASSED, Level.FAILED)
    found.append(findings[-1].level)
    return found


def _read_records(corpus: Corpus, case: Case, root: CheckpointRoot, scope: set[EpisodeId] | None) -> str:
    location, written = root.location(case.checkpoint_id), corpus.records[case.checkpoint_id]
    try:
        part = read_part(case.files, location, AGENT.place, checkpoint_id=case.checkpoint_id, scope=scope)
        for each in part.records:
            for name in each.payloads:
                each.decode(name)
    except (StateCorrupt, StateNotFound) as error:
        return type(error).__name__ if ROOT in error.message else f"nameless: {error.message}"
    if case.exact:
        assert list(part.records) == [each for each in written if scope is None or each.episode in scope]
    return "right" if case.exact else "read"


def declared(case: Case) -> int:
    """Bytes that the files of a case hold, and say that they hold uncompressed; an index again, as it is parsed."""
    total = 0
    for path, data in case.files.all_files().items():
        total += len(data)
        if path.endswith(".gck") and (parts := parted(data)) is not None:
            index = parts[1]
            total += index.ByteSize()
            chunks = [*index.chunks, *(base.chunk for base in index.base_chunks)]
            total += sum(min(chunk.raw_length, chunk.stored_length << 16, 2**31) for chunk in chunks)
    return total


def _status(name: str) -> int:
    """A figure of this process's memory, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def _grown(before: int) -> int:
    return _status("VmHWM") - before


def check_case(corpus: Corpus, case: Case) -> list[str]:
    """Read a case, and compare what that took with what the files declare."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = _status("VmRSS")
    try:
        found = read_all_ways(corpus, case)
    finally:
        faulthandler.cancel_dump_traceback_later()
    grown, allowed = _grown(before), declared(case) + SPARE
    assert grown <= allowed, f"took {grown} bytes, {allowed} are allowed"
    return found


def run(seed: str, count: int, first: int = 0) -> dict[str, int]:
    """Try the cases of these numbers; counts of what they came to. Raises with the first that fails."""
    corpus = Corpus(seed)
    seen: Counter[str] = Counter()
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + ADDRESS_SPACE, resource.RLIM_INFINITY))
    for number in range(first, first + count):
        case = make_case(corpus, number)
        try:
            seen.update(check_case(corpus, case))
        except BaseException:
            print(f"case {number} of seed {seed}: {case.what} of {case.checkpoint_id}", file=sys.stderr)
            traceback.print_exc()
            raise SystemExit(1) from None
    return dict(seen)


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)))
