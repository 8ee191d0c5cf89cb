"""No path call runs on an event loop's thread: not in a participant, not in a coordinator, not in what it serves.

Run as a program it plays one round and prints what Python's audit events saw on the loop's thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import open_channel, wire
from gym_ckpt_grpc.coordinator import Coordinator, Fleet, Server
from gym_ckpt_grpc.coordinator.served import CoordinatorServer
from gym_ckpt_grpc.protocol.identity import ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import FileLayer, LocalFiles, Retention
from gym_ckpt_grpc.testing import FakeOwner, serve
from gymckpt.v1 import coordinator_pb2 as pb
from gymckpt.v1 import coordinator_pb2_grpc

REPOSITORY = Path(__file__).parents[2]
CONTINUED = pb.CHECKPOINT_EPISODE_KIND_CONTINUED
EPISODES = [EpisodeId(f"r{number}") for number in range(8)]


async def play(root: Path, files: FileLayer, ready: Callable[[], None]) -> None:
    """Checkpoints of every way to take one, a restore, and all that can be asked and removed.

    ready: called once everything is built; building resolves the root, wherever the builder stands.
    """
    async with AsyncExitStack() as stack:
        servers: list[Server] = []
        owners: list[FakeOwner] = []
        for kind in ParticipantKind:
            owners.append(FakeOwner(kind))
            served = await stack.enter_async_context(serve(owners[-1], roots=[root], files=files))
            owners[-1].add(*(episode.capture_key for episode in EPISODES))
            servers.append(Server(kind=kind, service="test", address=served.address))
        coordinator = Coordinator(
            Fleet(servers), root=str(root), files=files, controller_id="trainer", retention=Retention(keep_last=2)
        )
        ready()
        await stack.enter_async_context(coordinator)
        await take(coordinator, "zero")
        await coordinator.hold("zero", "eval")
        await take(coordinator, "one")
        await take(coordinator, "two", reopen_when_captured=True)
        await take(coordinator, "three", incremental=True)
        await take(coordinator, "four", incremental=True, reopen_when_captured=True)
        await coordinator.status()
        for owner in owners:
            owner.live.clear()
        async with coordinator.restoring("latest"):
            pass
        assert all(len(owner.live) == len(EPISODES) for owner in owners)
        await coordinator.release("zero", "eval")
        server = await stack.enter_async_context(CoordinatorServer(coordinator))
        channel = await stack.enter_async_context(open_channel(server.address))
        await ask(coordinator_pb2_grpc.CoordinatorServiceStub(channel))


async def take(coordinator: Coordinator, checkpoint_id: str, **options: Any) -> None:
    async with coordinator.checkpoint(checkpoint_id=checkpoint_id) as checkpoint:
        report = await checkpoint.prepare(ready_within=10)
        await checkpoint.commit(report.continued(EPISODES), **options)
        await checkpoint.publish()


async def ask(stub: Any) -> None:
    """The served coordinator: reading, taking and deleting."""
    await stub.ListParticipants(pb.ListParticipantsRequest(), timeout=20)
    listed = await stub.ListCheckpoints(pb.ListCheckpointsRequest(), timeout=20)
    assert len(listed.checkpoints) >= 3
    await stub.GetCheckpoint(pb.GetCheckpointRequest(checkpoint_id="three"), timeout=20)
    for request, call in (
        (pb.ListCheckpointEpisodesRequest(checkpoint_id="three", kind=CONTINUED), stub.ListCheckpointEpisodes),
        (pb.VerifyCheckpointRequest(checkpoint_id="three"), stub.VerifyCheckpoint),
    ):
        assert [message async for message in call(request, timeout=20)]
    await stub.PrepareCheckpoint(pb.PrepareCheckpointRequest(checkpoint_id="five"), timeout=20)
    scope = wire.episode_list(EPISODES)
    await stub.CommitCheckpoint(pb.CommitCheckpointRequest(checkpoint_id="five", scope=scope), timeout=20)
    await stub.PublishCheckpoint(pb.PublishCheckpointRequest(checkpoint_id="five"), timeout=20)
    await stub.ResumeCheckpoint(pb.ResumeCheckpointRequest(checkpoint_id="five"), timeout=20)
    await stub.DeleteCheckpoint(pb.DeleteCheckpointRequest(checkpoint_id="zero"), timeout=20)


def on_a_loop() -> bool:
    """Whether an event loop runs in this thread now."""
    return asyncio._get_running_loop() is not None


@dataclass
class Watch:
    """Calls by name, and those that came on a loop's thread once it was armed."""

    armed: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    on_loop: list[str] = field(default_factory=list)

    def arm(self) -> None:
        self.armed = True

    def note(self, call: str) -> None:
        name = call.partition("(")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.armed and on_a_loop():  # not raised: whoever meets an error may try again for long
            self.on_loop.append(call)


