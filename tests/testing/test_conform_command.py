"""`gym-ckpt conform`: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import orjson

from gym_ckpt_grpc.testing import FakeOwner, serve
from tests.testing.broken import CONTROLLER, FAULTS, OBSERVER, serve_broken


async def conform(*arguments: str | Path, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run the command; (exit code, standard output, standard error)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GYM_CKPT")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from gym_ckpt_grpc.cli import main; main()", "conform", *map(str, arguments)),
        env={**kept, "PYTHONFAULTHANDLER": "1", **(environment or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def token_files(tmp_path: Path) -> list[str | Path]:
    for name, token in (("controller", CONTROLLER), ("observer", OBSERVER)):
        (tmp_path / name).write_text(token + "\n")
    return ["--token-file", tmp_path / "controller", "--observer-token-file", tmp_path / "observer"]


async def test_all_holds(tmp_path: Path) -> None:
    """Exit 0, a table per group, and what could not be checked with the reason."""
    only = [word for i in ("C7", "C17", "C78", "C93", "C316") for word in ("--only", i)]
    owner = FakeOwner()
    spare = owner.add("spare-a1")
    async with serve(owner, roots=[tmp_path], token=CONTROLLER, observer_token=OBSERVER) as served:
        files = token_files(tmp_path)
        code, out, err = await conform(served.address, *files, "--root", tmp_path.as_uri(), *only)
        assert (code, err) == (0, "")
        assert "Fields and deadlines" in out
        assert "needs 1 expendable episodes" in out
        assert "0 broken" in out
        code, out, _ = await conform(
            served.address, *files, "--root", tmp_path, "--expendable", spare[0].capture_key, "--json", "--only", "C93"
        )
        assert code == 0
        report = orjson.loads(out)
        assert report["ids"]["holds"] == ["C93", "C98"]
        assert report["checks"][0]["name"] == "pending_outside"
    assert owner.live == {}


async def test_something_is_broken(tmp_path: Path) -> None:
    """Exit 1, with what was expected and what was seen."""
    async with serve_broken(FAULTS["Resume does not fence unknown ids"], tmp_path) as (address, _):
        files = token_files(tmp_path)
        code, out, _ = await conform(address, *files, "--only", "C17")
        assert code == 1
        assert "broken" in out
        assert "expected:" in out
        assert "seen:" in out
        code, out, _ = await conform(address, *files, "--only", "C17", "--json")
        assert code == 1
        assert orjson.loads(out)["ids"]["broken"] == ["C17", "C58"]


async def test_nobody_answers(tmp_path: Path) -> None:
    """Exit 3 for a server that is not there, and for refused credentials."""
    async with serve(FakeOwner(), token=CONTROLLER) as served:
        address = served.address
        code, _, err = await conform(address, environment={"GYM_CKPT_TOKEN": "wrong"})
        assert code == 3
        assert "credentials" in err
    code, _, err = await conform(address, *token_files(tmp_path))
    assert code == 3
    assert address in err


async def test_a_wrong_command_line() -> None:
    """Exit 2 for an unknown id and a bad episode; nothing was sent."""
    for arguments, named in ((("--only", "C9999"), "C9999"), (("--expendable", "a b"), "a b")):
        code, _, err = await conform("127.0.0.1:1", *arguments)
        assert code == 2
        assert named in err


async def test_no_test_framework_is_needed() -> None:
    """The command's imports bring in neither pytest nor anything of tests/."""
    program = (
        "import sys; import gym_ckpt_grpc.cli.conform;"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('pytest', '_pytest', 'tests', 'hypothesis')))"
    )
    process: Any = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.decode().strip() == "[]"
