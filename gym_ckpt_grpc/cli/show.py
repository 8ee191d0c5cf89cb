"""`gym-ckpt show` and `gym-ckpt verify`: what a checkpoint holds, and whether every byte of it is as it was."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.output import people, print_json, say, size, table
from gym_ckpt_grpc.storage import CheckpointRoot, EpisodeLists, Found, Level, read_episodes, verify_checkpoint


def show(root: str, checkpoint: str, *, as_json: bool) -> Exit:
    """Print one checkpoint: where it stands, its participants, its rollouts. Raises StateNotFound, StateCorrupt."""
    opened = CheckpointRoot(root)
    found = opened.find(checkpoint)
    episodes = read_episodes(opened.files, found.location, found.manifest)
    described = _described(found, episodes)
    if as_json:
        print_json(described)
        return Exit.OK
    head = described
    state = f"published as number {head['sequence_number']}" if head["published"] else "complete, not published"
    people.print(f"[bold]{head['checkpoint_id']}[/bold]  {state}  epoch {head['epoch']}  by {head['controller_id']}")
    people.print(f"{found.location.uri}")
    rows = [
        (m["participant"], m["records"], m["restarts"], size(m["bytes"]), m["incarnation_id"][:12])
        for m in head["members"]
    ]
    people.print(table("", ["participant", "records", "restarts", "size", "process"], rows))
    people.print(f"{head['continued_count']:,} rollouts continue, {head['restart_count']:,} start over")
    for reason, count in sorted(Counter(episodes.restarts.values()).items()):
        people.print(f"  {count:,} start over: {reason}")
    for excluded in head["excluded"]:
        people.print(f"excluded: {excluded['participant']}: {excluded['reason']}")
    return Exit.OK


def _described(found: Found, episodes: EpisodeLists) -> dict[str, Any]:
    manifest, publication = found.manifest, found.publication
    return {
        "checkpoint_id": manifest.checkpoint_id,
        "uri": found.location.uri,
        "published": publication is not None,
        "sequence_number": publication.number if publication else 0,
        "epoch": manifest.epoch,
        "run_id": manifest.run_id,
        "controller_id": manifest.controller_id,
        "created": manifest.created,
        "source_checkpoint": manifest.source_checkpoint,
        "manifest_digest": found.manifest_digest,
        "members": [
            {
                "participant": "/".join(m.participant.place),
                "incarnation_id": m.participant.incarnation_id,
                "records": m.records,
                "restarts": m.restarts,
                "bytes": m.bytes,
                "manifest_digest": m.manifest_digest,
                "files": [entry.name for entry in m.files],
            }
            for m in manifest.members
        ],
        "excluded": [
            {"participant": f"{e.kind}/{e.service}/{e.instance}", "reason": e.reason} for e in manifest.excluded
        ],
        "records": sum(m.records for m in manifest.members),
        "bytes": sum(m.bytes for m in manifest.members),
        "continued_count": len(episodes.continued),
        "continued": [str(episode) for episode in episodes.continued],
        "restart_count": len(episodes.restarts),
        "restarts": {str(episode): reason for episode, reason in episodes.restarts.items()},
    }


def verify(root: str, checkpoint: str, *, as_json: bool) -> Exit:
    """Read every byte of a checkpoint and print what is wrong; FAILED if anything is."""
    opened = CheckpointRoot(root)
    checkpoint_id = opened.find(checkpoint).manifest.checkpoint_id if checkpoint == "latest" else checkpoint
    findings = list(verify_checkpoint(opened, checkpoint_id))
    faults = [finding for finding in findings if finding.is_fault]
    checked = [finding for finding in findings if finding.level is Level.CHECKED]
    intact = bool(findings) and findings[-1].level is Level.PASSED
    if as_json:
        print_json(
            {
                "checkpoint_id": checkpoint_id,
                "intact": intact,
                "files": len(checked),
                "bytes": sum(finding.size for finding in checked),
                "faults": [
                    {
                        "level": str(finding.level),
                        "file": finding.file,
                        "participant": finding.participant,
                        "episode": str(finding.episode or ""),
                        "message": finding.message,
                    }
                    for finding in faults
                ],
            }
        )
        return Exit.OK if intact else Exit.FAILED
    for finding in faults:
        episode = f" {finding.episode}" if finding.episode else ""
        say(people, "red", str(finding.level), f"{finding.file}{episode}: {finding.message}")
    verdict = "[green]intact[/green]" if intact else f"[red]damaged[/red]: {len(faults)} faults"
    total = size(sum(finding.size for finding in checked))
    people.print(f"{checkpoint_id}: {verdict}; {len(checked)} files, {total} read")
    return Exit.OK if intact else Exit.FAILED
