"""What a checkpoint can do with the calls of an inference worker: cut them, look for cuts, release cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gym_ckpt_grpc.capture import AsyncTokenStore, Coordinates, CutOutcome, CutReference, StoredCuts, finished_cut
from gym_ckpt_grpc.control import BackendInfo, CallIdentity, CutPresence
from gym_ckpt_grpc.minigym.worker_calls import WorkerCall
from gym_ckpt_grpc.minigym.worker_controls import WorkerControls
from gym_ckpt_grpc.protocol.errors import StateNotFound

REMEMBERED = 1024
"""Finished calls that can still be asked for: their replies may be held in front of this worker."""


@dataclass(frozen=True, slots=True)
class AskedCut:
    """One cut that was asked for, and what came of it, for tests."""

    call: CallIdentity
    outcome: CutOutcome


class WorkerCuts:
    """The worker's side of `GenerationService`. Of no use before `open`. listed: whether tests ask what it did."""

    def __init__(self, describe: Callable[[], BackendInfo], controls: WorkerControls, *, listed: bool) -> None:
        self.asked: list[AskedCut] = []
        self.released: list[str] = []
        self._listed = listed
        self._describe = describe
        self._controls = controls
        self._calls: dict[str, WorkerCall] = {}
        self._ended: dict[str, Coordinates] = {}  # by call id, in the order they ended
        self._stored: StoredCuts | None = None

    def open(self, tokens: AsyncTokenStore) -> None:
        """Give it the token store."""
        self._stored = StoredCuts(tokens)

    def add(self, call: WorkerCall) -> None:
        """A call has begun."""
        self._calls[call.id] = call

    def ended(self, call: WorkerCall) -> None:
        """A call has ended. Where the tokens of a whole reply stand is remembered for a while."""
        if self._calls.pop(call.id, None) is None or call.state != "end" or call.coordinates is None:
            return
        self._ended[call.id] = call.coordinates
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    # ---- CutEngine

    def describe(self) -> BackendInfo:
        return self._describe()

    async def cut(self, call: CallIdentity, age: float) -> CutOutcome:
        await self._controls.before_cut()
        outcome = await self._outcome(call)
        if self._listed:
            self.asked.append(AskedCut(call, outcome))
        return outcome

    async def _outcome(self, asked: CallIdentity) -> CutOutcome:
        call, ended = self._calls.get(asked.model_call_id), self._ended.get(asked.model_call_id)
        if call is not None and call.staged is not None:
            return _not_of(call.staged.admission.capture_key, asked) or CutOutcome.of(await call.staged.cut())
        if call is not None:
            return CutOutcome.uncuttable("the call is not captured")
        if ended is None:
            return CutOutcome.not_found()
        if ended.capture_failed:
            return CutOutcome.uncuttable(f"the call was not captured: {ended.capture_failed}")
        return _not_of(ended.capture_key, asked) or CutOutcome.of(finished_cut(ended))

    async def check(self, cuts: Sequence[CutReference]) -> Sequence[CutPresence]:
        return await self._store.check(cuts)

    async def release(self, cut_ids: Sequence[str]) -> Sequence[bool]:
        if self._listed:
            self.released += cut_ids
        return await self._store.release(cut_ids)

    @property
    def _store(self) -> StoredCuts:
        if self._stored is None:
            raise StateNotFound("this worker has no token store")
        return self._stored


def _not_of(capture_key: str, asked: CallIdentity) -> CutOutcome | None:
    """What to say of a call that belongs to another attempt than the one that is asked for."""
    if capture_key == asked.episode.capture_key:
        return None
    return CutOutcome.uncuttable(f"the call belongs to {capture_key}")