class Watched:
    """A file layer, or a sink or source of it, every call of which is noted."""

    def __init__(self, inner: Any, watch: Watch, prefix: str = "") -> None:
        self._inner, self._watch, self._prefix = inner, watch, prefix

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return self._noted(name, attribute) if callable(attribute) else attribute

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **more: Any) -> Any:
            self._watch.note(f"{self._prefix}{name}({arguments[:1]})")
            done = call(*arguments, **more)
            kind = {"create": "sink.", "open": "source."}.get(name)
            return Watched(done, self._watch, kind) if kind else done

        return noted


async def test_no_call_of_the_file_layer_runs_on_the_loop(tmp_path: Path) -> None:
    watch = Watch()
    await play(tmp_path, Watched(LocalFiles(), watch), watch.arm)
    assert watch.on_loop == []
    used = {"create", "sink.write", "sink.sync", "publish", "sync_dir", "open", "source.read", "move_dir"}
    assert used <= set(watch.calls)


AUDITED = ("open", "os.", "shutil.", "glob.", "pathlib.", "tempfile.")
UNAUDITED = ("stat", "lstat", "fsync", "fdatasync", "statvfs", "readlink", "access", "pread", "fstat")
"""Calls of `os` that raise no audit event."""


@contextmanager
def audited(seen: list[str], elsewhere: list[str]) -> Iterator[Callable[[], None]]:
    """Note what touches a path: `seen` on a loop's thread, `elsewhere` on others, once what it gives was called."""
    active = False

    def begin() -> None:
        nonlocal active
        active = True

    def note(event: str, target: object) -> None:
        if active and event.startswith(AUDITED) and not _is_code(target):
            (seen if on_a_loop() else elsewhere).append(f"{event}({target!r}) on {threading.current_thread().name}")

    def standing_for(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **more: Any) -> Any:
            note(f"os.{name}", arguments[0])
            return real(*arguments, **more)

        return call

    sys.addaudithook(lambda event, arguments: note(event, arguments[0] if arguments else ""))
    with pytest.MonkeyPatch.context() as patch:
        for name in UNAUDITED:
            patch.setattr(os, name, standing_for(name))
        try:
            yield begin
        finally:
            active = False


def _is_code(target: object) -> bool:
    """Modules that are imported late, and tracebacks that read them; not what a round should be blamed for."""
    return str(target).endswith((".py", ".pyc", ".so")) or str(target).startswith((sys.prefix, sys.base_prefix))


def test_no_other_path_call_runs_on_the_loop_either(tmp_path: Path) -> None:
    """The whole of Python's own calls, in a process of its own: an audit hook stays for good."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.control.test_paths_off_the_loop", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["on_loop"] == []
    assert found["elsewhere"] > 100, "the hook saw nothing"


def main(root: Path) -> None:
    seen: list[str] = []
    elsewhere: list[str] = []
    with audited(seen, elsewhere) as begin:
        asyncio.run(play(root, LocalFiles(), begin))
    print(json.dumps({"on_loop": seen, "elsewhere": len(elsewhere)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
