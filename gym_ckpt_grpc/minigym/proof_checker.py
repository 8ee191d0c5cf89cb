"""The proof checker: a verification that is a pure function of the proof, so there is nothing to checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from gym_ckpt_grpc.minigym.resources_server import ResourcesServer
from gym_ckpt_grpc.participants import ResourcesMode, VerifyMode


class ProofChecker(ResourcesServer):
    """Checks proofs. Setup: `difficulty`, >= 1: about one proof in that many holds.

    Verify wants the `messages` of one try, whose last one is the proof; a refused one gets `feedback` in its state.
    """

    checkpoint_mode = ResourcesMode.STATELESS
    checkpoint_verify = VerifyMode.REPLAY
    name = "proofs"
    tools = ()

    def open(self, session_id: str, setup: Mapping[str, Any]) -> None:
        _difficulty(setup)

    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ValueError(f"no tool {tool!r}")

    def judge(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        proof: str = setup["messages"][-1]["content"]
        noise = int.from_bytes(hashlib.sha256(proof.encode()).digest()[:4], "big")
        if noise % _difficulty(setup) == 0:
            return 1.0, {"feedback": ""}
        return 0.0, {"feedback": f"step {1 + noise % 7} does not follow"}

    def close(self, session_id: str) -> None:
        """There is nothing to forget."""


def _difficulty(setup: Mapping[str, Any]) -> int:
    difficulty = setup["difficulty"]
    if type(difficulty) is not int or difficulty < 1:
        raise ValueError(f"difficulty is {difficulty!r}, not an integer >= 1")
    return difficulty
