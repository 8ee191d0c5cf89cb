"""Exporters for processes without a set-up of OpenTelemetry: `configure`, and what `GYM_CKPT_TELEMETRY` says.

What is here never replaces providers that are there, never blocks a call, and holds up no exit for long.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self
from urllib.parse import unquote, urlsplit

from opentelemetry import metrics, trace

from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.emitting import Telemetry, default_telemetry
from gym_ckpt_grpc.telemetry.ending import EXIT_LIMIT

if TYPE_CHECKING:
    from gym_ckpt_grpc.telemetry.pipelines import Pipelines

VARIABLE = "GYM_CKPT_TELEMETRY"
"""Comma list: `otlp` or `otlp:http://collector:4317`, `prometheus:9464` or `prometheus:HOST:PORT`, `console`."""
SHUTDOWN_LIMIT = 2.0
"""Seconds that telemetry may take at the end of a process, whatever its back end does."""
LOOPBACK = "127.0.0.1"
DEFAULT_ENDPOINT = "http://localhost:4317"
INSTALL = "pip install 'gym-ckpt-grpc[telemetry]'"
log = logging.getLogger(__name__)


class Exporting:
    """What `configure` has switched on. Used as a context manager, or ended by `shutdown`; else the end of the process
    does it. prometheus_address: `host:port` of `/metrics`, empty without."""

    def __init__(self, telemetry: Telemetry, pipelines: Pipelines | None) -> None:
        self._telemetry = telemetry
        self._pipelines = pipelines
        self._lock = threading.Lock()
        self.prometheus_address = pipelines.page.address if pipelines and pipelines.page else ""
        # Together with the wait for spans to be ended, which is before it, this stays within the limit.
        atexit.register(self.shutdown, SHUTDOWN_LIMIT - EXIT_LIMIT)

    def shutdown(self, timeout: float = SHUTDOWN_LIMIT) -> bool:
        """Export what waits, and close; whether all of it was done. Never raises, never takes longer. Once: a process
        that has ended its telemetry has none any more."""
        with self._lock:
            pipelines, self._pipelines = self._pipelines, None
        atexit.unregister(self.shutdown)
        if pipelines is None:
            return True
        flushing = min(EXIT_LIMIT, timeout / 4)
        flushed = self._telemetry.flush(flushing)
        return pipelines.end(timeout - flushing) and flushed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


_given: Exporting | None = None


def configure(
    *,
    otlp: bool | str = False,
    prometheus: int | str | None = None,
    console: bool = False,
    span_groups: str | None = None,
    service_name: str = "",
) -> Exporting:
    """Export spans and metrics of this process. Once per process.

    otlp: to an OTLP collector over gRPC; its URL (`http://host:4317`, `https://` with TLS), or True for the standard
    variables `OTEL_EXPORTER_OTLP_*`, which also have headers, certificates and limits. prometheus: a port for
    `/metrics` on 127.0.0.1, or `host:port`; port 0 picks one. console: to standard error. span_groups: in place of
    GYM_CKPT_SPAN_GROUPS. service_name: in place of `OTEL_SERVICE_NAME`.

    A provider of traces or of metrics that this process has already stays: ours are used where there is none. Raises
    UsageError for what is missing, half given, or taken; nothing is changed then.
    """
    global _given
    wanted = _checked(otlp, prometheus, console)
    if _given is not None:
        raise UsageError("telemetry of this process is configured already; a process does it once")
    telemetry = default_telemetry()
    free = Free.seen()
    if not free.traces:
        log.info("this process has a tracer provider: spans of checkpoints go there, and `configure` adds none")
    if not free.metrics:
        log.info("this process has a meter provider: metrics of checkpoints go there, and `configure` adds none")
    try:
        pipelines = _built(wanted, free, service_name, telemetry) if free.traces or free.metrics else None
    except UsageError:
        raise
    except Exception as error:  # the SDK reads variables of its own, and raises what it likes for a wrong one
        raise UsageError(f"OpenTelemetry's SDK was not set up: {error}") from error
    if pipelines is not None and pipelines.tracers is not None:
        trace.set_tracer_provider(pipelines.tracers)
    if pipelines is not None and pipelines.meters is not None:
        metrics.set_meter_provider(pipelines.meters)
    if span_groups is not None:
        telemetry.switches.set(span_groups)
    _given = Exporting(telemetry, pipelines)
    return _given


@contextlib.contextmanager
def exporting(service_name: str) -> Iterator[Exporting | None]:
    """What GYM_CKPT_TELEMETRY says, for as long as the block lasts; None if nothing.

    What is wrong with it warns and exports nothing: telemetry stops no server. service_name: unless
    `OTEL_SERVICE_NAME` says another.
    """
    handle: Exporting | None = None
    text = os.environ.get(VARIABLE, "").strip()
    try:
        if text:
            handle = _configured(_words(text), "" if os.environ.get("OTEL_SERVICE_NAME") else service_name)
    except UsageError as error:
        log.warning("%s exports nothing: %s", VARIABLE, error)
    if handle is not None and handle.prometheus_address:
        log.info("metrics of %s are at http://%s/metrics", service_name, handle.prometheus_address)
    try:
        yield handle
    finally:
        if handle is not None:
            handle.shutdown()


class PageTaken(UsageError):
    """The port of `/metrics` cannot be had."""


def _configured(words: dict[str, Any], service_name: str) -> Exporting:
    """`configure`; where the port is taken, without the page: a shell's variable is one port for all that it runs."""
    try:
        return configure(**words, service_name=service_name)
    except PageTaken as error:
        if len(words) == 1:
            raise
        log.warning("%s: %s; the rest is exported", VARIABLE, error)
        del words["prometheus"]
        return configure(**words, service_name=service_name)


