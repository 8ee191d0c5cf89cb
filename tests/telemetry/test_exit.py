"""The end of a process is not held up by a back end that is down, refuses, is silent, or stands still (field case 145).

A bound, not a speed: with the SDK's own hooks each of these takes ten seconds and more.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from gym_ckpt_grpc.telemetry.configuring import SHUTDOWN_LIMIT, VARIABLE
from gym_ckpt_grpc.telemetry.switches import VARIABLE as GROUPS
from tests.e2e.plays import counting
from tests.e2e.rig import COUNTER, LIMIT, rig
from tests.telemetry.otlp_receiver import Collector
from tests.telemetry.programs import clean_env

MARGIN = 3.0
"""Seconds that a busy machine may take for all else that a process does at its end."""

PROGRAM = dedent("""
    import logging, signal, sys, threading
    from gym_ckpt_grpc import telemetry

    how = sys.argv[1]
    logging.basicConfig(level=logging.INFO)
    handle = telemetry.configure(otlp=sys.argv[2], prometheus=0, span_groups="checkpoint")
    recorder = telemetry.Recorder("agent", service="agent", instance="0")
    for _ in range(600):  # more than a batch: an export is under way at once
        with recorder.operation("prepare"):
            pass
    telemetry.default_telemetry().flush()

    def work_until_told():
        print("ready", flush=True)
        sys.stdin.readline()

    if how == "exit":
        work_until_told()
    elif how == "shutdown":
        work_until_told()
        handle.shutdown()
    elif how == "error":
        work_until_told()
        raise ValueError("a fault of the program")
    elif how == "sigterm":
        with telemetry.unwinding_sigterm(), handle:
            try:
                work_until_told()
            finally:
                print("state is safe", flush=True)
    else:
        work_until_told()  # sigterm, with nothing that catches it
""")


@contextmanager
def refusing() -> Iterator[str]:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def silent() -> Iterator[str]:
    """A black hole: connections are made, and not a byte comes back."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def unanswering() -> Iterator[str]:
    """A collector that takes each request and never answers it."""
    with Collector() as collector:
        collector.answering.clear()
        yield collector.endpoint


@contextmanager
def stopped() -> Iterator[str]:
    """A collector that worked, and whose process stands still now."""
    program = """if True:
        import sys
        from tests.telemetry.otlp_receiver import Collector
        with Collector() as collector:
            print(collector.endpoint, flush=True)
            sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_env()
    ) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        os.kill(process.pid, signal.SIGSTOP)
        try:
            yield endpoint
        finally:
            process.kill()


BACK_ENDS = {"refusing": refusing, "silent": silent, "unanswering": unanswering, "stopped": stopped}


@contextmanager
def running(how: str, endpoint: str) -> Iterator[subprocess.Popen[str]]:
    """The program, with an export under way; it waits for a line."""
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, how, endpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=clean_env(),
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield process


@pytest.mark.e2e
@pytest.mark.behaviour("C311")
@pytest.mark.parametrize("how", ["exit", "shutdown", "error", "sigterm", "plain sigterm"])
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_the_exit_is_bounded_whatever_the_back_end_does(back_end: str, how: str) -> None:
    with BACK_ENDS[back_end]() as endpoint, running(how, endpoint) as process:
        told = time.monotonic()
        if "sigterm" in how:
            process.send_signal(signal.SIGTERM)
            output, problems = process.communicate(timeout=LIMIT)
        else:
            output, problems = process.communicate("end\n", timeout=LIMIT)
        took = time.monotonic() - told
    assert took < SHUTDOWN_LIMIT + MARGIN, problems
    expected = {"exit": 0, "shutdown": 0, "error": 1}.get(how, -signal.SIGTERM)
    assert process.returncode == expected, problems
    if how == "sigterm":
        assert output == "state is safe\n"


@pytest.mark.e2e
def test_what_was_recorded_last_arrives_where_the_back_end_works() -> None:
    with Collector() as collector, running("exit", collector.endpoint) as process:
        process.communicate("end\n", timeout=LIMIT)
        assert process.returncode == 0
        collector.until(lambda seen: sum(span.name == "gym.checkpoint.prepare" for span in seen.spans) == 600)


@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.behaviour("C311")
async def test_servers_end_in_time_and_their_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silent() as endpoint:
        monkeypatch.setenv(VARIABLE, f"otlp:{endpoint}")
        monkeypatch.setenv(GROUPS, "all")
        async with rig(tmp_path, COUNTER) as gym:
            await gym.start()
            await gym.held_at_call(counting("a"), turn=1)
            checkpoint = await gym.checkpoint()
            await gym.leave()
            processes = dict(gym.servers._processes)
            told = time.monotonic()
            await gym.servers.stop(grace=2 * LIMIT)
            took = time.monotonic() - told
            assert {name: process.ending for name, process in processes.items()} == dict.fromkeys(processes, "SIGTERM")
            assert took < 1.0 + SHUTDOWN_LIMIT + MARGIN  # open connections have a second
            assert gym.faults(checkpoint.id) == []
