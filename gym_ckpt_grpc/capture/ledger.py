"""The capture ledger: the rows of each attempt's calls, on the disk of a policy model server.

    ledger = CaptureLedger(directory)
    admission = ledger.admit(episode, call_id, conversation)      # None: the attempt is fenced, refuse the call
    ...                                                           # the call, staged by its inference worker
    ledger.append_staged(admission, coordinates, response_id, message)

Everything blocks: call it in threads, any number at once. Several processes may work on one directory. Files and
fences are those of attempt_rows.py; nothing is admitted for a fenced attempt either.

Rows are durable when an append returns, so that after a loss of power no manifest is short by a call whose reply
was delivered. `sync_rows=False` saves one sync per call: rows then survive the death of the process and not that of
the machine, which only checkpoints outlive. Source: participants section 12.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from gym_ckpt_grpc.capture.admission import CaptureAdmission, Coordinates
from gym_ckpt_grpc.capture.attempt_rows import MAX_COUNTERS, AttemptRows
from gym_ckpt_grpc.capture.json_fields import call_id_problem
from gym_ckpt_grpc.capture.ledger_files import LedgerFiles
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
from gym_ckpt_grpc.control import Continuation, Row, StagedRows
from gym_ckpt_grpc.protocol.errors import InvalidArgument, UsageError, Violation
from gym_ckpt_grpc.protocol.ids import EpisodeId

log = logging.getLogger(__name__)

MAX_INDEXES = 4096
"""Rollouts whose rows are kept indexed in memory; those of others are read again when they call."""
MAX_PENDING = 65_536
"""Admitted calls without a row that are remembered; calls that end without one are the first to go."""


class CaptureLedger(AttemptRows):
    """The ledger in one directory; implements `control.Ledger`. See the module.

    directory: made if missing, on a file system with `flock`. sync_rows: see the module. Raises StateUnwritable if
    the directory cannot be used. Every method raises StateUnwritable and StateCorrupt for what the disk does.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, sync_rows: bool = True, files: LedgerFiles | None = None
    ) -> None:
        super().__init__(directory, sync_rows=sync_rows, files=files)
        self._indexes: Recent[ParentIndex] = Recent(MAX_INDEXES)
        self._numbers: Recent[int] = Recent(MAX_COUNTERS)
        self._contexts: OrderedDict[str, Context] = OrderedDict()

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
        kept = self.append_line(episode, line_of(row))
        if not kept:
            log.warning("a row of %s was dropped, the attempt is fenced; its tokens are staged under %s", episode, key)
        with self._mutex:
            self._contexts.pop(admission.call_id, None)
        return kept

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
        return self.read(episodes, lambda episode: read_rows(self._files, self._paths.rows_of(episode), episode))

    def call_id(self, row: Row) -> str:
        """The model call that a row is about."""
        return str(row["call_id"])

    def staging_keys(self, row: Row) -> tuple[str, str] | None:
        """(capture key of its stamp or "", staging key) of a row with tokens; None for a failure."""
        return row_staging_key(row)

    def tokens(self, row: Row) -> int:
        """Tokens that its call has added to what its parent had; 0 for a failure."""
        return int(row.get("added_length", 0))

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
        lines: dict[EpisodeId, list[bytes]] = {}
        for target, fields in rows.items():
            try:
                lines[target] = [line_of(row) for row in check_fields(fields)]
            except ValueError as error:
                raise ValueError(f"{target}: {error}") from error
        return self.stage_lines(lines)

    def _forget(self, rollouts: Collection[str]) -> None:
        super()._forget(rollouts)
        with self._mutex:
            self._indexes.drop(rollouts)
            self._numbers.drop(rollouts)


def _mismatch(admission: CaptureAdmission, coordinates: Coordinates) -> str:
    """Say in what coordinates are not those of an admission, "" if in nothing."""
    for name in ("capture_key", "call_id", "mode", "previous_length"):
        if getattr(admission, name) != getattr(coordinates, name):
            return f"the coordinates have the {name} {getattr(coordinates, name)!r}"
    if coordinates.staging_chain[:-1] != admission.staging_chain and admission.prefix_ids is None:
        return "the coordinates have another staging chain than their admission"
    return ""
