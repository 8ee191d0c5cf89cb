"""`CheckpointRoot`: one place that keeps checkpoints, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from gym_ckpt_grpc.protocol.errors import (
    InvalidArgument,
    StateCorrupt,
    StateNotFound,
    StateUnwritable,
    Violation,
)
from gym_ckpt_grpc.protocol.ids import checkpoint_id_problem
from gym_ckpt_grpc.storage import holds, pins
from gym_ckpt_grpc.storage import owner as owners
from gym_ckpt_grpc.storage.aggregate import AggregateManifest, read_aggregate
from gym_ckpt_grpc.storage.files import FileLayer
from gym_ckpt_grpc.storage.holds import Hold
from gym_ckpt_grpc.storage.intent import Intent, read_intent, write_intent
from gym_ckpt_grpc.storage.local_files import LocalFiles
from gym_ckpt_grpc.storage.locations import CheckpointLocation, path_to_uri, resolve_root
from gym_ckpt_grpc.storage.owner import Owner
from gym_ckpt_grpc.storage.pins import Pin
from gym_ckpt_grpc.storage.preflight import Preflight, preflight
from gym_ckpt_grpc.storage.sequence import Publication, Sequence

LATEST = "latest"
"""What `find` takes for the newest published checkpoint."""


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint. publication: None if not published. manifest_digest: of checkpoint.json."""

    location: CheckpointLocation
    manifest: AggregateManifest
    manifest_digest: str
    publication: Publication | None


@dataclass(frozen=True, slots=True)
class Published:
    """A publication, which stands. latest_error: why LATEST could not be moved to it, or empty."""

    publication: Publication
    latest_error: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """One published checkpoint of a list.

    manifest: None if it cannot be read; problem says why. bytes: of all parts' files, 0 if unknown.
    """

    publication: Publication
    location: CheckpointLocation
    manifest: AggregateManifest | None
    bytes: int
    problem: str = ""


