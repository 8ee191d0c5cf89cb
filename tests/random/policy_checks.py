"""What must hold of the random policy server: its counts, its cuts, its exports, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gym_ckpt_grpc.participants.cut_book import PLACE
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Record

if TYPE_CHECKING:
    from tests.random.policy import Policy, Sent
    from tests.random.world import World


def check(policy: Policy, world: World) -> None:
    """After every operation."""
    if policy.wrong is not None:
        raise policy.wrong
    _check_counts(policy)
    _check_cuts(policy, world)
    _check_retired(policy, world)


def _check_counts(policy: Policy) -> None:
    counts = policy.real.report(0).counts
    alive = [sent for sent in policy.sent.values() if not sent.over]
    tagged = [sent for sent in alive if sent.episode is not None]
    inside = [sent for sent in tagged if sent.inside]
    undelivered = [sent for sent in inside if sent.undelivered]
    closed = not policy.is_open()
    skipped = [sent for sent in undelivered if sent.constrained and sent.call_ids]
    expected = {
        "inflight": len(inside),
        "untagged": sum(sent.episode is None for sent in alive),
        "waiting": len(tagged) - len(inside),
        "held": len(undelivered) if closed else 0,
        "cut_skipped": len(skipped) if closed else 0,
    }
    found = {name: counts[name] for name in expected}
    assert found == expected, f"P: counts {found}, not {expected}"
    assert 0 <= counts["paused"] <= sum(sent.streams and sent.status > 0 for sent in undelivered)
    assert counts["held_bytes"] >= 0
    assert closed or counts["cut"] == counts["cut_failed"] == counts["paused"] == 0, f"P: open, and {counts}"
    if policy.real.gate().cuts.is_open:
        parts = counts["cut"] + counts["cut_failed"] + counts["cut_skipped"]
        assert counts["cut_failed"] >= 0, f"P: {counts}"
        assert parts == counts["held"], f"P: {counts}"


def _check_cuts(policy: Policy, world: World) -> None:
    """Readiness does not wait for cuts beyond their budget; what a call is said to have, it has; leases are held."""
    late = policy.clock() > policy.cuts_end + 1e-6
    waiting = [blocker for blocker in policy.real.report(100).blockers if blocker.place == PLACE]
    assert not (late and waiting), f"P: {waiting} block {policy.clock() - policy.cuts_end} s after the time for cuts"
    tickets = list(policy.real.gate().undelivered())
    ending = world.model.phase == "RESUMING"  # no more is exported, and the cuts are forgotten with the opening
    for ticket in () if ending else tickets:
        if ticket.cut is not None:
            worker = policy.workers[ticket.cut.backend]
            known = worker.own if ticket.cut.own else worker.cuts | worker.own
            assert ticket.cut.evidence.cut_id in known, f"P: the cut of {ticket.call_id} was given up under it"
    running = {ticket.call_id for ticket in policy.real.gate()._tickets.values()}
    leased = set(policy.real._state._restored._leases)
    assert leased <= running, f"P: leases of {leased - running}, which have ended"


def _check_retired(policy: Policy, world: World) -> None:
    """Nothing is left of a retired attempt."""
    unfreed = {episode.rollout_id for episode in world.model.unfreed}
    for rollout, attempt in world.model.marks.items():
        if rollout in unfreed:
            continue
        left = [episode for episode in policy.here(rollout) if episode.attempt <= attempt]
        assert not left, f"P: {left} were retired"
        cuts = [episode for episode in policy.real._state._restored._cuts if episode.rollout_id == rollout]
        assert all(episode.attempt > attempt for episode in cuts), f"P: {cuts} were retired"
        try:
            rows = policy.ledger.export([EpisodeId(rollout, attempt)])
        except StaleAttempt:
            continue
        raise AssertionError(f"P: {rollout} was retired through {attempt}, and its ledger can be read: {rows}")


def check_export(policy: Policy, world: World, records: Sequence[Record]) -> None:
    """After an export, while the gate still is as it was."""
    opened = world.model.opened
    scope: Any = opened.args.get("capture") if opened else None
    undelivered = [sent for sent in policy.sent.values() if sent.undelivered]
    hidden = {call_id for sent in undelivered for call_id in sent.call_ids}
    found = {record.episode: record for record in records}
    assert len(found) == len(records), "P: two records of an episode"
    for episode, record in found.items():
        calls = [row["call_id"] for row in record.decode("rows")]
        assert len(calls) == len(set(calls)), f"P: {episode} has a row twice"
        assert not hidden & set(calls), f"P: {episode} has rows of undelivered calls: {hidden & set(calls)}"
        _check_record_cuts(policy, record, undelivered)
    for episode in scope if scope is not None and not scope.is_all else ():
        if world.model.refuses(episode):
            continue
        given = found.get(episode)
        rows = {row["call_id"] for row in given.decode("rows")} if given else set()
        missing = policy.delivered.get(episode, set()) - rows
        assert not missing, f"P: rows of delivered calls of {episode} are missing: {missing}"
        digests = {cut["request_digest"] for cut in given.decode("cuts")} if given else set()
        kept = {digest for digest in policy.restored.get(episode, {}) if not _lost(policy, digest, episode)}
        assert kept <= digests, f"P: restored cuts of {episode} are not kept: {kept - digests}"


def _lost(policy: Policy, digest: str, episode: EpisodeId) -> bool:
    """Whether all workers may have said that they have no such cut."""
    source = policy.restored[episode][digest]
    return all(any(source[:6] in cut for cut in worker.denied) for worker in policy.workers.values())


def _check_record_cuts(policy: Policy, record: Record, undelivered: Sequence[Sent]) -> None:
    cuts = record.decode("cuts")
    digests = [cut["request_digest"] for cut in cuts]
    assert len(digests) == len(set(digests)), f"P: {record.episode} has two cuts of one digest"
    current = {sent.call_ids[-1] for sent in undelivered if sent.call_ids}
    for cut in cuts:
        worker = policy.workers[cut["backend"]]
        assert cut["cut_id"] in worker.cuts or cut["cut_id"] in worker.own, f"P: {cut} is exported and was given up"
        its_own = cut["source_call_id"][:6] in cut["cut_id"] or cut["cut_id"] in worker.shared
        assert its_own, f"P: {cut} is of another call"
        restored = policy.restored.get(record.episode, {}).get(cut["request_digest"]) == cut["source_call_id"]
        assert restored or cut["source_call_id"] in current, f"P: {cut} is of no call"
        if not restored:
            assert cut["source_capture_key"] == record.episode.capture_key


def check_end(policy: Policy) -> None:
    """All calls have ended, all faults too, and all time has passed."""
    counts = policy.real.report(100).counts
    names = ("inflight", "held", "paused", "waiting", "held_bytes", "cut", "cut_failed", "cut_skipped", "untagged")
    assert not any(counts[name] for name in names), f"P: left at the end: {counts}"
    assert not policy.sent, f"P: calls that never end: {policy.sent}"
    state = policy.real._state
    kept = [state._restored._leases, state._deleting, state._earlier]
    assert not any(kept), f"P: kept for calls that have ended: {kept}"
    owners = (policy.real._sweeper._tasks, state._looks._tasks, state._releaser._tasks)
    tasks = [task.get_name() for owner in owners for task in owner._tasks]
    assert not tasks, f"P: tasks left: {tasks}"
    assert not state.made._made, f"P: checkpoints nobody will decide about: {state.made._made}"
    named = set().union(*policy.named.values())
    lost = [cut for worker in policy.workers.values() for cut in worker.told if (worker.name, cut) not in named]
    assert len(lost) <= counts["cuts_unreleased"], f"P: {lost} are at their workers, and nobody knows of them"
    gone = [
        (name, cut)
        for name, cut in named
        if cut not in policy.workers[name].cuts and cut not in policy.workers[name].own
    ]
    assert not gone, f"P: manifests name cuts that were given up: {gone}"
