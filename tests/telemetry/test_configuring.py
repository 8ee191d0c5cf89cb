"""`telemetry.configure`: what it refuses, what it leaves alone, what it exports, and what it does when that blocks."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.telemetry import Reading, Recorder, Switches, Telemetry, catalogue, configure, exporting
from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import INSTRUMENTS, Kind
from gym_ckpt_grpc.telemetry.pipelines import MetricsPage, Pipelines
from gymckpt.v1 import participant_pb2 as pb
from tests.control.scripted import Participant
from tests.telemetry.programs import ran

SECRET = "s3cr3t-of-the-collector"


class HeldExporter(SpanExporter):
    """Blocks in its first export until it is let go. taken: names of spans, by batch."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.taken: list[list[str]] = []
        self.ended = False
        self._result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken.append([span.name for span in spans])
        self.began.set()
        self.go.wait(30)
        return self._result

    def shutdown(self) -> None:
        self.ended = True


class Losses:
    """Counts what is told lost."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, lost: int) -> None:
        self.count += lost


@pytest.fixture
def losses() -> Losses:
    return Losses()


@pytest.fixture
def held() -> Iterator[HeldExporter]:
    exporter = HeldExporter()
    yield exporter
    exporter.go.set()


def built(
    exporter: SpanExporter | None = None,
    *,
    losses: Losses,
    capacity: int = 2048,
    metrics: Sequence[MetricExporter] = (),
    page: tuple[str, int] | None = None,
) -> tuple[Telemetry, Pipelines]:
    """Telemetry over pipelines, none of it global."""
    made = Pipelines(
        spans=[exporter] if exporter else [], metrics=metrics, page=page, capacity=capacity, on_loss=losses
    )
    telemetry = Telemetry(tracer_provider=made.tracers, meter_provider=made.meters, switches=Switches("checkpoint"))
    return telemetry, made


def make_spans(telemetry: Telemetry, count: int) -> None:
    """So many ended spans, handed to the provider."""
    for _ in range(count):
        with telemetry.span(catalogue.PREPARE):
            pass
    assert telemetry.flush()


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "name where to export to"),
        ({"otlp": ""}, "http://host:port"),
        ({"otlp": "collector:4317"}, "http://host:port"),
        ({"otlp": "http://collector"}, "http://host:port"),
        ({"otlp": "ftp://collector:4317"}, "http://host:port"),
        ({"otlp": f"http://me:{SECRET}@collector:4317"}, "a host and a port alone"),
        ({"otlp": f"http://collector:4317/?auth={SECRET}"}, "a host and a port alone"),
        ({"otlp": "http://collector:notaport"}, "http://host:port"),
        ({"prometheus": True}, "is a port"),
        ({"prometheus": 70_000}, "is no port"),
        ({"prometheus": "9464"}, "host:port"),
        ({"prometheus": "127.0.0.1:"}, "is no port"),
        ({"prometheus": ":9464"}, "host:port"),
    ],
)
def test_half_given_values_are_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        configure(**arguments)  # type: ignore[arg-type]
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_HEADERS": SECRET}, "item 1 is no name=value"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": f"a=b,authorization=Bearer {SECRET}\x01"}, "item 2"),
        ({"OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"auth orization={SECRET}"}, "TRACES_HEADERS: item 1"),
        ({"OTEL_EXPORTER_OTLP_CLIENT_KEY": "/a"}, "given together"),
        ({"OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE": "/a"}, "given together"),
        ({"OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere/ca.pem"}, "names no file"),
        ({"OTEL_EXPORTER_OTLP_CERTIFICATE": __file__}, "is for TLS"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "over gRPC"),
    ],
)
def test_half_given_variables_are_refused_without_their_values(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said) as refused:
        configure(otlp="http://127.0.0.1:4317")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["otlp,otlp", "jaeger", "prometheus", "prometheus:x", "console:1", "prometheus:1,prometheus:2", ","]
)
def test_a_wrong_variable_warns_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setenv("GYM_CKPT_TELEMETRY", text)
    with exporting("a server") as handle:
        assert handle is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_no_variable_is_no_telemetry(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("GYM_CKPT_TELEMETRY", raising=False)
    with exporting("a server") as handle:
        assert handle is None
    assert not caplog.records


@pytest.mark.parametrize("package", ["opentelemetry.sdk", "prometheus_client", "opentelemetry.exporter.otlp"])
def test_a_missing_package_is_named_with_the_extra(package: str) -> None:
    ran(f"""
        import sys
        sys.modules[{package!r}] = None
        from gym_ckpt_grpc.protocol.errors import UsageError
        from gym_ckpt_grpc import telemetry
        try:
            telemetry.configure(otlp=True)
        except UsageError as error:
            assert "pip install 'gym-ckpt-grpc[telemetry]'" in str(error), error
        else:
            sys.exit("not refused")
    """)


def test_a_port_that_is_taken_is_refused_and_changes_nothing() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran(f"""
            from opentelemetry import metrics
            from gym_ckpt_grpc.protocol.errors import UsageError
            from gym_ckpt_grpc import telemetry
            before = type(metrics.get_meter_provider())
            try:
                telemetry.configure(prometheus={taken.getsockname()[1]})
            except UsageError as error:
                assert "cannot be served" in str(error), error
            assert type(metrics.get_meter_provider()) is before
            telemetry.configure(prometheus=0).shutdown()
        """)


# ---- what is left alone


def test_providers_of_the_process_stay() -> None:
    done = ran("""
        import logging, threading
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.trace import TracerProvider
        logging.basicConfig(level=logging.INFO)
        tracers, meters = TracerProvider(shutdown_on_exit=False), MeterProvider(shutdown_on_exit=False)
        trace.set_tracer_provider(tracers)
        metrics.set_meter_provider(meters)
        from gym_ckpt_grpc import telemetry
        with telemetry.configure(otlp=True, prometheus=0, console=True) as handle:
            assert handle.prometheus_address == ""
            assert trace.get_tracer_provider() is tracers
            assert metrics.get_meter_provider() is meters
            assert threading.active_count() == 1, threading.enumerate()
    """)
    assert "has a tracer provider" in done.stderr
    assert "has a meter provider" in done.stderr
    assert "Overriding" not in done.stderr


def test_only_the_signal_that_nobody_provides_is_ours() -> None:
    ran("""
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.trace import TracerProvider
        tracers = TracerProvider(shutdown_on_exit=False)
        trace.set_tracer_provider(tracers)
        from gym_ckpt_grpc import telemetry
        with telemetry.configure(prometheus=0) as handle:
            assert handle.prometheus_address.startswith("127.0.0.1:")
            assert trace.get_tracer_provider() is tracers
    """)


def test_a_process_configures_once_and_the_first_stays() -> None:
    ran("""
        import urllib.request
        from gym_ckpt_grpc.protocol.errors import UsageError
        from gym_ckpt_grpc import telemetry
        handle = telemetry.configure(prometheus=0)
        try:
            telemetry.configure(prometheus=0)
        except UsageError as error:
            assert "already" in str(error)
        else:
            raise SystemExit("configured twice")
        urllib.request.urlopen(f"http://{handle.prometheus_address}/metrics").read()
        assert handle.shutdown() and handle.shutdown()
    """)


# ---- what is exported


def test_recorders_made_before_export_after_it_and_spans_go_with_them() -> None:
    done = ran(
        """
        from gym_ckpt_grpc import telemetry
        recorder = telemetry.Recorder("agent", service="agent", instance="0")
        with telemetry.configure(console=True, span_groups="checkpoint", service_name="mine"):
            with recorder.operation("prepare", checkpoint_id="c1"):
                recorder.event("preempted")
    """
    )
    assert '"name": "gym.checkpoint.prepare"' in done.stderr
    assert '"gym.checkpoint.events_total"' in done.stderr
    assert '"service.name": "mine"' in done.stderr
    assert done.stdout == ""


def test_what_waits_at_the_end_of_a_process_is_exported_although_nobody_ends_telemetry() -> None:
    """Also where an interpreter that is ending starts no thread any more (Python 3.12)."""
    done = ran(
        """
        from gym_ckpt_grpc import telemetry
        telemetry.configure(console=True, span_groups="checkpoint")
        with telemetry.Recorder("agent", service="agent", instance="0").operation("prepare"):
            pass
        """,
        OTEL_BSP_SCHEDULE_DELAY="600000",
        OTEL_METRIC_EXPORT_INTERVAL="600000",
    )
    assert '"name": "gym.checkpoint.prepare"' in done.stderr
    assert '"gym.checkpoint.operation_duration_ms"' in done.stderr


def test_each_incarnation_has_an_id_of_its_own(losses: Losses) -> None:
    ids = set()
    for _ in range(2):
        _, made = built(HeldExporter(), losses=losses)
        assert made.tracers is not None
        ids.add(made.tracers.resource.attributes["service.instance.id"])
        made.end(0.5)
    assert len(ids) == 2


class AllGauges:
    """Shows each gauge, with an attribute that none should have."""

    def readings(self) -> Iterable[Reading]:
        for gauge in catalogue.GAUGES:
            yield gauge, 1.0, {at.PARTICIPANT_KIND: "agent", at.SERVICE: "a", at.INSTANCE: "an-instance-id"}


def scraped(address: str) -> dict[str, str]:
    """Family -> type, and fails if the page is not what Prometheus reads."""
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    assert "an-instance-id" not in text
    assert "a-rollout-id" not in text
    return {family.name: family.type for family in text_string_to_metric_families(text)}


@pytest.mark.behaviour("C310")
def test_every_instrument_has_the_name_of_the_catalogue_and_no_id_gets_through(losses: Losses) -> None:
    telemetry, made = built(losses=losses, page=("127.0.0.1", 0))
    assert made.page is not None
    source = AllGauges()
    telemetry.watch(source)
    for instrument in INSTRUMENTS:
        if instrument.kind is not Kind.GAUGE:
            telemetry.add(instrument, 3, {at.PARTICIPANT_KIND: "agent", at.ID: "a-rollout-id"})
    types = {Kind.COUNTER: "counter", Kind.HISTOGRAM: "histogram", Kind.GAUGE: "gauge"}
    families = scraped(made.page.address)
    for instrument in INSTRUMENTS:
        # The parser names a counter without its suffix.
        name = (
            instrument.prometheus.removesuffix("_total") if instrument.kind is Kind.COUNTER else instrument.prometheus
        )
        assert families.pop(name) == types[instrument.kind], instrument.name
    assert families.keys() <= {"target_info", "target"}
    made.end(2.0)


def test_histograms_have_the_buckets_of_the_catalogue(losses: Losses) -> None:
    telemetry, made = built(losses=losses, page=("127.0.0.1", 0))
    assert made.page is not None
    Recorder("agent", telemetry=telemetry).count(catalogue.PAUSE, 3)
    text = urllib.request.urlopen(f"http://{made.page.address}/metrics", timeout=10).read().decode()
    [family] = [f for f in text_string_to_metric_families(text) if f.name == catalogue.PAUSE.prometheus]
    bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert bounds == [*catalogue.PAUSE.buckets, float("inf")]
    made.end(2.0)


def test_two_scrapes_at_once_do_not_share_what_is_collected() -> None:
    inside, most, both = 0, 0, threading.Barrier(2)

    class Slow:
        def collect(self) -> Iterable[object]:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            with threading.Lock():
                threading.Event().wait(0.05)
            inside -= 1
            return []

    registry = CollectorRegistry()
    registry.register(Slow())  # type: ignore[arg-type]
    page = MetricsPage(registry, "127.0.0.1", 0)

    def scrape() -> None:
        both.wait(10)
        urllib.request.urlopen(f"http://{page.address}/metrics", timeout=10).read()

    scrapes = [threading.Thread(target=scrape) for _ in range(2)]
    for thread in scrapes:
        thread.start()
    for thread in scrapes:
        thread.join(10)
    page.close()
    assert most == 1


# ---- an exporter that blocks


@pytest.mark.behaviour("C311")
async def test_calls_complete_while_the_exporter_is_still_at_its_first_batch(
    tmp_path: Path, held: HeldExporter, losses: Losses
) -> None:
    telemetry, made = built(held, losses=losses, capacity=600)
    make_spans(telemetry, 512)  # a batch: exported at once
    assert held.began.wait(10)
    async with Participant(tmp_path, telemetry=telemetry) as participant:
        for _ in range(100):
            await participant.stub.GetStatus(pb.GetStatusRequest(), timeout=10)
    assert len(held.taken) == 1, "still at the first"
    assert not held.go.is_set()
    held.go.set()
    made.end(5.0)
    assert losses.count == 0


def test_the_queue_is_bounded_and_what_does_not_fit_is_counted(held: HeldExporter, losses: Losses) -> None:
    telemetry, made = built(held, losses=losses, capacity=10)
    make_spans(telemetry, 10)
    assert held.began.wait(10)
    make_spans(telemetry, 25)
    assert losses.count == 15
    held.go.set()
    assert made.end(10.0)
    assert sum(map(len, held.taken)) == 20


def test_spans_that_could_not_be_exported_are_counted(losses: Losses) -> None:
    failing = HeldExporter(SpanExportResult.FAILURE)
    failing.go.set()
    telemetry, made = built(failing, losses=losses)
    make_spans(telemetry, 7)
    assert made.end(10.0)
    assert losses.count == 7


def test_losses_are_a_metric_of_the_process() -> None:
    ran(
        """
        import re, urllib.request
        from gym_ckpt_grpc import telemetry
        with telemetry.configure(otlp="http://127.0.0.1:1", prometheus=0, span_groups="checkpoint") as handle:
            recorder = telemetry.Recorder("agent", service="agent", instance="0")
            for _ in range(20):
                with recorder.operation("prepare"): pass
            assert telemetry.default_telemetry().flush()
            text = urllib.request.urlopen(f"http://{handle.prometheus_address}/metrics").read().decode()
            [lost] = re.findall("^gym_checkpoint_spans_dropped_total ([0-9.]+)$", text, re.MULTILINE)
            assert float(lost) >= 12, "4 are tried for seconds, 4 wait"
        """,
        OTEL_BSP_MAX_QUEUE_SIZE="4",
    )


@pytest.mark.behaviour("C311")
def test_the_end_does_not_wait_for_an_export_that_never_ends(
    held: HeldExporter, losses: Losses, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry, made = built(held, losses=losses, capacity=600)
    make_spans(telemetry, 512)
    assert held.began.wait(10)
    make_spans(telemetry, 3)
    done = threading.Event()
    answers: list[bool] = []

    def end() -> None:
        answers.append(made.end(0.4))
        done.set()

    threading.Thread(target=end, daemon=True).start()
    assert done.wait(10), "the SDK's own limit is half a minute"
    assert not held.go.is_set()
    assert answers == [False]
    assert held.ended, "it was told to give up"
    assert "3 spans that could not be exported" in caplog.text


# ---- secrets


def test_headers_reach_the_collector_and_no_log() -> None:
    program = """
        import logging, sys
        logging.basicConfig(level=logging.DEBUG)
        from gym_ckpt_grpc import telemetry
        with telemetry.exporting("agent"):
            with telemetry.Recorder("agent").operation("prepare"): pass
    """
    for headers in (f"authorization=Bearer {SECRET}", SECRET, f"a b={SECRET}", f"authorization={SECRET}\x07"):
        done = ran(
            program,
            GYM_CKPT_TELEMETRY="otlp:http://127.0.0.1:1",
            GYM_CKPT_SPAN_GROUPS="checkpoint",
            OTEL_EXPORTER_OTLP_HEADERS=headers,
            GRPC_VERBOSITY="debug",
        )
        assert SECRET not in done.stderr + done.stdout
        assert "export" in done.stderr
