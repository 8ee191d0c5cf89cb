"""No token, key or payload is in anything that people or machines read: a full run with every secret marked.

Field cases 17 and 150. What an operator puts into a process's environment stays readable there by the same user
(`/proc/PID/environ`): it is where OTLP headers and `GYM_CKPT_TOKEN` come from, and is not searched. Nor is what gRPC's
core prints under `GRPC_TRACE=api` or `all`: whole metadata, tokens included, whatever we do.
"""

from __future__ import annotations

import asyncio
import base64
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gym_ckpt_grpc.auth import TokenFile
from tests.e2e.marked_run import MarkedRun
from tests.e2e.marks import Evidence, Mark, Marks, command_lines, files_under, reprs
from tests.telemetry.exporting import exporting
from tests.telemetry.otlp_receiver import Collector

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", params=["tokens", "certificates"])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MarkedRun]:
    """A run that has ended, with its collector still there."""
    with Collector() as collector:
        run = MarkedRun(tmp_path_factory.mktemp("marked"), collector, mtls=request.param == "certificates")
        asyncio.run(run.go())
        yield run


@pytest.mark.behaviour("C320")
def test_nothing_marked_is_anywhere(done: MarkedRun) -> None:
    assert "\n".join(map(str, done.evidence.hits())) == ""


def test_the_run_was_a_full_one(done: MarkedRun) -> None:
    """Every channel says something, every mark was really in use, and payloads are where they belong."""
    evidence = done.evidence
    assert all(sources and any(sources.values()) for sources in evidence.channels.values())
    assert {"policy_model.log", "counter.log", "inference.log"} <= {
        Path(name).name for name in evidence.channels["logs"]
    }
    assert b" DEBUG " in evidence.channels["logs"]["gym/logs/counter.log"]
    assert b"Log level DEBUG" in evidence.channels["logs"]["gym/logs/policy_model.log"]  # by gRPC's core
    assert evidence.stored_payloads() == {"prompt", "session-state", "trainer-state"}
    header = evidence.marks.secret["otlp-header"].value
    assert any(headers.get("x-marked") == header for headers in done.collector.headers)
    assert len(done.errors) > 50
    assert any("UNAUTHENTICATED" in error for error in done.errors)
    told = b"\n".join(evidence.channels["audit"].values())
    assert b"CommitCheckpoint" in told
    assert b"UNAUTHENTICATED" in told
    assert any(b"gym.checkpoint.commit" in request for request in evidence.channels["telemetry"].values())
    named = {name.rpartition(".")[2] for name in evidence.channels["reprs"]}
    assert {"Coordinator", "Credentials", "TokenFile", "Authenticator", "Deployment"} <= named
    assert any(name.endswith("events.jsonl") for name in evidence.channels["files"])
    if done.mtls:
        assert sum(name.startswith("key of") for name in evidence.marks.secret) > 5


@pytest.mark.behaviour("C320")
def test_stored_files_are_for_their_owner_and_name_no_place(done: MarkedRun) -> None:
    """Cookies must go into checkpoints; nobody else may read them. A part does not say where it was written."""
    root = done.directory / "gym" / "root"
    for file in root.rglob("*"):
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    parts = files_under(root, only=root.rglob("*.gck"))
    assert parts
    assert [name for name, content in parts.items() if str(done.directory).encode() in content] == []


# ---- the search finds what there is: a leak planted in each channel


class Leaky(TokenFile):
    """A token file as a careless one would be."""

    def __repr__(self) -> str:
        return f"Leaky({self.token()!r})"


Leaky.__module__ = TokenFile.__module__


def in_a_file(name: str) -> Callable[[Path, Mark, Collector], dict[str, bytes]]:
    def plant(directory: Path, mark: Mark, collector: Collector) -> dict[str, bytes]:
        (directory / name).write_text(f"first\nrefused: Bearer {mark.value[:16]}...\n")
        return files_under(directory)

    return plant


def in_base64(directory: Path, mark: Mark, collector: Collector) -> dict[str, bytes]:
    return {f"after {n} bytes": base64.b64encode(b"x" * n + mark.value.encode()) for n in range(4)}


def in_a_name(directory: Path, mark: Mark, collector: Collector) -> dict[str, bytes]:
    (directory / mark.value).write_text("")
    return files_under(directory)


def in_a_span(directory: Path, mark: Mark, collector: Collector) -> dict[str, bytes]:
    with exporting("leaky", collector.endpoint) as here:
        tracer = here.telemetry._tracer
        tracer.start_span("refused", attributes={"metadata": f"authorization: Bearer {mark.value}"}).end()
    return {str(n): request for n, request in enumerate(collector.requests)}


def in_a_metric(directory: Path, mark: Mark, collector: Collector) -> dict[str, bytes]:
    from gym_ckpt_grpc.telemetry import catalogue

    with exporting("leaky", collector.endpoint) as here:
        here.telemetry.add(catalogue.CONTROL_ERRORS, 1, {"caller": mark.value})
    return {str(n): request for n, request in enumerate(collector.requests)}


def in_a_repr(directory: Path, mark: Mark, collector: Collector) -> dict[str, bytes]:
    file = directory / "token"
    file.write_text(mark.value)
    kept = Leaky(file)
    found = reprs()
    assert kept.token()
    return found


def in_a_command_line(directory: Path, mark: Mark, collector: Collector) -> dict[str, bytes]:
    command = [sys.executable, "-c", "input()", f"--token={mark.value}"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        return command_lines({"child": child.pid})
    finally:
        child.communicate(b"\n")


PLANTS = {
    "a log": in_a_file("server.log"),
    "an audit line": in_a_file("audit.jsonl"),
    "an event log beside a manifest": in_a_file("events.jsonl"),
    "the name of a file": in_a_name,
    "base64": in_base64,
    "a span": in_a_span,
    "a metric": in_a_metric,
    "a repr": in_a_repr,
    "a command line": in_a_command_line,
}


@pytest.mark.parametrize("place", PLANTS)
def test_a_planted_leak_is_found(place: str, tmp_path: Path) -> None:
    marks = Marks.new()
    with Collector() as collector:
        content = PLANTS[place](tmp_path, marks.secret["controller"], collector)
    hits = Evidence(marks, {place: content}).hits()
    assert {(channel, name) for channel, _, name in hits} == {(place, "controller")}
    assert place != "base64" or len(hits) == 4


@pytest.mark.parametrize("name", ["prompt", "trainer-state"])
def test_a_payload_is_found_outside_its_places_only(name: str) -> None:
    marks = Marks.new()
    content = {"file": f"... {marks.payload[name].value} ...".encode()}
    assert Evidence(marks, {"logs": content}).hits() == [("logs", "file", name)]
    assert Evidence(marks, stored=content).hits() == []
    assert Evidence(marks, stored=content).stored_payloads() == {name}
    secret = {"file": marks.secret["peer"].value.encode()}
    assert Evidence(marks, stored=secret).hits() == [("stored", "file", "peer")]
