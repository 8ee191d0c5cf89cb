"""A policy model server around its owner: a real ledger, scripted backends, and a handler that captures its calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from gym_ckpt_grpc.capture import CaptureLedger, Coordinates, finished_cut, staging_key
from gym_ckpt_grpc.capture.admission import CaptureAdmission
from gym_ckpt_grpc.capture.ledger_files import LedgerFiles
from gym_ckpt_grpc.control import (
    BackendInfo,
    Budget,
    CallIdentity,
    Capability,
    Closing,
    Continuation,
    CutAck,
    CutDisposition,
    CutEvidence,
    CutPresence,
    Sweep,
    SweepHeader,
)
from gym_ckpt_grpc.integrations import CheckpointMiddleware, visit_of
from gym_ckpt_grpc.participants import PolicyModelOwner, PolicyModelSettings
from gym_ckpt_grpc.participants.generation_call import GenerationCall
from gym_ckpt_grpc.participants.tickets import Ticket
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import App, Call, FakePort, budget, call, exported, reopen, restore, spin

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TOKENS = 7
"""Tokens that each call adds."""


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def answer_to(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The assistant message that follows a conversation."""
    return {"role": "assistant", "content": f"reply {len(messages)}"}


def coordinates_of(admission: CaptureAdmission) -> Coordinates:
    """As an inference worker gives them, with made-up hashes."""
    key = staging_key(admission.capture_key, admission.call_id)
    return Coordinates(
        capture_key=admission.capture_key,
        call_id=admission.call_id,
        mode=admission.mode,
        staging_key=key,
        staging_chain=(*admission.staging_chain, key),
        weight_version=1,
        previous_length=admission.previous_length,
        added_length=TOKENS,
        total_length=admission.previous_length + TOKENS,
        staging_digest=digest_of(key),
        extras_digest=digest_of("extras"),
        chain_hash=digest_of(f"chain {key}"),
        cumulative_hash=digest_of(f"all {key}"),
        prefix_tokens=TOKENS,
        prefix_digest=digest_of(f"tokens {key}"),
        output_limit=64,
        finish_reason="stop",
    )


class FakeBackend:
    """An inference worker without tokens.

    cuts: those that exist. silent: calls it cannot cut. twice: each acknowledgement comes again, which is bad. error:
    what each request to it raises, by method. hold: what a request waits for, by method. asked: methods in the order
    they were asked.
    """

    def __init__(self, name: str = "inference-0") -> None:
        self.name = name
        self.weights = 1
        self.capabilities = frozenset({Capability.CUT, Capability.CONTINUE, Capability.FINISHED})
        self.cuts: dict[str, CutEvidence] = {}
        self.changed: set[str] = set()
        self.silent: set[str] = set()
        self.twice = False
        self.error: dict[str, Exception] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.asked: list[str] = []
        self.released: list[str] = []
        self._asked = asyncio.Event()
        self._made: Counter[str] = Counter()  # by call: cuts ever made of it

    async def asked_again(self, count: int) -> None:
        """Wait until it was asked so often."""
        async with asyncio.timeout(10):
            while len(self.asked) < count:
                self._asked.clear()
                await self._asked.wait()

    async def _step(self, method: str) -> None:
        self.asked.append(method)
        self._asked.set()
        if (held := self.hold.get(method)) is not None:
            await held.wait()
        if (error := self.error.get(method)) is not None:
            raise error

    async def describe(self, budget: Budget) -> BackendInfo:
        await self._step("describe")
        return BackendInfo(self.name, f"{self.name}-life", "minigym", self.weights, self.capabilities)

    async def cut(self, sweep: Sweep, budget: Budget) -> AsyncIterator[SweepHeader | Sequence[CutAck]]:
        await self._step("cut")
        yield SweepHeader(self.name, f"{self.name}-life", f"snapshot-{sweep.closing}-{sweep.number}")
        acks = [self._ack(call) for call, _ in sweep.calls]
        yield acks * 2 if self.twice else acks

    def _ack(self, call: CallIdentity) -> CutAck:
        if call.model_call_id in self.silent:
            return CutAck(call, CutDisposition.UNCUTTABLE, "told so")
        self._made[call.model_call_id] += 1
        cut_id = f"{call.model_call_id}-{self._made[call.model_call_id]}"
        key = f"cuts/{call.episode}/{call.model_call_id}/{cut_id}"
        made = CutEvidence(cut_id, (key,), 3, digest_of(cut_id), 64, self.weights)
        self.cuts[cut_id] = made
        return CutAck(call, CutDisposition.CUT, evidence=made)

    async def check(self, cuts: Sequence[CutEvidence], budget: Budget) -> list[CutPresence]:
        await self._step("check")
        return [self._presence(cut) for cut in cuts]

    def _presence(self, cut: CutEvidence) -> CutPresence:
        if cut.cut_id in self.changed:
            return CutPresence.CHANGED
        finished = bool(cut.finish_reason)  # named by a call's own key: the worker keeps its tokens
        return CutPresence.PRESENT if finished or self.cuts.get(cut.cut_id) == cut else CutPresence.MISSING

    async def release(self, cut_ids: Sequence[str], budget: Budget) -> None:
        await self._step("release")
        for cut_id in cut_ids:
            self.released.append(cut_id)
            self.cuts.pop(cut_id, None)


