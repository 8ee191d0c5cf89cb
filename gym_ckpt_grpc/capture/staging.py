"""One call of an inference worker while it is captured: what it stages, and where that stands.

fetched = await fetch(admission, tokens)
prompt = (*fetched.prefix, *suffix)
call = StagedCall.begin(admission, tokens, prompt, fetched=fetched, weight_version=7, output_limit=512)
call.add(token_id, logprob, 7)
evidence = await call.cut()                 # durable; the generation goes on
coordinates = await call.complete("stop")   # durable

Source: participants section 13.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Self

from gym_ckpt_grpc.capture.admission import CaptureAdmission, Coordinates, admission_problems
from gym_ckpt_grpc.capture.continuation import Snapshot
from gym_ckpt_grpc.capture.json_fields import MAX_TOKEN_ID, number_problem, refuse
from gym_ckpt_grpc.capture.token_records import Kind, TokenRecord, build, tokens_digest
from gym_ckpt_grpc.capture.token_store import AsyncTokenStore
from gym_ckpt_grpc.control import CutEvidence
from gym_ckpt_grpc.control.generation import FINISH_REASONS
from gym_ckpt_grpc.protocol.errors import ControlError, StateNotFound, UsageError, Violation

_log = logging.getLogger(__name__)

NO_TOKENS = tokens_digest(())


@dataclass(frozen=True, slots=True)
class Fetched:
    """What an admission refers to, read from the token store.

    prefix: ids of the parent's whole sequence, () in mode `text`. snapshot: of the cut to be continued; None if the
    admission has no continuation, or if the store no longer has it.
    """

    prefix: tuple[int, ...] = ()
    snapshot: Snapshot | None = None


async def fetch(admission: CaptureAdmission, store: AsyncTokenStore) -> Fetched:
    """Read prefix and cut of an admission.

    Raises InvalidArgument where the prefix is not as declared, StateNotFound naming a key of the parent's chain that
    is gone, StateCorrupt for records that cannot be read.
    """
    refuse("admission", admission_problems(admission))
    prefix = admission.prefix_ids or ()
    if admission.staging_chain:
        prefix = await _resolve(admission, store)
    snapshot = None
    if admission.continuation is not None:
        keys = admission.continuation.staging_keys
        found = await store.get(keys)
        if len(found) == len(keys):
            snapshot = Snapshot.of([found[key] for key in keys])
    return Fetched(prefix, snapshot)


async def _resolve(admission: CaptureAdmission, store: AsyncTokenStore) -> tuple[int, ...]:
    found = await store.get(admission.staging_chain)
    ids: list[int] = []
    chain_hash = ""
    for i, key in enumerate(admission.staging_chain):
        record = found.get(key)
        if record is None:
            raise StateNotFound(f"the token store has no {key}, which the prefix of call {admission.call_id} needs")
        if record.previous_length != len(ids):
            _breach(f"staging_chain[{i}]", f"begins at token {record.previous_length}, not at {len(ids)}")
        ids += record.ids
        chain_hash = record.chain_hash
    if len(ids) != admission.previous_length:
        _breach("previous_length", f"is {admission.previous_length}, the staging chain has {len(ids)} tokens")
    if chain_hash != admission.parent_chain_hash:
        _breach("parent_chain_hash", "is not that of the staging chain")
    if admission.prefix_ids is not None and admission.prefix_ids != tuple(ids):
        _breach("prefix_ids", "are not the tokens of the staging chain")
    return tuple(ids)


def _breach(field: str, problem: str) -> NoReturn:
    refuse("admission", [Violation(f"admission.{field}", problem)])
    raise AssertionError("a violation is refused")


class StagedCall:
    """A captured call from its admission to its coordinates. `begin` makes one.

    One event loop; the methods that stage are asynchronous, the others quick.
    """

    def __init__(
        self,
        admission: CaptureAdmission,
        store: AsyncTokenStore,
        *,
        prefix: tuple[int, ...],
        suffix: tuple[int, ...],
        snapshot: Snapshot | None,
        weight_version: int,
        output_limit: int,
    ) -> None:
        self.admission = admission
        self.output_limit = output_limit
        self.weight_version = weight_version
        self.coordinates: Coordinates | None = None
        self._store = store
        self._prefix = prefix
        self._suffix = suffix
        self._snapshot = snapshot
        self._ids = list(snapshot.generated_ids) if snapshot else []
        self._logprobs = list(snapshot.generated_logprobs) if snapshot else []
        self._ended = ""
        self._settled = asyncio.Event()

    @classmethod
    def begin(
        cls,
        admission: CaptureAdmission,
        store: AsyncTokenStore,
        prompt_ids: Sequence[int],
        *,
        fetched: Fetched,
        weight_version: int,
        output_limit: int,
    ) -> Self:
        """Begin to capture. Everything wrong here is the caller's error, InvalidArgument: no call exists afterwards.

        A cut that does not fit costs its continuation, not the call: begin again with `admission.fresh()`.

        prompt_ids: as the engine gets them: the prefix and what follows it; for a continuation the prefix and the
        delta of the cut, exactly. weight_version: of the weights in use now, >= 0. output_limit: most tokens of the
        whole reply, >= 1; that of the cut for a continuation.
        """
        prompt = tuple(prompt_ids)
        found = admission_problems(admission)
        found += _number_problems(prompt[len(fetched.prefix) :], weight_version, output_limit)
        refuse("admission", found)
        _check_prefix(admission, fetched.prefix, prompt)
        snapshot = fetched.snapshot
        if (snapshot is None) is not (admission.continuation is None):
            _breach("continuation", "is there without the fetched cut, or that without it")
        if snapshot is not None:
            refuse("admission", _continuation_problems(admission, snapshot, weight_version, output_limit))
            if prompt[len(fetched.prefix) :] != snapshot.ids:
                _breach("continuation", "is not continued: the prompt is not the prefix and the cut's tokens")
            weight_version = min(weight_version, snapshot.weight_version)
        return cls(
            admission,
            store,
            prefix=fetched.prefix,
            suffix=snapshot.prompt_ids if snapshot else prompt[len(fetched.prefix) :],
            snapshot=snapshot,
            weight_version=weight_version,
            output_limit=output_limit,
        )

    # ---- what it has

    @property
    def generated_ids(self) -> tuple[int, ...]:
        """Tokens of the reply so far, those of the continued cut included."""
        return tuple(self._ids)

    @property
    def generated_logprobs(self) -> tuple[float, ...]:
        """Their log-probabilities."""
        return tuple(self._logprobs)

    @property
    def reused(self) -> int:
        """How many of them come from the continued cut."""
        return self._snapshot.generated if self._snapshot else 0

    def add(self, token_id: int, logprob: float, weight_version: int) -> None:
        """One more generated token. Raises UsageError at the output limit or after the end, ValueError for no token."""
        if self._ended:
            raise UsageError(f"call {self.admission.call_id} has {self._ended}")
        if len(self._ids) >= self.output_limit:
            raise UsageError(f"call {self.admission.call_id} has all its {self.output_limit} tokens")
        if not 0 <= token_id <= MAX_TOKEN_ID or not math.isfinite(logprob) or weight_version < 0:
            raise ValueError(f"token {token_id} with log-probability {logprob} of weights {weight_version}")
        self._ids.append(token_id)
        self._logprobs.append(logprob)
        self.weight_version = min(self.weight_version, weight_version)

    # ---- records

    def prefix_record(self, cut_id: str) -> TokenRecord:
        """A snapshot of all tokens after the prefix, for a cut. Changes nothing, and is not staged yet."""
        return self._builder("cut", cut_id)()

    def chunk_record(
        self,
        cut_id: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        weight_version: int,
        after: Sequence[TokenRecord] = (),
    ) -> TokenRecord:
        """A record of newly generated tokens alone, for a cut that consists of the records before it and this one.

        token_ids, logprobs: at least one, as many of each. after: the records that they follow, in order, the first
        a prefix_record; by default those of the continued cut. Changes nothing, and is not staged yet. Raises
        ValueError for arrays that do not agree, UsageError where there is nothing that they could follow.
        """
        if not token_ids:
            raise ValueError("a chunk has at least one token")
        if len(token_ids) != len(logprobs):
            raise ValueError(f"a chunk has {len(token_ids)} tokens and {len(logprobs)} log-probabilities")
        if not after and self._snapshot is not None:
            after = self._snapshot.records
        if not after:
            raise UsageError("a chunk follows a record of this call or a continued cut")
        return build(
            kind="chunk",
            capture_key=self.admission.capture_key,
            call_id=self.admission.call_id,
            cut_id=cut_id,
            mode=self.admission.mode,
            parent_id=self.admission.parent_id,
            before=(*self._prefix, *(token for record in after for token in record.ids)),
            ids=token_ids,
            generated=len(token_ids),
            logprobs=logprobs,
            weight_version=min(self.weight_version, weight_version),
            output_limit=self.output_limit,
            chain=after[-1].chain_hash,
        )

    async def cut(self) -> CutEvidence:
        """Stage what there is now, durably, and say where it stands; the call goes on.

        Once the call has ended its completion is the cut: finished, and nothing is staged for it. Raises
        StateUnwritable, and UsageError if the call was not captured.
        """
        if self._ended:
            await self._settled.wait()
        if self.coordinates is not None:
            if self.coordinates.capture_failed:
                raise UsageError(f"call {self.admission.call_id} was not captured: {self.coordinates.capture_failed}")
            return finished_cut(self.coordinates)
        record = await self._store.build(self._builder("cut", uuid.uuid4().hex))
        try:
            await self._store.put([record])
        except asyncio.CancelledError:
            self._store.discard([record.key])  # nobody will hear of it
            raise
        return cut_evidence([record])

    async def complete(self, finish_reason: str, stop_reason: str = "") -> Coordinates:
        """End the call: stage it durably, then give its coordinates.

        finish_reason: `stop` or `length`. Whatever goes wrong in building or storing gives `capture_failed`
        coordinates: the completion itself is good. Raises UsageError if the call has ended already.
        """
        if self._ended:
            raise UsageError(f"call {self.admission.call_id} has {self._ended} already")
        self._ended = "completed"
        try:
            self.coordinates = await self._stage(finish_reason, stop_reason)
        finally:
            self._settled.set()
        return self.coordinates

    async def _stage(self, finish_reason: str, stop_reason: str) -> Coordinates:
        try:
            record = await self._store.build(self._builder("completion", "", finish_reason, stop_reason))
            await self._store.put([record])
        except Exception as error:
            _log.warning("call %s was not captured", self.admission.call_id, exc_info=True)
            return self._failed(_reason_of(error), finish_reason, stop_reason)
        return self._coordinates(record)

    def fail(self, reason: str) -> Coordinates:
        """End the call as one whose tokens are not to be used; the ledger appends the reason.

        Raises UsageError if the call has ended already.
        """
        if self._ended:
            raise UsageError(f"call {self.admission.call_id} has {self._ended} already")
        self._ended = "failed"
        self.coordinates = self._failed(reason or "no reason given", "", "")
        self._settled.set()
        return self.coordinates

    # ---- inside

    def _builder(
        self, kind: Kind, cut_id: str, finish_reason: str = "", stop_reason: str = ""
    ) -> Callable[[], TokenRecord]:
        """What builds a record of all tokens there are now. Quick; to call it is not, with a long context."""
        if kind == "completion" and finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {finish_reason[:80]!r} is neither stop nor length")
        return partial(
            build,
            kind=kind,
            capture_key=self.admission.capture_key,
            call_id=self.admission.call_id,
            cut_id=cut_id,
            mode=self.admission.mode,
            parent_id=self.admission.parent_id,
            before=self._prefix,
            ids=(*self._suffix, *self._ids),
            generated=len(self._ids),
            logprobs=tuple(self._logprobs),
            weight_version=self.weight_version,
            output_limit=self.output_limit,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            chain=self.admission.parent_chain_hash,
        )

    def _coordinates(self, record: TokenRecord) -> Coordinates:
        return Coordinates(
            capture_key=record.capture_key,
            call_id=record.call_id,
            mode=self.admission.mode,
            staging_key=record.key,
            staging_chain=(*self.admission.staging_chain, record.key),
            weight_version=record.weight_version,
            previous_length=record.previous_length,
            added_length=len(record.ids),
            total_length=record.total_length,
            staging_digest=record.staging_digest,
            extras_digest=record.extras_digest,
            chain_hash=record.chain_hash,
            cumulative_hash=record.cumulative_hash,
            prefix_tokens=len(self._ids),
            prefix_digest=tokens_digest(record.generated_ids),
            output_limit=record.output_limit,
            finish_reason=record.finish_reason,
            stop_reason=record.stop_reason,
        )

    def _failed(self, reason: str, finish_reason: str, stop_reason: str) -> Coordinates:
        """Coordinates with an empty delta."""
        return Coordinates(
            capture_key=self.admission.capture_key,
            call_id=self.admission.call_id,
            mode=self.admission.mode,
            staging_key="",
            staging_chain=(),
            weight_version=self.weight_version,
            previous_length=self.admission.previous_length,
            added_length=0,
            total_length=self.admission.previous_length,
            staging_digest="",
            extras_digest="",
            chain_hash="",
            cumulative_hash="",
            prefix_tokens=0,
            prefix_digest=NO_TOKENS,
            output_limit=self.output_limit,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            capture_failed=reason[:500],
        )


def cut_evidence(records: Sequence[TokenRecord]) -> CutEvidence:
    """The evidence of a cut that consists of these records, which are durable: its last one names it."""
    last = records[-1]
    generated = [token for record in records for token in record.generated_ids]
    return CutEvidence(
        cut_id=last.cut_id,
        staging_keys=tuple(record.key for record in records),
        prefix_tokens=len(generated),
        prefix_digest=tokens_digest(generated),
        output_limit=last.output_limit,
        weight_version=min(record.weight_version for record in records),
    )


def finished_cut(coordinates: Coordinates) -> CutEvidence:
    """The finished cut that the coordinates of a completed call are. Raises ValueError if its capture failed.

    Its id is that of the call. No staged cut has it, so giving it up leaves the tokens, which are the call's.
    """
    if coordinates.capture_failed:
        raise ValueError(f"call {coordinates.call_id} was not captured: {coordinates.capture_failed}")
    return CutEvidence(
        cut_id=f"finished.{coordinates.call_id}",
        staging_keys=(coordinates.staging_key,),
        prefix_tokens=coordinates.prefix_tokens,
        prefix_digest=coordinates.prefix_digest,
        output_limit=coordinates.output_limit,
        weight_version=coordinates.weight_version,
        finish_reason=coordinates.finish_reason,
        stop_reason=coordinates.stop_reason,
    )


def _reason_of(error: Exception) -> str:
    """Why a call was not captured; what an unexpected error says stays in this process's log."""
    if isinstance(error, ControlError):
        return error.message
    return str(error) if isinstance(error, ValueError) else f"unexpected {type(error).__name__}"


