"""The policy server of the random sequences: a real owner and ledger, drawn calls, and workers that misbehave."""

from __future__ import annotations

import asyncio
import math
import random
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from gym_ckpt_grpc.capture import CaptureAdmission, CaptureLedger, finished_cut
from gym_ckpt_grpc.control import Closing, Opening
from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.integrations import CheckpointMiddleware, visit_of
from gym_ckpt_grpc.participants import PolicyModelOwner, PolicyModelSettings
from gym_ckpt_grpc.participants.generation_call import GenerationCall
from gym_ckpt_grpc.participants.policy_state import StagedPolicy
from gym_ckpt_grpc.participants.request_digest import request_digest
from gym_ckpt_grpc.participants.tickets import Ticket
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record
from tests.participants.fakes import App, Call, call
from tests.participants.policy_rig import answer_to, coordinates_of
from tests.random import policy_checks
from tests.random.ledger_disk import OK, LedgerDisk
from tests.random.subjects import Clock, Outside, Subject
from tests.random.virtual_time import CountedThread
from tests.random.workers import Worker

if TYPE_CHECKING:
    from tests.random.world import World

PATH = "/v1/chat/completions"
GO, REPLY, MUTE, FAIL, RAISE, AGAIN = "go", "reply", "mute", "fail", "raise", "again"
"""What a handler is told: go on; reply, with or without its coordinates; fail; raise; ask the other worker."""
ANSWER = (REPLY,) * 3
NAMES = ("a", "b")


@dataclass(eq=False)
class Sent:
    """One call as its client sees it. call_ids: of each time it was begun. used: the cut it goes on from, or "".

    row: the call id of its row. stops: places where its handler waits for a word, beside its end.
    """

    episode: EpisodeId | None
    worker: str
    streams: bool = False
    waits: bool = False
    constrained: bool = False
    stops: frozenset[str] = frozenset()
    words: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    inside: bool = False
    finishing: bool = False
    call_ids: list[str] = field(default_factory=list)
    used: str = ""
    row: str = ""
    client: Call | None = None

    @property
    def over(self) -> bool:
        assert self.client is not None
        return self.client.task.done()

    @property
    def status(self) -> int:
        return self.client.answer.status if self.client else 0

    @property
    def undelivered(self) -> bool:
        return self.inside and not self.over and (not self.status or (self.streams and self.waits))

    @property
    def delivered(self) -> bool:
        """Whether the client has all of a good reply."""
        assert self.client is not None
        task = self.client.task
        return self.status == 200 and task.done() and not task.cancelled() and task.exception() is None


class WatchedOwner(PolicyModelOwner):
    """Tells the subject what the control plane asks of it."""

    subject: Policy

    async def close_admission(self, closing: Closing) -> None:
        subject = self.subject
        subject.closing = closing
        within = min(closing.ready_within or 0.0, closing.budget.left())
        subject.cuts_end = subject.clock() + self.settings.cut_share * within
        await super().close_admission(closing)

    async def open_admission(self, opening: Opening) -> None:
        await super().open_admission(opening)
        self.subject.closing = None

    async def activate(self, staged: StagedPolicy) -> None:
        self.subject.forget(target.rollout_id for target in staged.targets)
        await super().activate(staged)
        for target in staged.targets:
            cuts = staged.cuts.get(target, ())
            self.subject.restored[target] = {each.record.request_digest: each.record.source_call_id for each in cuts}
            self.subject.offered |= {each.record.cut_id for each in cuts}

    async def discard(self, staged: StagedPolicy) -> None:
        if staged.activating:
            self.subject.forget(target.rollout_id for target in staged.targets)
        await super().discard(staged)

    async def retire(self, episode: EpisodeId, budget: Budget) -> None:
        self.subject.forget([episode.rollout_id], through=episode.attempt)
        await super().retire(episode, budget)

    def forget(self, rollout_id: str, through_attempt: int) -> None:
        self.subject.forget([rollout_id], through=through_attempt)
        super().forget(rollout_id, through_attempt)

    async def delete_restored(self, episode: EpisodeId) -> None:
        if episode in self.restored_pending():
            self.subject.forget([episode.rollout_id])
        await super().delete_restored(episode)


