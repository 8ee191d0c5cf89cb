"""Messages of GenerationService <-> values. Nothing else reads or builds these messages by hand."""

from __future__ import annotations

from dataclasses import dataclass

from gym_ckpt_grpc.control import (
    BackendInfo,
    CallIdentity,
    Capability,
    CutAck,
    CutDisposition,
    CutEvidence,
    Sweep,
    wire,
)
from gym_ckpt_grpc.control.generation import CutPresence
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gymckpt.v1 import generation_pb2 as pb

NOBODY = EpisodeId("unreadable")
"""Stands in an acknowledgement whose own episode cannot be read. Its digest is left empty, so no call matches it."""


@dataclass(frozen=True, slots=True)
class CutReference:
    """A cut as a checkpoint knows it. Fields as in `CutEvidence`."""

    cut_id: str
    staging_keys: tuple[str, ...]
    prefix_tokens: int
    prefix_digest: str


@dataclass(frozen=True, slots=True)
class CutOutcome:
    """What became of one call: evidence with CUT and FINISHED, a reason with UNCUTTABLE and FAILED, else neither.

    Raises ValueError for another combination.
    """

    disposition: CutDisposition
    reason: str = ""
    evidence: CutEvidence | None = None

    def __post_init__(self) -> None:
        durable = self.disposition in (CutDisposition.CUT, CutDisposition.FINISHED)
        explained = self.disposition in (CutDisposition.UNCUTTABLE, CutDisposition.FAILED)
        if self.disposition is CutDisposition.UNSPECIFIED or durable is (self.evidence is None):
            raise ValueError(f"{self.disposition.name} with evidence {self.evidence}")
        if explained is not bool(self.reason):
            raise ValueError(f"{self.disposition.name} with reason {self.reason!r}")
        finished = self.disposition is CutDisposition.FINISHED
        if self.evidence is not None and finished is not bool(self.evidence.finish_reason):
            raise ValueError(f"{self.disposition.name} with finish reason {self.evidence.finish_reason!r}")

    @classmethod
    def of(cls, evidence: CutEvidence) -> CutOutcome:
        """FINISHED if the evidence has a finish reason, else CUT."""
        kind = CutDisposition.FINISHED if evidence.finish_reason else CutDisposition.CUT
        return cls(kind, evidence=evidence)

    @classmethod
    def not_found(cls) -> CutOutcome:
        """Not here, or not here yet."""
        return cls(CutDisposition.NOT_FOUND)

    @classmethod
    def uncuttable(cls, reason: str) -> CutOutcome:
        """Can never be cut."""
        return cls(CutDisposition.UNCUTTABLE, reason)

    @classmethod
    def failed(cls, reason: str) -> CutOutcome:
        """Could not be cut this time."""
        return cls(CutDisposition.FAILED, reason)


# ---- who serves


def info_to(info: BackendInfo) -> pb.GetBackendResponse:
    """The message of who a backend is."""
    return pb.GetBackendResponse(
        backend_id=info.backend_id,
        incarnation_id=info.incarnation_id,
        model_id=info.model_id,
        weight_version=info.weight_version,
        capabilities=[pb.GenerationCapability.ValueType(int(one)) for one in sorted(info.capabilities)],
    )


def info_from(message: pb.GetBackendResponse) -> BackendInfo:
    """Who a backend is; capabilities of a newer version are left out."""
    known = {int(one) for one in Capability} - {0}
    return BackendInfo(
        backend_id=message.backend_id,
        incarnation_id=message.incarnation_id,
        model_id=message.model_id,
        weight_version=message.weight_version,
        capabilities=frozenset(Capability(number) for number in message.capabilities if number in known),
    )


# ---- calls and acknowledgements


def call_to(call: CallIdentity, age: float | None = None) -> pb.GenerationCall:
    """The message of a call. age: seconds, None to leave it out."""
    return pb.GenerationCall(
        ticket_id=call.ticket_id,
        episode=wire.episode_to(call.episode),
        model_call_id=call.model_call_id,
        request_digest=call.request_digest,
        age=None if age is None else wire.duration(age),
    )


def call_from(message: pb.GenerationCall) -> CallIdentity:
    """The call of a message. Raises ValueError for an illegal episode."""
    return CallIdentity(
        ticket_id=message.ticket_id,
        episode=wire.episode_from(message.episode),
        model_call_id=message.model_call_id,
        request_digest=message.request_digest,
    )


def sweep_to(sweep: Sweep) -> pb.CutGenerationsRequest:
    """The request of a sweep."""
    return pb.CutGenerationsRequest(
        checkpoint_id=sweep.checkpoint_id,
        service=sweep.service,
        closing=sweep.closing,
        sweep=sweep.number,
        calls=[call_to(call, age) for call, age in sweep.calls],
    )


def ack_to(call: CallIdentity, outcome: CutOutcome) -> pb.CutAck:
    """The acknowledgement of one call."""
    return pb.CutAck(
        call=call_to(call),
        disposition=pb.CutDisposition.ValueType(int(outcome.disposition)),
        reason=outcome.reason,
        evidence=None if outcome.evidence is None else _evidence_to(outcome.evidence),
    )


def ack_from(message: pb.CutAck) -> CutAck:
    """What a backend says of one call, as it says it; the judge decides.

    Where the call cannot be read, the ticket is kept and nothing else of it, so that the ack fails that call alone.
    A disposition of a newer version is UNSPECIFIED.
    """
    number = int(message.disposition)
    try:
        call = call_from(message.call)
    except ValueError:
        call = CallIdentity(message.call.ticket_id, NOBODY, "", "")
    return CutAck(
        call=call,
        disposition=CutDisposition(number) if number in set(CutDisposition) else CutDisposition.UNSPECIFIED,
        reason=message.reason,
        evidence=_evidence_from(message.evidence) if message.HasField("evidence") else None,
    )


def _evidence_to(evidence: CutEvidence) -> pb.CutEvidence:
    return pb.CutEvidence(
        cut_id=evidence.cut_id,
        staging_keys=evidence.staging_keys,
        prefix_tokens=evidence.prefix_tokens,
        prefix_digest=evidence.prefix_digest,
        output_limit=evidence.output_limit,
        weight_version=evidence.weight_version,
        finish_reason=evidence.finish_reason,
        stop_reason=evidence.stop_reason,
    )


def _evidence_from(message: pb.CutEvidence) -> CutEvidence:
    return CutEvidence(
        cut_id=message.cut_id,
        staging_keys=tuple(message.staging_keys),
        prefix_tokens=message.prefix_tokens,
        prefix_digest=message.prefix_digest,
        output_limit=message.output_limit,
        weight_version=message.weight_version,
        finish_reason=message.finish_reason,
        stop_reason=message.stop_reason,
    )


# ---- cuts


def reference_to(cut: CutEvidence | CutReference) -> pb.CutReference:
    """The message that names a cut."""
    return pb.CutReference(
        cut_id=cut.cut_id,
        staging_keys=cut.staging_keys,
        prefix_tokens=cut.prefix_tokens,
        prefix_digest=cut.prefix_digest,
    )


def reference_from(message: pb.CutReference) -> CutReference:
    """The cut that a message names."""
    return CutReference(message.cut_id, tuple(message.staging_keys), message.prefix_tokens, message.prefix_digest)


def presence_to(presence: CutPresence) -> pb.CutPresence.ValueType:
    """The number of a presence."""
    return pb.CutPresence.ValueType(int(presence))


def presence_from(number: int) -> CutPresence:
    """UNSPECIFIED for a number of a newer version."""
    return CutPresence(number) if number in set(CutPresence) else CutPresence.UNSPECIFIED
