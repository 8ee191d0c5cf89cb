"""Spans of several processes put together: the tree of a trace, what is wrong with it, and a drawing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gym_ckpt_grpc.telemetry import attributes as at
from gym_ckpt_grpc.telemetry.catalogue import SpanType
from gym_ckpt_grpc.telemetry.emitting import SCOPE

BAR = 40
"""Characters of the time line beside a drawing."""


@dataclass(frozen=True)
class Seen:
    """A span as a collector sees it: it has ended. began, ended: ms since 1970. parent_id: empty for a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    process: str = ""
    kind: str = "internal"
    began: float = 0.0
    ended: float = 0.0
    status: str = "unset"
    attributes: dict[str, object] = field(default_factory=dict, compare=False)
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id) of each."""
    scope: str = SCOPE
    """Name of the tracer: ours, or that of another library in the process."""

    @property
    def ms(self) -> float:
        """How long it took."""
        return self.ended - self.began

    @property
    def outcome(self) -> object:
        """As our spans have it; None for others."""
        return self.attributes.get(at.OUTCOME)

    def of(self, name: str) -> object:
        """An attribute, by a name of `attributes`."""
        return self.attributes.get(name)


class Trace:
    """The spans of one trace id, of all processes. duplicates: span ids that came more than once."""

    def __init__(self, spans: Iterable[Seen]) -> None:
        came = sorted(spans, key=lambda span: (span.began, span.ended))
        self.duplicates = sorted(span_id for span_id, count in Counter(s.span_id for s in came).items() if count > 1)
        self.spans = list({span.span_id: span for span in came}.values())
        self._by_id = {span.span_id: span for span in self.spans}

    @property
    def trace_id(self) -> str:
        """Common to all of them."""
        return self.spans[0].trace_id

    @property
    def roots(self) -> list[Seen]:
        """Spans without a parent."""
        return [span for span in self.spans if not span.parent_id]

    @property
    def root(self) -> Seen:
        """The one root; fails if there are more, or none."""
        assert len(self.roots) == 1, f"{len(self.roots)} roots:\n{self.drawn()}"
        return self.roots[0]

    @property
    def orphans(self) -> list[Seen]:
        """Spans whose parent never came: it did not end, or its process did not export it."""
        return [span for span in self.spans if span.parent_id and span.parent_id not in self._by_id]

    @property
    def processes(self) -> set[str]:
        """Everybody who has a span in it, by the names without pids."""
        return {name_of(span.process) for span in self.spans}

    @cached_property
    def _below(self) -> dict[str, list[Seen]]:
        below: dict[str, list[Seen]] = {}
        for span in self.spans:
            below.setdefault(span.parent_id, []).append(span)
        return below

    def children(self, span: Seen) -> list[Seen]:
        """In the order of their beginnings."""
        return self._below.get(span.span_id, [])

    def parent(self, span: Seen) -> Seen | None:
        """None for a root and for an orphan."""
        return self._by_id.get(span.parent_id)

    def above(self, span: Seen) -> Iterator[Seen]:
        """Its parent, that one's parent, and so on."""
        at_hand = self.parent(span)
        while at_hand is not None:
            yield at_hand
            at_hand = self.parent(at_hand)

    def under(self, span: Seen) -> Iterator[Seen]:
        """Everything below it."""
        for child in self.children(span):
            yield child
            yield from self.under(child)

    def of(self, span: SpanType | str, *, process: str = "", kind: str = "") -> list[Seen]:
        """The spans of one type, or of an RPC's full method name. process: of this one only, by its name."""
        name = span if isinstance(span, str) else span.name
        return [
            seen
            for seen in self.spans
            if seen.name == name and process in ("", seen.process.partition(":")[0]) and kind in ("", seen.kind)
        ]

    def only(self, span: SpanType | str, *, process: str = "", kind: str = "") -> Seen:
        """The one span of a type."""
        found = self.of(span, process=process, kind=kind)
        assert len(found) == 1, f"{len(found)} spans of {span}:\n{self.drawn()}"
        return found[0]

    def whole(self) -> None:
        """Fail unless it is one tree: one root, no orphan, nothing twice."""
        assert len(self.roots) == 1, f"{len(self.roots)} roots:\n{self.drawn()}"
        assert self.orphans == [], f"{len(self.orphans)} orphans:\n{self.drawn()}"
        assert self.duplicates == [], f"twice: {self.duplicates}\n{self.drawn()}"

    # ---- for people

    def drawn(self) -> str:
        """One line per span, below its parent, with its process, ms and place in time."""
        first, last = min(s.began for s in self.spans), max(s.ended for s in self.spans)
        lines = [f"trace {self.trace_id}: {len(self.spans)} spans, {last - first:.1f} ms"]
        for top in [*self.roots, *self.orphans]:
            lines += self._lines(top, 0 if not top.parent_id else 1, first, max(last - first, 1e-6))
        return "\n".join(lines)

    def _lines(self, span: Seen, depth: int, first: float, whole: float) -> Iterator[str]:
        name = span.name.removeprefix("gym.checkpoint.").rpartition("/")[2]
        if span.kind != "internal":
            name += f" ({span.kind})"
        if span.parent_id and span.parent_id not in self._by_id:
            name = f"ORPHAN {name}"
        begin = round((span.began - first) / whole * BAR)
        end = max(begin + 1, round((span.ended - first) / whole * BAR))
        bar = " " * begin + "=" * (end - begin)
        outcome = "" if span.outcome in ("ok", None) else f" {span.outcome}"
        text = "  " * depth + name
        yield f"{text:<46.46} {span.process:<22.22} {span.ms:9.1f} ms |{bar:<{BAR + 1}}|{outcome}"
        for child in self.children(span):
            yield from self._lines(child, depth + 1, first, whole)


def name_of(process: str) -> str:
    """A process's name without what tells its lives apart."""
    return process.partition(":")[0]


def grouped(spans: Iterable[Seen]) -> list[Trace]:
    """By trace, the one with most spans first."""
    found: dict[str, list[Seen]] = {}
    for span in spans:
        found.setdefault(span.trace_id, []).append(span)
    return sorted((Trace(each) for each in found.values()), key=lambda trace: -len(trace.spans))
