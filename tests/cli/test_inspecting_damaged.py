"""Every kind of damage, and every command that looks at a root: an answer with the file's name, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gym_ckpt_grpc.cli import operator_commands, root_commands  # noqa: F401 - they register their commands
from gym_ckpt_grpc.cli.app import app
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from gym_ckpt_grpc.storage import CheckpointRoot, LocalFiles
from tests.storage.damaged import (
    AGENT,
    COUNTER,
    ENVIRONMENT,
    MAIL,
    POLICY,
    ROLLOUTS,
    copy_of_part,
    cut_short,
    flip,
    flip_payload,
    make_checkpoint,
    only,
    tree,
    unsynced,
)

__all__ = ["unsynced"]

TWO = "checkpoints/two"
ROLLOUT = ROLLOUTS[3].rollout_id
"""One of those whose state moved: its records are in the second checkpoint's own files."""


@dataclass(frozen=True)
class Damage:
    """One kind.

    hurt: does it to a root. shows: what `show two` has to name, or "" if it has nothing to say. verifies: whether
    verify finds the second checkpoint intact. lists: whether ls says that all is well. episode: the same of `episode`.
    """

    hurt: Callable[[Path], object]
    shows: str = ""
    verifies: bool = False
    lists: bool = False
    episode: bool = True


def records(who: object, checkpoint: str = "two") -> str:
    return f"{copy_of_part(who, checkpoint)}/records-*.gck"  # type: ignore[arg-type]


def index(path: Path) -> Path:
    """Flip a bit of a records file's index."""
    return flip(path, path.stat().st_size - 90)


def odd_directories(root: Path) -> None:
    for name in (".deleted-gone", ".aside-half", "strange\x1b[2J", "not ours", "empty"):
        (root / "checkpoints" / name).mkdir()
    (root / "checkpoints" / "file").touch()
    (root / "checkpoints" / os.fsdecode(b"\xff\xfe")).mkdir()
    make_checkpoint(CheckpointRoot(str(root)), "three", published=False)


def link(path: Path) -> None:
    """The file is a link now, to what it was."""
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def intact(hurt: Callable[[Path], object]) -> Damage:
    """What costs nothing."""
    return Damage(hurt, verifies=True, lists=True)


def lose(*patterns: str) -> Callable[[Path], None]:
    """Remove these files of the second checkpoint."""

    def hurt(root: Path) -> None:
        for pattern in patterns:
            only(root / TWO, pattern).unlink()

    return hurt


