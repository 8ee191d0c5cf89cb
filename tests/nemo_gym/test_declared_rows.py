"""Every declared server verifies its own example rows twice, with equal results: a replayed verdict is the verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.integrations.nemo_gym.audited import TABLE
from tests.nemo_gym.audit.bodies import bodies_of
from tests.nemo_gym.audit.serving import Served, class_of
from tests.nemo_gym.audit.verify_rows import differing

REPOSITORY = Path(__file__).parents[2]
SERVERS = sorted(one.module.split(".")[1] for one in TABLE.servers.values())
JUDGED = sorted(one.module.split(".")[1] for one in TABLE.servers.values() if one.judge)
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def processes() -> tuple[Results, Results]:
    """What two processes with different hash seeds saw: a replay after a crash is another process too."""
    command = [sys.executable, "-m", "tests.nemo_gym.audit.verify_rows"]
    started = [
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "77")
    ]
    try:
        results: list[Results] = []
        for process in started:
            out, errors = process.communicate()
            assert process.returncode == 0, errors[-3000:]
            results.append(json.loads(out))
        return results[0], results[1]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.timeout(180)
def test_both_processes_saw_every_server(processes: tuple[Results, Results]) -> None:
    assert [sorted(results) for results in processes] == [SERVERS, SERVERS]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("server", SERVERS)
def test_the_rows_verify_equally(processes: tuple[Results, Results], server: str) -> None:
    """Twice in one session, in reverse order, and in a second process: same bytes, same questions to the judge.

    The rewards are of at least two kinds, one of them not zero; else the rows would prove nothing.
    """
    one, other = (results[server] for results in processes)
    assert one["declared"], "declaration_of() does not give the table's entry for the real class"
    assert set(one["statuses"]) == {200}
    assert one["failed"] == []
    assert one["unequal"] == []
    assert any(one["rewards"])
    assert len(set(one["rewards"])) > 1
    assert (one["judge_calls"] > 0) is (server in JUDGED)
    assert one == other


async def test_a_verifier_that_counts_is_noticed() -> None:
    """The comparison itself: one whose verdict depends on how often it was asked."""
    released = class_of("resources_servers.mrcr.app", "MRCRResourcesServer")
    directory = Path(sys.modules[released.__module__].__file__ or "").parent
    asked = []

    class Counting(released):  # type: ignore[valid-type, misc]
        async def verify(self, body: Any) -> Any:
            asked.append(body)
            verdict = await super().verify(body)
            verdict.reward += len(asked)
            return verdict

    Counting.verify.__annotations__ = released.verify.__annotations__
    bodies = bodies_of(directory)[:3]
    assert (await differing(Served(released, directory, ""), bodies))[1] == []
    assert (await differing(Served(Counting, directory, ""), bodies))[1] == [0, 1, 2]
