"""What a backend says about cuts, judged: complete evidence, and each acknowledgement of a sweep alone.

Source: participants section 8.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gym_ckpt_grpc.control.generation import FINISH_REASONS, CallIdentity, CutAck, CutDisposition, CutEvidence
from gym_ckpt_grpc.protocol.generation_validation import MAX_CUT_ID

DURABLE = (CutDisposition.CUT, CutDisposition.FINISHED)
"""Dispositions that come with evidence."""
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Cut:
    """A durable cut of one call, as it was accepted: what an export writes down without asking or computing more.

    backend: its name among the backends. incarnation_id, snapshot_id: of the pass that made it, for audit. own: made
    from the finished call's own coordinates, so the backend knows no such cut, and incarnation and snapshot are "".
    """

    backend: str
    incarnation_id: str
    snapshot_id: str
    evidence: CutEvidence
    own: bool = False


def check_evidence(disposition: CutDisposition, evidence: CutEvidence | None) -> str:
    """What is wrong with what came with a disposition; "" if nothing is."""
    if disposition not in DURABLE:
        return "" if evidence is None else f"{disposition.name} comes with evidence"
    if evidence is None:
        return f"{disposition.name} comes without evidence"
    finished = disposition is CutDisposition.FINISHED
    keys = evidence.staging_keys
    rules = (
        (0 < len(evidence.cut_id.encode()) <= MAX_CUT_ID, f"the cut id must have 1 to {MAX_CUT_ID} bytes"),
        (bool(keys) and all(keys), "staging keys are missing"),
        (len(set(keys)) == len(keys), "a staging key stands twice"),
        (evidence.prefix_tokens >= 0, "the prefix token count is negative"),
        (bool(_DIGEST.fullmatch(evidence.prefix_digest)), "the prefix digest is no SHA-256"),
        (evidence.output_limit >= 1, "the output limit must be at least 1"),
        (evidence.weight_version >= 0, "the weight version is negative"),
        (not evidence.stop_reason or bool(evidence.finish_reason), "a stop reason without a finish reason"),
        (finished or not evidence.finish_reason, "CUT comes with a finish reason"),
        (not finished or evidence.finish_reason in FINISH_REASONS, "the finish reason must be stop or length"),
    )
    return next((problem for holds, problem in rules if not holds), "")


class Judge:
    """Judges the acknowledgements of one sweep. asked: the calls of its inventory."""

    def __init__(self, asked: Iterable[CallIdentity]) -> None:
        self._asked = {call.ticket_id: call for call in asked}
        self._answered: set[str] = set()

    def judge(self, ack: CutAck) -> str:
        """What is wrong with an acknowledgement; "" if it stands. Each counts as its call's answer, a bad one too."""
        ticket_id = ack.call.ticket_id
        asked = self._asked.get(ticket_id)
        if asked is None:
            return "it names a call that was not asked about"
        if ticket_id in self._answered:
            return "its call was acknowledged before"
        self._answered.add(ticket_id)
        if ack.call != asked:
            return "it names another call under this ticket"
        if ack.disposition is CutDisposition.UNSPECIFIED:
            return "it has no disposition"
        return check_evidence(ack.disposition, ack.evidence)

    def unanswered(self) -> list[str]:
        """Tickets of the inventory that nothing was said about, in its order."""
        return [ticket_id for ticket_id in self._asked if ticket_id not in self._answered]