class Policy(Subject):
    """Calls of episodes and of nobody, each at one of two workers.

    delivered: call ids of rows whose reply a client has, by attempt. restored: of each target, the digests of its cuts
    that no delivered call has used -> the call that was cut. named: of each manifest, its cuts. bodies: requests by
    their digest.
    """

    lists_only = True
    moves = ("arrive",) * 14 + ("stir",) * 14

    def __init__(self, clock: Clock, outside: Outside) -> None:
        self.clock = clock
        made = {name: Worker(name) for name in NAMES}
        self.workers: dict[str, Worker] = outside.kept.setdefault("workers", made)
        self.named: dict[str, set[tuple[str, str]]] = outside.kept.setdefault("named", {})
        for each in self.workers.values():
            each.told.clear()  # by a process that is gone: nobody can give them up
            each.on_release = self._released(each.name)
        self.bodies: dict[str, dict[str, Any]] = outside.kept.setdefault("bodies", {})
        self.wrong: AssertionError | None = None
        self.disk = LedgerDisk()
        self.ledger = CaptureLedger(outside.directory, sync_rows=False, files=self.disk)
        settings = PolicyModelSettings(cut_share=0.5, release_retry_for=600.0)
        self.real = WatchedOwner(ledger=self.ledger, backends=dict(self.workers), settings=settings, clock=clock)
        self.real.subject = self
        self.owner = self.real
        thread = self.real._state._thread
        assert thread is not None
        thread._thread = CountedThread()
        self.served = CheckpointMiddleware(App({PATH: self._answer}), self.real.gate())
        self.closing: Closing | None = None
        self.cuts_end = 0.0
        self.sent: dict[str, Sent] = {}
        self.all = 0
        self.delivered: dict[EpisodeId, set[str]] = {}
        self.restored: dict[EpisodeId, dict[str, str]] = {}
        self.offered: set[str] = set()

    def _released(self, worker: str) -> Any:
        def heard(cut_id: str) -> None:
            holders = [name for name, cuts in self.named.items() if (worker, cut_id) in cuts]
            if holders and self.wrong is None:
                self.wrong = AssertionError(f"{cut_id} was given up, and {holders} name it")

        return heard

    # ---- the server

    async def _answer(self, scope: MutableMapping[str, Any], body: bytes) -> tuple[int, Mapping[str, str], Any]:
        sent = self.sent[dict(scope["headers"])[b"x-test"].decode()]
        sent.inside = True
        visit, request = visit_of(scope), orjson.loads(body)
        while True:
            generation, admission = await self._begin(sent, visit, request)
            if sent.streams:
                return 200, {"content-type": "text/event-stream"}, self._events(sent, generation, admission, request)
            word = await sent.words.get()
            if word == AGAIN:
                sent.worker = "ab"[sent.worker == "a"]
                continue
            if word == RAISE:
                raise RuntimeError("the handler fails on purpose")
            if word == FAIL:
                if admission is not None:
                    self.ledger.append_failure(admission, "on purpose")
                return 500, {}, None
            self._finish(sent, generation, admission, request, word)
            return 200, {}, answer_to(request["messages"])

    async def _begin(self, sent: Sent, visit: Any, request: Any) -> tuple[GenerationCall, CaptureAdmission | None]:
        if "begin" in sent.stops:
            await sent.words.get()
        generation = self.real.begin_generation(visit, request, backend=sent.worker, model="m")
        sent.call_ids.append(generation.call_id)
        sent.used = generation.continuation.source_call_id if generation.continuation else ""
        admission = None
        if isinstance(visit, Ticket):
            messages = request["messages"]
            admission = self.ledger.admit(visit.episode, generation.call_id, messages, generation.continuation)
            if admission is None:
                raise StaleAttempt(f"{visit.episode} is fenced", episodes=[visit.episode])
        if "register" in sent.stops:
            await sent.words.get()
        generation.registered()
        return generation, admission

    def _finish(
        self, sent: Sent, generation: GenerationCall, admission: CaptureAdmission | None, request: Any, word: str
    ) -> None:
        if admission is None:
            return
        coordinates = coordinates_of(admission)
        message = answer_to(request["messages"])
        if self.ledger.append_staged(admission, coordinates, f"r-{generation.call_id}", message):
            sent.row = generation.call_id
        own = finished_cut(coordinates)
        self.workers[sent.worker].own[own.cut_id] = own
        if word != MUTE:
            generation.finished(own)

    async def _events(
        self, sent: Sent, generation: GenerationCall, admission: CaptureAdmission | None, request: Any
    ) -> AsyncIterator[bytes]:
        yield b"data: 0\n\n"
        while (word := await sent.words.get()) not in (REPLY, MUTE):
            if word == RAISE:
                raise RuntimeError("the stream breaks on purpose")
            yield b"data: 1\n\n"
        self._finish(sent, generation, admission, request, word)
        yield b"data: 2\n\n"

    # ---- its clients

    def _body(self, drawn: random.Random) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": drawn.choice("aab")}]
        for _ in range(drawn.choice((0, 0, 1, 2))):
            messages += [answer_to(messages), {"role": "user", "content": "on"}]
        body: dict[str, Any] = {"messages": messages}
        return body | ({"tool_choice": "required"} if drawn.random() < 0.12 else {})

    def _send(self, sent: Sent, body: dict[str, Any]) -> None:
        self._settle_sent()
        self.bodies[request_digest(body)] = body
        sent.constrained = "tool_choice" in body
        body = body | ({"stream": True} if sent.streams else {})
        self.all += 1
        name = str(self.all)
        self.sent[name] = sent
        headers = {"x-test": name} | ({"x-gymckpt-waiting": "1"} if sent.waits else {})
        prefix = f"/rollout/{sent.episode}" if sent.episode else ""
        sent.client = call(self.served, f"{prefix}{PATH}", body, headers=headers)

    def _settle_sent(self) -> None:
        """Take in what has ended."""
        for name, sent in list(self.sent.items()):
            if sent.client is None or not sent.over:
                continue
            del self.sent[name]
            if not sent.client.task.cancelled():
                sent.client.task.exception()
            if sent.delivered and sent.episode is not None:
                self._took(sent, sent.episode)

    def _took(self, sent: Sent, episode: EpisodeId) -> None:
        if sent.row:
            self.delivered.setdefault(episode, set()).add(sent.row)
        offered = self.restored.get(episode, {})
        self.restored[episode] = {digest: source for digest, source in offered.items() if source != sent.used}

    def forget(self, rollouts: Iterable[str], through: float = math.inf) -> None:
        """What clients know of these rollouts, through an attempt, is of dead attempts."""
        self._settle_sent()
        gone = set(rollouts)
        for known in (self.delivered, self.restored):
            for episode in [each for each in known if each.rollout_id in gone and each.attempt <= through]:
                del known[episode]

    def of(self, episode: EpisodeId) -> list[Sent]:
        return [sent for sent in self.sent.values() if sent.episode == episode and not sent.over]

    def start(self, episode: EpisodeId) -> None:
        self._send(Sent(episode, "a"), self._body(random.Random(0)))

    def arrive(self, episode: EpisodeId, choice: int) -> None:
        drawn = random.Random(choice)
        streams = drawn.random() < 0.3
        stops = frozenset(stop for stop in ("begin", "register") if drawn.random() < 0.15)
        sent = Sent(
            episode if drawn.random() < 0.93 else None,
            drawn.choice(NAMES),
            streams=streams,
            waits=drawn.random() < 0.7,
            stops=stops,
        )
        again = [digest for digest in self.restored.get(episode, {}) if digest in self.bodies]
        if again and drawn.random() < 0.7:
            self._send(sent, self.bodies[drawn.choice(sorted(again))])
        else:
            self._send(sent, self._body(drawn))

    def step(self, episode: EpisodeId) -> None:
        for sent in self.of(episode)[:1]:
            sent.words.put_nowait(REPLY)

    def finish(self, episode: EpisodeId) -> None:
        for sent in self.of(episode)[:1]:
            assert sent.client is not None
            sent.client.task.cancel()

    def restart(self, episode: EpisodeId) -> None:
        for sent in self.of(episode)[-1:]:
            assert sent.client is not None
            sent.client.leave()

    def stir(self, choice: int) -> None:
        drawn = random.Random(choice)
        self._settle_sent()
        if drawn.random() < (0.05 if self.disk.mode == OK else 0.3):
            self.disk.steer(drawn)
            return
        if drawn.random() < 0.4 or not self.sent:
            self.workers[drawn.choice(NAMES)].steer(drawn)
            return
        sent = drawn.choice(list(self.sent.values()))
        word = drawn.choice((*ANSWER, GO, MUTE, FAIL, RAISE, AGAIN, AGAIN, "cancel", "leave"))
        assert sent.client is not None
        if word == "cancel":
            sent.client.task.cancel()
        elif word == "leave":
            sent.client.leave()
        else:
            sent.words.put_nowait(word)

    # ---- what the sequences ask

    def is_open(self) -> bool:
        return not self.real.admission.closed

    def floor(self, rollout_id: str) -> int:
        return 1 + self.ledger._fences.read().get(rollout_id, -1)

    def here(self, rollout_id: str) -> list[EpisodeId]:
        return self.real._state._here(rollout_id)

    def value(self, record: Record) -> int:
        """A number that says which rows and which cuts it has."""
        rows = [row["call_id"] for row in record.decode("rows")]
        cuts = sorted((cut["request_digest"], cut["cut_id"]) for cut in record.decode("cuts"))
        return zlib.crc32(orjson.dumps([rows, cuts]))

    def hangs(self) -> bool:
        looks = self.real._state._looks._running  # an opening waits for them a moment
        return bool(looks) or any(worker.hangs for worker in self.workers.values())

    def faults(self) -> set[str]:
        return {f"ledger:{self.disk.mode}"} if self.disk.mode != OK else set()

    def calm(self) -> None:
        self.disk.mode = OK
        for worker in self.workers.values():
            worker.calm()

    def check(self, world: World) -> None:
        self._settle_sent()
        policy_checks.check(self, world)

    def check_export(self, world: World, records: Sequence[Record]) -> None:
        self._settle_sent()
        policy_checks.check_export(self, world, records)

    def published(self, checkpoint_id: str, records: Sequence[Record]) -> None:
        self.named[checkpoint_id] = {
            (cut["backend"], cut["cut_id"]) for record in records for cut in record.decode("cuts")
        }

    async def check_end(self, world: World) -> None:
        for _ in range(3):
            for sent in list(self.sent.values()):
                for _ in range(4):
                    sent.words.put_nowait(REPLY)
            await world.time.settle()
        await world.time.advance(5.0)
        self._settle_sent()
        policy_checks.check(self, world)
        policy_checks.check_end(self)

    async def end(self) -> None:
        tasks = [sent.client.task for sent in self.sent.values() if sent.client is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.real.close()
