"""What an operation over the fleet raises. Each carries one outcome per participant, successes too.

    GymCkptError
    ├── FleetInvalid               a fleet's declaration is wrong; nothing was called
    └── FleetError                 an operation failed somewhere
        ├── DiscoveryFailed        looking found a required server missing or a wrong one
        ├── PrepareFailed          a Prepare call failed
        ├── NotPrepared            no safe cut in time; `report` has the blockers
        ├── CaptureFailed  CommitFailed  PublishFailed
        ├── RestoreFailed
        ├── RetireFailed  ForgetFailed

A lost lease is `LeaseLost`, a replaced coordinator `StaleController`, a publication whose durability is not
known `PublishUnknown`: these are ControlErrors of the protocol. Source: coordination sections 2, 4 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gym_ckpt_grpc.protocol.errors import ControlError, GymCkptError

if TYPE_CHECKING:
    from gym_ckpt_grpc.coordinator.looking import Sighting
    from gym_ckpt_grpc.coordinator.outcomes import Outcome
    from gym_ckpt_grpc.coordinator.report import FleetReport
    from gym_ckpt_grpc.coordinator.retiring import RetireResult


class FleetInvalid(GymCkptError):
    """The declaration of a fleet cannot be used: an unknown key, a missing kind, two entries for one place."""


class FleetError(GymCkptError):
    """An operation failed on at least one participant.

    outcomes: one per participant called.
    """

    def __init__(self, message: str, outcomes: Iterable[Outcome[Any]] = ()) -> None:
        super().__init__(message)
        self.outcomes: tuple[Outcome[Any], ...] = tuple(outcomes)

    @property
    def failures(self) -> tuple[Outcome[Any], ...]:
        """The outcomes that are failures."""
        return tuple(outcome for outcome in self.outcomes if outcome.error)

    @property
    def cause(self) -> ControlError | None:
        """The first failure, or None where no call failed."""
        return next((outcome.error for outcome in self.outcomes if outcome.error), None)


class DiscoveryFailed(FleetError):
    """The fleet is not as declared; one error names all findings. sightings: what was found per server."""

    def __init__(self, message: str, sightings: Sequence[Sighting] = ()) -> None:
        super().__init__(message)
        self.sightings = tuple(sightings)


class PrepareFailed(FleetError):
    """A Prepare call failed on a required participant."""


class NotPrepared(FleetError):
    """No safe cut in the time given. Later stages were not touched. report: blockers per participant."""

    def __init__(self, message: str, outcomes: Iterable[Outcome[Any]], report: FleetReport) -> None:
        super().__init__(message, outcomes)
        self.report = report


class CaptureFailed(FleetError):
    """A Capture failed on a required participant."""


class CommitFailed(FleetError):
    """A Commit failed, or what was written does not agree with what was captured. Nothing is published."""


class PublishFailed(FleetError):
    """Nothing was published."""


class RestoreFailed(FleetError):
    """A restore failed: the clean-up has run, and nothing restored is left where it could be reached."""


class RetireFailed(FleetError):
    """Some attempt is not freed somewhere. Its mark stays; call again. result: one outcome per episode."""

    def __init__(self, message: str, result: RetireResult) -> None:
        super().__init__(message, result.outcomes)
        self.result = result


class ForgetFailed(FleetError):
    """A stage of a Forget failed; later ones were not called. Call again."""


def describe(failures: Iterable[Outcome[Any]], limit: int = 5) -> str:
    """Name up to `limit` failed participants with their errors, for a message."""
    texts = [f"{outcome.name}: {outcome.error}" for outcome in failures]
    more = f"; and {len(texts) - limit} more" if len(texts) > limit else ""
    return "; ".join(texts[:limit]) + more
