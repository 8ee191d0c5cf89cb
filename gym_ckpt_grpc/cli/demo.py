"""`gym-ckpt demo`: runs the demo and shows what was saved."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import errors, people, print_json, say, size, table
from gym_ckpt_grpc.minigym.demo import Demo, DemoFailed, DemoReport, DemoSettings, Watcher
from gym_ckpt_grpc.minigym.supervisor import Unhealthy
from gym_ckpt_grpc.protocol.errors import GymCkptError, UsageError
from gym_ckpt_grpc.protocol.identity import ParticipantKind


async def demo(*, rollouts: int, seed: int, keep: Path | None, leave_out: str, cuts: bool, as_json: bool) -> Exit:
    """Run the demo. A failed one keeps its logs and says where; progress goes to standard error."""
    kind = _kind(leave_out)
    directory = _directory(keep)
    settings = DemoSettings(directory=directory, rollouts=rollouts, seed=seed, leave_out=kind, cuts=cuts)
    failed = True
    try:
        with _watching() as watcher:
            run = Demo(settings, watcher)
            report = await run.run()
        failed = not report.passed
        if as_json:
            print_json(msgspec.to_builtins(report))
        else:
            _print(report, cuts=cuts)
        for rollout, reason in list(run.failures.items())[:5]:
            say(errors, "red", f"rollout {rollout} ended without a result:", reason)
        return Exit.FAILED if failed else Exit.OK
    except (DemoFailed, Unhealthy, GymCkptError) as error:
        say(errors, "red", "the demo failed:", error)
        return Exit.FAILED
    except BaseException:
        failed = False  # interrupted: nothing to look into
        raise
    finally:
        if keep is None and not failed:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            errors.print(f"kept: {directory}", soft_wrap=True)


def _kind(leave_out: str) -> ParticipantKind | None:
    if not leave_out:
        return None
    try:
        return ParticipantKind(leave_out)
    except ValueError:
        raise UsageError(f"--leave-out {leave_out!r} is none of {', '.join(ParticipantKind)}") from None


def _directory(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="gym-ckpt-demo-"))
    if keep.exists() and any(keep.iterdir()):
        raise UsageError(f"--keep {keep} is not empty")
    keep.mkdir(parents=True, exist_ok=True)
    return keep


@contextmanager
def _watching() -> Iterator[Watcher]:
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=not errors.is_terminal) as bars:
        tasks: dict[str, int] = {}

        def count(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done)  # type: ignore[arg-type]

        yield Watcher(say=lambda line: bars.console.print(line, soft_wrap=True), count=count)


def _print(report: DemoReport, *, cuts: bool) -> None:
    rows = [
        ("rollouts", report.rollouts, ""),
        ("finished before the checkpoint", report.finished_before, ""),
        ("in flight at the checkpoint", report.in_flight, ""),
        ("continued after the crash", report.continued, "by the worker's own log"),
        ("restarted from the prompt", report.restarted, "by the worker's own log"),
        ("lost", report.lost, ""),
        ("different from the run never killed", report.different, "transcript, tools, state, reward"),
        ("turns saved", report.turns_saved, ""),
        ("tokens saved", report.tokens_saved, "of those turns"),
        (
            "tokens kept in the middle",
            report.tokens_kept,
            f"of {report.generations_continued} generations, cut and continued",
        ),
        (
            "tokens generated again",
            report.tokens_redone,
            "made after the cut" if cuts else "made after the cut, or undelivered at it",
        ),
        ("pause, ms", report.pause_ms, "first server closed to last one open (released)"),
        ("of it for the safe cut, ms", report.cut_ms, "until every server was at its cut (prepared)"),
        ("durable after, ms", report.durable_ms, "written while the servers worked on"),
        ("checkpoint", size(report.bytes), ""),
    ]
    people.print(table("", ["", "", ""], rows))
    people.print("[green]nothing was lost[/green]" if report.passed else "[red]the promise was not kept[/red]")
