"""The table of declared servers against the released sources, and when a declaration applies."""

from __future__ import annotations

import hashlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from gym_ckpt_grpc.integrations.nemo_gym import declared
from gym_ckpt_grpc.integrations.nemo_gym.audited import TABLE
from gym_ckpt_grpc.integrations.nemo_gym.declared import Declaration, Declared, Release, declaration_of
from gym_ckpt_grpc.participants import ResourcesMode, VerifyMode
from tests.nemo_gym.audit.check import audit
from tests.nemo_gym.audit.sources import Sources

ROOT = Path(str(metadata.distribution("nemo-gym").locate_file("")))
SERVERS = list(TABLE.servers.values())
every_server = pytest.mark.parametrize("declaration", SERVERS, ids=[one.module.split(".")[1] for one in SERVERS])


# ---- the table


def test_at_least_twenty_servers_are_declared() -> None:
    assert len(SERVERS) >= 20
    assert [key for key, one in TABLE.servers.items() if key != one.key] == []


def test_the_release_is_the_audited_one() -> None:
    """Its base class and its judge call run in every server."""
    assert metadata.version("nemo-gym") == TABLE.release.version
    for path, digest in TABLE.release.sources.items():
        assert hashlib.sha256((ROOT / path).read_bytes()).hexdigest() == digest, path


@every_server
def test_the_sources_are_those_that_were_read(declaration: Declaration) -> None:
    """Every file that the server imports, and no other: a new helper has not been read by anybody."""
    assert Sources(ROOT).closure(declaration.module) == declaration.sources


@every_server
def test_the_audit_finds_what_the_table_allows(declaration: Declaration) -> None:
    """Nothing that is refused; what needs a person's word is in `allows`, word for word, and nothing else is."""
    seen = audit(Sources(ROOT), declaration.module, declaration.server)
    assert seen.refused == set()
    assert seen.found == set(declaration.allows)
    assert seen.judge is declaration.judge


def test_what_is_declared() -> None:
    declaration = SERVERS[0]
    assert (declaration.mode, declaration.verify) == (ResourcesMode.STATELESS, VerifyMode.REPLAY)


@pytest.mark.parametrize(
    "line",
    [
        "from helper import score",
        "import helper",
        "from resources_servers.calendar.helper import score",
        "from .helper import score",
        "from . import helper",
        "def later():\n    from helper import score",
        "if True:\n    import helper as h",
        "from resources_servers.calendar import helper",
        "import resources_servers.calendar.helper",
    ],
)
def test_a_new_helper_file_is_seen(line: str) -> None:
    """However it is imported, and whatever it imports itself."""
    place = "resources_servers/calendar"
    (declaration,) = (one for one in SERVERS if one.module == "resources_servers.calendar.app")
    texts = {
        f"{place}/app.py": f"{line}\n{(ROOT / place / 'app.py').read_text()}",
        f"{place}/helper.py": "from resources_servers.calendar import deeper\n",
        f"{place}/deeper.py": "",
    }
    closure = Sources(ROOT, texts).closure(declaration.module)
    assert set(closure) - set(declaration.sources) == {f"{place}/helper.py", f"{place}/deeper.py"}


def test_a_changed_helper_is_seen() -> None:
    path = "resources_servers/calendar/utils.py"
    (declaration,) = (one for one in SERVERS if one.module == "resources_servers.calendar.app")
    closure = Sources(ROOT, {path: (ROOT / path).read_text() + "\n"}).closure(declaration.module)
    assert {name for name, digest in closure.items() if declaration.sources[name] != digest} == {path}


# ---- when a declaration applies

MODULE = "fixture_servers.words.app"
APP = (
    "from scoring_of_words import score\n\n\nclass Words:\n    pass\n\n\nclass Outer:\n    class Words:\n        pass\n"
)
FILES = {
    "fixture_servers/words/app.py": APP,
    "fixture_servers/words/scoring_of_words.py": "def score(words):\n    return len(words)\n",
}
FRAMEWORK = {"fixture_framework/base.py": "class Base:\n    pass\n"}
Load = Callable[[], type]