def _number_problems(suffix: tuple[int, ...], weight_version: int, output_limit: int) -> list[Violation]:
    """What is no such number. suffix: the prompt behind the prefix, which was checked when it was staged."""
    checks = [("weight_version", number_problem(weight_version, 0)), ("output_limit", number_problem(output_limit, 1))]
    wrong = (problem for token in suffix if (problem := number_problem(token, 0, MAX_TOKEN_ID)))
    checks.append(("prompt_ids", next(wrong, None)))
    return [Violation(name, problem) for name, problem in checks if problem]


def _check_prefix(admission: CaptureAdmission, prefix: tuple[int, ...], prompt: tuple[int, ...]) -> None:
    if len(prefix) != admission.previous_length:
        _breach("previous_length", f"is {admission.previous_length}, the prefix has {len(prefix)} tokens")
    if admission.prefix_ids is not None and admission.prefix_ids != prefix:
        _breach("prefix_ids", "are not the tokens of the prefix")
    if prompt[: len(prefix)] != prefix:
        _breach("prefix_ids", "do not begin the prompt")


def _continuation_problems(
    admission: CaptureAdmission, snapshot: Snapshot, weight_version: int, output_limit: int
) -> list[Violation]:
    """Everything in which a continuation and the cut it names do not agree."""
    continuation = admission.continuation
    assert continuation is not None
    pairs = (
        ("continuation.staging_keys", continuation.staging_keys, snapshot.keys),
        ("continuation.source_capture_key", continuation.source_capture_key, snapshot.capture_key),
        ("continuation.source_call_id", continuation.source_call_id, snapshot.call_id),
        ("continuation.prefix_tokens", continuation.prefix_tokens, snapshot.generated),
        ("continuation.prefix_digest", continuation.prefix_digest, snapshot.prefix_digest),
        ("continuation.weight_version", continuation.weight_version, snapshot.weight_version),
        ("continuation.output_limit", continuation.output_limit, snapshot.output_limit),
        ("continuation.finish_reason", continuation.finish_reason, snapshot.finish_reason),
        ("continuation.stop_reason", continuation.stop_reason, snapshot.stop_reason),
        ("parent_id", admission.parent_id, snapshot.parent_id),
        ("previous_length", admission.previous_length, snapshot.previous_length),
        ("mode", admission.mode, snapshot.mode),
    )
    found = [Violation(f"admission.{name}", "is not that of the cut") for name, said, is_so in pairs if said != is_so]
    if snapshot.weight_version > weight_version:
        problem = f"is {snapshot.weight_version}, newer than the weights in use, {weight_version}"
        found.append(Violation("admission.continuation.weight_version", problem))
    if output_limit != snapshot.output_limit:
        found.append(Violation("output_limit", f"is {output_limit}, that of the cut is {snapshot.output_limit}"))
    return found
