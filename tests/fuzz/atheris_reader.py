"""Coverage-guided fuzzing of the reader: `make fuzz-reader` (MINUTES=30).

An input is a byte that names a checkpoint of the corpus and one of its files, and other bytes for that file; whatever
names the file is put right. The mutator knows the structure: it changes fields and chunks and seals them again.
What it finds is left as `found-*` in the directory given last; `... atheris_reader.py FILE` repeats it.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gym_ckpt_grpc.storage"]):
    from tests.fuzz.store_cases import IDS, Case, Corpus, read_all_ways, with_aggregate, with_manifest, with_records
    from tests.fuzz.store_mutants import changed_json, changed_records, parted, sealed

RECORDS, MANIFEST, AGGREGATE = range(3)
KINDS = 3
LONGEST = 1 << 18
CORPUS = Corpus("atheris")


def what(data: bytes) -> tuple[str, int]:
    """The checkpoint and the file that an input is for."""
    selector = data[0] if data else 0
    return IDS[selector % len(IDS)], selector // len(IDS) % KINDS


def read_one(data: bytes) -> None:
    """Read the checkpoint with these bytes in the place of its own; anything but a typed error is a find."""
    name, kind = what(data)
    if kind == RECORDS:
        files = with_records(CORPUS, name, data[1:])
    else:
        files = CORPUS.files.copy()
        (with_manifest if kind == MANIFEST else with_aggregate)(CORPUS, name, files, data[1:])
    read_all_ways(CORPUS, Case(0, name, files, False, "atheris"))


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """One more input, made from another."""
    rng = random.Random(seed)
    if len(data) < 2 or rng.random() < 0.05:
        data = rng.choice(seeds())
    head, body = data[:1], data[1:]
    roll = rng.random()
    if what(data)[1] != RECORDS:
        try:
            body = changed_json(rng, body) if roll < 0.6 else atheris.Mutate(body, max_size - 1)
        except (ValueError, RecursionError, IndexError, TypeError):
            body = atheris.Mutate(body, max_size - 1)
    elif roll < 0.6:
        body = changed_records(rng, body, CORPUS.records_files)
    elif roll < 0.9 and (parts := parted(body)) is not None:
        index = parts[1].SerializeToString()
        body = sealed(parts[0], atheris.Mutate(index, len(index) + 200))
    else:
        body = atheris.Mutate(body, max_size - 1)
    return (head + body)[:max_size]


def seeds() -> list[bytes]:
    """Real files, each as an input."""
    made = []
    for at, name in enumerate(IDS):
        paths = (CORPUS.records_path(name), CORPUS.manifest_path(name), CORPUS.root.location(name).aggregate)
        made += [bytes([at + len(IDS) * kind]) + CORPUS.data(path) for kind, path in enumerate(paths)]
    return made


def main(arguments: list[str]) -> None:
    """Arguments as of libFuzzer; a directory given last gets the seeds."""
    directory = Path(arguments[-1])
    if directory.is_dir():
        for number, data in enumerate(seeds()):
            (directory / f"seed-{number}").write_bytes(data)
    limits = [f"-max_len={LONGEST}", "-timeout=30", "-rss_limit_mb=2048", f"-artifact_prefix={directory.parent}/found-"]
    atheris.Setup([arguments[0], *limits, *arguments[1:]], read_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main(sys.argv)
