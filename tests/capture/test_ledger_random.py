"""Random sequences against a model that is a dictionary."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from gym_ckpt_grpc.capture import CaptureAdmission, CaptureLedger, fences
from gym_ckpt_grpc.control import Row
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.capture.ledger_rig import Message, coordinates, restore, said, user

ROLLOUTS = ["r", "r1", "r-a1x", "q" * 250]
ATTEMPTS = range(4)
EPISODES = [EpisodeId(rollout, attempt) for rollout in ROLLOUTS for attempt in ATTEMPTS]


class Model:
    """Call ids of each attempt's rows, with their stamps, and the fences."""

    def __init__(self) -> None:
        self.rows: dict[EpisodeId, list[tuple[str, str]]] = {}
        self.through: dict[str, int] = {}

    def fenced(self, episode: EpisodeId) -> bool:
        return episode.attempt <= self.through.get(episode.rollout_id, -1)

    def drop(self, rollout: str, wanted: Callable[[int], bool]) -> None:
        for episode in [each for each in self.rows if each.rollout_id == rollout and wanted(each.attempt)]:
            del self.rows[episode]


class World:
    """One directory under several ledgers, as many processes would have it, beside the model."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory = directory
        self.rng = rng
        self.model = Model()
        self.ledgers = [self.opened() for _ in range(3)]
        self.pending: list[tuple[int, EpisodeId, CaptureAdmission, list[Message]]] = []
        self.records: list[tuple[EpisodeId, list[Row], list[tuple[str, str]]]] = []
        self.replies: dict[str, list[Message]] = {}
        self.steps = 0

    def opened(self) -> CaptureLedger:
        return CaptureLedger(self.directory, sync_rows=False)

    def some_ledger(self) -> CaptureLedger:
        return self.rng.choice(self.ledgers)

    def some_episodes(self) -> list[EpisodeId]:
        return [self.rng.choice(EPISODES) for _ in range(self.rng.randint(1, 3))]

    # ---- operations

    def admit(self) -> None:
        """A call that begins anew, or goes on from any call of its attempt's rows."""
        at, episode = self.rng.randrange(3), self.rng.choice(EPISODES)
        parents = [call_id for call_id, _ in self.model.rows.get(episode, ()) if call_id in self.replies]
        parent = self.rng.choice(["", *parents])
        conversation = [*self.replies[parent], user("more")] if parent else [user(f"begin {self.steps}")]
        admission = self.ledgers[at].admit(episode, f"c{self.steps}", conversation)
        assert (admission is None) is self.model.fenced(episode)
        if admission is not None:
            assert admission.parent_id == parent
            self.pending.append((at, episode, admission, conversation))

    def append(self) -> None:
        if not self.pending:
            return
        at, episode, admission, conversation = self.pending.pop(self.rng.randrange(len(self.pending)))
        reply = said(f"reply {admission.call_id}")
        failed = self.rng.random() < 0.2
        if failed:
            kept = self.ledgers[at].append_failure(admission, "lost")
        else:
            found = coordinates(admission, f"reply {admission.call_id}")
            kept = self.ledgers[at].append_staged(admission, found, "resp", reply)
        assert kept is not self.model.fenced(episode)
        if kept:
            self.model.rows.setdefault(episode, []).append((admission.call_id, "failure" if failed else ""))
            if not failed:
                self.replies[admission.call_id] = [*conversation, reply]

    def retire(self) -> None:
        asked = self.some_episodes()
        found = self.some_ledger().retire(asked)
        there = {episode for episode in asked if episode in self.model.rows}
        assert (set(found.removed), set(found.absent)) == (there, set(asked) - there)
        for episode in asked:
            self.model.through[episode.rollout_id] = max(
                self.model.through.get(episode.rollout_id, -1), episode.attempt
            )
            through = self.model.through[episode.rollout_id]
            self.model.drop(episode.rollout_id, lambda attempt, through=through: attempt <= through)  # type: ignore[misc]

    def discard(self) -> None:
        asked = self.some_episodes()
        self.some_ledger().discard(asked)
        for episode in asked:
            self.model.rows.pop(episode, None)

    def delete(self) -> None:
        rollouts = [self.rng.choice(ROLLOUTS)]
        self.some_ledger().delete(rollouts)
        self.model.drop(rollouts[0], lambda attempt: True)
        self.model.through.pop(rollouts[0], None)

    def checkpoint(self) -> None:
        live = [episode for episode in EPISODES if not self.model.fenced(episode) and episode.attempt < ATTEMPTS[-1]]
        if live:
            episode = self.rng.choice(live)
            rows = self.some_ledger().export([episode])[episode]
            self.records.append((episode, rows, list(self.model.rows.get(episode, ()))))

    def restore(self) -> None:
        if not self.records:
            return
        episode, rows, modelled = self.rng.choice(self.records)
        restore(self.some_ledger(), {episode: rows})
        target = episode.next()
        self.model.drop(target.rollout_id, lambda attempt: True)
        self.model.through[target.rollout_id] = episode.attempt
        if modelled:
            self.model.rows[target] = [(call_id, stamp or episode.capture_key) for call_id, stamp in modelled]

    def abandon(self) -> None:
        """An import that is written and dropped."""
        if self.records:
            episode, rows, _ = self.rng.choice(self.records)
            ledger = self.some_ledger()
            ledger.drop(ledger.stage({episode.next(): rows}))

    def tear(self) -> None:
        """A process dies in the middle of a line, of rows or of fences."""
        files = [*(self.directory / "rows").iterdir(), self.directory / "fences.log"]
        with self.rng.choice(files).open("ab") as file:
            file.write(self.rng.choice((b'{"kind":"sta', b'[["r",', b"\x00" * 9, b"{")))

    def reopen(self) -> None:
        """A process goes away and another one takes its place."""
        at = self.rng.randrange(3)
        self.ledgers[at] = self.opened()
        self.pending = [each for each in self.pending if each[0] != at]

    def check(self) -> None:
        """Everything that can be read, by a ledger chosen anew for each attempt."""
        for episode in EPISODES:
            ledger = self.some_ledger()
            if self.model.fenced(episode):
                with pytest.raises(StaleAttempt):
                    ledger.manifest(episode)
                continue
            want = self.model.rows.get(episode, [])
            manifest = ledger.manifest(episode)
            listed = {call["call_id"]: call["capture_key"] for call in manifest["calls"]}
            assert listed == {call: stamp or str(episode) for call, stamp in want if not self.is_failure(call)}
            assert {each["call_id"] for each in manifest["failures"]} == {c for c, _ in want if self.is_failure(c)}
            rows = ledger.export([episode])[episode]
            assert [ledger.call_id(row) for row in rows] == [call_id for call_id, _ in want]

    def is_failure(self, call_id: str) -> bool:
        return call_id not in self.replies

    def run(self, count: int) -> None:
        chances = {
            self.admit: 30,
            self.append: 25,
            self.retire: 6,
            self.discard: 5,
            self.delete: 5,
            self.checkpoint: 6,
            self.restore: 6,
            self.abandon: 1,
            self.tear: 4,
            self.reopen: 2,
        }
        for step in range(count):
            self.steps += 1
            self.rng.choices(list(chances), list(chances.values()))[0]()
            if step % 10 == 0:
                self.check()
        self.check()


@pytest.mark.behaviour("P240", "P249", "P251", "P252", "P253", "P255")
@pytest.mark.parametrize("number", range(6))
def test_random_sequences_agree_with_the_model(
    tmp_path: Path, rng: random.Random, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "SLACK", 8)
    seed = rng.randrange(2**32)
    print(f"seed {seed}")
    World(tmp_path, random.Random(seed)).run(250)
