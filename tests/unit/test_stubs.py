"""The generated code loads without a warning at both ends of the protobuf and grpcio ranges."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "gen" / "python"
OLDEST = ROOT / ".venv-oldest" / "bin" / "python"

ENVIRONMENTS = [
    pytest.param(OLDEST, "oldest.txt", {"grpcio": "1.80.0", "protobuf": "6.31.1"}, id="oldest"),
    pytest.param(Path(sys.executable), "dev.txt", {}, id="newest"),
]

SCRIPT = """
import importlib, importlib.metadata, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    print("loaded", name)
for name in ("grpcio", "protobuf"):
    print("version", name, importlib.metadata.version(name))
"""


def stubs() -> list[str]:
    """The names of every generated module."""
    modules = sorted(GENERATED.rglob("*_pb2*.py"))
    return [".".join(module.relative_to(GENERATED).with_suffix("").parts) for module in modules]


def load(python: Path, names: list[str]) -> subprocess.CompletedProcess[str]:
    """Import the modules in a fresh process of `python`, warnings being errors."""
    quoted = "[" + ", ".join(f'"{name}"' for name in names) + "]"
    return subprocess.run(
        [str(python), "-W", "error", "-c", SCRIPT, quoted],
        env={**os.environ, "PYTHONPATH": str(GENERATED), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=ROOT / "protos",
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_every_proto_has_its_stubs() -> None:
    """Each proto has messages and, typed as well, services."""
    protos = [path.relative_to(ROOT / "protos") for path in (ROOT / "protos").rglob("*.proto")]
    assert protos
    for proto in protos:
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
            assert (GENERATED / proto.with_name(proto.stem + suffix)).is_file()


@pytest.mark.parametrize(("python", "lock", "lower_end"), ENVIRONMENTS)
def test_stubs_load_without_warnings(python: Path, lock: str, lower_end: dict[str, str]) -> None:
    """Every stub loads at this end of the ranges, all in one process, none with a warning."""
    assert python.exists(), "`make test` makes this environment"
    names = stubs()
    assert names
    result = load(python, names)
    assert result.returncode == 0, result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("loaded")] == names
    locked = (ROOT / "requirements" / lock).read_text(encoding="utf-8").splitlines()
    for name in ("grpcio", "protobuf"):
        version = next(line.split()[2] for line in result.stdout.splitlines() if f"version {name} " in line)
        assert f"{name}=={version} \\" in locked
        assert lower_end.get(name, version) == version


def test_a_warning_is_an_error_in_this_check(tmp_path: Path) -> None:
    """The check itself notices a module that warns."""
    (tmp_path / "warns.py").write_text("import warnings; warnings.warn('old gencode')\n", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, '["warns"]'],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.returncode != 0
    assert "old gencode" in result.stderr
