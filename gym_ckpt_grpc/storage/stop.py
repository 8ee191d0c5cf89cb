"""Stopping a write: stop and publication exclude each other (storage section 3)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gym_ckpt_grpc.protocol.errors import GymCkptError


class WriteStopped(GymCkptError):
    """The write was stopped before it published anything; it has left no file."""


class StopFlag:
    """Shared by a write and who may stop it. The publication lock is held for one rename and one create.

    published: whether the write has given its files their final names.
    """

    def __init__(self) -> None:
        self.published = False
        self._stopped = threading.Event()
        self._publication = threading.Lock()

    @property
    def stopped(self) -> bool:
        """Whether stop was called. The write may have published before that."""
        return self._stopped.is_set()

    def stop(self, timeout: float | None = None) -> bool:
        """Stop the write. Once this has returned True, nothing of it will ever appear under a final name.

        Waits for a publication under way, `timeout` seconds at most (None: for ever); False means that it
        hangs there still, and that what it is naming may appear yet. May be called again, from any thread.
        """
        self._stopped.set()
        if not self._publication.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return False
        self._publication.release()
        return True

    def check(self) -> None:
        """Raise WriteStopped if stop was called."""
        if self._stopped.is_set():
            raise WriteStopped("the write was stopped")

    @contextmanager
    def publication(self) -> Iterator[None]:
        """Hold the publication lock; raises WriteStopped instead if stop was called first."""
        with self._publication:
            self.check()
            yield
            self.published = True
