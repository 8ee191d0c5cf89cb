"""`gym-ckpt show` and `gym-ckpt verify`: what a checkpoint holds, and whether every byte of it is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, print_json, say, size, table
from gym_ckpt_grpc.cli.roots import LISTED, described_troubles, open_root, progress, tell, tell_reasons, tell_troubles
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.storage import CheckpointRoot, Finding, Level, OpaqueBlock, verify_checkpoint
from gym_ckpt_grpc.storage.viewing import CheckpointView, PartView, view_checkpoint, view_root


def show(root: str, checkpoint: str, *, as_json: bool) -> Exit:
    """Print one checkpoint: where it stands, its participants, its rollouts; FAILED if something cannot be read."""
    view = view_checkpoint(open_root(root), checkpoint)
    code = Exit.FAILED if view.troubles else Exit.OK
    if as_json:
        print_json(described(view))
        return code
    _head(view)
    rows = [_row(part) for part in view.parts]
    people.print(table("", ["participant", "records", "restarts", "written", "state", "kind", "process"], rows))
    for part in view.parts:
        for entry in part.files:
            if entry.checkpoint:
                tell(f"{part.name} needs {entry.name} of {entry.checkpoint} ({size(entry.size)})")
            elif entry.label:
                tell(f"{part.name} has the document {entry.label} ({size(entry.size)})")
    _rollouts(view)
    tell_troubles(view.troubles)
    return code


def _head(view: CheckpointView) -> None:
    manifest, intent = view.manifest, view.intent
    if view.publication is not None:
        state = f"published as number {view.publication.number}"
    else:
        state = "complete, not published" if manifest else "not published, and not complete as far as can be read"
    who = manifest or intent
    tell((view.checkpoint_id, "bold"), f"  {state}", f"  epoch {who.epoch}  by {who.controller_id}" if who else "")
    tell(view.location.uri)
    if manifest is None:
        return
    source = f", restored from {manifest.source_checkpoint}" if manifest.source_checkpoint else ""
    tell(f"run {manifest.run_id}, created {manifest.created or 'at an unknown time'}{source}")
    tell(f"trainer's own state: {_trainer_words(manifest.trainer)}; proof of its frontier: {_yes(manifest.frontier)}")
    for name, version in sorted(manifest.policy_versions.items()):
        tell(f"policy version of {name}: {version}")


def _yes(value: object) -> str:
    return "none" if value is None else "there"


def _trainer_words(block: OpaqueBlock | None) -> str:
    if block is None:
        return "none"
    codec = block.payload().codec.name
    return f"{size(len(block.data))} {codec}{' ' if block.content_type else ''}{block.content_type}"


def _row(part: PartView) -> list[object]:
    known = part.manifest or part.member
    return [
        part.name,
        "?" if part.count is None else f"{part.count:,}",
        "?" if known is None else f"{known.restarts:,}",
        size(part.written_bytes),
        size(part.state_bytes),
        f"+{part.chain}" if part.chain else "full",
        part.identity.incarnation_id[:12],
    ]


def _rollouts(view: CheckpointView) -> None:
    if view.lists is not None:
        tell(f"{len(view.lists.continued):,} rollouts continue, {len(view.lists.restarts):,} start over")
        tell_reasons(view.lists.restarts.values())
    else:
        tell("which rollouts continue cannot be read")
    manifest = view.manifest
    if manifest is None:
        return
    for excluded in manifest.excluded:
        tell(f"excluded: {excluded.kind}/{excluded.service}/{excluded.instance}: {excluded.reason}")
    for action in manifest.straggler_actions[:LISTED]:
        tell(f"straggler {action.rollout_id} attempt {action.attempt}: {action.action} {action.reason}".rstrip())
    if len(manifest.straggler_actions) > LISTED:
        tell(f"and {len(manifest.straggler_actions) - LISTED:,} more straggler actions")


def described(view: CheckpointView) -> dict[str, Any]:
    """One checkpoint, for programs. What cannot be read is None or empty, and stands among the problems."""
    manifest, publication, lists = view.manifest, view.publication, view.lists
    who = manifest or view.intent
    return {
        "checkpoint_id": view.checkpoint_id,
        "uri": view.location.uri,
        "published": publication is not None,
        "complete": manifest is not None,
        "sequence_number": publication.number if publication else 0,
        "epoch": who.epoch if who else 0,
        "run_id": who.run_id if who else "",
        "controller_id": who.controller_id if who else "",
        "created": manifest.created if manifest else "",
        "source_checkpoint": manifest.source_checkpoint if manifest else "",
        "manifest_digest": view.manifest_digest,
        "members": [_member(part) for part in view.parts],
        "excluded": [
            {"participant": f"{e.kind}/{e.service}/{e.instance}", "reason": e.reason}
            for e in (manifest.excluded if manifest else ())
        ],
        "straggler_actions": [
            {"rollout_id": a.rollout_id, "attempt": a.attempt, "action": a.action, "reason": a.reason}
            for a in (manifest.straggler_actions if manifest else ())
        ],
        "trainer": _trainer(manifest.trainer) if manifest else None,
        "frontier": manifest.frontier if manifest else None,
        "policy_versions": manifest.policy_versions if manifest else {},
        "fingerprints": manifest.fingerprints if manifest else {},
        "chain": max((part.chain for part in view.parts), default=0),
        "bases": sorted({entry.checkpoint for part in view.parts for entry in part.files if entry.checkpoint}),
        "records": sum(part.count or 0 for part in view.parts),
        "bytes": sum(part.written_bytes for part in view.parts),
        "state_bytes": sum(part.state_bytes for part in view.parts),
        "continued_count": len(lists.continued) if lists else None,
        "continued": [str(episode) for episode in lists.continued] if lists else None,
        "restart_count": len(lists.restarts) if lists else None,
        "restarts": {str(episode): reason for episode, reason in lists.restarts.items()} if lists else None,
        "problems": described_troubles(view.troubles),
    }


def _trainer(block: OpaqueBlock | None) -> dict[str, Any] | None:
    if block is None:
        return None
    return {"codec": block.payload().codec.name, "content_type": block.content_type, "bytes": len(block.data)}


def _member(part: PartView) -> dict[str, Any]:
    known = part.manifest or part.member
    return {
        "participant": part.name,
        "incarnation_id": part.identity.incarnation_id,
        "records": part.count,
        "restarts": known.restarts if known else None,
        "bytes": part.written_bytes,
        "state_bytes": part.state_bytes,
        "chain": part.chain,
        "manifest_digest": part.member.manifest_digest if part.member else "",
        "files": [entry.name for entry in part.files if not entry.checkpoint],
        "base_files": [
            {"checkpoint_id": entry.checkpoint, "name": entry.name, "bytes": entry.size}
            for entry in part.files
            if entry.checkpoint
        ],
        "documents": [entry.label for entry in part.files if entry.label],
        "extra": part.manifest.extra if part.manifest else None,
    }


# ---- verify


def verify(root: str, checkpoint: str, *, everything: bool, as_json: bool) -> Exit:
    """Read every byte of a checkpoint, or of every published one; FAILED if anything is not as it was written."""
    opened = open_root(root)
    if not everything:
        found = view_checkpoint(opened, checkpoint or "latest")
        answer = _verified(opened, found.checkpoint_id, as_json=as_json)
        if as_json:
            print_json({**answer, "problems": described_troubles(found.doubts)})
        else:
            tell_troubles(found.doubts)
        return Exit.OK if answer["intact"] and not found.doubts else Exit.FAILED
    if checkpoint:
        raise UsageError("name a checkpoint, or give --all")
    view = view_root(opened, limit=None)
    answers = [_verified(opened, each.checkpoint_id, as_json=as_json) for each in view.newest]
    intact = all(answer["intact"] for answer in answers) and not view.troubles
    if as_json:
        print_json({"intact": intact, "checkpoints": answers, "problems": described_troubles(view.troubles)})
    else:
        tell_troubles(view.troubles)
        if not answers:
            tell("nothing is published")
    return Exit.OK if intact else Exit.FAILED


def _verified(root: CheckpointRoot, checkpoint_id: str, *, as_json: bool) -> dict[str, Any]:
    """Verify one; prints it for people, and gives it for programs."""
    findings = list(_watched(root, checkpoint_id))
    faults = [finding for finding in findings if finding.is_fault]
    strays = [finding for finding in findings if finding.level is Level.STRAY]
    checked = [finding for finding in findings if finding.level is Level.CHECKED]
    total = sum(finding.size for finding in checked)
    intact = bool(findings) and findings[-1].level is Level.PASSED
    if not as_json:
        for finding in faults:
            episode = f" {finding.episode}" if finding.episode else ""
            say(people, "red", str(finding.level), f"{finding.file}{episode}: {finding.message}")
        for finding in strays[:LISTED]:
            say(people, "yellow", str(finding.level), f"{finding.file}: {finding.message}")
        verdict = ("intact", "green") if intact else ("damaged", "red")
        count = "" if intact else f": {len(faults)} faults"
        tell(f"{checkpoint_id}: ", verdict, f"{count}; {len(checked)} files, {size(total)} read")
    return {
        "checkpoint_id": checkpoint_id,
        "intact": intact,
        "files": len(checked),
        "bytes": total,
        "faults": [_fault(finding) for finding in faults],
        "strays": [finding.file for finding in strays],
    }


def _watched(root: CheckpointRoot, checkpoint_id: str) -> Iterator[Finding]:
    """The findings, telling on a terminal how far it is."""
    done = files = 0
    for finding in verify_checkpoint(root, checkpoint_id):
        done, files = done + finding.size, files + (finding.level is Level.CHECKED)
        progress(f"{checkpoint_id}: {files} files, {size(done)} read")
        yield finding
    progress("")


def _fault(finding: Finding) -> dict[str, str]:
    return {
        "level": str(finding.level),
        "file": finding.file,
        "participant": finding.participant,
        "episode": str(finding.episode or ""),
        "message": finding.message,
    }
