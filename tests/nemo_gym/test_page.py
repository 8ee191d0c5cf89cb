"""docs/nemo-gym.md: every block of it is run, by one bash, as real processes on loopback; and its tables are true."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from gym_ckpt_grpc.integrations.nemo_gym.agent_table import AGENTS
from gym_ckpt_grpc.integrations.nemo_gym.audited import TABLE
from gym_ckpt_grpc.integrations.nemo_gym.environment_table import ENVIRONMENTS
from gym_ckpt_grpc.integrations.nemo_gym.hooks.known import KNOWN
from gym_ckpt_grpc.integrations.nemo_gym.options import options_of
from gym_ckpt_grpc.minigym.ports import free_ports
from gym_ckpt_grpc.protocol.errors import InvalidArgument
from tests.testing.pages import PORT, REPOSITORY, blocks_of

PAGE = "nemo-gym.md"
TEN, *REST = [text.splitlines() for language, _, text in blocks_of(PAGE) if language == "sh"]
COMMANDS = [*TEN, *(line for lines in REST for line in lines)]
TEXT = (REPOSITORY / "docs" / PAGE).read_text(encoding="utf-8")


def test_every_block_is_run() -> None:
    """Each fence is a named file that a command uses, or a list of commands."""
    for language, name, _ in blocks_of(PAGE):
        assert language in ("python", "yaml", "sh")
        assert (language == "sh") is not bool(name)
        assert not name or any(name in line for line in COMMANDS), name


def test_ten_lines() -> None:
    """From the installation to a run that has survived."""
    assert len(TEN) == 10
    assert TEN[0].startswith("pip install -q ")


def names_in_rows_after(heading: str) -> list[set[str]]:
    """The names in code style of each row of the first table behind a text: first cells, and last cells."""
    table = TEXT.split(heading, 1)[1].split("\n|", 1)[1].split("\n\n", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return [set(re.findall(r"`(\w+)`", " ".join(row[at] for row in rows))) for at in (0, -1)]


def servers_of(places: Iterable[str]) -> set[str]:
    """`resources_servers.mcqa.app:Class` -> `mcqa`."""
    return {place.split(".")[1] for place in places}


def test_the_tables_name_what_is_known() -> None:
    """Released servers with hooks, declared ones, audited agents and environments: all of them, and no others."""
    assert names_in_rows_after("**Resources servers.**")[0] == servers_of(KNOWN)
    assert names_in_rows_after("These released verifiers")[1] == servers_of(TABLE.servers)
    judged = {place for place, declared in TABLE.servers.items() if declared.judge}
    assert set(re.findall(r"`(\w+)`", TEXT.split("\n| yes | ")[1].split("\n")[0])) == servers_of(judged)
    assert names_in_rows_after("**Agents.**")[0] == servers_of(AGENTS)
    assert servers_of(ENVIRONMENTS) == {"single_agent_turn"}


def test_the_options_are_all_told() -> None:
    """Each key that the block takes is in a table, and no other."""
    whole, own = (names_in_rows_after(heading)[0] for heading in ("Unknown keys, and values", "Of each instance:"))
    config = {"gym_ckpt": {"instances": {"a": {"no": 1}}}, "a": {"resources_servers": {"a": {}}}}
    with pytest.raises(InvalidArgument) as refused:
        options_of(config, "a")
    assert own == set(re.findall(r"\w+", str(refused.value).split("there are", 1)[1]))
    with pytest.raises(InvalidArgument) as refused:
        options_of({**config, "gym_ckpt": {"no": 1, "instances": {}}}, "a")
    assert whole == set(re.findall(r"\w+", str(refused.value).split("there are", 1)[1]))


@pytest.mark.timeout(240)
def test_the_page_runs(tmp_path: Path) -> None:
    """All rollouts end with the reward of those that nobody killed, and some of them were in the checkpoint."""
    text = "\n".join(text for *_, text in blocks_of(PAGE))
    ports = sorted(set(PORT.findall(text)))
    free = dict(zip(ports, map(str, free_ports(len(ports))), strict=True))
    for language, name, block in blocks_of(PAGE):
        if language != "sh":
            (tmp_path / name).write_text(PORT.sub(lambda found: free[found[0]], block), encoding="utf-8")
    output, errors = run_in_bash(PORT.sub(lambda found: free[found[0]], "\n".join(COMMANDS)), tmp_path)
    assert "rewards: {1.0: 20}" in output, output
    met, continued = (int(number) for number in re.findall(r"^(?:in the checkpoint|continue): (\d+)$", output, re.M))
    assert met == continued > 0
    assert "restart_only" not in errors  # every server of the page keeps what it has, its own one as well


def run_in_bash(script: str, directory: Path) -> tuple[str, str]:
    """What a script prints, and what it says on the other stream; fails if a line fails. Nothing of it runs then."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PWD": str(directory)}
    with (directory / "errors.log").open("wb") as errors:
        bash = subprocess.Popen(
            ["bash", "-ec", f"trap 'kill -9 $(jobs -p)' EXIT\n{script}"],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        output = bash.communicate(timeout=230)[0]
    finally:
        if bash.poll() is None:
            os.killpg(bash.pid, signal.SIGKILL)
        bash.wait()
    said = (directory / "errors.log").read_text()
    assert bash.returncode == 0, f"{output}\n{said[-6000:]}"
    return output, said
