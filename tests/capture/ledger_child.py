"""A process beside the test, on the same ledger directory.

killed DIR            retires r-a1 and stops for good between the fence and the first unlink, saying `unlink`
serve DIR             answers commands, one JSON list per line: [name, capture key, call id]
append DIR KEY NAME N appends N rows to one attempt
race DIR NAME         appends to x0, x1, ... in turn, over and over, until all are fenced; prints what it appended
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import orjson

from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.capture.ledger_files import LocalLedgerFiles
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.capture.ledger_rig import ASK, R1, coordinates, made, said, talk

RACED = 12
"""Rollouts that `race` appends to."""


def say(value: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
    sys.stdout.flush()


class StopsAtUnlink(LocalLedgerFiles):
    def remove(self, path: str) -> None:
        say("unlink")
        signal.pause()


def killed(directory: str) -> None:
    ledger = CaptureLedger(directory)
    made(ledger, R1, "one")
    CaptureLedger(directory, files=StopsAtUnlink()).retire([R1])


def serve(directory: str) -> None:
    ledger = CaptureLedger(directory)
    say("ready")
    for line in sys.stdin.buffer:
        name, key, call_id = orjson.loads(line)
        episode = EpisodeId.from_capture_key(key)
        if name == "talk":
            say(talk(ledger, episode, 2, prefix=call_id))
        elif name == "admit":
            say(ledger.admit(episode, call_id, ASK) is not None)
        elif name == "manifest":
            try:
                say([call["call_id"] for call in ledger.manifest(episode)["calls"]])
            except StaleAttempt as error:
                say(error.code.name)


def append(directory: str, key: str, name: str, count: str) -> None:
    ledger = CaptureLedger(directory, sync_rows=False)
    say("ready")
    sys.stdin.readline()
    for number in range(int(count)):
        made(ledger, EpisodeId.from_capture_key(key), f"{name}-{number}", reply="x" * (number * 37 % 9000))


def race(directory: str, name: str) -> None:
    ledger = CaptureLedger(directory, sync_rows=False)
    say("ready")
    sys.stdin.readline()
    kept: dict[str, list[str]] = {f"x{number}": [] for number in range(RACED)}
    live, turn = set(kept), 0
    while live:
        for rollout in sorted(live):
            turn += 1
            admission = ledger.admit(EpisodeId(rollout), f"{name}-{turn}", ASK)
            if admission is None:
                live.discard(rollout)
            elif ledger.append_staged(admission, coordinates(admission), "resp", said("ok")):
                kept[rollout].append(admission.call_id)
    say(kept)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"killed": killed, "serve": serve, "append": append, "race": race}
    commands[sys.argv[1]](*sys.argv[2:])