DAMAGES = {
    "nothing": intact(lambda root: None),
    "LATEST lost": intact(lambda root: os.remove(root / "LATEST")),
    "LATEST garbage": intact(lambda root: (root / "LATEST").write_bytes(b"\x1b[2J\xff" * 9)),
    "odd directories": intact(odd_directories),
    "its sequence entry flipped": Damage(lambda root: flip(root / "sequence/000000000003", 9), "sequence/"),
    "its sequence entry lost": Damage(
        lambda root: (root / "sequence/000000000003").unlink(), verifies=True, lists=True
    ),
    "a claim cut short": Damage(lambda root: cut_short(root / "sequence/000000000001"), verifies=True),
    "a number far beyond the sequence": Damage(
        lambda root: (root / "sequence/999999999999").write_bytes(b""), "sequence/999999999999"
    ),
    "checkpoint.json flipped": Damage(lambda root: flip(root / TWO / "checkpoint.json"), "two/checkpoint.json"),
    "checkpoint.json empty": Damage(
        lambda root: cut_short(root / TWO / "checkpoint.json", left=0), "two/checkpoint.json"
    ),
    "checkpoint.json lost": Damage(lose("checkpoint.json"), "two/checkpoint.json"),
    "checkpoint.json a directory": Damage(
        lambda root: (os.remove(root / TWO / "checkpoint.json"), os.mkdir(root / TWO / "checkpoint.json")),  # type: ignore[func-returns-value]
        "two/checkpoint.json",
    ),
    "checkpoint.json a link": Damage(lambda root: link(root / TWO / "checkpoint.json"), "two/checkpoint.json"),
    "intent lost": intact(lambda root: os.remove(root / TWO / "intent.json")),
    "intent flipped": Damage(lambda root: flip(root / TWO / "intent.json", 3), "two/intent.json", verifies=True),
    "no manifest and no intent": Damage(lose("checkpoint.json", "intent.json"), "intent.json"),
    "the lists flipped": Damage(lambda root: flip(only(root, f"{TWO}/episodes-*.json")), "episodes-", episode=False),
    "the lists lost": Damage(lose("episodes-*.json"), "episodes-", episode=False),
    "no manifest and no lists": Damage(lose("checkpoint.json", "episodes-*.json"), "episodes-", episode=False),
    "a part's manifest flipped": Damage(
        lambda root: flip(root / copy_of_part(AGENT, "two") / "manifest.json"), "agent/0/manifest.json"
    ),
    "a part's manifest lost": Damage(
        lambda root: os.remove(root / copy_of_part(AGENT, "two") / "manifest.json"), "agent/0/manifest.json"
    ),
    "a part's directory lost": Damage(
        lambda root: shutil.rmtree(root / copy_of_part(AGENT, "two")), "agent/0/manifest.json", episode=False
    ),
    "records cut short": Damage(lambda root: cut_short(only(root, records(AGENT))), "records-", episode=False),
    "records empty": Damage(lambda root: cut_short(only(root, records(AGENT)), left=0), "records-", episode=False),
    "records lost": Damage(lambda root: os.remove(only(root, records(AGENT))), "records-", episode=False),
    "records with a flipped index": Damage(lambda root: index(only(root, records(AGENT))), lists=True, episode=False),
    "records with a flipped header": Damage(
        lambda root: flip(only(root, records(AGENT)), 2), lists=True, episode=False
    ),
    "a record of another rollout flipped": Damage(
        lambda root: flip_payload(CheckpointRoot(str(root)), "two", AGENT.place, ROLLOUTS[5]), lists=True
    ),
    "its record flipped": Damage(
        lambda root: flip_payload(CheckpointRoot(str(root)), "two", AGENT.place, ROLLOUTS[3]), lists=True, episode=False
    ),
    "its records replaced by another's": Damage(
        lambda root: shutil.copy(only(root, records(COUNTER)), only(root, records(MAIL))), "records-", episode=False
    ),
    "a document flipped": Damage(
        lambda root: flip(only(root, f"{copy_of_part(POLICY, 'two')}/staging_keys-*.json")), lists=True
    ),
    "a document lost": Damage(
        lambda root: os.remove(only(root, f"{copy_of_part(POLICY, 'two')}/staging_keys-*.json")), "staging_keys-"
    ),
    "the file of its base lost": Damage(
        lambda root: os.remove(only(root, records(ENVIRONMENT, "one"))), "one/participants/environment", episode=False
    ),
    "the base deleted": Damage(lambda root: shutil.rmtree(root / "checkpoints/one"), "one/participants", episode=False),
    "its directory lost": Damage(lambda root: shutil.rmtree(root / TWO), "two/checkpoint.json", episode=False),
    "all of it garbage": Damage(
        lambda root: [cut_short(path, left=0) for path in (root / TWO).rglob("*") if path.is_file()],
        "two/checkpoint.json",
        episode=False,
    ),
}

COMMANDS: dict[str, list[str]] = {
    "ls": ["ls"],
    "ls all": ["ls", "--all"],
    "show": ["show", "two"],
    "show latest": ["show"],
    "show one": ["show", "one"],
    "episode": ["episode", ROLLOUT, "--checkpoint", "two"],
    "episode raw": ["episode", ROLLOUT, "--raw"],
    "episode full": ["episode", ROLLOUT, "--full", "--attempt", "0"],
    "verify": ["verify", "two"],
    "verify all": ["verify", "--all"],
    "diff": ["diff", "one", "two", "--rollouts"],
    "diff itself": ["diff", "two", "two"],
}


@pytest.fixture(params=DAMAGES)
def hurt(request: pytest.FixtureRequest, pristine: Path, tmp_path: Path, unsynced: None) -> tuple[Damage, Path]:
    """A kind of damage, and a root that has it."""
    damage = DAMAGES[request.param]
    root = tmp_path / "root"
    shutil.copytree(pristine, root)
    damage.hurt(root)
    return damage, root


