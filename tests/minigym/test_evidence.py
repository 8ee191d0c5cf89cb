"""What was saved and what was redone, by the workers' log alone."""

from __future__ import annotations

from pathlib import Path

from gym_ckpt_grpc.minigym.evidence import judge
from gym_ckpt_grpc.minigym.inference_log import InferenceLog


class Log:
    """Writes the lines of calls as a worker does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = InferenceLog(path, life=1)

    def next_life(self) -> None:
        self._log.close()
        self._log = InferenceLog(self.path, life=2)

    def call(self, rollout: str, turn: int, tokens: int, *, reused: int = 0, ended: bool = True) -> None:
        """One call of a rollout, `tokens` of which it made."""
        common = {"call_id": f"{rollout}{turn}", "rollout_id": rollout, "attempt": 0, "turn": turn}
        source = f"{rollout}{turn}" if reused else ""
        self._log.write("start", **common, messages=1, context_digest="", continued_from=source, reused=reused)
        if ended:
            self._log.write("end", **common, tokens=tokens, ids_digest="", finish_reason="stop")
        else:
            self._log.write("tokens", **common, tokens=tokens)


def test_turns_before_the_cut_are_saved_and_a_cut_turn_is_kept_in_part(tmp_path: Path) -> None:
    log = Log(tmp_path / "inference.jsonl")
    log.call("a", 0, 40)
    log.call("a", 1, 32, ended=False)  # cut after 20 of them
    log.call("b", 0, 30)
    log.call("c", 0, 50)  # came after the checkpoint's own start: nothing of it is in a cut
    log.next_life()
    log.call("a", 1, 10, reused=20)
    log.call("c", 0, 50)
    found = judge(log.path, ["a", "b", "c"], ["a", "b", "c"])
    assert found.continued == {"a", "b"}
    assert found.restarted == {"c"}
    assert (found.turns_saved, found.tokens_saved) == (2, 40 + 30)
    assert (found.calls_continued, found.tokens_kept) == (1, 20)
    assert found.tokens_redone == (32 - 20) + 50


def test_a_first_turn_that_is_continued_is_no_restart(tmp_path: Path) -> None:
    """And a killed call whose last progress line came before its cut was not made less than nothing again."""
    log = Log(tmp_path / "inference.jsonl")
    log.call("a", 0, 16, ended=False)
    log.next_life()
    log.call("a", 0, 10, reused=25)
    found = judge(log.path, ["a"], ["a"])
    assert found.continued == {"a"}
    assert found.restarted == set()
    assert (found.tokens_kept, found.tokens_redone) == (25, 0)


def test_what_has_no_result_continued_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path / "inference.jsonl")
    log.call("a", 0, 40)
    log.next_life()
    found = judge(log.path, ["a"], [])
    assert found.continued == set()
    assert (found.tokens_saved, found.tokens_redone) == (0, 40)
