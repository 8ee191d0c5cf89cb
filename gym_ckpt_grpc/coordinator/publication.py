"""Publishing one checkpoint, so that its outcome is known whatever interrupts the caller.

The threads that write cannot be taken back. So what they found out is kept here by the threads themselves, and a
caller that was cancelled, or an exit, reads it afterwards. Source: coordination section 9.
"""

from __future__ import annotations

from gym_ckpt_grpc.coordinator import ledger
from gym_ckpt_grpc.coordinator.deadlines import Deadline
from gym_ckpt_grpc.coordinator.errors import PublishFailed
from gym_ckpt_grpc.coordinator.threads import in_thread
from gym_ckpt_grpc.protocol.errors import ControlError, OutOfTime, PublishUnknown, StaleController
from gym_ckpt_grpc.storage import AggregateManifest, CheckpointRoot


class Publication:
    """The publication of one checkpoint.

    number: its sequence number once it is known to be published. unknown: whether an entry may exist that is not
    known. latest_error: why LATEST could not be moved, or empty.
    """

    def __init__(self, root: CheckpointRoot, checkpoint_id: str, epoch: int) -> None:
        self._root = root
        self._checkpoint_id = checkpoint_id
        self._epoch = epoch
        self.manifest: AggregateManifest | None = None
        self.digest = ""
        self.number: int | None = None
        self.unknown = False
        self.latest_error = ""
        self._appending: set[object] = set()  # tries whose thread has not ended; a hung one comes back some day

    async def run(self, draft: ledger.Draft, deadline: Deadline, *, traceparent: str = "") -> int:
        """Write the manifest, then the entry; returns its number. The same call again gives the same.

        traceparent: see `ledger.write_manifest`.
        Raises PublishFailed (nothing is published), PublishUnknown (the same call again decides),
        StaleController (a newer controller has taken over).
        """
        try:
            await in_thread(lambda: self._write(draft, traceparent), "writing the aggregate manifest", deadline)
        except StaleController:
            raise
        except ControlError as error:
            raise PublishFailed(f"the aggregate manifest was not written: {error}") from error
        self.unknown = True
        a_try = object()
        self._appending.add(a_try)
        try:
            await in_thread(lambda: self._append(a_try), "publishing", deadline)
        except (StaleController, PublishUnknown):
            raise
        except OutOfTime as error:
            raise PublishUnknown(error.message) from error
        except ControlError as error:
            raise PublishFailed(f"nothing was published: {error}") from error
        assert self.number is not None
        return self.number

    def _write(self, draft: ledger.Draft, traceparent: str) -> None:
        self.manifest, self.digest = ledger.write_manifest(self._root, draft, traceparent=traceparent)

    def _append(self, a_try: object) -> None:
        try:
            self._publish()
        finally:
            self._appending.discard(a_try)

    def _publish(self) -> None:
        try:
            published = ledger.publish(self._root, self._checkpoint_id, self.digest, epoch=self._epoch)
        except PublishUnknown:
            raise
        except ControlError:
            self.unknown = False
            raise
        self.latest_error = published.latest_error
        self.number = published.publication.number
        self.unknown = False

    async def find_out(self, deadline: Deadline) -> None:
        """Read the root again: afterwards `number` says whether it is published, unless it is `unknown` still, since
        a thread that was given up may publish it yet. Raises what reading raises."""
        number = await in_thread(
            lambda: ledger.publication_number(self._root, self._checkpoint_id), "reading the sequence", deadline
        )
        self.number = self.number or number
        self.unknown = self.number is None and bool(self._appending)
