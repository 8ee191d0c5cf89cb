"""What a check found, and the report of them all."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gym_ckpt_grpc.testing.conformance.context import Context


class Verdict(enum.StrEnum):
    """How a check ended."""

    HOLDS = "holds"
    BROKEN = "broken"
    SKIPPED = "skipped"


class Broken(Exception):
    """The participant does not keep its word. expected, seen: one line each."""

    def __init__(self, expected: str, seen: str) -> None:
        super().__init__(f"expected {expected}; seen {seen}")
        self.expected = expected
        self.seen = seen


class Skipped(Exception):
    """The check cannot be made here; the message says why."""


CheckFunction = Callable[["Context"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ids: the behaviours of docs/behaviour/control.md that it looks at. title: what holds."""

    ids: tuple[str, ...]
    title: str
    run: CheckFunction
    group: str

    @property
    def name(self) -> str:
        """Name of its function, for `--only`."""
        return getattr(self.run, "__name__", "")


@dataclass(slots=True)
class Group:
    """Collects the checks of one module, in order."""

    name: str
    checks: list[Check] = field(default_factory=list)

    def check(self, *ids: str) -> Callable[[CheckFunction], CheckFunction]:
        """Add a function as a check of these behaviours; the first line of its docstring says what holds."""

        def add(function: CheckFunction) -> CheckFunction:
            title = (function.__doc__ or "").partition("\n")[0].rstrip(".")
            self.checks.append(Check(ids, title, function, self.name))
            return function

        return add


@dataclass(frozen=True, slots=True)
class Result:
    """One check's result. expected, seen: of a broken one. why: of a skipped one. seconds: how long it took."""

    check: Check
    verdict: Verdict
    expected: str = ""
    seen: str = ""
    why: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        ids = " ".join(self.check.ids)
        text = f"{ids}: {self.check.title}: {self.verdict}"
        if self.verdict is Verdict.BROKEN:
            return f"{text}: expected {self.expected}; seen {self.seen}"
        return f"{text}: {self.why}" if self.why else text


@dataclass(frozen=True, slots=True)
class Report:
    """Every result of a run. participant: `kind/service/instance`. left: what could not be tidied up."""

    address: str
    participant: str
    incarnation_id: str
    results: tuple[Result, ...]
    left: tuple[str, ...] = ()

    def of(self, verdict: Verdict) -> list[Result]:
        """The results that ended so."""
        return [result for result in self.results if result.verdict is verdict]

    def ids(self, verdict: Verdict) -> list[str]:
        """The behaviours of those results, each once, in order."""
        return list(dict.fromkeys(i for result in self.of(verdict) for i in result.check.ids))

    @property
    def ok(self) -> bool:
        """Whether nothing is broken and nothing was left behind."""
        return not self.of(Verdict.BROKEN) and not self.left

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "address": self.address,
            "participant": self.participant,
            "incarnation_id": self.incarnation_id,
            "ok": self.ok,
            "holds": len(self.of(Verdict.HOLDS)),
            "broken": len(self.of(Verdict.BROKEN)),
            "skipped": len(self.of(Verdict.SKIPPED)),
            "ids": {str(verdict): self.ids(verdict) for verdict in Verdict},
            "left_behind": list(self.left),
            "checks": [
                {
                    "ids": list(r.check.ids),
                    "name": r.check.name,
                    "group": r.check.group,
                    "title": r.check.title,
                    "verdict": str(r.verdict),
                    "expected": r.expected,
                    "seen": r.seen,
                    "why": r.why,
                    "seconds": round(r.seconds, 3),
                }
                for r in self.results
            ],
        }


def chosen(checks: Iterable[Check], only: Iterable[str]) -> list[Check]:
    """The checks that `only` names by id or by name; all of them for an empty one."""
    wanted = set(only)
    return [check for check in checks if not wanted or wanted.intersection((*check.ids, check.name))]
