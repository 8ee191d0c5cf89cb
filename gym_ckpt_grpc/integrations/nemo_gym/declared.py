"""Released verifier servers that are known to keep no state, and whose verdicts may be made twice.

Each was read by a person, and its sources are pinned: with any other content, or another release of the framework, the
declaration does not apply, and the server is restart-only until its author or ours looks again. The table is
`audited.py`; `tests/nemo_gym/audit` checks it. Nothing here imports the framework.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from gym_ckpt_grpc.participants import ResourcesMode, VerifyMode

log = logging.getLogger(__name__)

DISTRIBUTION = "nemo-gym"


@dataclass(frozen=True, slots=True)
class Declaration:
    """One server: stateless, with replayable verification.

    module, server: the very class it is about; one that inherits from it is another server. saw: what its reader saw.
    sources: path -> sha256 of every file of `resources_servers` that it imports. judge: verification asks a judge
    model. allows: what the audit found and a person accepted, word for word.
    """

    module: str
    server: str
    saw: str
    sources: Mapping[str, str]
    judge: bool = False
    allows: tuple[str, ...] = ()

    mode: ClassVar[ResourcesMode] = ResourcesMode.STATELESS
    verify: ClassVar[VerifyMode] = VerifyMode.REPLAY

    @property
    def key(self) -> str:
        """`module:class`."""
        return f"{self.module}:{self.server}"


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the framework, with the files of it that every server runs: its base class and its judge call."""

    version: str
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Declared:
    """The whole table."""

    release: Release
    servers: Mapping[str, Declaration]


_warned: set[str] = set()


def declaration_of(cls: type, table: Declared | None = None) -> Declaration | None:
    """What is declared for a server's class, or for the class that the launcher made of it under the same name.

    None if nothing is, or if a file is not the one that was read: then one warning names it, once per process.
    """
    if table is None:
        from gym_ckpt_grpc.integrations.nemo_gym.audited import TABLE

        table = TABLE
    declaration = table.servers.get(f"{cls.__module__}:{cls.__qualname__}")
    if declaration is None:
        return None
    problem = problem_with(declaration, table.release)
    if problem is None:
        return declaration
    if declaration.key not in _warned:
        _warned.add(declaration.key)
        log.warning(
            "the declaration of %s does not apply: %s. It is restart-only, and its verifications are waited for",
            declaration.key,
            problem,
        )
    return None


def problem_with(declaration: Declaration, release: Release) -> str | None:
    """Why a declaration does not hold for the code this process has loaded, naming the file; None if it does."""
    module = sys.modules.get(declaration.module)
    file = getattr(module, "__file__", None)
    place = declaration.module.replace(".", "/") + ".py"
    if file is None or not Path(file).as_posix().endswith(f"/{place}"):
        return f"its module was not loaded from a file {place}"
    root = Path(file).parents[place.count("/")]
    for path, digest in (*release.sources.items(), *declaration.sources.items()):
        if _digest(root / path) != digest:
            return f"{root / path} is not the file that was audited"
    loaded = {os.path.realpath(path) for path in _loaded_files({Path(path).name for path in declaration.sources})}
    for path in declaration.sources:
        if os.path.realpath(root / path) not in loaded:
            return f"{root / path} is not what its server imported"
    version = _version()
    if version != release.version:
        return f"{DISTRIBUTION} {version or '(not installed)'} is not the audited release {release.version}"
    return None


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _loaded_files(names: set[str]) -> list[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [file for file in files if isinstance(file, str) and os.path.basename(file) in names]


def _version() -> str | None:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
