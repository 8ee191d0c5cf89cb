"""Generate the Python code of the contract from `protos/` into `gen/python/`.

Runs in the tool environment `.venv-gen` (requirements/gen.txt), whose compiler is the oldest that the
package supports: what it writes loads with every supported protobuf and grpcio.

    python tools/generate.py            write gen/python
    python tools/generate.py --check    exit 1 and print a diff where gen/python is not what it would write
"""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = ROOT / "gen" / "python"
PACKAGE = "gymckpt"

PACKAGE_DOCSTRINGS = {
    PACKAGE: '"""Generated from protos/gymckpt by `make gen`. Do not edit."""\n',
    f"{PACKAGE}/v1": '"""Generated from protos/gymckpt/v1 by `make gen`. Do not edit."""\n',
}


class GenerationError(Exception):
    """The compiler refused the protos, or there are none."""


def compile_protos(out: Path) -> None:
    """Run the compiler and its stub plugins over every proto, writing below `out`."""
    from grpc_tools import protoc

    protos = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.rglob("*.proto"))
    if not protos:
        raise GenerationError(f"no .proto file below {PROTOS.relative_to(ROOT)}")
    scripts = Path(sys.executable).parent
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *protos,
        ]
    )
    if status != 0:
        raise GenerationError(f"protoc ended with status {status}")


def generate(out: Path) -> None:
    """Fill the empty directory `out` with the whole generated package."""
    compile_protos(out)
    for folder, docstring in PACKAGE_DOCSTRINGS.items():
        (out / folder / "__init__.py").write_text(docstring, encoding="utf-8")
    (out / PACKAGE / "py.typed").touch()


def contents(root: Path) -> dict[str, str]:
    """Every generated file below `root`, by its path relative to it; caches left out."""
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((root / PACKAGE).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def difference(committed: dict[str, str], fresh: dict[str, str]) -> list[str]:
    """The lines of a unified diff from what is committed to what the compiler writes."""
    lines: list[str] = []
    for name in sorted(committed.keys() | fresh.keys()):
        if (name in committed) != (name in fresh):
            lines.append(f"{name}: only in {'gen/python' if name in committed else 'a fresh generation'}")
            continue
        old, new = committed[name].splitlines(), fresh[name].splitlines()
        lines += difflib.unified_diff(old, new, f"gen/python/{name}", f"fresh/{name}", lineterm="")
    return lines


def replace(committed: dict[str, str], fresh: dict[str, str]) -> int:
    """Make gen/python what was just generated, touching only files that differ; how many did."""
    changed = [name for name in committed.keys() | fresh.keys() if committed.get(name) != fresh.get(name)]
    for name in changed:
        path = GENERATED / name
        if name in fresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(fresh[name], encoding="utf-8")
        else:
            path.unlink()
    return len(changed)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the process's exit status."""
    parser = argparse.ArgumentParser(description="Generate gen/python from protos.")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        try:
            generate(fresh)
        except GenerationError as error:
            print(f"generate: {error}", file=sys.stderr)
            return 1
        if not options.check:
            changed = replace(contents(GENERATED), contents(fresh))
            print(f"gen/python/{PACKAGE}: {changed} files changed")
            return 0
        lines = difference(contents(GENERATED), contents(fresh))
    if lines:
        print("\n".join(lines))
        print("gen/python is not what the protos say: run `make gen`", file=sys.stderr)
        return 1
    print("gen/python is current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
