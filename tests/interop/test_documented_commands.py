"""`docs/debugging.md`: each command runs against a living server and prints what the page says."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gym_ckpt_grpc.auth import Authenticator, Role, TokenValue
from tests.control.scripted import Participant

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "debugging.md"
BLOCK = re.compile(r"<!-- (?P<fails>fails, )?prints: (?P<text>[^\n]+?) -->\n```sh\n(?P<command>.*?)```", re.DOTALL)
TOKEN = "token-of-the-interop-test"


@dataclass(frozen=True)
class Documented:
    """One command of the page."""

    command: str
    text: str
    fails: bool


def documented() -> list[Documented]:
    page = PAGE.read_text(encoding="utf-8")
    found = [Documented(m["command"], m["text"], bool(m["fails"])) for m in BLOCK.finditer(page)]
    assert len(found) == page.count("```sh\n"), "every sh block says what it prints"
    return found


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Participant]:
    authenticator = Authenticator({Role.CONTROLLER: TokenValue(TOKEN)})
    async with Participant(tmp_path, authenticator=authenticator, token=TokenValue(TOKEN)) as p:
        yield p


async def run(command: str, p: Participant, home: Path) -> tuple[int, str]:
    """Exit status and everything printed, with an environment of its own."""
    tools = Path(sys.executable).parent
    environment = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "ADDRESS": p.server.address,
        "TOKEN": TOKEN,
    }
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        f"set -eu -o pipefail\n{command}",
        cwd=ROOT,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_every_documented_command(served: Participant, tmp_path: Path) -> None:
    """In the order of the page, on one server."""
    for block in documented():
        status, output = await run(block.command, served, tmp_path)
        assert (status != 0) is block.fails, f"{block.command}\n{output}"
        assert block.text in output, f"{block.command}\n{output}"
        assert TOKEN not in output
    assert await served.phase() == "IDLE"


def test_the_page_covers_both_tools() -> None:
    """Both list services, ask the status, are refused without a token and without a deadline."""
    commands = [block.command for block in documented()]
    for tool in ("grpcurl ", "buf curl "):
        mine = [command for command in commands if tool in command]
        for part in ("GetStatus", "Prepare", "Resume"):
            assert any(part in command for command in mine), (tool, part)
        assert any("TOKEN" not in command for command in mine)
    assert any("-max-time" in command for command in commands)


def test_no_secret_on_a_command_line() -> None:
    """The token is expanded by the tool itself, or read from standard input; never an argument."""
    for block in documented():
        for line in block.command.splitlines():
            if "TOKEN" in line:
                single_quoted = "'authorization: Bearer " in line and "${TOKEN}'" in line
                assert single_quoted or line.startswith("printf "), line