class CheckpointRoot:
    """A root and its checkpoints. Every method blocks; none keeps state, so threads may share one.

    uri: `file://` URI or absolute path; links in it are followed once, here. Raises InvalidArgument.
    """

    def __init__(self, uri: str, files: FileLayer | None = None) -> None:
        self.files: FileLayer = LocalFiles() if files is None else files
        self.path = resolve_root(uri, self.files)
        self.sequence = Sequence(self.files, self.path)

    def __repr__(self) -> str:
        return f"CheckpointRoot({self.uri!r})"

    @property
    def uri(self) -> str:
        """The `file://` URI, links followed."""
        return path_to_uri(self.path)

    def shortened(self, message: str) -> str:
        """A message about files of this root, with their names from the root on, as people look for them."""
        return message.replace(f"{self.path}/", "")

    def preflight(self, *, expected_bytes: int = 0) -> Preflight:
        """Check that the root can be written, that creation is exclusive, and that `expected_bytes` fit.

        Makes the root if it is missing. Raises StateUnwritable naming the path.
        """
        return preflight(self.files, self.path, expected_bytes=expected_bytes)

    # ---- checkpoints

    def location(self, checkpoint_id: str) -> CheckpointLocation:
        """Where a checkpoint is or will be. Raises InvalidArgument for an illegal id."""
        if problem := checkpoint_id_problem(checkpoint_id):
            raise InvalidArgument(
                f"checkpoint_id {checkpoint_id[:80]!r} {problem}",
                violations=[Violation("checkpoint_id", problem)],
            )
        return CheckpointLocation(self.path, checkpoint_id)

    def write_intent(self, intent: Intent) -> CheckpointLocation:
        """Take a directory for a checkpoint. Raises CheckpointConflict if another has it, StateUnwritable."""
        location = self.location(intent.checkpoint_id)
        write_intent(self.files, location, intent)
        return location

    def read_intent(self, checkpoint_id: str) -> Intent:
        """Whose a checkpoint's directory is. Raises StateNotFound, StateCorrupt."""
        return read_intent(self.files, self.location(checkpoint_id))

    def find(self, selector: str = LATEST) -> Found:
        """The complete checkpoint of an id, or the newest published one for `latest`.

        Raises StateNotFound, or StateCorrupt if its aggregate manifest is damaged or not the published one.
        """
        if selector == LATEST:
            publication = self.sequence.latest()
            if publication is None:
                raise StateNotFound(f"nothing is published in {self.path!r}")
        else:
            self.location(selector)
            matching = (entry for entry in self.sequence.publications() if entry.checkpoint_id == selector)
            publication = next(matching, None)
        location = self.location(publication.checkpoint_id if publication else selector)
        digest = publication.manifest_digest if publication else None
        try:
            manifest, found = read_aggregate(self.files, location, expected_digest=digest)
        except StateNotFound as error:
            if publication is None:
                raise
            if self._is_deleted(publication, self.sequence.publications()):
                raise StateNotFound(f"checkpoint {selector!r} was deleted") from error
            raise StateCorrupt(f"{error.message}, which publication {publication.number} names") from error
        return Found(location, manifest, found, publication)

    def published(self, *, below: int | None = None) -> Iterator[Listed]:
        """The published checkpoints, newest first; one that cannot be read is listed with its problem.

        Deleted ones are passed over. below: only those of a lower number.
        """
        publications = self.sequence.publications()
        for publication in publications:
            if below is not None and publication.number >= below:
                continue
            if self._is_deleted(publication, publications):
                continue
            location = CheckpointLocation(self.path, publication.checkpoint_id)
            if problem := checkpoint_id_problem(publication.checkpoint_id):
                yield Listed(publication, location, None, 0, f"its id {problem}")
                continue
            try:
                manifest, _ = read_aggregate(self.files, location, expected_digest=publication.manifest_digest)
            except (StateNotFound, StateCorrupt) as error:
                yield Listed(publication, location, None, 0, error.message)
                continue
            yield Listed(publication, location, manifest, sum(member.bytes for member in manifest.members))

    def _is_deleted(self, publication: Publication, publications: tuple[Publication, ...]) -> bool:
        """Whether it was deleted: its directory is gone as a whole. The newest is never deleted: it is missing then."""
        if publication == publications[0] or checkpoint_id_problem(publication.checkpoint_id):
            return False
        return not self.files.exists(CheckpointLocation(self.path, publication.checkpoint_id).directory)

    def publish(self, checkpoint_id: str, manifest_digest: str, *, epoch: int) -> Published:
        """Publish a complete, checked and durable checkpoint, then move LATEST.

        Raises as `Sequence.publish`; a failure to move LATEST is reported, not raised.
        """
        self.location(checkpoint_id)
        publication = self.sequence.publish(checkpoint_id, manifest_digest, epoch=epoch)
        try:
            self.sequence.move_latest(publication)
        except StateUnwritable as error:
            return Published(publication, error.message)
        return Published(publication)

    # ---- owner, pins and holds

    def read_owner(self) -> Owner | None:
        """Who owns the root, as far as can be read."""
        return owners.read_owner(self.files, self.path)

    def write_owner(self, owner: Owner) -> None:
        """Write a heartbeat. Raises StateUnwritable."""
        owners.write_owner(self.files, self.path, owner)

    def pin(self, checkpoint_id: str, *, epoch: int) -> Pin:
        """Keep a checkpoint for a restore. Once this has returned it stays; see retention.py.

        Raises StateNotFound if it is not there, StateCorrupt, StateUnwritable, InvalidArgument.
        """
        pin = Pin(epoch, checkpoint_id)
        self._require_complete(checkpoint_id)
        pins.add_pin(self.files, self.path, pin)
        self._keep_or(lambda: self.unpin(pin), checkpoint_id)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let a checkpoint go; not pinned is fine. Raises StateUnwritable."""
        pins.remove_pin(self.files, self.path, pin)

    def pins(self) -> tuple[Pin, ...]:
        """Every pin. Raises StateCorrupt if they cannot be read."""
        return pins.list_pins(self.files, self.path)

    def hold(self, checkpoint_id: str, name: str) -> Hold:
        """Keep a complete checkpoint until `release`, through all epochs. Once this has returned it stays.

        name: who holds it, at most 100 characters as in an id; again with the same name is fine. Raises
        StateNotFound if it is not there, StateCorrupt, StateUnwritable, InvalidArgument.
        """
        hold = Hold(checkpoint_id, name)
        holds.check_name(name)
        self._require_complete(checkpoint_id)
        holds.add_hold(self.files, self.path, hold)
        self._keep_or(lambda: self.release(checkpoint_id, name), checkpoint_id)
        return hold

    def release(self, checkpoint_id: str, name: str) -> None:
        """Let a held checkpoint go; not held is fine. Raises StateUnwritable, InvalidArgument."""
        self.location(checkpoint_id)
        holds.remove_hold(self.files, self.path, Hold(checkpoint_id, name))

    def holds(self) -> tuple[Hold, ...]:
        """Every hold, by checkpoint and name. Raises StateCorrupt if they cannot be read."""
        return holds.list_holds(self.files, self.path)

    def _require_complete(self, checkpoint_id: str) -> None:
        self.files.open(self.location(checkpoint_id).aggregate).close()

    def _keep_or(self, undo: Callable[[], None], checkpoint_id: str) -> None:
        """Look again once a pin or hold is placed: a removal that looked before then has moved the checkpoint away."""
        try:
            self._require_complete(checkpoint_id)
        except StateNotFound:
            with suppress(StateUnwritable):
                undo()
            raise