def digests(files: dict[str, str]) -> dict[str, str]:
    return {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}


@pytest.fixture
def table() -> Declared:
    declaration = Declaration(MODULE, "Words", "counts words", digests(FILES))
    release = Release(metadata.version("nemo-gym"), digests(FRAMEWORK))
    return Declared(release, {declaration.key: declaration})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small installation: one server with a helper beside it, and the framework's base."""
    for path, text in {**FILES, **FRAMEWORK}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def load(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports the server as it is started: its own directory on sys.path."""
    before = set(sys.modules)
    monkeypatch.setattr(declared, "_warned", set())
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.syspath_prepend(str(root / "fixture_servers" / "words"))

    def imported() -> type:
        importlib.invalidate_caches()
        found: type = importlib.import_module(MODULE).Words
        return found

    yield imported
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_released_class_is_declared(table: Declared, load: Load) -> None:
    assert declaration_of(load(), table) is table.servers[f"{MODULE}:Words"]


def test_the_class_that_the_launcher_makes_is_declared(table: Declared, load: Load) -> None:
    """It has the released class's own name and module."""
    cls = load()
    made = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    assert declaration_of(made, table) is not None


def test_other_classes_are_not_declared(table: Declared, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """Neither one that inherits, nor another of the file: nobody has read what they add. They are no news either."""
    cls = load()

    class Words(cls):  # type: ignore[valid-type, misc]
        pass

    assert declaration_of(Words, table) is None
    assert declaration_of(sys.modules[MODULE].Outer.Words, table) is None
    assert declaration_of(int, table) is None
    assert caplog.records == []


@pytest.mark.parametrize("path", [*FILES, *FRAMEWORK])
def test_a_changed_file_is_named_once(
    path: str, table: Declared, root: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """No declaration, for any file of the closure and of the framework; one warning, however often it is asked for."""
    (root / path).write_text((root / path).read_text() + "# local change\n")
    cls = load()
    assert declaration_of(cls, table) is None
    assert declaration_of(cls, table) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{root / path} is not the file that was audited" in record.getMessage()
    assert f"{MODULE}:Words" in record.getMessage()


@pytest.mark.parametrize("path", [*FILES, *FRAMEWORK])
def test_a_missing_file_is_named(
    path: str, table: Declared, root: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    cls = load()
    (root / path).unlink()
    assert declaration_of(cls, table) is None
    assert str(root / path) in caplog.records[0].getMessage()


def test_a_helper_from_elsewhere_is_noticed(
    table: Declared, root: Path, load: Load, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audited file is in its place, and another of its name was imported: `utils` is a common name."""
    other = root / "elsewhere"
    other.mkdir()
    (other / "scoring_of_words.py").write_text("def score(words):\n    return 7\n")
    monkeypatch.syspath_prepend(str(other))
    assert declaration_of(load(), table) is None
    assert "scoring_of_words.py is not what its server imported" in caplog.records[0].getMessage()


@pytest.mark.parametrize("version", ["0.7.1", "0.6.9"])
def test_another_release_is_named(version: str, table: Declared, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    other = Declared(Release(version, table.release.sources), table.servers)
    assert declaration_of(load(), other) is None
    assert f"is not the audited release {version}" in caplog.records[0].getMessage()


def test_a_framework_that_is_not_installed_is_no_release(
    table: Declared, load: Load, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declared, "DISTRIBUTION", "no-such-distribution")
    assert declaration_of(load(), table) is None
    assert "no-such-distribution (not installed)" in caplog.records[0].getMessage()


def test_a_module_from_no_file_of_that_place(
    table: Declared, load: Load, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = load()
    monkeypatch.setattr(sys.modules[MODULE], "__file__", None)
    assert declaration_of(cls, table) is None
    assert "fixture_servers/words/app.py" in caplog.records[0].getMessage()