def _words(text: str) -> dict[str, bool | int | str]:
    found: dict[str, bool | int | str] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, given, rest = word.partition(":")
        if name in found:
            raise UsageError(f"{VARIABLE}: {name} is named twice")
        if name == "otlp":
            found[name] = rest if given else True
        elif name == "prometheus" and rest:
            found[name] = rest if ":" in rest else _port(rest)
        elif word == "console":
            found[name] = True
        else:
            raise UsageError(f"{VARIABLE}: {name[:40]!r} is none of otlp, otlp:URL, prometheus:PORT, console")
    return found


# ---- what is asked for -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """Checked arguments. endpoint: None for the standard variables."""

    otlp: bool
    endpoint: str | None
    headers: Mapping[str, dict[str, str]]
    page: tuple[str, int] | None
    console: bool


@dataclass(frozen=True, slots=True)
class Free:
    """Whether this process has no provider of traces, of metrics."""

    traces: bool
    metrics: bool

    @classmethod
    def seen(cls) -> Free:
        """As it is now. The API has placeholders where nobody has set one."""
        return cls(*("Proxy" in type(p).__name__ for p in (trace.get_tracer_provider(), metrics.get_meter_provider())))


def _checked(otlp: bool | str, prometheus: int | str | None, console: bool) -> Wanted:
    if otlp is False and prometheus is None and not console:
        raise UsageError("name where to export to: otlp, prometheus or console")
    endpoint = None if isinstance(otlp, bool) else _endpoint(otlp)
    headers: dict[str, dict[str, str]] = {}
    if otlp is not False:
        _check_variables(endpoint)
        headers = {signal: _headers(signal) for signal in ("traces", "metrics")}
    page = None if prometheus is None else _page(prometheus)
    return Wanted(otlp is not False, endpoint, headers, page, console)


def _endpoint(text: str) -> str:
    try:
        url = urlsplit(text)
        whole = url.scheme in ("http", "https") and bool(url.hostname) and url.port is not None
    except ValueError:
        url, whole = urlsplit(""), False
    if not whole:
        raise UsageError("the OTLP endpoint is http://host:port, or https://host:port with TLS")
    if url.username is not None or url.query or url.fragment or url.path.strip("/"):
        raise UsageError("the OTLP endpoint is a host and a port alone; headers are in OTEL_EXPORTER_OTLP_HEADERS")
    return text


