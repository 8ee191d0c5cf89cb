"""Names of a ledger's files, from which the attempt can be read back, and its directories.

    <directory>/lock                    who changes fences or removes files has it
    <directory>/fences.log              fences.py
    <directory>/rows/<name>.rows        rows of one attempt: one JSON object per line
    <directory>/tokens/<name>.tokens    optional: tokens kept by the server itself; the ledger only removes them
    <directory>/imports/<id>/           an import that was written and is not in place yet

`<name>` is the capture key; of a long rollout id its start and its digest stand for it.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.ids import EpisodeId

MAX_NAME = 200
"""Longest file name, in bytes."""
ROWS, TOKENS = ".rows", ".tokens"

_LONGEST_TAIL = len("-a4294967294" + TOKENS)
_MAX_STEM = MAX_NAME - _LONGEST_TAIL
_STEM_DIGEST = 2 + 64
_NAME = re.compile(r"(?P<stem>.+?)(?:-a(?P<attempt>[1-9][0-9]{0,9}))?\Z")


def stem_of(rollout_id: str) -> str:
    """What stands for a rollout in its files' names. `=`, which no id has, keeps the two forms apart."""
    if len(rollout_id) <= _MAX_STEM:
        return rollout_id
    digest = hashlib.sha256(rollout_id.encode()).hexdigest()
    return f"{rollout_id[: _MAX_STEM - _STEM_DIGEST]}=h{digest}"


def name_of(episode: EpisodeId) -> str:
    """The file name of an attempt, without its ending."""
    stem = stem_of(episode.rollout_id)
    return stem if episode.attempt == 0 else f"{stem}-a{episode.attempt}"


@dataclass(frozen=True, slots=True)
class FileOfAttempt:
    """A file found in a directory: whose it is."""

    stem: str
    attempt: int
    path: str


class LedgerPaths:
    """The paths of one ledger directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.lock = posixpath.join(directory, "lock")
        self.fences = posixpath.join(directory, "fences.log")
        self.rows = posixpath.join(directory, "rows")
        self.tokens = posixpath.join(directory, "tokens")
        self.imports = posixpath.join(directory, "imports")

    def rows_of(self, episode: EpisodeId) -> str:
        """The rows of one attempt."""
        return posixpath.join(self.rows, name_of(episode) + ROWS)

    def tokens_of(self, episode: EpisodeId) -> str:
        """The tokens that the server itself may keep of one attempt."""
        return posixpath.join(self.tokens, name_of(episode) + TOKENS)

    def attempts(self, directory: str, names: Iterable[str]) -> list[FileOfAttempt]:
        """What the names found in `rows` or `tokens` stand for; others are left out."""
        ending = ROWS if directory == self.rows else TOKENS
        found = []
        for name in names:
            match = _NAME.match(name.removesuffix(ending)) if name.endswith(ending) else None
            if match:
                attempt = int(match["attempt"] or 0)
                found.append(FileOfAttempt(match["stem"], attempt, posixpath.join(directory, name)))
        return found
