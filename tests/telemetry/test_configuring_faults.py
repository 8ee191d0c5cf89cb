"""What is wrong around `configure`: variables of the SDK, credentials, a port that is taken, clients of `/metrics`."""

from __future__ import annotations

import os
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.telemetry import configure, exporting, pipelines
from gym_ckpt_grpc.telemetry.pipelines import MetricsPage
from tests.telemetry.programs import ran

SECRET = "s3cr3t-of-the-collector"


def test_a_port_that_is_taken_costs_the_page_alone() -> None:
    """One variable for a shell is one port for every command and server in it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran(f"""
            import logging, os
            said = []
            logging.getLogger("gym_ckpt_grpc").addHandler(type("Kept", (logging.Handler,), dict(
                emit=lambda self, record: said.append(record.getMessage())))())
            from opentelemetry import trace
            from gym_ckpt_grpc import telemetry
            os.environ["GYM_CKPT_TELEMETRY"] = "console,prometheus:{taken.getsockname()[1]}"
            with telemetry.exporting("second") as handle:
                assert handle is not None and not handle.prometheus_address
                assert "sdk" in type(trace.get_tracer_provider()).__module__
            assert len(said) == 1 and "cannot be served" in said[0], said
        """)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://["),
    ],
)
def test_what_the_sdk_refuses_is_a_usage_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, value: str
) -> None:
    """It raises what it likes for variables that are its own, some of it after the page is up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match="set up"):
        configure(otlp=True, prometheus=port)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
    monkeypatch.setenv("GYM_CKPT_TELEMETRY", "otlp")
    if variable != "OTEL_EXPORTER_OTLP_ENDPOINT":
        monkeypatch.setenv("GYM_CKPT_TELEMETRY", "otlp:http://127.0.0.1:4317")
    with exporting("a server") as handle:
        assert handle is None
    assert "exports nothing" in caplog.text


@pytest.mark.parametrize("infix", ["", "_TRACES", "_METRICS"])
def test_credentials_in_an_endpoint_are_refused_without_them(monkeypatch: pytest.MonkeyPatch, infix: str) -> None:
    """The SDK names the endpoint in its log with each export that fails."""
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP{infix}_ENDPOINT", f"http://me:{SECRET}@127.0.0.1:1")
    with pytest.raises(UsageError, match=f"OTLP{infix}_ENDPOINT has credentials") as refused:
        configure(otlp=True)
    assert SECRET not in str(refused.value)


# ---- the page


@pytest.mark.parametrize("sent", [b"", b"GET /met"])
def test_a_client_that_stands_still_is_closed_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], sent: bytes
) -> None:
    """Else each holds a thread and a file of the server for as long as it likes."""
    monkeypatch.setattr(pipelines._Silent, "timeout", 0.1)
    page = MetricsPage(CollectorRegistry(), "127.0.0.1", 0)
    try:
        host, _, port = page.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(sent)
            assert client.recv(1) == b""
    finally:
        page.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_the_page_is_served_at_an_address_of_ipv6() -> None:
    page = MetricsPage(CollectorRegistry(), "::1", 0)
    try:
        assert page.address.startswith("[::1]:")
        with urllib.request.urlopen(f"http://{page.address}/metrics", timeout=10) as answer:
            assert answer.status == 200
    finally:
        page.close()


# ---- a forked child


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_the_whole_queue_to_itself() -> None:
    """The SDK empties its own there; a count that stayed as it was would lose every span, the lock the thread."""
    ran("""
        import os, threading
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
        from gym_ckpt_grpc.telemetry.pipelines import BoundedSpans

        go, taken, lost = threading.Event(), [], []

        class Held(SpanExporter):
            def export(self, spans):
                go.wait(30)
                taken.extend(span.name for span in spans)
                return SpanExportResult.SUCCESS

        spans = BoundedSpans(Held(), capacity=4, on_loss=lost.append)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(spans)
        tracer = provider.get_tracer("x")
        while not lost:
            tracer.start_span("parent's").end()
        spans._lock.acquire()
        if (child := os.fork()) == 0:
            lost.clear()
            go.set()
            tracer.start_span("child's").end()
            os._exit(0 if spans.force_flush() and taken == ["child's"] and not lost else 1)
        spans._lock.release()
        go.set()
        for _ in range(300):
            if (ended := os.waitpid(child, os.WNOHANG))[0]:
                break
            threading.Event().wait(0.05)
        else:
            os.kill(child, 9)
        assert ended[0] and ended[1] == 0, ended
    """)
