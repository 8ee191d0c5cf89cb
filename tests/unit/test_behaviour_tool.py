"""tools/behaviour.py: the lists, their owners and the tests that name an id are held together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import behaviour

LIST = """# A list
- C1 The first.
- C2 The second.
- C3 The third.
- P1 *(later)* Not yet.
- a line without an id
"""
OWNERS = """
finished = ["storage"]
[slice]
ids = []
[control]
ids = ["C1-C2"]
[storage]
ids = ["C3"]
[later]
ids = ["P1"]
"""
TESTS = """
import pytest
pytestmark = pytest.mark.behaviour("C1")

@pytest.mark.behaviour("C3")
def test_third(): ...

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.behaviour("C2"))])
def test_second(x): ...
"""


class Checkout:
    """A small checkout whose three kinds of file a test may change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lists = root / "docs" / "behaviour"
        self.lists.mkdir(parents=True)
        (root / "tests" / "room").mkdir(parents=True)
        self.write()

    def write(self, lists: str = LIST, owners: str = OWNERS, tests: str = TESTS) -> None:
        """Write the files, those not given as they were at first."""
        (self.lists / "control.md").write_text(lists, encoding="utf-8")
        (self.lists / "owners.toml").write_text(owners, encoding="utf-8")
        (self.root / "tests" / "room" / "test_room.py").write_text(tests, encoding="utf-8")

    def check(self) -> int:
        """The exit status of `--check`."""
        return behaviour.main(["--check", "--root", str(self.root)])


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A checkout in which all is well."""
    return Checkout(tmp_path)


def test_all_is_well(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    """Marks on modules, functions and parameters all count."""
    assert checkout.check() == 0
    assert capsys.readouterr().out == "behaviour: 4 ids, 3 named by tests\n"


def test_report_lists_what_lacks_a_test(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    """The report gives each milestone's count and the ids that no test names."""
    checkout.write(tests="")
    assert behaviour.main(["--root", str(checkout.root)]) == 0
    out = capsys.readouterr().out
    assert "control: 0 of 2 have a test\n    without: C1-C2\n" in out
    assert "storage (finished): 0 of 1 have a test\n    without: C3\n" in out


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tests": ""}, "storage is finished, and these have no test: C3"),
        ({"lists": LIST + "- C4 The fourth.\n"}, "C4 has no owner"),
        ({"lists": LIST + "- C1 Again.\n"}, "C1 stands twice in the lists"),
        ({"owners": OWNERS + '[workers]\nids = ["C2"]\n'}, "C2 has several owners: control, workers"),
        ({"owners": OWNERS.replace("C1-C2", "C1-C2 C3")}, "neither an id nor a range"),
        ({"owners": OWNERS.replace("C1-C2", "C2-C1")}, "runs backwards"),
        ({"owners": OWNERS.replace("C1-C2", "C1-P2")}, "neither an id nor a range"),
        ({"owners": OWNERS.replace('"C1-C2"', '"C1-C2", "C2"')}, "control names C2 twice"),
        ({"owners": OWNERS.replace('"C3"', '"C3", "C9"')}, "storage owns the unknown id C9"),
        ({"owners": OWNERS.replace("[later]", "[workers]")}, "P1 is marked (later), but workers owns it"),
        ({"owners": OWNERS + "[sometime]\nids = []\n"}, "unknown milestones sometime"),
        ({"owners": OWNERS.replace('["storage"]', '["store"]')}, "unknown milestones store"),
        ({"tests": TESTS.replace('"C1"', '"C1", "C77"')}, "test_room.py:3: unknown id 'C77'"),
        ({"tests": TESTS.replace('"C1"', "*IDS")}, "written out as plain strings"),
    ],
)
def test_check_refuses(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], change: dict[str, str], complaint: str
) -> None:
    """Each broken rule makes `--check` fail and say so."""
    checkout.write(**change)
    assert checkout.check() == 1
    assert complaint in capsys.readouterr().err


def test_slice_takes_ids_out_of_the_ranges_of_others(checkout: Checkout) -> None:
    """Naming an id in `slice` is enough: the other ranges stay as they are."""
    checkout.write(owners=OWNERS.replace("ids = []", 'ids = ["C2", "C3"]'))
    assert checkout.check() == 0
    owners = behaviour.read_owners(checkout.lists / "owners.toml")
    assert owners.of("C2") == ["slice"]
    assert owners.ids["control"] == ["C1"]
    assert owners.ids["storage"] == []


def test_ranges_are_written_as_they_are_read() -> None:
    """`compress` and `expand` undo each other."""
    ids = ["C1", "C2", "C3", "C10", "P10", "P11", "R1"]
    written = behaviour.compress(reversed(ids))
    assert written == "C1-C3 C10 P10-P11 R1"
    assert [identifier for entry in written.split() for identifier in behaviour.expand(entry)] == ids


def test_this_checkout_is_well() -> None:
    """The project's own lists, owners and tests keep the rules."""
    assert behaviour.main(["--check"]) == 0
