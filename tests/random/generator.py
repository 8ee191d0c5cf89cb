"""Chooses the next operation: mostly one that leads on, often one that disturbs, sometimes one out of place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.random import faulty_owner, steered_files
from tests.random.kinds import KINDS
from tests.random.ops import Op, episodes, op
from tests.random.world import World

ROLLOUTS = [f"r{number}" for number in range(5)]
DEADLINES = (0.3, 2.0, 8.0, 30.0, 30.0, 30.0)
TTLS = (3.0, 10.0, 10.0, 30.0)
PASSING = (0.1, 0.6, 1.5, 4.0, 6.0, 11.0, 31.0)
NEXT = {
    "IDLE": "prepare prepare prepare restore retire forget start start step commit_kept resume_other".split(),
    "PREPARING": "park park park park prepare resume retire capture".split(),
    "PREPARED": "capture commit commit commit prepare resume retire renew_lease".split(),
    "CAPTURED": "commit commit commit resume resume_keep resume_keep capture retire".split(),
    "COMMITTING": "commit commit resume resume_keep capture retire".split(),
    "COMMITTED": "resume resume resume commit resume_retire prepare".split(),
    "RESTORING": "resume restore_again retire renew_lease".split(),
    "RESTORED": "resume resume resume retire restore_again forget".split(),
    "RESUMING": "resume resume commit capture calm".split(),
}
OTHERS = (
    "fault fault files calm calm calm advance advance cancel status again again stale_epoch new_epoch other_id".split()
)
MOVES = "start step step park finish restart restart".split()


class Generator:
    """The operations of one seed, each chosen in view of what the world has come to."""

    def __init__(self, seed: int, world: World) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.sent: list[Op] = []
        self._ids = 0
        self._epoch = 1
        self._queue: list[Op | Callable[[], Op]] = []
        self._lively = bool(KINDS[world.kind].moves)
        self._passing = (0.02, 0.1, 0.3, 0.7, *PASSING) if self._lively else PASSING

    def next(self) -> Op:
        """The next operation."""
        if self._queue:
            queued = self._queue.pop(0)
            return self._sent(queued if isinstance(queued, Op) else queued())
        pools = [NEXT[self.world.model.phase], OTHERS, [*MOVES, *self.world.node.subject.moves]]
        weights = (4, 3, 5) if self._lively else (4, 4, 2)
        kind = self.random.choice(self.random.choices(pools, weights=weights)[0])
        if self.random.random() < 0.01:
            kind = "crash"
        if self.random.random() < 0.03:
            self._queue += self._story()
        if self._lively and self.random.random() < 0.15:
            self._queue += self._round_of_life()
        if self.world.served and kind == "advance" and self.random.random() < 0.5:
            kind = "step"
        chosen: Op = getattr(self, f"_{kind}")()
        return self._sent(chosen)

    def _sent(self, chosen: Op) -> Op:
        if chosen.is_call:
            self.sent.append(chosen)
        return chosen

    # ---- who calls

    def _new_id(self) -> str:
        self._ids += 1
        return f"c{self._ids}"

    def _id(self) -> str:
        opened = self.world.model.opened
        return opened.id if opened else f"c{max(self._ids, 1)}"

    def _who(self, **given: Any) -> dict[str, Any]:
        opened = self.world.model.opened
        return {
            "id": self._id(),
            "epoch": max(self._epoch, self.world.model.highest),
            "controller": opened.controller if opened else f"t{self._epoch}",
            "deadline": self.random.choice(DEADLINES),
        } | given

    def _episodes(self, count: int) -> list[str]:
        """Capture keys of attempts that may be alive, marked or unheard of."""
        marks = self.world.model.marks
        chosen = self.random.sample(ROLLOUTS, k=min(count, len(ROLLOUTS)))
        found = []
        for rollout in chosen:
            least = max(marks.get(rollout, -1) + 1, self.world.node.subject.floor(rollout))
            attempt = least if self.random.random() < 0.8 else self.random.randrange(3)
            pending = [e.attempt for e in self.world.node.owner.restored_pending() if e.rollout_id == rollout]
            found.append(EpisodeId(rollout, max([attempt, *pending])).capture_key)
        return found

    def _scope(self) -> list[str] | None:
        opened = self.world.model.opened
        asked = opened.args.get("capture") if opened else None
        if asked is not None and self.random.random() < 0.8:
            known: Any = asked
            keys = [episode.capture_key for episode in known]
            self.random.shuffle(keys)
            return None if known.is_all else keys
        everything = self.random.random() < 0.4 and not self.world.node.subject.lists_only
        return None if everything else self._episodes(self.random.randrange(5))

    # ---- the server's own life

    def _start(self) -> Op:
        return op("start", episodes=self._episodes(self.random.randrange(1, 4)))

    def _arrive(self) -> Op:
        return op("arrive", episodes=self._episodes(self.random.randrange(1, 4)), choice=self.random.randrange(10**6))

    def _stir(self) -> Op:
        return op("stir", choice=self.random.randrange(10**6))

    def _step(self) -> Op:
        return op("step", episodes=self._episodes(2))

    def _finish(self) -> Op:
        return op("finish", episodes=self._episodes(1))

    def _restart(self) -> Op:
        return op("restart", episodes=self._episodes(1))

    def _park(self) -> Op:
        report = self.world.node.owner.report(100)
        return op("step", episodes=[b.episode.capture_key for b in report.blockers if b.episode])

    # ---- faults and time

    def _fault(self) -> Op:
        mode = self.random.choice(faulty_owner.MODES)
        return op("fault", hook=self.random.choice(faulty_owner.HOOKS), mode=mode)

    def _files(self) -> Op:
        return op("files", mode=self.random.choice(steered_files.MODES))

    def _calm(self) -> Op:
        active = sorted(self.world.faults() - self.world.node.subject.faults())
        if not active:
            return op("status")
        hook, _ = self.random.choice(active).split(":")
        if hook == "files":
            return op("files", mode=steered_files.OK)
        return op("fault", hook=hook, mode=faulty_owner.OK)

    def _advance(self) -> Op:
        return op("advance", seconds=self.random.choice(self._passing))

    def _cancel(self) -> Op:
        return op("cancel", which=self.random.randrange(8))

    def _status(self) -> Op:
        return op("status")

    def _crash(self) -> Op:
        """The process dies; most often the next thing is a Restore of the newest checkpoint."""
        if self.world.manifests and self.random.random() < 0.8:
            self._queue.append(op("status"))
        self._epoch += self.random.random() < 0.5
        return op("crash")

    def _story(self) -> list[Op]:
        """Operations that seldom meet by chance: something hangs, and the next calls come while it does."""
        who = {"id": self._id(), "epoch": max(self._epoch, self.world.model.highest), "deadline": 30.0}
        who["controller"] = self._who()["controller"]
        scope = self._scope()
        commit = op("commit", scope=scope, place=who["id"], stop=False, **who)
        first: tuple[Op, Op] = self.random.choice(
            [
                (op("fault", hook="export", mode="hang"), op("capture", scope=scope, **who)),
                (op("fault", hook="export", mode="stubborn"), commit),
                (op("fault", hook="delete", mode="fail"), commit),
                (op("files", mode=steered_files.HOLD_PUBLISH), commit),
                (op("files", mode=steered_files.HOLD_START), commit),
                (op("fault", hook="retire", mode="fail"), self._retire()),
            ]
        )
        then = self.random.choices(
            [self._retire, self._resume, self._resume_keep, self._new_epoch, self._commit, self._forget, self._advance],
            k=2,
        )
        return [*first, *(each() for each in then), self._calm_all(first[0])]

    def _round_of_life(self) -> list[Callable[[], Op]]:
        """A whole checkpoint of what is alive, with things happening meanwhile; often a crash and a restore of it."""
        happens = [self._arrive, self._stir, self._stir, self._stir, self._advance, self._step]
        some: list[Callable[[], Op]] = self.random.choices(happens, k=self.random.randrange(1, 5))
        some += [self._arrive] * self.random.randrange(1, 5)
        others: list[Callable[[], Op]] = self.random.choices(happens, k=self.random.randrange(0, 4))
        found = [*some, self._roomy_prepare, *others, self._park, self._park, self._short_wait, self._commit_all]
        found += self.random.choice([[], [self._stir], [self._short_wait], [self._resume_keep]])
        if self.random.random() < 0.5:
            return [*found, self._resume]
        found += [self._crash, self._restore_all, self._stir, self._resume, self._arrive, *some, *others]
        again = [self._finish, self._finish, self._roomy_prepare, self._short_wait, self._commit_all, self._resume]
        return [*found, *again] if self.random.random() < 0.7 else found

    def _roomy_prepare(self) -> Op:
        fresh = self.world.model.opened is None
        who = self._who(**({"id": self._new_id()} if fresh else {}), deadline=30.0)
        return op("prepare", within=self.random.choice((0.5, 2.0, 8.0)), ttl=30.0, **who)

    def _short_wait(self) -> Op:
        return op("advance", seconds=self.random.choice((0.05, 0.3, 0.6, 1.0, 2.0)))

    def _commit_all(self) -> Op:
        alive = {episode for rollout in ROLLOUTS for episode in self.world.node.subject.here(rollout)}
        scope = sorted(episode.capture_key for episode in alive if not self.world.model.refuses(episode))
        who = self._who(deadline=30.0)
        return op("commit", scope=scope, place=who["id"], stop=False, **who)

    def _restore_all(self) -> Op:
        known = self.world.manifests
        if not known:
            return self._prepare()
        source = list(known)[-1]
        chosen = sorted(known[source].counts)
        return self._restore_call(source, chosen, [episode.attempt + 1 for episode in chosen])

    def _calm_all(self, fault: Op) -> Op:
        if fault.name == "files":
            return op("files", mode=steered_files.OK)
        return op("fault", hook=fault["hook"], mode=faulty_owner.OK)

    # ---- calls

    def _prepare(self) -> Op:
        fresh = self.world.model.opened is None and self.random.random() < 0.95
        who = self._who(**({"id": self._new_id()} if fresh else {}))
        opened = self.world.model.opened
        ttl = opened.ttl if opened and self.random.random() < 0.9 else self.random.choice(TTLS)
        within = self.random.choice((0.0, 0.1, 0.1, who["deadline"] * 0.5))
        return op("prepare", within=within, ttl=ttl, **who)

    def _capture(self) -> Op:
        return op("capture", scope=self._scope(), **self._incarnation(), **self._who())

    def _commit(self) -> Op:
        who = self._who()
        stop = self.random.random() < 0.1
        return op("commit", scope=self._scope(), place=who["id"], stop=stop, **self._incarnation(), **who)

    def _incarnation(self) -> dict[str, str]:
        return {"incarnation": "other"} if self.random.random() < 0.03 else {}

    def _commit_kept(self) -> Op:
        kept = self.world.model.kept
        if not kept:
            return self._commit()
        chosen = self.random.choice(sorted(kept))
        asked: Any = kept[chosen].args.get("capture")
        known: Any = kept[chosen].args.get("commit")
        nothing: list[str] | None = [] if self.world.node.subject.lists_only else None
        scope = nothing if asked is None or asked.is_all else [episode.capture_key for episode in asked]
        stop = known[2] if known else False
        return op("commit", scope=scope, place=chosen, stop=stop, **self._who(id=chosen))

    def _resume(self) -> Op:
        return op("resume", keep=False, **self._who())

    def _resume_keep(self) -> Op:
        return op("resume", keep=True, **self._who())

    def _resume_other(self) -> Op:
        return op("resume", keep=self.random.random() < 0.5, **self._who(id=f"c{self.random.randrange(self._ids + 2)}"))

    def _resume_retire(self) -> Op:
        self._queue.append(op("retire", episodes=self._episodes(2), **self._who(id="")))
        return self._resume()

    def _restore(self) -> Op:
        known = self.world.manifests
        if not known:
            return self._prepare()
        source = self.random.choice(sorted(known)) if self.random.random() < 0.97 else "c999"
        stored = sorted(known[source].counts) if source in known else []
        chosen = [e for e in stored if self.random.random() < 0.7]
        if self.random.random() < 0.3:
            chosen += [e for e in episodes(self._episodes(1)) if e.rollout_id not in {c.rollout_id for c in chosen}]
        marks = self.world.model.marks
        install = [max(e.attempt, marks.get(e.rollout_id, 0), 0) + 1 for e in chosen]
        if self.random.random() < 0.1:
            install = [e.attempt + 1 for e in chosen]
        if self.random.random() < 0.6 and self.world.model.opened is None:
            # A controller retires what is alive of the scope before it restores.
            retired = [EpisodeId(e.rollout_id, a - 1).capture_key for e, a in zip(chosen, install, strict=True)]
            restore = self._restore_call(source, chosen, install)
            if retired:
                self._queue.append(restore)
                return op("retire", episodes=retired, **self._who(id=""))
        return self._restore_call(source, chosen, install)

    def _restore_call(self, source: str, chosen: list[EpisodeId], install: list[int]) -> Op:
        who = self._who(**({"id": self._new_id()} if self.world.model.opened is None else {}))
        keys = [e.capture_key for e in chosen]
        ttl = self.random.choice(TTLS)
        return op("restore", source=source, scope=keys, install_as=install, ttl=ttl, **who)

    def _restore_again(self) -> Op:
        opened = self.world.model.opened
        same = [call for call in self.sent if call.name == "restore" and opened and call["id"] == opened.id]
        return same[-1] if same else self._restore()

    def _retire(self) -> Op:
        outside = self.world.model.opened is None
        return op("retire", episodes=self._episodes(self.random.randrange(1, 4)), **self._outside(outside))

    def _forget(self) -> Op:
        marks = self.world.model.marks
        chosen = [r for r in sorted(marks) if self.random.random() < 0.6] or [self.random.choice(ROLLOUTS)]
        rollouts = [(r, max(0, marks.get(r, 0) - (self.random.random() < 0.2))) for r in chosen]
        return op("forget", rollouts=rollouts, **self._outside(self.world.model.opened is None))

    def _outside(self, outside: bool) -> dict[str, Any]:
        return self._who(**({"id": ""} if outside and self.random.random() < 0.8 else {}))

    def _renew_lease(self) -> Op:
        return op("renew_lease", **self._who())

    # ---- calls out of place

    def _again(self) -> Op:
        """An earlier call, delivered once more."""
        return self.random.choice(self.sent[-12:]) if self.sent else self._start()

    def _any(self) -> Callable[[], Op]:
        names = ("prepare", "capture", "commit", "resume", "retire", "forget", "renew_lease")
        chosen: Callable[[], Op] = getattr(self, f"_{self.random.choice(names)}")
        return chosen

    def _stale_epoch(self) -> Op:
        made = self._any()()
        return op(made.name, **{**made.args, "epoch": self.random.randrange(self._epoch + 1)})

    def _new_epoch(self) -> Op:
        self._epoch = max(self._epoch, self.world.model.highest) + 1
        made = self._any()()
        return op(made.name, **{**made.args, "epoch": self._epoch, "controller": f"t{self._epoch}"})

    def _other_id(self) -> Op:
        made = self._any()()
        if made.name == "commit":
            return made
        chosen = self.random.choice([f"c{self.random.randrange(self._ids + 2)}", "never-heard-of"])
        controller = self.random.choice([made["controller"], "somebody"])
        return op(made.name, **{**made.args, "id": chosen, "controller": controller})
