"""The commands of an operator against a living deployment and its root."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.auth import TokenFile
from gym_ckpt_grpc.coordinator import Coordinator, FleetReport
from gym_ckpt_grpc.minigym.deployment import Deployment
from gym_ckpt_grpc.protocol import EpisodeId
from tests.e2e.processes import clean_env, listening, run, started, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@dataclass(frozen=True)
class Up:
    """A deployment that `gym-ckpt up` keeps running, and what it printed about itself."""

    plan: Deployment
    printed: dict[str, Any]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("up")
    with started("up", "--json", "--rollouts", "8", "--directory", str(directory)) as running:
        assert running.popen.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            line = running.popen.stdout.readline()
            assert line, running.lines
            lines.append(line)
        yield Up(Deployment.load(directory / "minigym.json"), json.loads("".join(lines)))
        assert running.interrupt() == 130


async def checkpoint(plan: Deployment) -> str:
    """Take and publish a checkpoint of the deployment, its rollouts in flight included; gives its id."""
    token = TokenFile(plan.token_file("controller"))
    async with Coordinator(plan.fleet(), root=plan.root.as_uri(), controller_id="test", token=token) as coordinator:
        async with coordinator.checkpoint(deadline=60) as taken:
            report = await taken.prepare(ready_within=20)
            await taken.commit(in_flight(report))
            await taken.publish()
        return taken.id


def in_flight(report: FleetReport) -> list[EpisodeId]:
    """No trainer is asked here: an empty scope is a checkpoint too."""
    return report.continued([])


def test_up_prints_what_the_other_commands_need(up: Up) -> None:
    """Addresses, fleet file, root and token file; the token itself is nowhere."""
    roles = {server["role"] for server in up.printed["servers"]}
    assert roles == {"environment", "agent", "policy_model", "counter", "blackjack", "inference"}
    secret = Path(up.printed["token_file"]).read_text().strip()
    assert secret not in json.dumps(up.printed)
    assert listening([int(s["url"].rpartition(":")[2]) for s in up.printed["servers"]])


def test_status_shows_every_participant(up: Up) -> None:
    """With an observer's token; it changes nothing."""
    ended = run("status", "--json", "--fleet", up.printed["fleet"], "--token-file", up.printed["observer_token_file"])
    assert ended.returncode == 0, ended.stderr
    servers = json.loads(ended.stdout)["servers"]
    assert {s["service"] for s in servers} == {"environment", "agent", "policy_model", "counter", "blackjack"}
    assert {s["status"]["phase"] for s in servers} == {"PHASE_IDLE"}


def test_the_token_may_come_from_the_environment(up: Up) -> None:
    """As a file's name or as the value."""
    token_file = up.printed["token_file"]
    by_file = run("status", "--json", "--fleet", up.printed["fleet"], GYM_CKPT_TOKEN_FILE=token_file)
    by_value = run("status", "--json", GYM_CKPT_FLEET=up.printed["fleet"], GYM_CKPT_TOKEN=Path(token_file).read_text())
    assert by_file.returncode == by_value.returncode == 0


def test_status_without_a_token_is_refused(up: Up) -> None:
    """Exit 3, and each server is named with the finding REFUSED."""
    ended = run("status", "--json", "--fleet", up.printed["fleet"])
    assert ended.returncode == 3
    assert {s["finding"] for s in json.loads(ended.stdout)["servers"]} == {"REFUSED"}


async def test_show_and_verify_a_published_checkpoint(up: Up) -> None:
    """`latest` and the id name the same; a person's table and a program's object agree."""
    checkpoint_id = await checkpoint(up.plan)
    root = up.printed["root"]
    shown = json.loads(run("show", "--json", "--root", root).stdout)
    assert shown["checkpoint_id"] == checkpoint_id
    assert shown["published"] is True
    assert len(shown["members"]) == 5
    assert checkpoint_id in run("show", "--root", root, checkpoint_id).stdout
    verified = run("verify", "--json", "--root", root)
    assert verified.returncode == 0
    assert json.loads(verified.stdout)["intact"] is True


async def test_verify_names_the_damaged_file(up: Up) -> None:
    """One flipped byte: exit 1, and the fault names the file."""
    checkpoint_id = await checkpoint(up.plan)
    [records] = (up.plan.root / "checkpoints" / checkpoint_id / "participants").glob("environment/*/*/records-*.gck")
    damaged = bytearray(records.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    records.chmod(0o600)
    records.write_bytes(damaged)
    ended = run("verify", "--json", "--root", up.printed["root"], checkpoint_id)
    assert ended.returncode == 1
    faults = json.loads(ended.stdout)["faults"]
    assert any(records.name in fault["file"] for fault in faults)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("show", "--root", "/nonexistent"), 2, "/nonexistent"),
        (("show",), 2, "--root"),
        (("status",), 2, "--fleet"),
        (("status", "--fleet", "/nonexistent.yaml"), 2, "/nonexistent.yaml"),
        (("status", "--token-file", "/nonexistent", "--fleet", "x"), 2, "x"),
        (("demo", "--leave-out", "agnet"), 2, "agnet"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_a_wrong_command_line_exits_2_and_says_why(arguments: tuple[str, ...], code: int, text: str) -> None:
    """Never a traceback."""
    ended = run(*arguments)
    assert ended.returncode == code, ended.stderr
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_dead_server_ends_up_and_is_named(tmp_path: Path) -> None:
    """`up` does not stay half up: it says which server ended, and its logs' end."""
    with started("up", "--json", "--directory", str(tmp_path)) as running:
        assert running.popen.stdout is not None
        printed = ""
        while not printed.endswith("}\n") or printed.count("{") != printed.count("}"):
            printed += running.popen.stdout.readline()
        pid = next(s["pid"] for s in json.loads(printed)["servers"] if s["role"] == "counter")
        subprocess.run(["kill", "-KILL", str(pid)], check=True, env=clean_env())
        assert running.popen.wait(30) == 1
        assert until(lambda: any("counter" in line for line in running.lines))
