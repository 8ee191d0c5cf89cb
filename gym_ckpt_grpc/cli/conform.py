"""`gym-ckpt conform`: what a running participant keeps of the control plane's behaviours, and what it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from gym_ckpt_grpc.auth import ClientTls, TokenSource
from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import errors, people, print_json, say, table
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.testing import Report, Result, Unreachable, Verdict, run_conformance

_COLOURS = {Verdict.HOLDS: "green", Verdict.BROKEN: "red", Verdict.SKIPPED: "yellow"}


async def conform(
    address: str,
    *,
    token: TokenSource | None,
    observer_token: TokenSource | None,
    root: str | None,
    expendable: Sequence[str],
    only: Sequence[str],
    ready_within: float,
    allow_insecure: bool,
    tls: ClientTls | None,
    as_json: bool,
) -> Exit:
    """Run the conformance kit and print its report; FAILED if anything is broken, UNREACHABLE if nobody answers."""
    try:
        report = await run_conformance(
            address,
            token=token,
            observer_token=observer_token,
            root=root,
            expendable=[_episode(key) for key in expendable],
            only=only,
            ready_within=ready_within,
            allow_insecure=allow_insecure,
            tls=tls,
        )
    except Unreachable as error:
        say(errors, "red", "error:", error)
        return Exit.UNREACHABLE
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)
    return Exit.OK if report.ok else Exit.FAILED


def _episode(key: str) -> EpisodeId:
    try:
        return EpisodeId.from_capture_key(key)
    except ValueError as error:
        raise UsageError(f"--expendable {key!r}: {error}") from None


def _print(report: Report) -> None:
    say(people, "bold", report.participant, f"at {report.address}, process {report.incarnation_id[:12]}")
    for group, results in groupby(report.results, lambda result: result.check.group):
        people.print(table(group, ["", "behaviour", "what holds"], [_row(result) for result in results]))
    for verdict in (Verdict.HOLDS, Verdict.BROKEN, Verdict.SKIPPED):
        people.print(f"{len(report.of(verdict)):>4} {verdict}")
    for left in report.left:
        say(people, "red", "left behind", left)


def _row(result: Result) -> list[object]:
    colour = _COLOURS[result.verdict]
    text = result.check.title
    if result.verdict is Verdict.BROKEN:
        text += f"\n  expected: {result.expected}\n  seen:     {result.seen}"
    elif result.why:
        text += f"\n  {result.why}"
    return [Text(str(result.verdict), style=colour), " ".join(result.check.ids), text]
