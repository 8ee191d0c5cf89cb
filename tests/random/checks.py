"""What must hold after each step: of the answer of a call, and of the participant's state."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from gym_ckpt_grpc.control import EpisodeListKind
from gym_ckpt_grpc.control.status import Status
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.random import steered_files
from tests.random.driver import Answer
from tests.random.ops import episodes

if TYPE_CHECKING:
    from tests.random.world import Manifest, Pending, World

LEDGER = {"ledger:full", "ledger:broken"}
FAULTS = {
    "INTERNAL": {"close:fail", "delete:fail"},
    "EXPORT_FAILED": {"export:fail"},
    "STATE_UNWRITABLE": {f"files:{steered_files.ENOSPC}", *LEDGER},
    "INSTALL_FAILED": {"close:fail", "stage:fail", "activate:fail", "discard:fail", "delete:fail", *LEDGER},
}
"""Code -> faults of which one must have been in force for a call to fail with it."""
CAN_FAIL = {
    "prepare": {"INTERNAL", "DEADLINE_EXCEEDED", "STALE_CHECKPOINT"},
    "capture": {
        *("EXPORT_FAILED", "RESTART_IN_SCOPE", "DEADLINE_EXCEEDED", "STALE_CHECKPOINT", "INVALID_PHASE"),
        "STALE_ATTEMPT",
    },
    "commit": {
        *("EXPORT_FAILED", "RESTART_IN_SCOPE", "DEADLINE_EXCEEDED", "STALE_CHECKPOINT", "INVALID_PHASE"),
        *("STATE_UNWRITABLE", "STALE_ATTEMPT", "CHECKPOINT_CONFLICT", "INTERNAL"),
    },
    "resume": {"DEADLINE_EXCEEDED"},
    "restore": {
        *("INSTALL_FAILED", "DEADLINE_EXCEEDED", "STALE_CHECKPOINT", "INVALID_PHASE"),
        *("STALE_ATTEMPT", "STATE_NOT_FOUND", "STATE_UNWRITABLE"),
    },
    "retire": set[str](),
    "forget": set[str](),
    "renew_lease": set[str](),
}
"""Codes that an accepted call may end with."""


def check_answer(world: World, call: Pending, answer: Answer) -> None:
    """An accepted call succeeds, or fails with a code for which there is a reason."""
    op, code = call.op, answer.code
    if code == "ok":
        _check_success(world, call, answer)
        return
    said = f"{op} failed with {code} ({answer.text})"
    if "waited" in call.facts and code in ("STALE_CHECKPOINT", "DEADLINE_EXCEEDED"):
        return  # for an earlier controller's publication, until its time or its checkpoint had ended
    assert code in CAN_FAIL[op.name], said
    reason: Any = True
    if code in FAULTS:
        reason = FAULTS[code] & call.facts
        if code == "INSTALL_FAILED":  # or nobody waited for it for a while
            reason = reason or "nobody waits" in answer.text
    elif code == "DEADLINE_EXCEEDED":
        reason = world.time.clock() - call.began >= min(0.09, op["deadline"]) * 0.89
    elif code == "STALE_CHECKPOINT":
        opened = world.model.opened
        reason = opened is None or opened.id != op["id"] or opened.ending
    elif code == "RESTART_IN_SCOPE":
        reason = call.restarts
    elif code == "STALE_ATTEMPT" and op.name != "restore":
        reason = any(world.node.subject.floor(e.rollout_id) > e.attempt for e in episodes(op["scope"] or []))
    elif code == "STATE_NOT_FOUND":
        reason = op["source"] not in world.manifests
    elif code == "CHECKPOINT_CONFLICT":
        reason = op["place"] in world.manifests
    assert reason, f"{said} for no reason"


def _check_success(world: World, call: Pending, answer: Answer) -> None:
    op, model = call.op, world.model
    assert not call.restarts, f"R8: a scope that names restarts was accepted: {call.restarts}"
    if op.name == "commit":
        _check_commit(world, call, answer)
    if op.name == "retire":
        failed = [episode for episode, problem in answer.reply.items() if problem]
        told = {EpisodeId.from_capture_key(episode) for episode, problem in answer.reply.items() if not problem}
        assert told | set(episodes(failed)) == set(episodes(op["episodes"]))
        faults = {"retire:fail", "retire:hang", "retire:stubborn", "activate:hang", "stage:hang", "close:hang"}
        faults |= {"activate:stubborn", "stage:stubborn", "close:stubborn", "open:hang", "open:stubborn", "open:fail"}
        faults |= LEDGER
        timed_out = world.time.clock() - call.began >= op["deadline"] * 0.89
        assert not failed or timed_out or faults & call.facts, f"{op} left {failed} for no reason"
    if op.name == "restore" and not answer.replayed:
        wanted = {EpisodeId(e.rollout_id, a) for e, a in zip(episodes(op["scope"]), op["install_as"], strict=True)}
        stored = world.manifests[op["source"]].counts
        with_record = {e.rollout_id for e in episodes(op["scope"]) if e in stored}
        pending = world.node.owner.restored_pending()
        if model.opened and not model.opened.ending and not any(model.refuses(e) for e in wanted):
            missing = {e for e in wanted if e.rollout_id in with_record} - pending
            assert not missing, f"{op} left {missing} out"


def _check_commit(world: World, call: Pending, answer: Answer) -> None:
    look_at_disk(world)
    found = world.manifests.get(call.op["place"])
    assert found is not None, f"{call.op} succeeded without a manifest"
    assert found.digest == answer.reply.manifest_digest, "R4: the manifest is not the one that Commit returned"
    assert len(found.counts) == answer.reply.record_count


def check_state(world: World, status: Status) -> None:
    """R1, R3, R4, R5, R6, R9, R13 and R14, on what the participant tells and on its disk."""
    model, owner, phase = world.model, world.node.owner, status.phase.name
    said = f"in {phase} with {sorted(world.faults())}"
    assert world.node.subject.is_open() == (phase == "IDLE"), f"R1: admission is wrong {said}"
    assert bool(status.active_checkpoint_id) == (phase != "IDLE"), f"R1: {status.active_checkpoint_id!r} {said}"
    report = owner.report(100)
    assert owner.is_ready() == (report.blocker_count == 0), f"R3: {report} {said}"
    assert report.blocker_count == len(report.blockers) or report.blocker_count > 100, f"R3: {report}"
    if model.opened is not None:
        assert status.active_checkpoint_id == model.opened.id, f"{status.active_checkpoint_id} is open {said}"
        assert status.controller_id == model.opened.controller, f"{status.controller_id} {said}"
    assert status.highest_epoch == model.highest, f"R13: epoch {status.highest_epoch}, not {model.highest}"
    assert status.leases_expired == model.expiries, "R14: a lease expired without time passing"
    marks = {mark.rollout_id: mark.attempt for mark in world.node.plane._core.retirement.marks}
    assert marks == model.marks, f"marks {marks}, not {model.marks} {said}"
    unfreed = {blocker.episode for blocker in world.node.plane._core.retirement.blockers()}
    assert unfreed == model.unfreed, f"held: {unfreed}, not {model.unfreed} {said}"
    _check_readiness(world, phase)
    _check_pending(world)
    _check_at_work(world, phase)
    look_at_disk(world)
    world.node.subject.check(world)
    for checkpoint_id, found in world.ledger.exports.items():
        assert len(found) == 1, f"R5: {checkpoint_id} was captured {len(found)} times"


def _check_readiness(world: World, phase: str) -> None:
    """PREPARED exactly while the cut is safe; neither early nor late."""
    owner = world.node.owner
    safe = owner.is_ready() and not world.model.unfreed
    if phase == "PREPARED":
        capturing = "capture" in world.model.opened.args if world.model.opened else False
        assert safe or capturing, "PREPARED without a safe cut"
    if phase == "PREPARING" and safe:
        close = owner.steps["close"]
        assert close.inside or close.failed, "a safe cut was missed"


WORK = {
    "RESTORING": ("close", "stage", "activate", "discard", "delete", "open"),
    "COMMITTING": ("export", "delete"),
}
"""Phase -> hooks of which one must hang while the phase lasts, once all is quiet."""


def _check_at_work(world: World, phase: str) -> None:
    """R11 among others: nothing stays in a phase of work that nothing holds up."""
    if phase not in WORK or not world.time.exact:
        return
    steps = world.node.owner.steps
    held_up = any(steps[name].inside for name in WORK[phase]) or world.node.subject.hangs()
    retries = phase == "RESTORING" and steps["open"].failed  # with back-off
    writes = phase == "COMMITTING" and (world.files.held or world.files.publishing)
    assert held_up or retries or writes, f"{phase} and nothing to be done"


def _check_pending(world: World) -> None:
    """Restored state goes by a start, a retire, a Commit that left it out, or the end of its own Restore."""
    ledger, model = world.ledger, world.model
    now = world.node.owner.restored_pending()
    own = {*ledger.last_install, *(model.opened.install if model.opened else ())}
    lost = {e for e in ledger.pending - now if not model.refuses(e)} - ledger.outside - ledger.started - own
    assert not lost, f"restored state of {lost} has gone"
    ledger.outside -= now - ledger.pending
    ledger.pending = now
    ledger.last_install = frozenset(model.opened.install) if model.opened else frozenset()


def check_lease(world: World, call: Pending) -> None:
    """R14: the lease counts from the end of an accepted call of its checkpoint."""
    opened, left = world.model.opened, world.node.plane.status().lease_remaining
    current = opened is not None and opened.id == call.holds and world.model.phase not in ("IDLE", "RESUMING")
    if current and opened and left is not None and call.ended is not None and world.time.exact:
        assert left >= min(opened.ttl, opened.ttl - (world.time.clock() - call.ended)) - 1e-5, f"R14: {left} s are left"


async def check_lists(world: World) -> None:
    """R3: the list of blockers has each episode once, and all that the report names."""
    listed = [e async for batch in world.node.owner.list_episodes(EpisodeListKind.BLOCKING) for e in batch]
    blocking = {blocker.episode for blocker in world.node.owner.report(100).blockers if blocker.episode}
    assert len(listed) == len(set(listed)), f"R3: {listed}"
    assert set(listed) == blocking, f"R3: {listed}, and {blocking} block"


def look_at_disk(world: World) -> None:
    """R4, R5, R6, R9: each manifest that is there."""
    known = {*world.manifests, *world.ledger.exports, *world.ledger.dead}
    for checkpoint_id in known:
        data = world.read_manifest(checkpoint_id)
        seen = world.manifests.get(checkpoint_id)
        if seen is not None:
            assert data == seen.data, f"R9: the manifest of {checkpoint_id} changed"
        elif data is not None:
            world.manifests[checkpoint_id] = _take_in(world, checkpoint_id, data)
    _bury(world)


def _take_in(world: World, checkpoint_id: str, data: bytes) -> Manifest:
    """A new manifest: it must be allowed, verify, and hold the first capture."""
    from tests.random.world import Manifest

    ledger, model = world.ledger, world.model
    assert checkpoint_id not in ledger.dead, f"R6: {checkpoint_id} was resumed without a manifest and got one"
    assert checkpoint_id in model.resumed or (model.opened and model.opened.id == checkpoint_id), checkpoint_id
    part = world.read_part(checkpoint_id)
    first = ledger.exports[checkpoint_id][0]
    stored = [(record.episode, record.fields, _payloads(record)) for record in part.records]
    frozen = [(record.episode, record.fields, _payloads(record)) for record in first]
    assert stored == frozen, f"R5: {checkpoint_id} holds other records than its capture"
    counts = {record.episode: world.node.subject.value(record) for record in part.records}
    world.node.subject.published(checkpoint_id, part.records)
    return Manifest(data, hashlib.sha256(data).hexdigest(), counts)


def _payloads(record: Any) -> dict[str, bytes]:
    return {name: bytes(payload.data) for name, payload in record.payloads.items()}


def _bury(world: World) -> None:
    """Ids that may get no manifest any more, unless their publication hung past the limit."""
    ledger, model = world.ledger, world.model
    for checkpoint_id in ledger.exports:
        over = checkpoint_id in model.resumed and checkpoint_id not in model.kept
        if over and checkpoint_id not in world.manifests and not world.files.publishing:
            ledger.dead.add(checkpoint_id)
