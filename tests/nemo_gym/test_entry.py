"""`entry.py` as the framework's own `gym env start` starts it: by path, in the server's directory."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gym_ckpt_grpc.coordinator import Coordinator, Finding, Fleet, Server
from gym_ckpt_grpc.integrations.nemo_gym import entry
from gym_ckpt_grpc.minigym.ports import free_ports
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.supervisor import Supervisor

APP = """
import json
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
import sys
from importlib.util import find_spec

import agent  # a sibling with the name of a module of this project's integration
from options import OPTIONS

with open("words.json") as file:
    WORDS = json.load(file)

class Tiny(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    def setup_webserver(self):
        app = super().setup_webserver()
        told = {"words": WORDS, "siblings": [agent.NAME, OPTIONS], "ours": find_spec("dispatch_gate")}
        app.get("/docs/told")(lambda: told)  # a route that is never held
        return app

    async def verify(self, body):
        raise NotImplementedError

if __name__ == "__main__":
    Tiny.run_webserver()
"""

pytestmark = [pytest.mark.timeout(120), pytest.mark.e2e]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a server of the user's own."""
    place = tmp_path / "resources_servers" / "tiny"
    place.mkdir(parents=True)
    (place / "app.py").write_text(APP)
    (place / "agent.py").write_text("NAME = 'a sibling'\n")
    (place / "options.py").write_text("OPTIONS = 'another'\n")
    (place / "words.json").write_text('["one"]')
    return place


def relative(directory: Path) -> str:
    return os.path.relpath(entry.__file__, directory)


def variables(directory: Path, port: int, control: str, **block: Any) -> dict[str, str]:
    """What the framework sets."""
    server = {"entrypoint": relative(directory), "host": "127.0.0.1", "port": port, **block}
    config = {
        "head_server": {"host": "127.0.0.1", "port": 1},
        "dry_run": False,
        "gym_ckpt": {"root": str(directory.parents[1] / "ckpt"), "instances": {"mine": {"control": control}}},
        "mine": {"resources_servers": {"tiny": server}},
    }
    return {"NEMO_GYM_CONFIG_DICT": json.dumps(config), "NEMO_GYM_CONFIG_PATH": "mine"}


@asynccontextmanager
async def started(directory: Path, logs: Path) -> AsyncIterator[tuple[int, str]]:
    """The server's port, and the address of its control plane."""
    port, control = free_ports(2)
    address = f"127.0.0.1:{control}"
    program = ["/bin/sh", "-c", f'cd {directory} && exec {sys.executable} "{relative(directory)}"']
    async with Supervisor(logs) as supervisor:
        spec = ProcessSpec("mine", program, port, health="/healthz", env=variables(directory, port, address))
        await supervisor.start([spec], within=100)
        yield port, address
        await supervisor.crash()


async def test_a_server_that_the_framework_starts(directory: Path, tmp_path: Path) -> None:
    """It is a participant, and all else is as it would be without: its siblings, its files, its routes."""
    (tmp_path / "ckpt").mkdir()
    async with started(directory, tmp_path / "logs") as (port, control), aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{port}/docs/told") as answer:
            assert await answer.json() == {"words": ["one"], "siblings": ["a sibling", "another"], "ours": None}
        async with http.post(f"http://127.0.0.1:{port}/seed_session", json={}) as answer:
            assert answer.status == 400  # the gate's: it needs the rollout's id
            assert (await answer.json())["error"]["code"] == "ROLLOUT_ID_REQUIRED"
        fleet = Fleet([Server(kind="resources", service="mine", address=control)], require_kinds=[])
        async with Coordinator(fleet, root=str(tmp_path / "ckpt")) as coordinator:
            (sighting,) = await coordinator.status()
            assert (sighting.finding, sighting.identity and sighting.identity.service) == (Finding.OK, "mine")


def ended(directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A start that comes to nothing."""
    return subprocess.run(
        [sys.executable, relative(directory)],
        cwd=directory,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_what_is_wrong_is_one_line(directory: Path) -> None:
    """No traceback, and nothing is served."""
    without = ended(directory, NEMO_GYM_CONFIG_PATH="")
    assert (without.returncode, without.stdout) == (2, "")
    assert "NEMO_GYM_CONFIG_PATH names no instance" in without.stderr
    workers = ended(directory, **variables(directory, 1, "127.0.0.1:1", num_workers=4))
    assert (workers.returncode, workers.stdout) == (2, "")
    assert workers.stderr.startswith("error: INVALID_ARGUMENT: mine.num_workers is 4")
    assert len(workers.stderr.splitlines()) == 1


def test_our_package_is_missing_in_the_servers_environment(tmp_path: Path) -> None:
    """A server may have an environment of its own; it needs our package too."""
    code = f"import runpy, sys; sys.path[:0] = ['.']; runpy.run_path({entry.__file__!r}, run_name='__main__')"
    hidden = "import sys; sys.modules['gym_ckpt_grpc'] = None; " + code
    without = subprocess.run(
        [sys.executable, "-c", hidden], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert without.returncode == 2
    assert "gym_ckpt_grpc is not installed in" in without.stderr
    assert "Traceback" not in without.stderr


def test_importing_it_changes_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEMO_GYM_CONFIG_PATH", raising=False)
    before = list(sys.path)
    importlib.reload(entry)
    assert entry.main() == 2
    assert sys.path == before
    assert "names no instance" in capsys.readouterr().err
