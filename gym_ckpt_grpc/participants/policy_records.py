"""What a policy model server checkpoints: ledger rows and cuts of each rollout, and the index of their staging keys.

Source: participants sections 7 and 8. No tokens travel in it, only the keys under which they are staged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from gym_ckpt_grpc.control.generation import Continuation, CutDisposition, CutEvidence, Row
from gym_ckpt_grpc.control.ports import CommitExtra, StagingKeys
from gym_ckpt_grpc.participants.cut_ack import check_evidence
from gym_ckpt_grpc.participants.records import VERSION, Reader, payload
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import MAX_LISTED
from gym_ckpt_grpc.storage import STAGING_KEYS, Record


@dataclass(frozen=True, slots=True)
class CutRecord:
    """A cut as a record keeps it.

    request_digest: of the effective request, by which a call finds it. service, model: whose it was. backend,
    incarnation_id, snapshot_id: who made it, for audit; the latter two are "" if it was made from the finished
    call's own coordinates. source_capture_key, source_call_id: the call that was cut. The rest: its evidence.
    """

    request_digest: str
    service: str
    model: str
    backend: str
    incarnation_id: str
    snapshot_id: str
    source_capture_key: str
    source_call_id: str
    cut_id: str
    staging_keys: tuple[str, ...]
    prefix_tokens: int
    prefix_digest: str
    output_limit: int
    weight_version: int
    finish_reason: str = ""
    stop_reason: str = ""

    @property
    def evidence(self) -> CutEvidence:
        """What a backend is asked to find again."""
        return CutEvidence(**{name: getattr(self, name) for name in _EVIDENCE})

    def continuation(self) -> Continuation:
        """As it rides in the capture admission of the call that goes on from it."""
        return Continuation(**{name: getattr(self, name) for name in _CONTINUATION})

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"staging_keys": list(self.staging_keys)}

    @classmethod
    def from_json(cls, value: Any) -> CutRecord:
        """Raises ValueError saying what is wrong."""
        if not isinstance(value, dict) or set(value) != set(_TYPES):
            raise ValueError(f"a cut must be an object with exactly {', '.join(_TYPES)}")
        keys = value["staging_keys"]
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ValueError("staging_keys of a cut must be a list of texts")
        for name, kind in _TYPES.items():
            if kind in (str, int) and type(value[name]) is not kind:
                raise ValueError(f"{name} of a cut is of type {type(value[name]).__name__}")
        cut = cls(**(value | {"staging_keys": tuple(keys)}))
        for name in ("request_digest", "service", "model", "backend", "source_capture_key", "source_call_id"):
            if not value[name]:
                raise ValueError(f"{name} of a cut is empty")
        disposition = CutDisposition.FINISHED if cut.finish_reason else CutDisposition.CUT
        if problem := check_evidence(disposition, cut.evidence):
            raise ValueError(f"cut {cut.cut_id!r:.80}: {problem}")
        return cut


_TYPES: Mapping[str, Any] = get_type_hints(CutRecord)
_EVIDENCE = tuple(each.name for each in fields(CutEvidence))
_CONTINUATION = tuple(each.name for each in fields(Continuation))


@dataclass(frozen=True, slots=True)
class PolicyModelRecord:
    """A rollout of a policy model server. rows: as its ledger has them. cuts: unique by request digest."""

    SCHEMA = "gymckpt.policy_model"

    episode: EpisodeId
    rows: Sequence[Row] = ()
    cuts: Sequence[CutRecord] = ()

    def to_record(self) -> Record:
        """Raises HookFailed naming the episode if a row cannot be kept exactly. Encodes all of it: not on the loop."""
        parts = {"rows": [dict(row) for row in self.rows], "cuts": [cut.to_json() for cut in self.cuts]}
        payloads = {name: payload(value, self.episode, name) for name, value in parts.items()}
        return Record(self.episode, self.SCHEMA, VERSION, payloads=payloads)

    @classmethod
    def from_record(cls, record: Record) -> PolicyModelRecord:
        """Raises InvalidState naming the episode. Decodes all of it: not on the loop."""
        reader = Reader(record, cls.SCHEMA)
        rows, found = reader.state("rows"), reader.state("cuts")
        reader.end()
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise reader.invalid("has rows that are no list of objects")
        if not isinstance(found, list):
            raise reader.invalid("has cuts that are no list")
        try:
            cuts = [CutRecord.from_json(value) for value in found]
        except ValueError as error:
            raise reader.invalid(f"has a wrong cut: {error}") from error
        if len({cut.request_digest for cut in cuts}) != len(cuts):
            raise reader.invalid("has two cuts of one request")
        return cls(record.episode, rows, cuts)


def staging_index(records: Iterable[Record], keys_of: Callable[[Row], tuple[str, str] | None]) -> CommitExtra:
    """The keys that frozen records name, by capture key. keys_of: see `Ledger.staging_keys`. Not on the loop.

    A row's key stands under the attempt that staged it, a cut's under the record's episode, so that a key which a
    restore has carried on may stand under two.
    """
    index: dict[str, set[str]] = {}
    for record in records:
        found = PolicyModelRecord.from_record(record)
        for row in found.rows:
            if (named := keys_of(row)) is not None:
                index.setdefault(named[0] or record.episode.capture_key, set()).add(named[1])
        for cut in found.cuts:
            index.setdefault(record.episode.capture_key, set()).update(cut.staging_keys)
    keys, facts = staging_facts(index)
    return CommitExtra(
        manifest={STAGING_KEYS: facts},
        documents={STAGING_KEYS: {capture_key: sorted(index[capture_key]) for capture_key in sorted(index)}},
        staging_keys=StagingKeys(len(keys), facts["digest"], tuple(keys[:MAX_LISTED])),
    )


def staging_facts(index: Mapping[str, Iterable[str]]) -> tuple[list[str], dict[str, Any]]:
    """All keys of an index, sorted, each once; and their count and digest, as the manifest has them."""
    keys = sorted(set[str]().union(*index.values()))
    digest = hashlib.sha256("".join(f"{key}\n" for key in keys).encode()).hexdigest()
    return keys, {"count": len(keys), "digest": digest}
