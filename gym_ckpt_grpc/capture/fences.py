"""Fences: up to which attempt each rollout was retired, durable and seen by every process at once.

`fences.log` begins with a line that names this very file, so that a reader notices when it was replaced. Each
further line is one batch: a JSON list of [rollout id, last fenced attempt], -1 for none; of a rollout the last
entry counts. So a batch is there whole or not at all. Lines are written by who has the ledger's lock, and read by
everyone, from where the last reading ended.
"""

from __future__ import annotations

import posixpath
import threading
import uuid
from collections.abc import Mapping

import orjson

from gym_ckpt_grpc.capture.ledger_files import END, LedgerFiles, append_line, whole_lines
from gym_ckpt_grpc.protocol.errors import StateCorrupt, StateNotFound, StateUnwritable
from gym_ckpt_grpc.protocol.ids import MAX_ATTEMPT, EpisodeId

SLACK = 10_000
"""Entries that no longer count, beyond as many as do, before the file is written anew."""
NONE = -1
"""The last fenced attempt of a rollout without a fence."""

_HEAD = len(b'{"fences":""}\n') + 32
_PER_LINE = 4096


class Fences:
    """The fences of one ledger directory. Methods may be called in any thread."""

    def __init__(self, files: LedgerFiles, path: str) -> None:
        self._files = files
        self._path = path
        self._mutex = threading.Lock()
        self._head = b""
        self._offset = 0
        self._entries = 0
        self._through: dict[str, int] = {}
        self._doubtful = False

    def ensure(self) -> None:
        """Make the file if there is none. The caller has the ledger's lock. Raises StateUnwritable."""
        if not self._files.exists(self._path):
            self._rewrite({})

    def covers(self, episode: EpisodeId) -> bool:
        """Whether this attempt is fenced now. Raises StateCorrupt."""
        return episode.attempt <= self.read().get(episode.rollout_id, NONE)

    def read(self) -> Mapping[str, int]:
        """The last fenced attempt of each rollout that has a fence, as of now; not to be kept.

        Raises StateCorrupt naming the file.
        """
        with self._mutex:
            self._read()
            return self._through

    def _read(self) -> None:
        try:
            source = self._files.open(self._path)
        except StateNotFound as error:
            raise StateCorrupt(f"{self._path!r} is gone") from error
        try:
            head = source.read(0, _HEAD)
            if head != self._head or source.size < self._offset:
                self._head, self._offset, self._entries, self._through = head, _HEAD, 0, {}
            data = source.read(self._offset, source.size - self._offset)
        finally:
            source.close()
        for start, line in whole_lines(data):
            self._take(line, self._offset + start)
        self._offset += data.rfind(END) + 1

    def _take(self, line: bytes, at: int) -> None:
        try:
            batch = orjson.loads(line)
            for rollout, through in batch:
                if type(rollout) is not str or type(through) is not int or not NONE <= through <= MAX_ATTEMPT:
                    raise ValueError(f"{rollout!r}, {through!r} is no fence")
        except (ValueError, TypeError) as error:
            self._head = b""  # read all of it again next time: what was taken of this line may be half of it
            raise StateCorrupt(f"{self._path!r} has a bad line at byte {at}: {error}") from error
        self._entries += len(batch)
        for rollout, through in batch:
            if through == NONE:
                self._through.pop(rollout, None)
            else:
                self._through[rollout] = through

    def write(self, changes: Mapping[str, int]) -> None:
        """Set fences and make them durable: one line, one sync, the sync also without changes.

        changes: rollout id -> last fenced attempt or NONE, each other than what `read` gives. The caller has the
        ledger's lock. Raises StateUnwritable: then they hold for now or not at all, and may not be durable.
        """
        # Reading goes on meanwhile: a sync may take long.
        with self._mutex:
            self._read()
            through = {**self._through, **changes}
            superseded = self._entries + len(changes) - len(self._through)
        if self._doubtful or superseded > len(through) + SLACK:
            self._rewrite(through)
        elif changes:
            self._append(changes)
        else:
            self._sync()

    def _append(self, changes: Mapping[str, int]) -> None:
        try:
            there = append_line(self._files, self._path, _line(changes), sync=True)
        except StateUnwritable:
            self._doubtful = True
            raise
        if not there:
            raise StateCorrupt(f"{self._path!r} is gone")

    def _sync(self) -> None:
        try:
            self._files.sync_file(self._path)
        except StateUnwritable:
            # The system may take what it failed to write for written: a later sync would prove nothing.
            self._doubtful = True
            raise

    def _rewrite(self, through: Mapping[str, int]) -> None:
        """Write the file anew and put it in place of the old one, durably."""
        temporary = f"{self._path}.new"
        self._files.remove(temporary)
        items = [(rollout, last) for rollout, last in through.items() if last != NONE]
        sink = self._files.create(temporary)
        try:
            sink.write(orjson.dumps({"fences": uuid.uuid4().hex}) + END)
            for start in range(0, len(items), _PER_LINE):
                sink.write(_line(dict(items[start : start + _PER_LINE])))
            sink.sync()
        finally:
            sink.close()
        self._files.replace(temporary, self._path)
        self._files.sync_dir(posixpath.dirname(self._path))
        self._doubtful = False


def _line(fences: Mapping[str, int]) -> bytes:
    return orjson.dumps(list(fences.items())) + END
