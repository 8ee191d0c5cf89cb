"""A ledger with a pretended inference worker, and file layers that count, pause and lose power."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.capture import CaptureAdmission, CaptureLedger, Coordinates
from gym_ckpt_grpc.capture.ledger_files import LocalAppendHandle, LocalLedgerFiles, LocalLock
from gym_ckpt_grpc.control import Row
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage.local_files import LocalSink, LocalSource
from tests.storage.recording_files import RecordingFiles, Step

R0, R1, R2 = (EpisodeId("r", attempt) for attempt in range(3))
S0 = EpisodeId("s")

Message = Mapping[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


ASK = [user("go")]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def coordinates(admission: CaptureAdmission, reply: str = "ok", **changes: Any) -> Coordinates:
    """What an inference worker would answer: five more tokens, hashes that follow from the parent and the reply."""
    key = f"{admission.capture_key}/{admission.call_id}"
    chain = sha(f"{admission.parent_chain_hash} {reply}")
    values: dict[str, Any] = {
        "capture_key": admission.capture_key,
        "call_id": admission.call_id,
        "mode": admission.mode,
        "staging_key": key,
        "staging_chain": (*admission.staging_chain, key),
        "weight_version": 7,
        "previous_length": admission.previous_length,
        "added_length": 5,
        "total_length": admission.previous_length + 5,
        "staging_digest": sha(f"staging {reply}"),
        "extras_digest": sha(f"extras {reply}"),
        "chain_hash": chain,
        "cumulative_hash": sha(f"tokens {chain}"),
        "prefix_tokens": 3,
        "prefix_digest": sha(reply),
        "output_limit": 64,
        "finish_reason": "stop",
    }
    return Coordinates(**{**values, **changes})


def admitted(
    ledger: CaptureLedger, episode: EpisodeId, call_id: str, conversation: Sequence[Message] = ASK
) -> CaptureAdmission:
    admission = ledger.admit(episode, call_id, conversation)
    assert admission is not None
    return admission


def made(
    ledger: CaptureLedger,
    episode: EpisodeId,
    call_id: str,
    conversation: Sequence[Message] = ASK,
    reply: str = "ok",
    **changes: Any,
) -> CaptureAdmission:
    """One call from admission to row."""
    admission = admitted(ledger, episode, call_id, conversation)
    assert ledger.append_staged(admission, coordinates(admission, reply, **changes), f"resp-{call_id}", said(reply))
    return admission


def talk(ledger: CaptureLedger, episode: EpisodeId, turns: int, *, start: int = 0, prefix: str = "c") -> list[Message]:
    """A conversation whose turns `start` and up are captured; returns it with its next question."""
    conversation: list[Message] = [user("q0")]
    for turn in range(turns):
        if turn >= start:
            made(ledger, episode, f"{prefix}{turn}", conversation, f"a{turn}")
        conversation += [said(f"a{turn}"), user(f"q{turn + 1}")]
    return conversation


def calls(ledger: CaptureLedger, episode: EpisodeId) -> list[str]:
    """Call ids of the manifest."""
    return [call["call_id"] for call in ledger.manifest(episode)["calls"]]


def exported(ledger: CaptureLedger, episode: EpisodeId) -> list[str]:
    """Call ids of the rows."""
    return [ledger.call_id(row) for row in ledger.export([episode])[episode]]


def restore(ledger: CaptureLedger, rows: Mapping[EpisodeId, Sequence[Row]]) -> None:
    """What a Restore does with the rows of its records: stamp them, and put them under the next attempts."""
    stamped = {each.next(): [ledger.stamped(row, each) for row in of] for each, of in rows.items()}
    ledger.activate(ledger.stage(stamped))


class SpyFiles(LocalLedgerFiles):
    """Real files. log: each operation and the last part of its path. before: called with both, to interfere."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] | None = None

    def _note(self, action: str, path: str) -> None:
        name = posixpath.basename(path)
        self.log.append((action, name))
        if self.before is not None:
            self.before(action, name)

    def count(self, action: str, name: str = "") -> int:
        return sum(each == action and name in path for each, path in self.log)

    def create(self, path: str) -> LocalSink:
        self._note("create", path)
        return super().create(path)

    def replace(self, temporary: str, path: str) -> None:
        self._note("replace", path)
        super().replace(temporary, path)

    def remove(self, path: str) -> None:
        self._note("remove", path)
        super().remove(path)

    def sync_file(self, path: str) -> None:
        self._note("sync", path)
        super().sync_file(path)

    def sync_dir(self, path: str) -> None:
        self._note("sync_dir", path)
        super().sync_dir(path)

    def open(self, path: str) -> LocalSource:
        self._note("open", path)
        return super().open(path)

    def names(self, path: str) -> list[str]:
        self._note("names", path)
        return super().names(path)

    def lock(self, path: str, *, wait: bool = True) -> LocalLock | None:
        self._note("lock", path)
        return super().lock(path, wait=wait)

    def open_to_append(self, path: str) -> LocalAppendHandle | None:
        self._note("open_to_append", path)
        handle = super().open_to_append(path)
        return handle and _SpyHandle(handle, self, path)


class _SpyHandle(LocalAppendHandle):
    def __init__(self, handle: LocalAppendHandle, files: SpyFiles, path: str) -> None:
        super().__init__(handle._handle, path)
        self._files = files

    def append(self, data: bytes) -> None:
        self._files._note("append", self._path)
        super().append(data)

    def sync(self) -> None:
        self._files._note("sync", self._path)
        super().sync()


class RecordingLedgerFiles(RecordingFiles):
    """Files in memory whose steps can be failed, and cut short by a loss of power at any of them."""

    def open_to_append(self, path: str) -> _RecordingHandle | None:
        inode = self._find(path)
        return None if inode is None else _RecordingHandle(self, path, inode)

    def lock(self, path: str, *, wait: bool = True) -> _NoLock | None:
        return _NoLock() if self.is_dir(posixpath.dirname(path)) else None

    def after(self, source: RecordingFiles) -> RecordingLedgerFiles:
        """Become what another layer is: `image` gives one that cannot append."""
        self.__dict__.update(source.__dict__)
        return self


class _NoLock:
    def release(self) -> None:
        pass


class _RecordingHandle:
    def __init__(self, files: RecordingLedgerFiles, path: str, inode: int) -> None:
        self._files = files
        self._path = path
        self._inode = inode

    def last_byte(self) -> bytes:
        return bytes(self._files._nodes[self._inode].data[-1:])

    def append(self, data: bytes) -> None:
        self._files._do("append to", Step("write", self._path, inode=self._inode, data=data))

    def sync(self) -> None:
        self._files._do("sync", Step("fsync", self._path, inode=self._inode))

    def close(self) -> None:
        pass
