"""How long a checkpoint's operations took, and when its three moments came: prepared, released, durable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """Seconds that each operation took, retries and repeats included; 0 for one that did not run.

    first_closed: monotonic seconds of the first Prepare sent; None if another process sent it. prepared_at: of the
    safe cut everywhere. released_at: of the last good Resume reply. durable_at: every part is synced. published_at:
    the sequence has its entry. All by the coordinator's own count; None until it is so.
    """

    prepare: float = 0.0
    capture: float = 0.0
    commit: float = 0.0
    publish: float = 0.0
    resume: float = 0.0
    first_closed: float | None = None
    prepared_at: float | None = None
    released_at: float | None = None
    durable_at: float | None = None
    published_at: float | None = None

    def after(self, moment: float | None) -> float | None:
        """Seconds from the first closing to a moment; None where either is not known."""
        return None if moment is None or self.first_closed is None else moment - self.first_closed

    @property
    def prepared_after(self) -> float | None:
        """Seconds until every participant was at its safe cut."""
        return self.after(self.prepared_at)

    @property
    def released_after(self) -> float | None:
        """Seconds until admission was open again everywhere."""
        return self.after(self.released_at)

    @property
    def durable_after(self) -> float | None:
        """Seconds until every part was synced."""
        return self.after(self.durable_at)

    @property
    def published_after(self) -> float | None:
        """Seconds until the sequence had its entry."""
        return self.after(self.published_at)

    @property
    def pause_ms(self) -> float:
        """Milliseconds from the first closing to the last opening; 0 if either is not known."""
        return 1000 * (self.released_after or 0.0)

    @property
    def cut_ms(self) -> float:
        """Milliseconds of the pause that were the wait for the safe cut."""
        return 1000 * (self.prepared_after or 0.0)

    @property
    def beyond_cut_ms(self) -> float:
        """Milliseconds of the pause beyond the wait for the safe cut; 0 if it is not open again, or never was cut."""
        if self.prepared_at is None or self.released_at is None:
            return 0.0
        return 1000 * (self.released_at - self.prepared_at)
