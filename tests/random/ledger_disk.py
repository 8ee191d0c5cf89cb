"""The disk of a ledger that fills up, or whose operations fail now and then, when told to."""

from __future__ import annotations

import random

from gym_ckpt_grpc.capture.ledger_files import LocalAppendHandle, LocalLedgerFiles
from gym_ckpt_grpc.protocol.errors import StateUnwritable
from gym_ckpt_grpc.storage.local_files import LocalSink

OK, FULL, BROKEN = "ok", "full", "broken"


class LedgerDisk(LocalLedgerFiles):
    """mode: FULL takes no byte more; BROKEN fails a third of all changes. Nothing is synced: no power is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = OK
        self._random = random.Random(0)

    def steer(self, choice: random.Random) -> None:
        """Change the mode."""
        self.mode = choice.choice((OK, OK, FULL, BROKEN))
        self._random = random.Random(choice.random())

    def _change(self, *, bytes_wanted: bool) -> None:
        if (self.mode == FULL and bytes_wanted) or (self.mode == BROKEN and self._random.random() < 1 / 3):
            raise StateUnwritable(f"the disk of the ledger is {self.mode} on purpose")

    def open_to_append(self, path: str) -> LocalAppendHandle | None:
        self._change(bytes_wanted=True)
        return super().open_to_append(path)

    def create(self, path: str) -> LocalSink:
        self._change(bytes_wanted=True)
        return super().create(path)

    def make_dirs(self, path: str) -> None:
        self._change(bytes_wanted=True)
        super().make_dirs(path)

    def replace(self, temporary: str, path: str) -> None:
        self._change(bytes_wanted=False)
        super().replace(temporary, path)

    def remove(self, path: str) -> None:
        self._change(bytes_wanted=False)
        super().remove(path)

    def sync_file(self, path: str) -> None:
        return None

    def sync_dir(self, path: str) -> None:
        return None
