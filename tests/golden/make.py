"""Write the golden checkpoints of today's format: once for each format version, by hand, before it is released.

    python -m tests.golden.make

Refuses to touch a fixture that exists.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles, write_part
from tests.e2e.plays import play
from tests.e2e.rig import rig
from tests.golden.scenes import (
    CHECKPOINT,
    DIGESTS,
    FORMAT,
    HELD_AFTER,
    HELD_TURN,
    HERE,
    LATER,
    PLACE,
    Scene,
    scenes,
    value_records,
)


def digests() -> dict[str, str]:
    """Path below this directory -> sha256, of every file of every fixture."""
    return {
        path.relative_to(HERE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(HERE.glob("format-*/**/*"))
        if path.is_file()
    }


async def make_scene(scene: Scene, out: Path, scratch: Path) -> None:
    """Run a deployment to the middle of its rollouts, checkpoint it twice, kill it, and keep what a restore needs.

    The second checkpoint points into the first.
    """
    async with rig(scratch, scene.topology) as gym:
        await gym.start()
        await gym.hold_tokens(HELD_AFTER, turn=HELD_TURN)
        gym.send(scene.tasks)
        for task in scene.tasks:
            await gym.held_tokens(task.rollout_id)
        await gym.checkpoint()
        for task in scene.tasks:  # cut, continued, and held once more
            await gym.held_tokens(task.rollout_id)
        async with gym.prepared() as checkpoint:
            await gym.commit(checkpoint, incremental=True)
        await gym.crash()
        shutil.copytree(gym.plan.root, out / "root")
        shutil.copytree(gym.plan.staged, out / "staged")
    rollouts = {task.rollout_id: {"task": task.as_row(), "result": asdict(play(task).result)} for task in scene.tasks}
    (out / "expected.json").write_bytes(orjson.dumps(rollouts, option=orjson.OPT_INDENT_2) + b"\n")


def make_values(out: Path) -> None:
    """A part with the values that codecs get wrong."""
    kind, service, instance = PLACE
    root = CheckpointRoot((out / "root").as_uri(), files=LocalFiles())
    identity = ParticipantIdentity(kind, service, instance, incarnation_id="golden")
    records, base = value_records(), root.location(CHECKPOINT)
    write_part(root.files, base, identity, checkpoint_id=CHECKPOINT, records=records[::2], restarts=0)
    later = root.location(LATER)
    write_part(root.files, later, identity, checkpoint_id=LATER, records=records, base=base, compress=True)


def main() -> None:
    """Make every fixture of the format."""
    if FORMAT.exists():
        sys.exit(f"{FORMAT.name} exists, and a fixture is never written again")
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made"
        for scene in scenes().values():
            out = made / scene.name
            out.mkdir(parents=True)
            asyncio.run(make_scene(scene, out, Path(scratch) / f"{scene.name}-life"))
            print(f"{scene.name}: {len(scene.tasks)} rollouts, {size_of(out):,} bytes")
        (made / "values" / "root").mkdir(parents=True)
        make_values(made / "values")
        shutil.copytree(made, FORMAT)
    DIGESTS.write_bytes(orjson.dumps(digests(), option=orjson.OPT_INDENT_2) + b"\n")


def size_of(directory: Path) -> int:
    """Bytes of all its files."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def read_expected(fixture: Path) -> dict[str, Any]:
    """By rollout: its task and what it gave when nobody killed it."""
    found: dict[str, Any] = orjson.loads((fixture / "expected.json").read_bytes())
    return found


if __name__ == "__main__":
    main()
