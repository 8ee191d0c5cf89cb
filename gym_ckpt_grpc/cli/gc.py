"""`gym-ckpt gc`: remove the checkpoints that a policy does not keep, and what crashed runs left.

It claims no epoch, so it replaces nobody, and may run beside a coordinator at work: what that could still need is never
removed (storage/pruning.py). Of directories that were never published it removes those of ended epochs only.
"""

from __future__ import annotations

import re
from typing import Any

from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, print_json, say, size, table
from gym_ckpt_grpc.cli.roots import open_root
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    Decision,
    Plan,
    Retention,
    RetentionOutcome,
    apply_retention,
    plan_retention,
)

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([smhdw]?)\Z")


def seconds(option: str, text: str) -> float:
    """A duration such as `90`, `90s`, `15m`, `6h`, `2d` or `1w`. Raises UsageError naming the option."""
    match = _DURATION.match(text)
    if match is None:
        raise UsageError(f"{option} {text!r} is no duration; write 90s, 15m, 6h, 2d or 1w")
    return float(match[1]) * _UNITS[match[2]]


def policy_of(keep_last: int | None, keep_every: int | None, keep_within: str | None) -> Retention | None:
    """The policy of options, those not given as `Retention` has them; None if none is given. Raises UsageError."""
    if keep_last is None and keep_every is None and keep_within is None:
        return None
    default = Retention()
    return Retention(
        keep_last=default.keep_last if keep_last is None else keep_last,
        keep_every=default.keep_every if keep_every is None else keep_every,
        keep_within=None if keep_within is None else seconds("--keep-within", keep_within),
    )


def gc(root: str, policy: Retention | None, *, grace: float, dry_run: bool, as_json: bool) -> Exit:
    """Print what is kept, what is removed and why; FAILED if something could not be removed, or nothing may be.

    policy: None keeps every published checkpoint. Raises StateNotFound, StateCorrupt, InvalidArgument.
    """
    opened = open_root(root)
    plan = plan_retention(opened, policy, epoch=None, grace=grace)
    outcome = None if dry_run else apply_retention(opened, plan)
    failures = plan.problems if outcome is None else outcome.failures
    if as_json:
        print_json(_described(opened, plan, outcome, failures))
    else:
        _print(plan, outcome, failures, policy)
    return Exit.FAILED if failures else Exit.OK


def _fates(plan: Plan, outcome: RetentionOutcome | None) -> list[tuple[Decision, str]]:
    """Each checkpoint or file with what became of it: `kept`, `removed`, `would go`, or `failed`."""
    decisions = (*plan.published, *plan.unpublished, *plan.files)
    if outcome is None:
        return [(each, "would go" if each.removed else "kept") for each in decisions]
    removed = {each.name for each in (*outcome.removed, *outcome.files)}
    kept = {each.name: each for each in outcome.kept}
    fates = []
    for each in decisions:
        if each.name in removed:
            fates.append((each, "removed"))
        elif each.name in kept or not each.removed:
            fates.append((kept.get(each.name, each), "kept"))
        else:
            fates.append((each, "failed"))
    return fates


def _freed(plan: Plan, outcome: RetentionOutcome | None) -> int:
    if outcome is not None:
        return outcome.bytes_freed
    return sum(each.bytes for each in (*plan.published, *plan.unpublished, *plan.files) if each.removed)


def _described(
    root: CheckpointRoot, plan: Plan, outcome: RetentionOutcome | None, failures: tuple[str, ...]
) -> dict[str, Any]:
    fates = {each.name: (each, fate) for each, fate in _fates(plan, outcome)}

    def listed(decisions: tuple[Decision, ...], name: str) -> list[dict[str, Any]]:
        return [
            {
                name: decision.name,
                "sequence_number": decision.number,
                "bytes": decision.bytes,
                "fate": fate.replace(" ", "_"),
                "reason": decision.reason,
            }
            for decision, fate in (fates[each.name] for each in decisions)
        ]

    return {
        "root": root.uri,
        "dry_run": outcome is None,
        "epoch": plan.inventory.history.epoch,
        "checkpoints": listed(plan.published, "checkpoint_id"),
        "orphans": listed(plan.unpublished, "checkpoint_id"),
        "files": listed(plan.files, "file"),
        "interrupted": list(plan.interrupted),
        "finished": list(outcome.finished) if outcome else [],
        "bytes_freed": _freed(plan, outcome),
        "failures": list(failures),
    }


_COLOURS = {"kept": "", "removed": "green", "would go": "yellow", "failed": "red"}


def _print(plan: Plan, outcome: RetentionOutcome | None, failures: tuple[str, ...], policy: Retention | None) -> None:
    rows = [
        (each.name, each.number or "", size(each.bytes) if each.bytes else "", fate, each.reason)
        for each, fate in _fates(plan, outcome)
    ]
    if rows:
        people.print(table("", ["checkpoint", "number", "size", "", "why"], rows))
    if outcome is None and plan.interrupted:
        people.print(f"{len(plan.interrupted)} interrupted removals would be finished")
    if outcome is not None and outcome.finished:
        say(people, "green", "finished", f"interrupted removals of {', '.join(outcome.finished)}")
    for failure in failures:
        say(people, "red", "failed" if outcome is not None and not plan.problems else "damaged", failure)
    if plan.problems:
        people.print("nothing is removed: what is published is not known while an entry of the sequence cannot be read")
        return
    going = sum(fate in ("removed", "would go") for _, fate in _fates(plan, outcome))
    verb = "would be removed" if outcome is None else "removed"
    people.print(f"{going} {verb}, {size(_freed(plan, outcome))}")
    if policy is None:
        people.print("every published checkpoint is kept: --keep-last, --keep-every or --keep-within says otherwise")
