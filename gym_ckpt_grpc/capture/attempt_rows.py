"""Lines of attempts in one directory, and the fences in front of them; what a line means, subclasses know.

Appending takes no lock. A line goes into the file of its attempt if there is one; who has to create it looks at the
fences before and after. Whoever changes fences or removes files holds the lock of the directory. An attempt is
fenced durably before anything of it is removed; from then on no process appends or reads it, until its rollout is
deleted or a restore installs it. Source: participants section 12.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from gym_ckpt_grpc.capture.fences import NONE, Fences
from gym_ckpt_grpc.capture.imports import WrittenRows, remove_import, write_import
from gym_ckpt_grpc.capture.ledger_files import (
    LedgerFiles,
    LocalLedgerFiles,
    append_line,
    create_new,
    locked,
    whole_lines,
)
from gym_ckpt_grpc.capture.ledger_ids import all_episodes, all_rollouts
from gym_ckpt_grpc.capture.ledger_names import FileOfAttempt, LedgerPaths, stem_of
from gym_ckpt_grpc.capture.recent import Recent
from gym_ckpt_grpc.control import Removed, StagedRows
from gym_ckpt_grpc.protocol.errors import StaleAttempt, StateNotFound
from gym_ckpt_grpc.protocol.ids import EpisodeId

T = TypeVar("T")

MAX_COUNTERS = 65_536
"""Rollouts whose last admission numbers are remembered beyond what their rows tell."""


class AttemptRows:
    """Lines of attempts in one directory. Everything blocks; methods may be called in any thread.

    directory: made if missing, on a file system with `flock`. sync_rows: whether a line is durable when its append
    returns. Raises StateUnwritable if the directory cannot be used. Every method raises StateUnwritable and
    StateCorrupt for what the disk does.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, sync_rows: bool = True, files: LedgerFiles | None = None
    ) -> None:
        self._files = files or LocalLedgerFiles()
        self._paths = LedgerPaths(os.path.abspath(directory))
        self._sync_rows = sync_rows
        self._fences = Fences(self._files, self._paths.fences)
        self._mutex = threading.Lock()
        self._named: Recent[bool] = Recent(MAX_COUNTERS)
        self._files.make_dirs(self._paths.rows)
        with locked(self._files, self._paths.lock):
            self._fences.ensure()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._paths.directory!r})"

    # ---- appending

    def append_line(self, episode: EpisodeId, line: bytes) -> bool:
        """Append one line, which has its end. False: the attempt is fenced, the line is dropped."""
        path, made = self._paths.rows_of(episode), False
        # Again only if the file was removed or made by someone else in between.
        while not append_line(self._files, path, line, sync=self._sync_rows):
            if self._fences.covers(episode):
                return False
            made = create_new(self._files, path)
            if made and self._fences.covers(episode):
                self._remove_made(episode)
                return False
        if self._sync_rows and (made or not self._named.get(episode)):
            # Also once by who found the file: the process that made it may not have come to this.
            self._files.sync_dir(self._paths.rows)
            with self._mutex:
                self._named.put(episode, True)
        return True

    def _remove_made(self, episode: EpisodeId) -> None:
        """Remove the file that was made for an attempt, if that is still fenced."""
        with locked(self._files, self._paths.lock):
            if self._fences.covers(episode):
                self._files.remove(self._paths.rows_of(episode))

    # ---- reading

    def read(self, episodes: Iterable[EpisodeId], read: Callable[[EpisodeId], T]) -> dict[EpisodeId, T]:
        """What `read` gives for each attempt. Raises StaleAttempt naming those that are fenced."""
        found = {episode: read(episode) for episode in episodes}
        # After reading: a ledger that was removed meanwhile is behind a fence that stands by now.
        fences = self._fences.read()
        if stale := [episode for episode in found if episode.attempt <= fences.get(episode.rollout_id, NONE)]:
            raise StaleAttempt(f"the ledger of {stale[0]} is fenced: the attempt was retired", episodes=stale)
        return found

    def lines_of(self, episode: EpisodeId) -> list[bytes]:
        """The whole lines of an attempt, without their ends, in the order they were appended; fenced or not."""
        try:
            source = self._files.open(self._paths.rows_of(episode))
        except StateNotFound:
            return []
        try:
            data = source.read(0, source.size)
        finally:
            source.close()
        return [line for _, line in whole_lines(data)]

    def is_fenced(self, episode: EpisodeId) -> bool:
        """Whether this attempt is fenced now."""
        return self._fences.covers(episode)

    # ---- restoring

    def stage_lines(self, lines: Mapping[EpisodeId, Sequence[bytes]]) -> WrittenRows:
        """Write lines, each with its end, for their targets aside; no lines clear what the target has. Touches
        nothing live. Raises UsageError for two attempts of a rollout. End it with `activate` or `drop`."""
        return write_import(self._files, self._paths, lines, sync=self._sync_rows)

    def activate(self, staged: StagedRows) -> None:
        """For each target: remove it and later attempts of that rollout, fence below it, put the rows in place.

        What is fenced goes as well, so that a late row of it finds no file to get into. The one write that may want
        for space comes first: if it fails, nothing has changed. After any failure stage and activate again.
        """
        written = _written(staged)
        try:
            with locked(self._files, self._paths.lock):
                self._activate(written.files)
        finally:
            remove_import(self._files, written)

    def _activate(self, staged: Mapping[EpisodeId, str | None]) -> None:
        first = {target.rollout_id: target.attempt for target in staged}
        fences = self._fences.read()
        below = {rollout: attempt - 1 for rollout, attempt in first.items()}
        self._fences.write({rollout: last for rollout, last in below.items() if fences.get(rollout, NONE) != last})
        found = self._find(first, lambda rollout, attempt: True)
        placed: set[str] = set()
        for target, path in staged.items():
            if path is not None:
                self._files.replace(path, self._paths.rows_of(target))
                placed.add(self._paths.rows_of(target))
        for each in found:
            if each.path not in placed:
                self._files.remove(each.path)
        self._sync_dirs()
        self._forget(first)

    def drop(self, staged: StagedRows) -> None:
        """Remove what `stage` wrote. Safe to repeat."""
        remove_import(self._files, _written(staged))

    # ---- removing

    def retire(self, episodes: Sequence[EpisodeId]) -> Removed:
        """Fence attempts up to each id, durably, then remove their ledgers. One sync.

        Raises TypeError for what is no list of EpisodeId, changing nothing.
        """
        asked = all_episodes(episodes)
        if not asked:
            return Removed((), ())
        through: dict[str, int] = {}
        for episode in asked:
            through[episode.rollout_id] = max(through.get(episode.rollout_id, NONE), episode.attempt)
        with locked(self._files, self._paths.lock):
            fences = self._fences.read()
            self._fences.write({r: last for r, last in through.items() if fences.get(r, NONE) < last})
        # A delete may come between: what is no longer fenced is not ours to remove.
        with locked(self._files, self._paths.lock):
            fences = self._fences.read()
            found = self._find(through, lambda rollout, attempt: attempt <= fences.get(rollout, NONE))
            for each in found:
                self._files.remove(each.path)
            self._forget(through)
        there = {each.path for each in found}
        removed = [episode for episode in asked if self._paths.rows_of(episode) in there]
        absent = [episode for episode in asked if self._paths.rows_of(episode) not in there]
        return Removed(tuple(removed), tuple(absent))

    def discard(self, episodes: Sequence[EpisodeId]) -> None:
        """Remove the ledgers of exactly these attempts, durably; fences stay as they are. Raises TypeError."""
        asked = all_episodes(episodes)
        if not asked:
            return
        with locked(self._files, self._paths.lock):
            for episode in asked:
                self._files.remove(self._paths.rows_of(episode))
                self._files.remove(self._paths.tokens_of(episode))
            self._sync_dirs()
            self._forget({episode.rollout_id for episode in asked})

    def delete(self, rollouts: Sequence[str]) -> None:
        """Remove all ledgers of these rollouts and their fences, durably; the ids can be used again.

        rollouts: rollout ids. Raises TypeError for a bare string, InvalidArgument for a bad id, changing nothing.
        """
        asked = all_rollouts(rollouts)
        if not asked:
            return
        with locked(self._files, self._paths.lock):
            for each in self._find(asked, lambda rollout, attempt: True):
                self._files.remove(each.path)
            # Before the fences go, or rows that come back with a loss of power would be those of the next use.
            self._sync_dirs()
            fences = self._fences.read()
            self._fences.write({rollout: NONE for rollout in asked if rollout in fences})
            self._forget(asked)

    def _find(self, rollouts: Collection[str], wanted: Callable[[str, int], bool]) -> list[FileOfAttempt]:
        """Files of these rollouts whose attempt is wanted. Each directory is listed once."""
        stems = {stem_of(rollout): rollout for rollout in rollouts}
        return [
            each
            for directory in (self._paths.rows, self._paths.tokens)
            for each in self._paths.attempts(directory, self._files.names(directory))
            if each.stem in stems and wanted(stems[each.stem], each.attempt)
        ]

    def _sync_dirs(self) -> None:
        self._files.sync_dir(self._paths.rows)
        if self._files.is_dir(self._paths.tokens):
            self._files.sync_dir(self._paths.tokens)

    def _forget(self, rollouts: Collection[str]) -> None:
        """Drop what memory holds of the rows of these rollouts."""
        with self._mutex:
            self._named.drop(rollouts)


def _written(staged: StagedRows) -> WrittenRows:
    if not isinstance(staged, WrittenRows):
        raise TypeError(f"{type(staged).__qualname__} is not what stage gave")
    return staged