class PolicyServer:
    """One process of a policy model server. `go` lets calls end, `backend` and `model` are what the next calls go to.

    directory: of its ledger, which outlives it; None for no ledger. files: those that the ledger uses. attach: to a
    port of this rig; else a control plane gives one. given: the continuation that each call got, in the order they
    began, and call_ids theirs. fail: calls end with a failure. finishes: they tell their coordinates.
    """

    def __init__(
        self,
        directory: Path | None,
        *backends: FakeBackend,
        settings: PolicyModelSettings | None = None,
        service: str = "policy",
        files: LedgerFiles | None = None,
        attach: bool = True,
        **options: Any,
    ) -> None:
        self.backends = {each.name: each for each in backends}
        self.ledger = CaptureLedger(directory, files=files) if directory is not None else None
        self.owner = PolicyModelOwner(ledger=self.ledger, backends=self.backends, settings=settings, **options)
        self.port = NamedPort(service)
        if attach:
            self.owner.attach(self.port)
        self.go = asyncio.Event()
        self.fail = False
        self.finishes = True
        self.backend, self.model = "inference-0", "minigym"
        self.given: list[Continuation | None] = []
        self.call_ids: list[str] = []
        self.app = App({CHAT: self.answer, "/v1/responses": self.answer, "/v1/messages": self.answer})
        self.served = CheckpointMiddleware(self.app, self.owner.gate())

    async def answer(self, scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
        request = orjson.loads(body)
        visit = visit_of(scope)
        generation = self.owner.begin_generation(visit, request, backend=self.backend, model=self.model)
        self.given.append(generation.continuation)
        self.call_ids.append(generation.call_id)
        if self.ledger is None or not isinstance(visit, Ticket):
            await self.go.wait()
            return 200, {}, answer_to(request["messages"])
        messages, continuation = request["messages"], generation.continuation
        admission = self.ledger.admit(visit.episode, generation.call_id, messages, continuation)
        assert admission is not None
        generation.registered()
        if request.get("stream"):
            return 200, {"content-type": "text/event-stream"}, self._events(generation, admission, messages)
        await self.go.wait()
        if self.fail:
            self.ledger.append_failure(admission, "told so")
            return 500, {}, None
        self._finish(generation, admission, messages)
        return 200, {}, answer_to(messages)

    def _finish(self, generation: GenerationCall, admission: CaptureAdmission, messages: Any) -> None:
        assert self.ledger is not None
        coordinates = coordinates_of(admission)
        self.ledger.append_staged(admission, coordinates, f"chatcmpl-{generation.call_id}", answer_to(messages))
        if self.finishes:
            generation.finished(finished_cut(coordinates))

    async def _events(
        self, generation: GenerationCall, admission: CaptureAdmission, messages: Any
    ) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await self.go.wait()
        self._finish(generation, admission, messages)
        yield b"data: 2\n\n"

    # ---- what a client does

    def call(self, episode: EpisodeId | None, path: str = CHAT, **request: Any) -> Call:
        """A request; one that streams comes from a caller that waits."""
        prefix = f"/rollout/{episode}" if episode else ""
        headers = {"x-gymckpt-waiting": "1"} if request.get("stream") else {}
        return call(self.served, f"{prefix}{path}", {"messages": [USER]} | request, headers=headers)

    async def turns(self, episode: EpisodeId, count: int) -> list[dict[str, Any]]:
        """Whole turns, one after the other; gives the conversation."""
        messages: list[dict[str, Any]] = [USER]
        self.go.set()
        for _ in range(count):
            reply = (await self.call(episode, messages=messages).end()).json()
            messages += [reply, USER]
        self.go.clear()
        return messages

    async def begin(self, episode: EpisodeId | None, **request: Any) -> Call:
        """A call that is under way at its backend."""
        begun = self.call(episode, **request)
        await spin()
        return begun

    def counts(self, *names: str) -> tuple[int, ...]:
        counts = self.owner.report(9).counts
        return tuple(counts[name] for name in names)

    # ---- what a control plane does

    async def close(self, number: int = 1, within: float = 5.0) -> None:
        """Close for checkpoint `ckpt-<number>` and wait until it is ready."""
        await self.owner.close_admission(Closing(f"ckpt-{number}", number, budget(), ready_within=within))
        await self.ready()

    async def ready(self) -> None:
        for _ in range(500):
            if self.owner.is_ready():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.owner.report(9))

    async def export(self, *episodes: EpisodeId) -> list[Record]:
        return await exported(self.owner, EpisodeScope.of(episodes))

    async def checkpoint(self, *episodes: EpisodeId, number: int = 1, durable: bool = True) -> list[Record]:
        """A whole checkpoint; admission stays closed."""
        await self.close(number)
        records = await self.export(*episodes)
        self.owner.write_ended(f"ckpt-{number}", durable)
        return records

    async def open(self) -> None:
        await reopen(self.owner)

    async def restore(self, records: Sequence[Record], *episodes: EpisodeId) -> None:
        """Install and open."""
        await restore(self.owner, records, episodes or None)
        await self.open()

    async def end(self) -> None:
        self.go.set()
        if self.owner.admission.closed:
            await self.open()
        await self.owner.close()


class NamedPort(FakePort):
    """A port of a service."""

    def __init__(self, service: str) -> None:
        super().__init__(ParticipantKind.POLICY_MODEL)
        self.service = service

    @property
    def identity(self) -> ParticipantIdentity:
        return replace(super().identity, service=self.service)
