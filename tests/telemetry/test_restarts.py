"""Field case 148: counters are of one incarnation, only rise, and restored work is not new work."""

from __future__ import annotations

from pathlib import Path

from gym_ckpt_grpc.telemetry import catalogue
from gym_ckpt_grpc.telemetry.catalogue import Kind
from tests.control.scripted import Participant
from tests.telemetry.kept import Kept

COUNTED = {each.name for each in catalogue.INSTRUMENTS if each.kind is not Kind.GAUGE}
Counts = dict[tuple[str, str], float]


def counts(kept: Kept) -> Counts:
    """Every series of a counter or a histogram."""
    return {
        (name, str(sorted(attributes.items()))): value for name, attributes, value in kept._series() if name in COUNTED
    }


def fallen(before: Counts, after: Counts) -> list[tuple[str, str]]:
    """The series that are gone or smaller than they were."""
    return [series for series, value in before.items() if after.get(series, -1) < value]


async def test_a_participant_that_is_restarted_and_a_coordinator_that_is_replaced(tmp_path: Path) -> None:
    """No rate is negative; what is restored is counted apart from what was written."""
    kept = Kept()
    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        episodes = p.add("a", "b")
        await p.prepare()
        await p.commit()
        await p.resume()
    first = counts(kept)
    assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 2
    written = kept.value(catalogue.BYTES_TOTAL, operation="commit")
    assert written > 0

    async with Participant(tmp_path, telemetry=kept.telemetry) as p:
        await p.restore(episodes)
        await p.resume("r1")
        second = counts(kept)
        assert fallen(first, second) == []
        assert kept.value(catalogue.RECORDS_TOTAL, operation="restore") == 2
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 2
        assert kept.value(catalogue.BYTES_TOTAL, operation="commit") == written
        assert kept.value(catalogue.PHASE, phase="IDLE") == 1  # of the one that lives, not of both

        await p.prepare("c2", epoch=2, controller="another")
        await p.commit(None, "c2", epoch=2, controller="another")
        await p.resume("c2", epoch=2, controller="another")
        third = counts(kept)
        assert fallen(second, third) == []
        assert kept.value(catalogue.RECORDS_TOTAL, operation="commit") == 4
    kept.check_declared()
    kept.all_ended()


async def test_another_process_counts_from_nought(tmp_path: Path) -> None:
    """Its series have a start time of their own, which is how a back end knows a new incarnation from a fall."""
    starts = []
    for _ in range(2):
        kept = Kept()
        async with Participant(tmp_path, telemetry=kept.telemetry) as p:
            await p.status()
            assert kept.value(catalogue.RPC_DURATION["server"]) == 1
            starts.append(kept.start_of(catalogue.RPC_DURATION["server"]))
    assert starts[0] < starts[1]
