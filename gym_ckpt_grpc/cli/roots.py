"""What the commands that look at a root share: how they open one, and how they tell what is wrong with it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from rich.text import Text

from gym_ckpt_grpc.cli.output import errors, people, printable
from gym_ckpt_grpc.protocol.errors import StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import CheckpointRoot
from gym_ckpt_grpc.storage.viewing import Trouble

LISTED = 20
"""Lines of one kind that people are shown; `--json` has all."""


def root_at(text: str) -> CheckpointRoot:
    """The root at a URI or a path, which may be relative to where the command was given; it need not exist."""
    return CheckpointRoot(text if text.startswith("file:") or "://" in text else os.path.abspath(text))


def open_root(text: str) -> CheckpointRoot:
    """A root that must be there. Raises StateNotFound, InvalidArgument."""
    root = root_at(text)
    if not root.files.is_dir(root.path):
        raise StateNotFound(f"{root.path!r} is no directory")
    return root


def tell(*parts: str | tuple[str, str]) -> None:
    """One line for people: texts, or (text, style), as they are but for what would command the terminal."""
    shown = [printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts]
    people.print(Text.assemble(*shown), soft_wrap=True)


def tell_lines(lines: Iterable[str], *, indent: int) -> None:
    """Many plain lines, which are printable already: without what makes one of `tell` cost a tenth of a millisecond."""
    people.file.writelines(f"{' ' * indent}{line}\n" for line in lines)


def tell_troubles(troubles: Iterable[Trouble], *, limit: int = LISTED) -> None:
    """What cannot be read, one line each."""
    told = list(troubles)
    for trouble in told[:limit]:
        tell(("problem: ", "red"), str(trouble))
    if len(told) > limit:
        tell(("problem: ", "red"), f"and {len(told) - limit:,} more; --json has all")


def described_troubles(troubles: Iterable[Trouble]) -> list[dict[str, str]]:
    """For programs."""
    return [{"file": each.file, "participant": each.participant, "message": each.message} for each in troubles]


def tell_episodes(head: str, episodes: Iterable[EpisodeId | str], *, limit: int = LISTED) -> None:
    """A line of episodes, if there are any."""
    told = [str(episode) for episode in episodes]
    if told:
        more = f" and {len(told) - limit:,} more" if len(told) > limit else ""
        tell(f"{head}: {', '.join(told[:limit])}{more}")


def tell_reasons(reasons: Iterable[str]) -> None:
    """How many rollouts start over for each reason, the most frequent first; many may have one of their own."""
    counted = Counter(reasons).most_common()
    for reason, count in counted[:LISTED]:
        tell(f"  {count:,} start over: {reason}")
    if len(counted) > LISTED:
        more = sum(count for _, count in counted[LISTED:])
        tell(f"  {more:,} start over for {len(counted) - LISTED:,} other reasons; --json has all")


def progress(text: str) -> None:
    """How far a long command is: one line on standard error, drawn over itself on a terminal, else nothing."""
    if errors.is_terminal:
        errors.file.write(f"\r\x1b[K{printable(text)}")
        errors.file.flush()