def _check_variables(endpoint: str | None) -> None:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    if protocol != "grpc":
        raise UsageError(f"OTLP is exported over gRPC, and OTEL_EXPORTER_OTLP_PROTOCOL says {protocol[:20]!r}")
    for infix in ("", "_TRACES", "_METRICS"):
        key, certificate, authority = (
            f"OTEL_EXPORTER_OTLP{infix}_{what}" for what in ("CLIENT_KEY", "CLIENT_CERTIFICATE", "CERTIFICATE")
        )
        if bool(os.environ.get(key)) != bool(os.environ.get(certificate)):
            raise UsageError(f"{key} and {certificate} are given together")
        for name in (key, certificate, authority):
            if (file := os.environ.get(name)) and not Path(file).is_file():
                raise UsageError(f"{name} names no file: {file}")
            if file and endpoint is not None and endpoint.startswith("http:"):
                raise UsageError(f"{name} is for TLS, and the endpoint {endpoint} is without it")
        where = f"OTEL_EXPORTER_OTLP{infix}_ENDPOINT"
        if endpoint is None and "@" in os.environ.get(where, ""):  # the SDK shows it whole in the log
            raise UsageError(f"{where} has credentials: they belong into OTEL_EXPORTER_OTLP_HEADERS")


def _headers(signal: str) -> dict[str, str]:
    """The headers of the standard variables. Read here, since the SDK and gRPC show a wrong one whole in the log."""
    own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_HEADERS"
    name = own if os.environ.get(own) else "OTEL_EXPORTER_OTLP_HEADERS"
    found: dict[str, str] = {}
    for number, item in enumerate(filter(str.strip, os.environ.get(name, "").split(",")), start=1):
        header, equals, value = item.partition("=")
        header, value = unquote(header).strip().lower(), unquote(value).strip()
        usable = header.isascii() and header.replace("-", "").replace("_", "").replace(".", "").isalnum()
        if not equals or not usable or not value.isascii() or not value.isprintable():
            raise UsageError(f"{name}: item {number} is no name=value of printable characters")
        found[header] = value
    return found


def _page(given: int | str) -> tuple[str, int]:
    if isinstance(given, bool):
        raise UsageError("prometheus is a port, or host:port")
    if isinstance(given, int):
        return LOOPBACK, _port(given)
    host, colon, port = given.rpartition(":")
    if not colon or not host:
        raise UsageError("prometheus is a port, or host:port")
    return host.strip("[]"), _port(port)


def _port(given: int | str) -> int:
    try:
        port = int(given)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise UsageError(f"{str(given)[:20]!r} is no port: 0 to 65535")
    return port


# ---- building it -----------------------------------------------------------------------------------------


def _built(wanted: Wanted, free: Free, service_name: str, telemetry: Telemetry) -> Pipelines:
    """The pipelines for what is free. Raises UsageError where a package is missing or the port is taken."""
    try:
        from gym_ckpt_grpc.telemetry import pipelines
    except ModuleNotFoundError as error:
        _missing(error)
    spans, readings = [], []
    pairs = []
    if wanted.otlp:
        where = wanted.endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT
        local = urlsplit(where).hostname in ("localhost", LOOPBACK, "::1")
        try:
            pairs.append(pipelines.otlp_exporters(wanted.endpoint, headers=wanted.headers, local=local))
        except ModuleNotFoundError as error:
            _missing(error)
    if wanted.console:
        pairs.append(pipelines.console_exporters())
    for of_spans, of_metrics in pairs:
        spans += [of_spans] if free.traces else []
        readings += [of_metrics] if free.metrics else []
    page = wanted.page if free.metrics else None
    try:
        return pipelines.Pipelines(
            spans=spans,
            metrics=readings,
            page=page,
            service_name=service_name,
            on_loss=lambda lost: telemetry.add(catalogue.SPANS_DROPPED, lost, {}),
        )
    except OSError as error:
        raise PageTaken(f"/metrics cannot be served at {page}: {error.strerror or error}") from error


def _missing(error: ModuleNotFoundError) -> NoReturn:
    if (error.name or "").split(".")[0] not in ("opentelemetry", "prometheus_client"):
        raise error
    raise UsageError(f"{error.name} is not installed, which exporting needs: {INSTALL}") from None
