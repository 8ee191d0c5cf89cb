"""What protocol.md allows: a small model of one participant, written from that page and not from the code.

It is told each call and what the call came to, reads the phase that the participant reports, and says which calls
are legal. Its table is the one of the behaviour list, section 1, word for word.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.random.ops import CALLS, Op, episodes, scope_of

TABLE = """
PREPARING  | joins  | P      | P      | runs  | P      | runs  | P    | runs
PREPARED   | replay | runs   | runs   | runs  | P      | runs  | P    | runs
CAPTURED   | replay | replay | runs   | runs  | P      | P     | P    | runs
COMMITTING | replay | replay | joins  | runs  | P      | P     | P    | runs
COMMITTED  | replay | replay | replay | runs  | P      | P     | P    | runs
RESTORING  | P      | P      | P      | runs  | joins  | waits | P    | runs
RESTORED   | P      | P      | P      | runs  | replay | runs  | runs | runs
RESUMING   | P      | P      | P      | joins | P      | P     | P    | P
NEW        | runs   | P      | P      | fence | runs   | runs  | runs | P
RESUMED    | S      | S      | S      | replay| S      | runs  | runs | S
"""
CELLS = {
    (row.split("|")[0].strip(), call): cell.strip()
    for row in TABLE.strip().splitlines()
    for call, cell in zip(CALLS, row.split("|")[1:], strict=True)
}
KEEPING = ("CAPTURED", "COMMITTING")
ACCEPTED = "accepted"


@dataclass
class Opened:
    """The open checkpoint or restore.

    args: what each call was asked with, as far as a retry must repeat it. frozen: its records are captured.
    install: what a restore makes live.
    """

    id: str
    epoch: int
    controller: str
    ttl: float
    args: dict[str, Hashable] = field(default_factory=dict)
    frozen: bool = False
    install: frozenset[EpisodeId] = frozenset()
    ending: bool = False


@dataclass
class Kept:
    """Records kept after Resume. since: when they were, or their write ended. sure: they cannot have expired yet."""

    epoch: int
    ttl: float
    args: dict[str, Hashable]
    since: float
    sure: bool


@dataclass
class Model:
    """One participant since its start. now: its clock, seconds. ever_kept: epoch of each id kept, dropped or not."""

    phase: str = "IDLE"
    now: float = 0.0
    highest: int = 0
    opened: Opened | None = None
    resumed: set[str] = field(default_factory=set)
    kept: dict[str, Kept] = field(default_factory=dict)
    ever_kept: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    unfreed: set[EpisodeId] = field(default_factory=set)
    expiries: int = 0

    def refuses(self, episode: EpisodeId) -> bool:
        return episode.attempt <= self.marks.get(episode.rollout_id, -1)

    # ---- what a call may do

    def verdict(self, call: Op) -> set[str]:
        """ACCEPTED, or the codes of which one must refuse the call. Order of checks: C11."""
        if call["deadline"] <= 0 and call.name != "resume":
            return {"DEADLINE_EXCEEDED"}
        if call["epoch"] < self.highest:
            return {"STALE_CONTROLLER"}
        if call.args.get("incarnation") == "other":
            return {"INCARNATION_CHANGED"}
        if self.opened and call["id"] == self.opened.id:
            return self._same_id(call, self.opened)
        if call["id"] in self.resumed:
            return self._resumed_id(call)
        if self.opened:
            return {ACCEPTED} if call.name == "resume" else {"CHECKPOINT_CONFLICT"}
        return self._cell("NEW", call)

    def _cell(self, row: str, call: Op) -> set[str]:
        cell = CELLS[row, call.name]
        return {"P": {"INVALID_PHASE"}, "S": {"STALE_CHECKPOINT"}}.get(cell) or self._unfit(call) or {ACCEPTED}

    def _unfit(self, call: Op) -> set[str]:
        """Refusals for what the call names, once phase and id are right; then it is that refusal, not acceptance."""
        if call.name == "forget":
            held = [e for e in self.unfreed for r, a in call["rollouts"] if e.rollout_id == r and e.attempt <= a]
            return {"RETIRE_INCOMPLETE"} if held else set()
        if call.name == "retire" and self.phase == "PREPARED" and self.opened and "capture" in self.opened.args:
            return {"INVALID_PHASE"}  # its records are being frozen
        if call.name == "restore" and self.phase == "IDLE":
            return {"STALE_ATTEMPT"} if any(self.refuses(target) for target in targets(call)) else set()
        return set()

    def _same_id(self, call: Op, opened: Opened) -> set[str]:
        if call["epoch"] == opened.epoch and call["controller"] != opened.controller:
            return {"CHECKPOINT_CONFLICT"}
        cell = CELLS[self.phase, call.name]
        known = opened.args.get(call.name)
        if cell in ("P", "S"):
            refusals = self._cell(self.phase, call)
            # Other arguments than before may be seen before the phase is: both are true of the call.
            return refusals | ({"CHECKPOINT_CONFLICT"} if self._conflicts(call, opened.args) else set())
        if call.name in ("prepare", "restore", "capture", "commit") and known not in (None, arguments(call)):
            return {"CHECKPOINT_CONFLICT"}
        if self._conflicts(call, opened.args):
            return {"CHECKPOINT_CONFLICT"}
        return self._cell(self.phase, call)

    def _conflicts(self, call: Op, args: Mapping[str, Hashable]) -> bool:
        if args.get(call.name) not in (None, arguments(call)) and call.name != "resume":
            return True
        captured = args.get("capture")
        return call.name == "commit" and captured is not None and captured != scope_of(call["scope"])

    def _resumed_id(self, call: Op) -> set[str]:
        kept = self.kept.get(call["id"])
        if call.name == "commit" and kept is not None:
            stale = set() if kept.sure else {"STALE_CHECKPOINT"}
            if call["epoch"] > kept.epoch:
                return {"STALE_CHECKPOINT"}
            return stale | ({"CHECKPOINT_CONFLICT"} if self._conflicts(call, kept.args) else {ACCEPTED})
        if self.opened and call.name in ("retire", "forget"):
            return {"STALE_CHECKPOINT"}
        return self._cell("RESUMED", call)

    # ---- what happened

    def accept(self, call: Op) -> None:
        """A call was accepted: obey its epoch, and take in what holds from this moment on."""
        self.obey(call)
        if call.name in ("prepare", "restore") and self.opened is None:
            ttl = min(call["ttl"], 600.0)
            self.opened = Opened(call["id"], call["epoch"], call["controller"], ttl)
            if call.name == "restore":
                self.opened.install = frozenset(targets(call))
        if call.name == "resume":
            self._resume(call)
        if self.opened and call["id"] == self.opened.id:
            if call.name in ("prepare", "restore", "capture", "commit"):
                self.opened.args[call.name] = arguments(call)
            if call.name == "commit":
                self.opened.args.setdefault("capture", scope_of(call["scope"]))
        elif call.name == "commit" and (kept := self.kept.get(call["id"])):
            kept.args["commit"], kept.since = arguments(call), self.now
        if call.name == "retire":
            for episode in episodes(call["episodes"]):
                self.marks[episode.rollout_id] = max(episode.attempt, self.marks.get(episode.rollout_id, -1))
                self.unfreed.add(episode)
        if call.name == "forget":
            for rollout, through in call["rollouts"]:
                if self.marks.get(rollout, through + 1) <= through:
                    del self.marks[rollout]

    def obey(self, call: Op) -> None:
        """A higher epoch ends what an earlier controller left to be written, and takes over what is open."""
        self.highest = max(self.highest, call["epoch"])
        self.kept = {name: kept for name, kept in self.kept.items() if kept.epoch >= call["epoch"]}
        if self.opened and call["id"] == self.opened.id:
            self.opened.epoch, self.opened.controller = call["epoch"], call["controller"]

    def _resume(self, call: Op) -> None:
        opened = self.opened
        if opened and call["id"] == opened.id and self.phase != "RESUMING":
            if call["keep"] and self.phase in KEEPING and opened.frozen:
                self.ever_kept[opened.id] = call["epoch"]
                self.kept[opened.id] = Kept(call["epoch"], opened.ttl, dict(opened.args), self.now, True)
            opened.ending = True
            return
        if not call["keep"]:
            self.kept.pop(call["id"], None)
        if not (opened and call["id"] == opened.id):
            self.resumed.add(call["id"])

    def free(self, episode: EpisodeId, failed: Collection[EpisodeId]) -> None:
        """Its retire ended: nothing of it is left, and of earlier attempts only those that are still stopped apart."""
        covered = {e for e in self.unfreed if e.rollout_id == episode.rollout_id and e.attempt <= episode.attempt}
        self.unfreed -= {e for e in covered if e == episode or e in failed}

    def observe(self, phase: str, now: float, *, exporting: bool, writing: set[str]) -> None:
        """Take in the phase reported once all is quiet; the rest follows from it."""
        opened = self.opened
        self.phase, self.now = phase, now
        if phase == "IDLE" and opened is not None:
            if opened.ending:  # otherwise its closing or its install failed, which fences nothing
                self.resumed.add(opened.id)
            self.opened = None
        if opened is not None and phase in ("PREPARED", "PREPARING") and not exporting:
            opened.args.pop("capture", None)
            opened.args.pop("commit", None)
        for name, kept in list(self.kept.items()):
            if name in writing:
                kept.since = now
            elif now - kept.since >= kept.ttl * 1.3 + 1:
                del self.kept[name]
            elif now - kept.since >= kept.ttl * 0.7:
                kept.sure = False


def targets(call: Op) -> list[EpisodeId]:
    """What a Restore installs."""
    return [EpisodeId(e.rollout_id, a) for e, a in zip(episodes(call["scope"]), call["install_as"], strict=True)]


def arguments(call: Op) -> Hashable:
    """What makes two calls the same, by protocol.md section 5 and 6."""
    picks: dict[str, Any] = {
        "prepare": lambda: call["ttl"],
        "capture": lambda: scope_of(call["scope"]),
        "commit": lambda: (scope_of(call["scope"]), call["place"], call["stop"]),
        "restore": lambda: (
            call["source"],
            call["ttl"],
            frozenset(zip(call["scope"], call["install_as"], strict=True)),
        ),
    }
    made: Hashable = picks[call.name]() if call.name in picks else None
    return made
