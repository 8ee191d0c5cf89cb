"""Marked secrets and payloads, and looking for them in everything that a run leaves behind."""

from __future__ import annotations

import base64
import gc
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from gym_ckpt_grpc.minigym.tasks import Task

INBOX_TEXT = "The password of the printer is in the attachment."
"""Stands in every mailbox of the inbox server, and in what its tools give."""


@dataclass(frozen=True)
class Mark:
    """Something that must not be found. value: whole. needle: its beginning, so that a shortened one is found too."""

    name: str
    value: str
    needle: bytes

    def is_in(self, content: bytes) -> bool:
        """Whether it is there, as it is or in base64."""
        return any(form in content for form in (self.needle, *_base64(self.needle)))

    @classmethod
    def new(cls, name: str) -> Mark:
        """A value that is found nowhere by accident; it can travel as a token and in a header."""
        beginning = f"mk{secrets.token_hex(4)}"
        return cls(name, f"{beginning}-{name}-{secrets.token_hex(12)}", beginning.encode())


@cache
def _base64(text: bytes) -> tuple[bytes, ...]:
    """What base64 of anything with this text in it contains: the digits that depend on the text alone, by position."""
    made = []
    for before in range(3):
        digits = base64.b64encode(b"\0" * before + text)
        whole = (before + len(text)) // 3 * 4
        made.append(digits[(0, 2, 3)[before] : whole])
    return tuple(made)


TOKENS = ("controller", "observer", "peer")


@dataclass(frozen=True)
class Marks:
    """Of one run. secret: found nowhere but in their own files. payload: only where payloads belong."""

    secret: dict[str, Mark]
    payload: dict[str, Mark]

    @classmethod
    def new(cls) -> Marks:
        """Fresh ones."""
        others = ("wrong-token", "refused-argument", "otlp-header", "authorization-header", "cookie")
        payload = {name: Mark.new(name) for name in ("prompt", "tool-argument", "trainer-state")}
        text = Mark("session-state", INBOX_TEXT, INBOX_TEXT.encode()[:20])
        return cls({name: Mark.new(name) for name in (*TOKENS, *others)}, {**payload, text.name: text})

    def __iter__(self) -> Iterator[Mark]:
        return iter([*self.secret.values(), *self.payload.values()])

    def private_keys(self, directory: Path) -> None:
        """Every private key under a directory is a secret from now on, by each line of its text."""
        for file in sorted(directory.rglob("*.key")):
            for number, line in enumerate(file.read_text().splitlines()[1:-1]):
                name = f"key of {file.stem}, line {number}"
                if len(line) > 20 and not _is_common(line, directory, file):
                    self.secret[name] = Mark(name, line, line.encode())


def _is_common(line: str, directory: Path, file: Path) -> bool:
    """Whether other keys have this line too: the beginning of an encoding is no secret."""
    return any(line in other.read_text() for other in directory.rglob("*.key") if other != file)


Channel = dict[str, bytes]
"""Source, such as a file -> what it says."""


@dataclass
class Evidence:
    """What a run left behind, by channel. stored: what is in the places where payloads belong, and secrets do not."""

    marks: Marks
    channels: dict[str, Channel] = field(default_factory=dict)
    stored: Channel = field(default_factory=dict)

    def hits(self) -> list[tuple[str, str, str]]:
        """(channel, source, name of the mark) of each mark that was found where it does not belong."""
        wanted = [(channel, sources, list(self.marks)) for channel, sources in self.channels.items()]
        wanted.append(("stored", self.stored, list(self.marks.secret.values())))
        return [
            (channel, source, mark.name)
            for channel, sources, marks in wanted
            for source, content in sources.items()
            for mark in marks
            if mark.is_in(content)
        ]

    def stored_payloads(self) -> set[str]:
        """Names of the payloads that were found where they belong."""
        found = b"\n".join(self.stored.values())
        return {mark.name for mark in self.marks.payload.values() if mark.is_in(found)}


# ---- channels


def files_under(directory: Path, *, only: Iterable[Path] = (), but: Iterable[Path] = ()) -> Channel:
    """Every file there, by its path, with its name; but for some, or only some, and what is under these."""
    wanted, left_out = tuple(only), tuple(but)

    def among(file: Path, places: tuple[Path, ...]) -> bool:
        return any(file == place or place in file.parents for place in places)

    return {
        str(file.relative_to(directory)): bytes(file.relative_to(directory)) + b"\n" + file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file() and not among(file, left_out) and (among(file, wanted) or not wanted)
    }


def reprs() -> Channel:
    """repr and str of every object of ours that this process has, by its class.

    But for what is data by itself: requests of protobuf, and the tasks that a trainer sends.
    """
    found: dict[str, list[str]] = {}
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).split(".")[0] == "gym_ckpt_grpc" and kind is not Task:
            said = found.setdefault(f"{kind.__module__}.{kind.__qualname__}", [])
            for told in (repr, str):
                try:
                    said.append(told(each))
                except Exception as error:  # half made, or ended
                    said.append(f"{type(error).__name__}: {error}")
    return {name: "\n".join(said).encode(errors="replace") for name, said in found.items()}


def command_lines(pids: Mapping[str, int]) -> Channel:
    """Command line and title of these processes and of all that they started, as `ps` shows them."""
    found: Channel = {}
    wanted = dict(pids)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                if int(entry.name) in wanted.values() or session in wanted.values():
                    line = (entry / "cmdline").read_bytes() + b"\n" + (entry / "comm").read_bytes()
                    found[f"{entry.name} {line[:80]!r}"] = line
            except OSError:
                continue  # it has ended
    assert found, f"no process of {pids} was seen"
    return found
