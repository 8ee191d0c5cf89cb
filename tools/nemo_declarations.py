"""Compare the table of declared servers with an installed NeMo Gym, and print what a person has to look at.

    .venv-nemo-gym/bin/python tools/nemo_declarations.py              every declared server, only what differs
    .venv-nemo-gym/bin/python tools/nemo_declarations.py SERVER...    these, declared or not, in full
    ... --root DIRECTORY                                              a checkout instead of the installed release

It reads sources and imports none of them. A digest goes into `integrations/nemo_gym/audited.py` only after the file was
read: the audit finds state, chance, clocks and I/O in what requests run, and what it finds is for a person to accept.
Exit status 1 if a declared server differs.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gym_ckpt_grpc.integrations.nemo_gym.audited import TABLE
from gym_ckpt_grpc.integrations.nemo_gym.declared import DISTRIBUTION, Declaration
from tests.nemo_gym.audit.check import audit
from tests.nemo_gym.audit.sources import Sources


def main(arguments: list[str] | None = None) -> int:
    """Print the differences, or the named servers in full."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("servers", nargs="*", help="directories below resources_servers")
    parser.add_argument("--root", type=Path, help="the directory that holds resources_servers and nemo_gym")
    options = parser.parse_args(arguments)
    root = options.root or Path(str(metadata.distribution(DISTRIBUTION).locate_file("")))
    sources = Sources(root)
    if options.servers:
        for name in options.servers:
            print("\n".join(described(sources, name)))
        return 0
    differences = [*release_differences(root, options.root is None)]
    for declaration in TABLE.servers.values():
        differences += server_differences(sources, declaration)
    print("\n".join(differences) or f"{len(TABLE.servers)} declared servers are as they were read")
    return 1 if differences else 0


def release_differences(root: Path, installed: bool) -> list[str]:
    """What is not as in the audited release itself."""
    found = []
    version = metadata.version(DISTRIBUTION) if installed else TABLE.release.version
    if version != TABLE.release.version:
        found.append(f"{DISTRIBUTION} {version}, audited {TABLE.release.version}")
    for path, digest in TABLE.release.sources.items():
        file = root / path
        now = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "gone"
        if now != digest:
            found.append(f"{path}: {now}")
    return found


def server_differences(sources: Sources, declaration: Declaration) -> list[str]:
    """What is not as in one server's entry, its name first."""
    now = sources.closure(declaration.module)
    found = [f"    {path}: {digest}" for path, digest in now.items() if declaration.sources.get(path) != digest]
    found += [f"    {path}: gone" for path in declaration.sources if path not in now]
    try:
        seen = audit(sources, declaration.module, declaration.server)
    except LookupError as error:
        return [f"{declaration.key}: {error}"]
    found += [f"    refused: {text}" for text in sorted(seen.refused)]
    found += [f"    found: {text}" for text in sorted(seen.found - set(declaration.allows))]
    found += [f"    no longer found: {text}" for text in sorted(set(declaration.allows) - seen.found)]
    if seen.judge is not declaration.judge:
        found.append(f"    judge: {seen.judge}")
    return [f"{declaration.key}:", *found] if found else []


def described(sources: Sources, name: str) -> list[str]:
    """One server in full, as its entry would need it. Raises LookupError if it has no class that is started."""
    module = f"resources_servers.{name}.app"
    server = started_class(sources, module)
    seen = audit(sources, module, server)
    lines = [f"{module}:{server}:"]
    lines += [f'    "{path}": "{digest}",' for path, digest in sources.closure(module).items()]
    lines += [f"    refused: {text}" for text in sorted(seen.refused)]
    lines += [f"    found: {text}" for text in sorted(seen.found)]
    return [*lines, f"    judge: {seen.judge}"]


def started_class(sources: Sources, module: str) -> str:
    """The class whose `run_webserver` the module calls."""
    found = sources.module(module)
    for node in ast.walk(found.tree) if found else ():
        if isinstance(node, ast.Attribute) and node.attr == "run_webserver" and isinstance(node.value, ast.Name):
            return node.value.id
    raise LookupError(f"no class is started by {module}")


if __name__ == "__main__":
    sys.exit(main())
