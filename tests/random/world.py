"""Runs a list of operations against one participant, beside the model, and checks the invariants after each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_ckpt_grpc.control import ControlSettings
from gym_ckpt_grpc.protocol.ids import EpisodeId, EpisodeScope
from gym_ckpt_grpc.storage import Record, read_part, resolve_checkpoint
from tests.random import faulty_owner, steered_files
from tests.random.driver import PATIENCE, Answer, Node, RealTime, ServedNode, VirtualTime
from tests.random.model import ACCEPTED, Model
from tests.random.ops import Op, episodes, op
from tests.random.steered_files import SteeredFiles
from tests.random.subjects import Outside

CLEANUP_LIMIT = 5.0
SETTINGS = ControlSettings(cleanup_limit=CLEANUP_LIMIT, deletion_wait=0.5, watch_interval=0.5, status_interval=0.1)


@dataclass
class Pending:
    """A call under way.

    facts: faults that were in force at some time of it. holds: the open id it is about. restarts: those that a new
    capture by it would name. waits: it waits for a publication that hangs, and has not begun.
    """

    op: Op
    task: asyncio.Task[Answer]
    began: float
    facts: set[str]
    holds: str = ""
    restarts: set[EpisodeId] = field(default_factory=set)
    waits: bool = False
    ended: float | None = None

    @property
    def failed(self) -> bool:
        return self.task.cancelled() or self.task.result().code != "ok"


@dataclass
class Manifest:
    """A manifest that was seen on disk: its bytes, its digest, the count that each episode had."""

    data: bytes
    digest: str
    counts: dict[EpisodeId, int]


@dataclass
class Ledger:
    """What happened in one process.

    exports: of each id, the records frozen. outside: restored episodes that some capture left out, which its Commit
    may delete. pending: restored and not started, as last seen. started: what clients began. dead: ids that must get
    no manifest any more.
    """

    exports: dict[str, list[Sequence[Record]]] = field(default_factory=dict)
    outside: set[EpisodeId] = field(default_factory=set)
    pending: frozenset[EpisodeId] = frozenset()
    last_install: frozenset[EpisodeId] = frozenset()
    started: set[EpisodeId] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)


class World:
    """One participant through crashes, and everything a sequence knows of it."""

    def __init__(self, kind: str, root: Path, *, served: bool = False) -> None:
        self.kind, self.root, self.served = kind, root, served
        self.time: VirtualTime | RealTime = RealTime() if served else VirtualTime()
        self.outside = Outside(root / "outside")
        self.manifests: dict[str, Manifest] = {}
        self.pending: list[Pending] = []
        self.wrong: AssertionError | None = None
        self._freed_now: list[EpisodeId] = []
        self.calls = 0
        self.refusals = 0
        self.answers: dict[str, int] = {}

    async def begin(self) -> None:
        """Start a process of the participant, with nothing in its memory."""
        self.files = SteeredFiles(self.time.hold)
        make = ServedNode if self.served else Node
        self.node = make(self.kind, self.root, self.time.clock, self.files, SETTINGS, self.outside)
        await self.node.start()
        self._ending, self._ends_by = False, 0.0
        self._held: set[str] = set()
        self.model, self.ledger = Model(now=self.time.clock()), Ledger()
        owner = self.node.owner
        owner.exporting = lambda: self.node.plane.status().active_checkpoint_id
        owner.exported = self._heard
        owner.freed = self._freed

    # ---- what the server tells

    def _heard(self, checkpoint_id: str, records: Sequence[Record], left_out: Sequence[EpisodeId]) -> None:
        """What is wrong is kept for later: raised here it would be the failure of a hook."""
        try:
            self._exported(checkpoint_id, records, left_out)
        except AssertionError as error:
            self.wrong = self.wrong or error

    def _freed(self, episode: EpisodeId) -> None:
        """A retire came to its end."""
        self._freed_now.append(episode)
        self.model.free(episode, self.node.owner.failed_retires)

    def _exported(self, checkpoint_id: str, records: Sequence[Record], left_out: Sequence[EpisodeId]) -> None:
        """An export came to its end: R7, R8, and that it tells what the server holds."""
        model = self.model
        current = {*model.kept, model.opened.id if model.opened and not model.opened.ending else ""}
        if checkpoint_id not in current:
            return  # dropped: its checkpoint was resumed
        self.ledger.exports.setdefault(checkpoint_id, []).append(tuple(records))
        if model.opened and checkpoint_id == model.opened.id:
            model.opened.frozen = True
            scope: Any = model.opened.args.get("capture", ())  # not told yet, if the call waited
            if scope != EpisodeScope.all():
                self.ledger.outside |= {e for e in self.node.owner.restored_pending() if e not in scope}
        restarts = set(self.node.owner.report(100).restarts)
        for record in records:
            assert not model.refuses(record.episode), f"R7: {record.episode} was retired before it was captured"
            assert record.episode not in restarts, f"R8: {record.episode} is a restart and was captured"
            expected = self.node.subject.expected(record.episode)
            value = self.node.subject.value(record)
            assert expected in (None, value), f"{record.episode} was captured at {value}, it is at {expected}"
        self.node.subject.check_export(self, records)

    def faults(self) -> set[str]:
        """Faults in force, as `hook:mode`."""
        steps = self.node.owner.steps.values()
        return (
            {f"{step.name}:{step.mode}" for step in steps if step.mode != faulty_owner.OK}
            | ({f"files:{self.files.mode}"} if self.files.mode != steered_files.OK else set())
            | self.node.subject.faults()
        )

    def snapshot(self) -> dict[str, Any]:
        """All state of the participant that a refused call must leave alone."""
        status, core = self.node.plane.status(), self.node.plane._core
        return {
            "phase": status.phase.name,
            "active": status.active_checkpoint_id,
            "controller": status.controller_id,
            "epoch": status.highest_epoch,
            "lease": status.lease_remaining and round(status.lease_remaining, 6) if self.time.exact else None,
            "marks": core.retirement.marks,
            "pending": self.node.owner.restored_pending(),
            "open": self.node.subject.is_open(),
            "expiries": status.leases_expired,
            "kept": sorted(core.machine.kept),
            "resumed": len(core.machine.resumed),
            "writes": status.writes_under_way,
        }

    # ---- operations

    async def do(self, step: Op) -> None:
        """Run one operation until all is quiet."""
        if step.is_call:
            await self._call(step)
        elif step.name == "advance":
            await self._advance(step["seconds"])
        elif step.name == "cancel":
            if self.pending:
                self.pending[step["which"] % len(self.pending)].task.cancel()
            await self.time.settle()
        elif step.name == "crash":
            await self.crash()
        else:
            published = step.name == "files" and self.files.publishing > 0
            self._poke(step)
            await self._quiet(published=published)
        await self.harvest()

    async def _quiet(self, *, published: bool = False) -> None:
        await self.time.settle()
        if self._ending or published:
            await self.time.advance(0.05)  # what waits for a publication looks that often whether it has ended

    def _poke(self, step: Op) -> None:
        if step.name == "fault":
            self.node.owner.steps[step["hook"]].steer(step["mode"])
        elif step.name == "files":
            self.files.steer(step["mode"])
        elif step.name == "status":
            self.node.plane.status()
        elif step.name == "stir":
            self.node.subject.stir(step["choice"])
        else:
            for episode in episodes(step["episodes"]):
                self.ledger.started.add(episode)
                if step.name not in ("start", "arrive") or self._may_start(episode):
                    how = (step["choice"],) if step.name == "arrive" else ()
                    getattr(self.node.subject, step.name)(episode, *how)
        for call in self.pending:
            call.facts |= self.faults()

    def _may_start(self, episode: EpisodeId) -> bool:
        """A client starts an attempt once nothing of another one is left, and waits for the end of a restore."""
        if self.node.subject.is_open():
            self._held.clear()
        elif episode.rollout_id in self._held:
            return False
        else:
            self._held.add(episode.rollout_id)
        others = [other for other in self.node.subject.here(episode.rollout_id) if other != episode]
        return not others and self.model.phase not in ("RESTORING", "RESTORED")

    async def _call(self, step: Op) -> None:
        if any(call.waits for call in self.pending):
            return  # one such call at a time is enough
        self.calls += 1
        opened_before = self.model.opened
        before, verdict, named = self.snapshot(), self.model.verdict(step), self._restarts(step)
        waits = self._waits(step, verdict)
        if verdict == {ACCEPTED}:
            self._accept(step, waits)
        task = asyncio.ensure_future(self.node.send(step))
        call = Pending(step, task, self.time.clock(), self.faults(), restarts=named)
        task.add_done_callback(lambda _: setattr(call, "ended", self.time.clock()))
        await self.node.arrived(task)
        await self.time.settle()
        if not self.time.exact and (ACCEPTED not in verdict or not (call.facts or step.name == "prepare")):
            await asyncio.wait({task}, timeout=PATIENCE)
            await self.time.settle()
        code = task.result().code if task.done() else ""
        if verdict != {ACCEPTED} and code in verdict:
            self.refusals += 1
            self._refused(step, before)
            return
        assert ACCEPTED in verdict, f"{step} gave {code or 'no answer'}, it must be refused with {sorted(verdict)}"
        if verdict != {ACCEPTED}:
            self._accept(step, waits)
        opened = self.model.opened
        left, before_left = self.node.plane.status().lease_remaining, before["lease"]
        if opened is opened_before and left is not None and before_left is not None:
            assert left >= before_left - 1e-5, f"R14: {step} made the lease shorter: {before_left} to {left}"
        call.holds = step["id"] if opened and opened.id == step["id"] else ""
        call.waits = waits and step.name != "renew_lease"
        call.facts |= {"waited"} if call.waits else set()
        self.pending.append(call)

    def _restarts(self, step: Op) -> set[EpisodeId]:
        """Restarts that a scope names which would be captured now."""
        opened = self.model.opened
        begins = opened is not None and opened.id == step["id"] and "capture" not in opened.args
        if step.name not in ("capture", "commit") or not begins:
            return set()
        return set(episodes(step["scope"] or [])) & set(self.node.owner.report(100).restarts)

    def _waits(self, step: Op, verdict: set[str]) -> bool:
        """Whether an accepted call must first wait for an earlier controller's publication that hangs."""
        writing = self.node.plane.status().writes_under_way
        older = any(epoch < step["epoch"] and name in writing for name, epoch in self.model.ever_kept.items())
        hangs = self.files.publishing > 0 and (self._ending or older)
        return ACCEPTED in verdict and hangs

    def _accept(self, step: Op, waits: bool) -> None:
        if waits and not self._ending:
            self._ending, self._ends_by = True, self.time.clock() + CLEANUP_LIMIT
        if waits and step.name != "renew_lease":  # which waits for nothing
            self.model.obey(step)
        else:
            self.model.accept(step)

    def _begun(self) -> None:
        """Calls that waited for a publication begin once it has ended, if they are still legal then."""
        self._ending = self._ending and self.files.publishing > 0 and self.time.clock() < self._ends_by
        for call in [call for call in self.pending if call.waits and not self._ending]:
            call.waits = False
            if ACCEPTED in self.model.verdict(call.op) and not (call.task.done() and call.failed):
                self.model.accept(call.op)
                for episode in self._freed_now:
                    self.model.free(episode, self.node.owner.failed_retires)
                call.holds = call.op["id"] if self.model.opened and self.model.opened.id == call.op["id"] else ""

    def _refused(self, step: Op, before: dict[str, Any]) -> None:
        after = self.snapshot()
        same = before == after if self.time.exact else before["epoch"] == after["epoch"]
        assert same, f"R13: {step} was refused and changed {changes(before, after)}"

    async def _advance(self, seconds: float) -> None:
        """Let time pass; a lease must expire exactly then, and only then, when nothing held it for its ttl."""
        model, plane = self.model, self.node.plane
        opened, phase, began = model.opened, model.phase, self.time.clock()
        status = plane.status()
        left = status.lease_remaining
        holders = [call for call in self.pending if opened and call.holds == opened.id]
        await self.time.advance(seconds)
        expired = plane.status().leases_expired - model.expiries
        model.expiries += expired
        assert expired in (0, 1), f"R14: one lease expired {expired} times"
        if expired and opened:
            opened.ending = True
        if not self.time.exact or opened is None or left is None or phase == "RESUMING":
            return
        ends = [call.ended for call in holders]
        if any(end is None for end in ends):
            assert not expired, "R14: a lease expired under a call"
        elif phase not in ("PREPARING", "RESTORING"):
            due = max((end + opened.ttl for end in ends if end is not None), default=began + left)
            if abs(due - self.time.clock()) > 0.01:
                assert bool(expired) == (due < self.time.clock()), f"R14: due {due}, now {self.time.clock()}: {expired}"

    async def crash(self) -> None:
        """The process dies once its held threads have gone on; another one takes its place."""
        self.calm()
        await self._quiet()
        await self.harvest()
        for call in self.pending:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self.pending), return_exceptions=True)
        self.pending.clear()
        await self.node.stop()
        await self.begin()

    def calm(self) -> None:
        """End all faults."""
        for step in self.node.owner.steps.values():
            step.steer(faulty_owner.OK)
        self.files.steer(steered_files.OK)
        self.node.subject.calm()

    # ---- afterwards

    async def harvest(self) -> None:
        """Take in what ended, then read the participant."""
        from tests.random.checks import check_answer, check_lease, check_state

        self._begun()
        self._freed_now.clear()
        if self.wrong is not None:
            raise self.wrong
        ended: list[Pending] = []
        for call in [call for call in self.pending if call.task.done()]:
            self.pending.remove(call)
            if not call.task.cancelled():
                answer = call.task.result()
                self.answers[answer.code] = self.answers.get(answer.code, 0) + 1
                check_answer(self, call, answer)
                ended.append(call)
        status = self.node.plane.status()
        if not self.time.exact and self.model.opened and status.leases_expired == self.model.expiries + 1:
            self.model.expiries, self.model.opened.ending = status.leases_expired, True  # real time passes by itself
        self.model.observe(
            status.phase.name,
            self.time.clock(),
            exporting=self.node.owner.steps["export"].inside > 0,
            writing=set(status.writes_under_way),
        )
        check_state(self, status)
        for call in ended:
            check_lease(self, call)

    def location(self, checkpoint_id: str) -> Any:
        """Where a checkpoint is."""
        return resolve_checkpoint(self.node.uri(checkpoint_id), [str(self.root)], files=self.files, field="uri")

    def read_manifest(self, checkpoint_id: str) -> bytes | None:
        """The manifest on disk, if there is one."""
        path = Path(self.location(checkpoint_id).part(self.node.identity.place).manifest)
        return path.read_bytes() if path.exists() else None

    def read_part(self, checkpoint_id: str) -> Any:
        """All of a part, verified."""
        place = self.node.identity.place
        return read_part(self.files, self.location(checkpoint_id), place, checkpoint_id=checkpoint_id)

    async def drain(self) -> None:
        """R12: without faults everything comes to its end, and the participant is open."""
        self.calm()
        await self._quiet()
        await self.harvest()
        if not self.time.exact:
            waiting = [call.task for call in self.pending]
            await asyncio.wait(waiting, timeout=PATIENCE) if waiting else None
        await self.do(op("advance", seconds=1.0))
        if self.model.phase != "IDLE":
            opened = self.model.opened
            assert opened is not None
            who = {"epoch": max(self.model.highest, opened.epoch), "controller": opened.controller}
            await self.do(op("resume", id=opened.id, keep=False, deadline=30.0, **who))
        for seconds in (6.0, 60.0, 600.0):
            await self.do(op("advance", seconds=seconds))
        if not self.time.exact:
            for call in self.pending:
                call.task.cancel()
            await asyncio.sleep(1.5 * SETTINGS.watch_interval)
            await self.harvest()
        assert self.model.phase == "IDLE", f"R12: left in {self.model.phase}"
        assert self.node.subject.is_open(), "R12: left closed"
        assert not self.pending, f"R12: {self.pending} never ended"
        left = [task.get_name() for task in self.node.plane._core.tasks._tasks]
        assert not left, f"R12: tasks left: {left}"
        await self.node.subject.check_end(self)


def changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What two snapshots differ in."""
    return ", ".join(f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key])
