"""Where the framework's telemetry is active, a checkpoint's spans and metrics go to its providers.

nemo-lens and the framework set OpenTelemetry's global providers, which ours look up when they are used. Global ones can
be set once in a process, so that each case is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from gym_ckpt_grpc.telemetry.attributes import ATTRIBUTES

pytest.importorskip("nemo.lens")

CYCLE = """
import asyncio, json, os, pathlib, sys, tempfile
os.environ["GYM_CKPT_SPAN_GROUPS"] = "default,checkpoint"
from tests.control.scripted import Participant

async def checkpoint():
    with tempfile.TemporaryDirectory() as root:
        async with Participant(pathlib.Path(root)) as p:
            p.add("a", "b")
            await p.prepare()
            await p.commit()
            await p.resume()

def told(spans, reader):
    from gym_ckpt_grpc.telemetry import default_telemetry
    from opentelemetry import trace
    assert default_telemetry().flush()
    trace.get_tracer_provider().force_flush()
    metrics = [
        (metric.name, dict(point.attributes))
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    ]
    found = [(span.name, dict(span.attributes), dict(span.resource.attributes)) for span in spans.get_finished_spans()]
    print(json.dumps({"spans": found, "metrics": metrics}))
"""

LENS = """
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from nemo.lens import NemoLensConfig, setup_telemetry
spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
def set_up():
    return setup_telemetry(
        NemoLensConfig(enabled=True, service_name="training"), span_exporter=spans, metric_reader=reader
    )
"""

# What the framework 0.7.0 imports of nemo-lens, and 0.1.0, the one that is released, does not have.
LATER_LENS = """
import nemo.lens.semconv
nemo.lens.semconv.NV_DL_RANK, nemo.lens.semconv.NV_DL_WORLD_SIZE = "dl.rank", "dl.world_size"
"""


def ran(*parts: str, **environment: str) -> str:
    """What a process of these parts prints."""
    program = "\n".join(textwrap.dedent(part) for part in parts)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def checked(told: dict[str, Any], service: str) -> None:
    """The whole of a checkpoint is there, under the names that we gave it, with the resource that they gave it."""
    spans = {name: attributes for name, attributes, _ in told["spans"]}
    assert {"gym.checkpoint.prepare", "gym.checkpoint.commit", "gym.checkpoint.resume"} <= set(spans)
    assert {"gymckpt.v1.ParticipantService/Commit"} <= set(spans)
    for name, attributes, resource in told["spans"]:
        assert resource["service.name"] == service
        assert set(attributes) <= set(ATTRIBUTES), name
        assert "[REDACTED]" not in attributes.values()
    assert spans["gym.checkpoint.commit"]["nemo.gym.checkpoint.id"] == "c1"
    metrics = {name for name, _ in told["metrics"]}
    assert {"gym.checkpoint.operation_duration_ms", "rpc.server.call.duration"} <= metrics


@pytest.mark.parametrize("order", ["before", "after"])
def test_lens_as_a_trainer_sets_it_up(order: str) -> None:
    """Its providers are used, whether it is set up before our first server or after."""
    first = "handle = set_up()" if order == "before" else "asyncio.run(checkpoint()); handle = set_up()"
    told = json.loads(ran(CYCLE, LENS, first, "asyncio.run(checkpoint())", "told(spans, reader)"))
    checked(told, "training")
    assert len([name for name, _, _ in told["spans"] if name == "gym.checkpoint.commit"]) == 1


def test_the_frameworks_own_set_up() -> None:
    """`init_telemetry`, which each of its servers calls: over lens that a trainer has set up, and by itself."""
    reused = """
        set_up()
        from nemo_gym.telemetry import init_telemetry
        assert init_telemetry("counter", "resources_servers").is_exporting
        asyncio.run(checkpoint())
        told(spans, reader)
    """
    told = json.loads(ran(LATER_LENS, CYCLE, LENS, reused, NEMO_GYM_OTEL_ENABLED="1"))
    checked(told, "training")

    own = """
        from nemo_gym.telemetry import init_telemetry, shutdown_telemetry
        assert init_telemetry("counter", "resources_servers").is_exporting
        asyncio.run(checkpoint())
        from gym_ckpt_grpc.telemetry import default_telemetry
        assert default_telemetry().flush()
        shutdown_telemetry()
    """
    shown = ran(LATER_LENS, CYCLE, own, NEMO_GYM_OTEL_ENABLED="1", NEMO_GYM_OTEL_EXPORTER="console")
    for expected in (
        '"name": "gym.checkpoint.commit"',
        '"nemo.gym.checkpoint.id": "c1"',
        '"service.name": "nemo/counter"',
        '"name": "gym.checkpoint.operation_duration_ms"',
        '"nemo.gym.checkpoint.participant_kind": "resources"',
    ):
        assert expected in shown
    assert "REDACTED" not in shown


def test_the_released_pair_does_not_fit() -> None:
    """nemo-gym 0.7.0 asks nemo-lens for names that 0.1.0 does not have, and stays off. When this fails, the page on
    telemetry can say less."""
    program = """
        from nemo_gym.telemetry import init_telemetry
        print(init_telemetry("counter", "resources_servers"))
    """
    assert ran(program, NEMO_GYM_OTEL_ENABLED="1").strip() == "None"


def test_their_helper_redacts_none_of_our_names() -> None:
    """It redacts by the names of attributes; its list is about prompts and credentials."""
    from nemo.lens import DEFAULT_REDACT_KEYS, redact_value

    for name in ATTRIBUTES:
        assert redact_value(name, "value") == "value"
        assert not [word for word in ("key", "token") if word in name]
    assert {"key", "token"} <= set(DEFAULT_REDACT_KEYS)


def test_our_groups_are_not_theirs() -> None:
    """Their switch says nothing about ours, and ours nothing about theirs: `checkpoint` is a group of lens too."""
    program = """
        os.environ["GYM_CKPT_SPAN_GROUPS"] = "none"
        set_up()
        asyncio.run(checkpoint())
        told(spans, reader)
    """
    told = json.loads(ran(CYCLE, LENS, program, NEMO_LENS_SPAN_GROUPS="all"))
    assert told["spans"] == []
    assert told["metrics"]