def run(root: Path, *arguments: str) -> Result:
    """Run a command; sees that it answered, and that nothing in its answer commands a terminal."""
    result = CliRunner().invoke(app, [*arguments, "--root", str(root)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    for text in (result.stdout, result.stderr):
        assert "Traceback" not in text
        odd = {char for char in text if not char.isprintable() and char != "\n"}
        assert not odd, f"{odd} in {text!r}"
    if "--json" in arguments and result.exit_code != 2:
        assert isinstance(json.loads(result.stdout), dict)
    return result


def test_every_command_answers(hurt: tuple[Damage, Path]) -> None:
    """Exit 0, 1 or 2, on standard output something for people or one JSON object; the root is as it was."""
    _, root = hurt
    before = tree(root)
    for name, arguments in COMMANDS.items():
        for more in ([], ["--json"]) if name in ("ls", "show", "episode", "verify all", "diff") else ([],):
            result = run(root, *arguments, *more)
            assert result.exit_code in (0, 1, 2), name
            assert (result.exit_code == 2) == (not result.stdout), f"{name}: {result.output}"
    assert tree(root) == before


def test_show_names_what_cannot_be_read(hurt: tuple[Damage, Path]) -> None:
    damage, root = hurt
    result, told = run(root, "show", "two"), run(root, "show", "two", "--json")
    assert result.exit_code == told.exit_code
    if damage.shows:
        assert result.exit_code == 1
        assert damage.shows in result.stdout
        assert any(damage.shows in f"{each['file']} {each['message']}" for each in json.loads(told.stdout)["problems"])
    else:
        assert (result.exit_code, json.loads(told.stdout)["problems"]) == (0, [])


def test_verify_and_ls_and_episode_exit_as_they_find(hurt: tuple[Damage, Path]) -> None:
    damage, root = hurt
    verified = run(root, "verify", "two")
    assert verified.exit_code == (0 if damage.verifies else 1), verified.output
    listed = run(root, "ls")
    assert listed.exit_code == (0 if damage.lists else 1), listed.output
    found = run(root, "episode", ROLLOUT, "--checkpoint", "two")
    assert found.exit_code == (0 if damage.episode else 1), found.output


@pytest.mark.behaviour("C184")
def test_salvage_makes_a_root_that_is_whole_or_says_why_not(hurt: tuple[Damage, Path], tmp_path: Path) -> None:
    """What it publishes verifies and is listed; what it refuses has a reason. The source is as it was."""
    _, root = hurt
    before = tree(root)
    result = run(root, "salvage", "two", "--to", str(tmp_path / "new"), "--json")
    assert tree(root) == before
    assert result.exit_code in (0, 1)
    told = json.loads(result.stdout)
    new = tmp_path / "new"
    if told["restorable"]:
        assert run(new, "verify").exit_code == 0
        assert json.loads(run(new, "ls", "--json").stdout)["published"][0]["continued"] == len(told["continued"])
    else:
        assert told["refused"]
        assert result.exit_code == 1
        assert json.loads(run(new, "ls", "--json").stdout)["published"] == []
    text = run(root, "salvage", "two", "--to", str(tmp_path / "again"))
    assert text.exit_code == result.exit_code
    for lost in told["lost"][:20]:
        assert lost["participant"] in text.stdout
    assert run(root, "salvage", "two", "--to", str(new)).exit_code == 2, "a root that is there is left alone"


@pytest.mark.parametrize(
    "arguments",
    [["show"], ["verify"], ["verify", "latest"], ["episode", ROLLOUT], ["diff", "one"], ["salvage"]],
    ids=" ".join,
)
def test_the_newest_one_may_not_be_the_newest(pristine: Path, tmp_path: Path, arguments: list[str]) -> None:
    """Where a later publication cannot be read, the answer is about an older checkpoint: it is no clean one."""
    root = tmp_path / "root"
    shutil.copytree(pristine, root)
    flip(root / "sequence/000000000003", 9)
    for more in ([], ["--json"]):
        to = ["--to", str(tmp_path / f"new{more}")] if arguments == ["salvage"] else []
        result = run(root, *arguments, *to, *more)
        assert result.exit_code == 1
        assert "sequence/000000000003" in result.stdout
        assert "one" in result.stdout


@pytest.mark.parametrize("path", ["sequence", "checkpoints", TWO, f"{TWO}/checkpoint.json", "pins", "holds", "LATEST"])
def test_what_may_not_be_read(pristine: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory or file of somebody else's, and all below it."""
    forbidden = str(pristine / path)
    for name in ("open", "names", "is_dir", "exists"):
        monkeypatch.setattr(LocalFiles, name, _refusing(getattr(LocalFiles, name), forbidden))
    for name, arguments in COMMANDS.items():
        result = run(pristine, *arguments)
        assert result.exit_code in (0, 1, 2), name
        assert (result.exit_code == 2) == (not result.stdout), f"{name}: {result.output}"
    assert run(pristine, "ls").exit_code == (0 if path == "LATEST" else 1)


def _refusing(original: Callable[..., object], forbidden: str) -> Callable[..., object]:
    def refuse(self: LocalFiles, path: str) -> object:
        if path == forbidden or path.startswith(f"{forbidden}/"):
            raise StateCorrupt(f"cannot read {path!r}: Permission denied (EACCES)")
        return original(self, path)

    return refuse


@pytest.mark.parametrize("name", COMMANDS)
def test_there_is_no_root(tmp_path: Path, name: str) -> None:
    """A usage error, on standard error, and nothing is made."""
    for more in ([], ["--json"]):
        result = run(tmp_path / "nowhere", *COMMANDS[name], *more)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "nowhere" in result.stderr
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_root_is_empty(tmp_path: Path, name: str) -> None:
    result = run(tmp_path, *COMMANDS[name])
    assert result.exit_code == (2 if COMMANDS[name][0] != "ls" and name != "verify all" else 0), result.output
