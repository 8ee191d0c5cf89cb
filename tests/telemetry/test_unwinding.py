"""SIGTERM closes the blocks of a process and ends it by the signal; a second one does not wait."""

from __future__ import annotations

import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.telemetry.programs import LIMIT, clean_env, ran

PROGRAM = """
    import asyncio, signal, sys
    from gym_ckpt_grpc.telemetry import unwinding_sigterm
    if "ignored" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    async def main():
        try:
            print("ready", flush=True)
            await asyncio.sleep(60)
        finally:
            print("closing", flush=True)
            if "stuck" in sys.argv:
                await asyncio.sleep(60)
            await asyncio.sleep(0)
            print("closed", flush=True)
    with unwinding_sigterm():
        if "ignored" in sys.argv:
            print("ready", flush=True)
            sys.stdin.readline()
        else:
            asyncio.run(main())
"""


@pytest.fixture(params=["", "stuck", "ignored"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_sigterm(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", dedent(PROGRAM), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_env(),
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            if how == "ignored":
                process.communicate("end\n", timeout=LIMIT)
                assert process.returncode == 0
                return
            assert process.stdout.readline() == "closing\n"
            if how == "stuck":
                process.send_signal(signal.SIGTERM)
            rest = process.stdout.read()  # not communicate: what readline has read beyond its line is lost to that
            process.wait(LIMIT)
            assert rest == ("" if how == "stuck" else "closed\n")
            assert process.returncode == -signal.SIGTERM
        finally:
            process.kill()


def test_a_handler_that_python_does_not_know_is_left_alone() -> None:
    """One of another language's, whose place could not be given back to it."""
    program = """
        import signal
        from unittest import mock
        from gym_ckpt_grpc.telemetry import unwinding_sigterm
        with mock.patch("signal.getsignal", return_value=None), mock.patch("signal.signal") as changed:
            with unwinding_sigterm():
                pass
        assert not changed.called, changed.mock_calls
    """
    ran(program)
