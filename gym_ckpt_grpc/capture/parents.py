"""Parents: which earlier call of an attempt a new conversation builds upon.

The *fingerprint* of the assistant's turns selects candidates: it covers what a model authors (text, reasoning,
refusal, tool calls by name and arguments) and nothing that servers and clients add or reshape, such as ids, nulls
and token fields. The digest of the context in front of the last turn confirms. Source: participants section 12.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gym_ckpt_grpc.capture.ledger_files import END, LedgerFiles
from gym_ckpt_grpc.capture.rows import AnyRow, FailureRow, decode_lines
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateNotFound, Violation
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import FileSource

FINGERPRINT_VERSION = 1
"""Version of the two functions below; rows of another one match nothing."""

Message = Mapping[str, Any]


def fingerprint(message: Message) -> str:
    """Digest of what the model authored in one assistant message. Raises InvalidArgument if it is no JSON."""
    authored = [_text(message.get("content"))]
    authored += [message.get(name) or "" for name in ("reasoning_content", "reasoning", "refusal")]
    calls = message.get("tool_calls") or []
    functions = [_get(call, "function") for call in (calls if isinstance(calls, list | tuple) else [calls])]
    if message.get("function_call"):
        functions.append(message["function_call"])
    authored.append([[_get(each, "name"), _get(each, "arguments")] for each in functions])
    return hashlib.sha256(_canonical(authored)).hexdigest()


def followed(turns: str, output: str) -> str:
    """Fingerprint of all assistant turns when one more follows. turns: of those before, "" for none."""
    return hashlib.sha256(f"{turns}\n{output}".encode()).hexdigest()


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else value


def _text(content: Any) -> Any:
    """Content as plain text where it is nothing else: null is no text, and text parts are joined."""
    if content is None:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        found = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) == len(content):
            return "".join(texts)
    return content


def _canonical(value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"is no JSON: {error}"
        raise InvalidArgument(f"a message {problem}", violations=[Violation("messages", problem)]) from error


@dataclass(frozen=True, slots=True)
class Context:
    """A request's conversation, as far as parents go. Digests in lower-case hex.

    length, digest: of all messages. turns: fingerprint of its assistant turns, "" if it has none. lead_length,
    lead_digest: of the messages in front of the last assistant turn.
    """

    length: int
    digest: str
    turns: str = ""
    lead_length: int = 0
    lead_digest: str = ""


def read_context(conversation: Sequence[Any]) -> Context:
    """Digest a conversation of OpenAI-style messages. Raises InvalidArgument for what is none."""
    hasher = hashlib.sha256()
    turns, lead_length, lead_digest = "", 0, ""
    for at, message in enumerate(conversation):
        if not isinstance(message, Mapping):
            problem = Violation(f"messages[{at}]", "is no object")
            raise InvalidArgument(f"messages[{at}] is no object", violations=[problem])
        if message.get("role") == "assistant":
            lead_length, lead_digest = at, hasher.hexdigest()
            turn = fingerprint(message)
            turns = followed(turns, turn)
            content = turn.encode()
        else:
            content = _canonical({name: value for name, value in message.items() if value is not None})
        hasher.update(b"%d:" % len(content) + content)
    return Context(len(conversation), hasher.hexdigest(), turns, lead_length, lead_digest)


@dataclass(frozen=True, slots=True)
class Parent:
    """A call that another can build upon. total_length: tokens of its sequence."""

    call_id: str
    total_length: int
    chain_hash: str
    staging_chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What is kept in memory of a row: enough to choose, and where the row stands in its file."""

    context_length: int
    context_digest: str
    total_length: int
    cumulative_hash: str
    at: int
    size: int


class ParentIndex:
    """The rows of one attempt as parents. It follows the file as processes append to it.

    Memory grows with the number of rows, not with their chains. May be used in any thread.
    """

    def __init__(self, files: LedgerFiles, path: str, episode: EpisodeId) -> None:
        self._files = files
        self._path = path
        self._episode = episode
        self._mutex = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._first = b""
        self._offset = 0
        self._candidates: dict[str, list[_Candidate]] = {}
        self._last_number = 0

    def look(self, context: Context) -> tuple[Parent | None, int]:
        """The call whose reply the conversation goes on from, and the last admission number in the rows.

        None for a root, and if it is not certain which. Raises StateCorrupt naming the episode.
        """
        with self._mutex:
            try:
                source = self._files.open(self._path)
            except StateNotFound:
                self._reset()
                return None, 0
            try:
                self._follow(source)
                return self._choose(context, source), self._last_number
            finally:
                source.close()

    def _follow(self, source: FileSource) -> None:
        # Files are appended to or replaced by others, and the first line of each is its own: a new call, or the
        # name of an import.
        known = min(len(self._first), source.size)
        if source.size < self._offset or source.read(0, known) != self._first:
            self._reset()
        start = self._offset
        data = source.read(start, source.size - start)
        for at, size, row in decode_lines(data, self._episode):
            self._take(row, start + at, size)
        self._first = self._first or data[: data.find(END) + 1]
        self._offset = start + data.rfind(END) + 1

    def _take(self, row: AnyRow, at: int, size: int) -> None:
        self._last_number = max(self._last_number, row.number)
        if isinstance(row, FailureRow) or row.fingerprint_version != FINGERPRINT_VERSION:
            return
        found = _Candidate(row.context_length, row.context_digest, row.total_length, row.cumulative_hash, at, size)
        self._candidates.setdefault(row.continuation, []).append(found)

    def _choose(self, context: Context, source: FileSource) -> Parent | None:
        lead = (context.lead_length, context.lead_digest)
        candidates = self._candidates.get(context.turns, ())  # a root has no turns, and a row always some
        found = [each for each in candidates if (each.context_length, each.context_digest) == lead]
        if len({(each.cumulative_hash, each.total_length) for each in found}) != 1:
            return None
        chosen = found[0]  # of equal ones any will do
        ((_, _, row),) = decode_lines(source.read(chosen.at, chosen.size) + END, self._episode)
        if isinstance(row, FailureRow) or not (row.cumulative_hash and row.chain_hash and row.total_length):
            return None
        return Parent(row.call_id, row.total_length, row.chain_hash, row.staging_chain)
