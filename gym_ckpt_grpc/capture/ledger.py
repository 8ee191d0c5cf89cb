"""The capture ledger: the rows of each attempt's calls, on the disk of a policy model server.

    ledger = CaptureLedger(directory)
    admission = ledger.admit(episode, call_id, conversation)      # None: the attempt is fenced, refuse the call
    ...                                                           # the call, staged by its inference worker
    ledger.append_staged(admission, coordinates, response_id, message)

Everything blocks: call it in threads, any number at once. Several processes may work on one directory. An attempt
is fenced durably before anything of it is removed; from then on no process admits, appends or reads it, until its
rollout is deleted or a restore installs it.

Appending takes no lock. A row goes into the file of its attempt if there is one; who has to create it looks at the
fences before and after. Whoever changes fences or removes files holds the lock of the directory.

Rows are durable when an append returns, so that after a loss of power no manifest is short by a call whose reply
was delivered. `sync_rows=False` saves one sync per call: rows then survive the death of the process and not that of
the machine, which only checkpoints outlive. Source: participants section 12.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from gym_ckpt_grpc.capture.admission import CaptureAdmission, Coordinates
from gym_ckpt_grpc.capture.fences import NONE, Fences
from gym_ckpt_grpc.capture.imports import WrittenRows, remove_import, write_import
from gym_ckpt_grpc.capture.json_fields import call_id_problem
from gym_ckpt_grpc.capture.ledger_files import LedgerFiles, LocalLedgerFiles, append_line, create_new, locked
from gym_ckpt_grpc.capture.ledger_ids import all_episodes, all_rollouts
from gym_ckpt_grpc.capture.ledger_names import FileOfAttempt, LedgerPaths, stem_of
from gym_ckpt_grpc.capture.manifest import Manifest, build_manifest
from gym_ckpt_grpc.capture.parents import (
    FINGERPRINT_VERSION,
    Context,
    Message,
    ParentIndex,
    fingerprint,
    followed,
    read_context,
)
from gym_ckpt_grpc.capture.recent import Recent
from gym_ckpt_grpc.capture.rows import (
    AnyRow,
    FailureRow,
    LineageRow,
    StagedRow,
    check_fields,
    line_of,
    problem_of,
    read_rows,
    row_staging_key,
    to_fields,
)
from gym_ckpt_grpc.capture.token_records import staging_key
from gym_ckpt_grpc.control import Continuation, Removed, Row, StagedRows
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StaleAttempt, UsageError, Violation
from gym_ckpt_grpc.protocol.ids import EpisodeId

log = logging.getLogger(__name__)

MAX_INDEXES = 4096
"""Rollouts whose rows are kept indexed in memory; those of others are read again when they call."""
MAX_COUNTERS = 65_536
"""Rollouts whose last admission numbers are remembered beyond what their rows tell."""
MAX_PENDING = 65_536
"""Admitted calls without a row that are remembered; calls that end without one are the first to go."""


class CaptureLedger:
    """The ledger in one directory; implements `control.Ledger`. See the module.

    directory: made if missing, on a file system with `flock`. sync_rows: see the module. Raises StateUnwritable if
    the directory cannot be used. Every method raises StateUnwritable and StateCorrupt for what the disk does.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, sync_rows: bool = True, files: LedgerFiles | None = None
    ) -> None:
        self._files = files or LocalLedgerFiles()
        self._paths = LedgerPaths(os.path.abspath(directory))
        self._sync_rows = sync_rows
        self._fences = Fences(self._files, self._paths.fences)
        self._mutex = threading.Lock()
        self._indexes: Recent[ParentIndex] = Recent(MAX_INDEXES)
        self._numbers: Recent[int] = Recent(MAX_COUNTERS)
        self._named: Recent[bool] = Recent(MAX_COUNTERS)
        self._contexts: OrderedDict[str, Context] = OrderedDict()
        self._files.make_dirs(self._paths.rows)
        with locked(self._files, self._paths.lock):
            self._fences.ensure()

    def __repr__(self) -> str:
        return f"CaptureLedger({self._paths.directory!r})"

    # ---- calls

    def admit(
        self,
        episode: EpisodeId,
        call_id: str,
        conversation: Sequence[Message],
        continuation: Continuation | None = None,
    ) -> CaptureAdmission | None:
        """Permission to stage a call, with its parent if that is certain; None if the attempt is fenced.

        call_id: never used before. conversation: OpenAI-style messages of the request. Its row is appended through
        this object, which remembers what the conversation was; a call that ends without one costs nothing. Raises
        InvalidArgument.
        """
        if problem := call_id_problem(call_id):
            raise InvalidArgument(f"call_id {problem}", violations=[Violation("call_id", problem)])
        context = read_context(conversation)
        if self._fences.covers(episode):
            return None
        parent, last = self._index(episode).look(context)
        with self._mutex:
            number = 1 + max(last, self._numbers.get(episode) or 0)
            self._numbers.put(episode, number)
        admission = CaptureAdmission(
            capture_key=episode.capture_key,
            call_id=call_id,
            mode="token_in" if parent else "text",
            number=number,
            continuation=continuation,
        )
        if parent:
            admission = replace(
                admission,
                parent_id=parent.call_id,
                previous_length=parent.total_length,
                parent_chain_hash=parent.chain_hash,
                staging_chain=parent.staging_chain,
            )
        with self._mutex:
            self._contexts[call_id] = context
            if len(self._contexts) > MAX_PENDING:
                self._contexts.popitem(last=False)
        return admission

    def _index(self, episode: EpisodeId) -> ParentIndex:
        with self._mutex:
            index = self._indexes.get(episode) or ParentIndex(self._files, self._paths.rows_of(episode), episode)
            self._indexes.put(episode, index)
            return index

    def append_staged(
        self,
        admission: CaptureAdmission,
        coordinates: Coordinates,
        response_id: str,
        message: Message,
        *,
        lineage_only: bool = False,
    ) -> bool:
        """Append the row of a completed call, before its reply is delivered. False: fenced meanwhile, dropped.

        message: the assistant message of the reply. lineage_only: later calls may build upon it, and no manifest
        has it. Coordinates that say `capture_failed`, or are not those of this admission, make a failure row.
        Raises UsageError for an admission that was not made here or has its row already.
        """
        context = self._context(admission)
        output = fingerprint(message)
        kind = LineageRow if lineage_only else StagedRow
        row = kind(
            call_id=admission.call_id,
            number=admission.number,
            mode=admission.mode,
            parent_id=admission.parent_id,
            staging_key=coordinates.staging_key,
            staging_chain=coordinates.staging_chain,
            weight_version=coordinates.weight_version,
            previous_length=coordinates.previous_length,
            added_length=coordinates.added_length,
            total_length=coordinates.total_length,
            staging_digest=coordinates.staging_digest,
            extras_digest=coordinates.extras_digest,
            chain_hash=coordinates.chain_hash,
            cumulative_hash=coordinates.cumulative_hash,
            response_id=response_id,
            context_length=context.length,
            context_digest=context.digest,
            output=output,
            continuation=followed(context.turns, output),
            fingerprint_version=FINGERPRINT_VERSION,
        )
        if reason := coordinates.capture_failed or _mismatch(admission, coordinates) or problem_of(row):
            return self.append_failure(admission, reason)
        return self._append(admission, row, coordinates.staging_key)

    def append_failure(self, admission: CaptureAdmission, reason: str) -> bool:
        """Append that a call's tokens were not kept. False: the attempt was fenced meanwhile, and it is dropped.

        reason: for people. Raises UsageError as `append_staged` does.
        """
        self._context(admission)
        text = reason.encode(errors="replace").decode()
        row = FailureRow(call_id=admission.call_id, number=admission.number, reason=text)
        return self._append(admission, row, staging_key(admission.capture_key, admission.call_id))

    def _context(self, admission: CaptureAdmission) -> Context:
        with self._mutex:
            context = self._contexts.get(admission.call_id)
        if context is None:
            raise UsageError(f"call {admission.call_id} was not admitted by this ledger, or has its row already")
        return context

    def _append(self, admission: CaptureAdmission, row: AnyRow, key: str) -> bool:
        episode = EpisodeId.from_capture_key(admission.capture_key)
        kept = self._append_line(episode, line_of(row))
        if not kept:
            log.warning("a row of %s was dropped, the attempt is fenced; its tokens are staged under %s", episode, key)
        with self._mutex:
            self._contexts.pop(admission.call_id, None)
        return kept

    def _append_line(self, episode: EpisodeId, line: bytes) -> bool:
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

    def manifest(self, episode: EpisodeId) -> Manifest:
        """What the training framework reads of an attempt (manifest.py); empty lists for one without a ledger.

        Raises StaleAttempt if it is fenced, StateCorrupt if a row poisons it.
        """
        return build_manifest(episode, self._rows([episode])[episode])

    def export(self, episodes: Iterable[EpisodeId]) -> dict[EpisodeId, list[Row]]:
        """All rows of each attempt, in the order they were appended; empty for one without a ledger.

        Raises StaleAttempt naming the fenced ones.
        """
        return {episode: [to_fields(row) for row in rows] for episode, rows in self._rows(episodes).items()}

    def _rows(self, episodes: Iterable[EpisodeId]) -> dict[EpisodeId, list[AnyRow]]:
        found = {episode: read_rows(self._files, self._paths.rows_of(episode), episode) for episode in episodes}
        # After reading: a ledger that was removed meanwhile is behind a fence that stands by now.
        fences = self._fences.read()
        if stale := [episode for episode in found if episode.attempt <= fences.get(episode.rollout_id, NONE)]:
            raise StaleAttempt(f"the ledger of {stale[0]} is fenced: the attempt was retired", episodes=stale)
        return found

    def call_id(self, row: Row) -> str:
        """The model call that a row is about."""
        return str(row["call_id"])

    def staging_keys(self, row: Row) -> tuple[str, str] | None:
        """(capture key of its stamp or "", staging key) of a row with tokens; None for a failure."""
        return row_staging_key(row)

    def stamped(self, row: Row, episode: EpisodeId) -> Row:
        """The row with the capture key of `episode` as who staged it; a stamp is kept, failures have none."""
        if "staging_key" not in row or row.get("capture_key"):
            return row
        return {**row, "capture_key": episode.capture_key}

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise ValueError saying what is wrong with the rows of one record."""
        check_fields(rows)

    # ---- restoring

    def stage(self, rows: Mapping[EpisodeId, Sequence[Row]]) -> StagedRows:
        """Write rows for their targets aside; empty ones clear what the target has. Touches nothing live.

        Raises ValueError naming target and row. End it with `activate` or `drop`.
        """
        return write_import(self._files, self._paths, rows, sync=self._sync_rows)

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
            self._indexes.drop(rollouts)
            self._numbers.drop(rollouts)
            self._named.drop(rollouts)


def _mismatch(admission: CaptureAdmission, coordinates: Coordinates) -> str:
    """Say in what coordinates are not those of an admission, "" if in nothing."""
    for name in ("capture_key", "call_id", "mode", "previous_length"):
        if getattr(admission, name) != getattr(coordinates, name):
            return f"the coordinates have the {name} {getattr(coordinates, name)!r}"
    if coordinates.staging_chain[:-1] != admission.staging_chain and admission.prefix_ids is None:
        return "the coordinates have another staging chain than their admission"
    return ""


def _written(staged: StagedRows) -> WrittenRows:
    if not isinstance(staged, WrittenRows):
        raise TypeError(f"{type(staged).__qualname__} is not what stage gave")
    return staged
