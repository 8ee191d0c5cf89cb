"""What each kind checkpoints: one frozen class per kind, converted to and from storage's `Record`.

Reading is strict: an unknown field or payload, a wrong type, another schema or a newer version is InvalidState,
which the control plane reports as STATE_CORRUPT naming the episode. Older versions are migrated first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from gym_ckpt_grpc.control.ports import HookFailed, InvalidState
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import Codec, Payload, PayloadRefused, Record, encode

VERSION = 1
"""Schema version of what is written: one for all kinds, raised by a change of any."""

MIGRATIONS: dict[tuple[str, int], Callable[[Record], Record]] = {}
"""(schema, version) -> the step from that version to the next. A kind that a version did not change has none."""


def payload(value: Any, episode: EpisodeId, what: str) -> Payload:
    """Encode state at its hand-over; what `storage.raw` made is stored as it is.

    Raises HookFailed naming the episode for what cannot be kept exactly.
    """
    if type(value) is Payload and value.codec is Codec.RAW:
        return value
    try:
        return encode(value, where=f"{what} of {episode}")
    except PayloadRefused as error:
        raise HookFailed(str(error), episode) from error


@dataclass(frozen=True, slots=True)
class Encoded:
    """An author's state, encoded. revision: the author's number for it, or None."""

    payload: Payload
    revision: int | None = None


def plain(value: Any) -> Any:
    """State for its author: as it was exported, and of RAW state the bytes."""
    return value.data if type(value) is Payload else value


def content_type(value: Any) -> str:
    """The content type of RAW state, empty for any other."""
    return value.content_type if type(value) is Payload else ""


class Reader:
    """Takes a record apart, and knows at the end what nobody asked for."""

    def __init__(self, record: Record, schema: str) -> None:
        self.episode = record.episode
        if record.schema != schema:
            raise self.invalid(f"is a {record.schema!r} record, not {schema!r}")
        if record.schema_version > VERSION:
            raise self.invalid(f"has schema version {record.schema_version}, this server reads up to {VERSION}")
        self._record = record = _migrated(record)
        self._left = {*record.fields, *(f"payload {name}" for name in record.payloads)}

    def text(self, name: str) -> str:
        """A text field that must be there and not be empty."""
        value = self._field(name)
        if not isinstance(value, str) or not value:
            raise self.invalid(f"has {name} {value!r:.80}, not a text")
        return value

    def optional_text(self, name: str) -> str | None:
        """A text field, or None if it is not there."""
        return self.text(name) if name in self._record.fields else None

    def count(self, name: str) -> int:
        """An integer field >= 0."""
        value = self._field(name)
        if type(value) is not int or value < 0:
            raise self.invalid(f"has {name} {value!r:.80}, not an integer >= 0")
        return value

    def state(self, name: str) -> Any:
        """A payload that must be there, decoded; a RAW one as it is, so that it would be written as RAW again."""
        self._left.discard(f"payload {name}")
        found = self._record.payloads.get(name)
        if found is None:
            raise self.invalid(f"has no payload {name}")
        return found if found.codec is Codec.RAW else self._record.decode(name)

    def optional(self, name: str) -> Any:
        """A payload, or None if it is not there."""
        return self.state(name) if name in self._record.payloads else None

    def mapping(self, name: str) -> dict[str, Any]:
        """A payload that is an object, or an empty one if it is not there."""
        value = self.optional(name)
        if value is not None and not isinstance(value, dict):
            raise self.invalid(f"has {name} of type {type(value).__name__}, not an object")
        return value or {}

    def end(self) -> None:
        """Refuse a record that has more than was asked for."""
        if self._left:
            raise self.invalid(f"has unknown parts: {', '.join(sorted(self._left))}")

    def invalid(self, problem: str) -> InvalidState:
        return InvalidState(f"the record of {self.episode} {problem}", self.episode)

    def _field(self, name: str) -> Any:
        self._left.discard(name)
        if name not in self._record.fields:
            raise self.invalid(f"has no field {name}")
        return self._record.fields[name]


def _migrated(record: Record) -> Record:
    """The record as this version would have written it, brought here one version at a time."""
    for version in range(record.schema_version, VERSION):
        if step := MIGRATIONS.get((record.schema, version)):
            record = step(record)
        record = replace(record, schema_version=version + 1)
    return record


@dataclass(frozen=True, slots=True)
class EnvironmentRecord:
    """An episode of an environment. boundary: None means start over from input."""

    SCHEMA = "gymckpt.environment"

    episode: EpisodeId
    task_digest: str
    task_field_digests: Mapping[str, str]
    boundary: Any = None

    def to_record(self) -> Record:
        payloads = {"task_field_digests": payload(dict(self.task_field_digests), self.episode, "task digests")}
        if self.boundary is not None:
            payloads["boundary"] = payload(self.boundary, self.episode, "boundary")
        return Record(self.episode, self.SCHEMA, VERSION, fields={"task_digest": self.task_digest}, payloads=payloads)

    @classmethod
    def from_record(cls, record: Record) -> EnvironmentRecord:
        reader = Reader(record, cls.SCHEMA)
        digests = reader.mapping("task_field_digests")
        if not all(isinstance(digest, str) for digest in digests.values()):
            raise reader.invalid("has a task field digest that is no text")
        made = cls(record.episode, reader.text("task_digest"), digests, reader.optional("boundary"))
        reader.end()
        return made


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """A native session of an agent, or a legacy run.

    session: the author's state. boundary: loop state, or None. seed: digest of the seed's body and its reply, so
    that the same seed again is known. activation: last completed index and its reply. kept_replies: replies of the
    policy that were on the wire when admission closed, by request digest. protocol_boundary: the step at which a
    legacy run goes on; None for a native session, and for a run that starts over from input. cookie_session_id:
    the id under which a legacy run's author finds the session in its own cookie, or None.
    """

    SCHEMA = "gymckpt.agent"

    episode: EpisodeId
    session_key: str
    session: Any
    boundary: Any = None
    seed: Mapping[str, Any] = field(default_factory=dict)
    activations: int = 0
    activation_reply: Any = None
    kept_replies: Mapping[str, Any] = field(default_factory=dict)
    protocol_boundary: Any = None
    cookie_session_id: str | None = None

    def to_record(self, session: Encoded | None = None) -> Record:
        """As storage keeps it. session: the author's state as it was encoded already, instead of `self.session`."""
        made = session or Encoded(payload(self.session, self.episode, "session"))
        optional = {
            "boundary": self.boundary,
            "seed": dict(self.seed) or None,
            "activation_reply": self.activation_reply,
            "kept_replies": dict(self.kept_replies) or None,
            "protocol_boundary": self.protocol_boundary,
        }
        parts = {name: value for name, value in optional.items() if value is not None}
        fields: dict[str, Any] = {"session_key": self.session_key, "activations": self.activations}
        if self.cookie_session_id is not None:
            fields["cookie_session_id"] = self.cookie_session_id
        payloads = {"session": made.payload}
        payloads |= {name: payload(value, self.episode, name) for name, value in parts.items()}
        return Record(self.episode, self.SCHEMA, VERSION, revision=made.revision, fields=fields, payloads=payloads)

    @classmethod
    def from_record(cls, record: Record) -> AgentRecord:
        reader = Reader(record, cls.SCHEMA)
        seed = reader.mapping("seed")
        if seed and set(seed) != {"digest", "reply"}:
            raise reader.invalid("has a seed without digest and reply")
        made = cls(
            record.episode,
            reader.text("session_key"),
            reader.state("session"),
            reader.optional("boundary"),
            seed,
            reader.count("activations"),
            reader.optional("activation_reply"),
            reader.mapping("kept_replies"),
            reader.optional("protocol_boundary"),
            reader.optional_text("cookie_session_id"),
        )
        reader.end()
        return made


@dataclass(frozen=True, slots=True)
class ResourcesRecord:
    """A session of a resources server. state: the author's, or None for a stateless one."""

    SCHEMA = "gymckpt.resources"

    episode: EpisodeId
    session_id: str
    state: Any = None

    def to_record(self, state: Encoded | None = None) -> Record:
        """As storage keeps it. state: the author's, as it was encoded already, instead of `self.state`."""
        made = state or Encoded(payload(self.state, self.episode, "session state"))
        fields = {"session_id": self.session_id}
        payloads = {"state": made.payload}
        return Record(self.episode, self.SCHEMA, VERSION, revision=made.revision, fields=fields, payloads=payloads)

    @classmethod
    def from_record(cls, record: Record) -> ResourcesRecord:
        reader = Reader(record, cls.SCHEMA)
        made = cls(record.episode, reader.text("session_id"), reader.state("state"))
        reader.end()
        return made
