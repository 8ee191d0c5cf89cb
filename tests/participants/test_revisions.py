"""Revisions: the numbers of sessions, what is refused at start, and the audit that finds a broken promise."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from gym_ckpt_grpc.minigym.office_server import OfficeServer
from gym_ckpt_grpc.minigym.resources_server import install
from gym_ckpt_grpc.participants import (
    AgentOwner,
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
    RestoredState,
    SessionRevisions,
)
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.testing import RevisionAudit
from tests.minigym.gated import plays
from tests.participants.precopy_rig import HandPace, RevisedServer

EXPORTED = ResourcesSettings(mode=ResourcesMode.EXPORTED)
SETUP = {"seed": 3, "goal": 4}


def test_a_number_never_comes_back() -> None:
    """Not for another session, not after an end and a new beginning."""
    revisions = SessionRevisions()
    seen: set[int] = set()
    for key in ("a", "b", "a", "a", "c"):
        revisions.changed(key)
        seen.add(revisions.current()[key])
        if key == "b":
            revisions.ended("a")
            revisions.ended("never there")
    assert len(seen) == 5
    assert set(revisions.current()) == {"a", "b", "c"}


@pytest.mark.parametrize("kind", ["resources", "agent"])
@pytest.mark.parametrize("wrong", ["asynchronous", "no function"])
def test_a_hook_that_cannot_be_called_on_the_loop_stops_the_server_at_start(kind: str, wrong: str) -> None:
    async def asynchronous() -> Mapping[str, int]:
        return {}

    hooks: Any = RevisedServer()
    hooks.session_revisions = asynchronous if wrong == "asynchronous" else {"a": 1}
    make = AgentOwner if kind == "agent" else partial(ResourcesOwner, settings=EXPORTED)
    with pytest.raises(UsageError, match="session_revisions must be a plain function"):
        make(hooks)


# ---- the audit


class Faulty:
    """A server whose revisions are wrong in one way."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"k": {"n": 0}, "other": {"n": 0}}
        self.revisions: dict[str, Any] = {"k": 1, "other": 1}

    def session_revisions(self) -> Mapping[str, Any]:
        return self.revisions

    async def export_sessions(self, ids: Sequence[str]) -> Mapping[str, Any]:
        return {key: dict(self.state[key]) for key in ids if key in self.state}


def moved(server: Faulty, n: Any, revision: Any) -> None:
    server.state["k"], server.revisions["k"] = {"n": n}, revision


FAULTS: dict[str, tuple[Callable[[Faulty], object], str]] = {
    "did not move": (lambda server: moved(server, 1, 1), "session k: its state has changed, and its revision is 1"),
    "none": (lambda server: moved(server, 1, None), "session k: revision None is no integer"),
    "below 0": (lambda server: moved(server, 1, -1), "session k: revision -1 is no integer"),
    "too large": (lambda server: moved(server, 1, 2**64), "session k: revision 18446744073709551616 is no integer"),
    "lost": (lambda server: server.state.pop("k"), "session k: session_revisions knows it, export_sessions does not"),
    "no state": (lambda server: moved(server, {1}, 2), "session k: its state cannot be stored: "),
}


@pytest.mark.parametrize("fault", list(FAULTS))
async def test_the_audit_finds_it_and_names_the_session(fault: str) -> None:
    server = Faulty()
    audit = RevisionAudit(server)
    assert await audit.look() == []
    break_it, problem = FAULTS[fault]
    break_it(server)
    [found] = await audit.look()
    assert found.startswith(problem)


async def test_the_audit_finds_a_number_that_has_come_back() -> None:
    """For another state; for the very same it is no fault."""
    server = Faulty()
    audit = RevisionAudit(server)
    seen = []
    for n, revision in ((0, 1), (1, 2), (0, 1), (2, 2)):
        moved(server, n, revision)
        seen.append(await audit.look())
    assert seen[:3] == [[], [], []]
    assert seen[3] == ["session k: revision 2 has come back for another state"]


async def test_the_audit_says_nothing_of_what_changes_while_it_looks() -> None:
    server = Faulty()
    audit = RevisionAudit(server)
    await audit.look()
    whole = server.export_sessions

    async def changing(ids: Sequence[str]) -> Mapping[str, Any]:
        moved(server, 5, 6)
        return await whole(ids)

    server.export_sessions = changing  # type: ignore[method-assign]
    assert await audit.look() == []
    del server.export_sessions
    assert await audit.look() == []


# ---- the office, which has revisions


async def test_the_office_keeps_the_promise_through_every_tool() -> None:
    """Seeds, tools that succeed and fail, verify, close, restore, and beginning anew under the same id."""
    server = OfficeServer()
    audit, rng = RevisionAudit(server), random.Random(1)
    for n in range(300):
        key = rng.choice("abc")
        choice = rng.random()
        if choice < 0.1:
            server.open(key, {**SETUP, "seed": n})
        elif choice < 0.15:
            server.close(key)
        elif choice < 0.2 and key not in server.session_revisions():
            state = (await server.export_sessions(["d"])).get("d")
            await server.restore_sessions([RestoredState(key, EpisodeId("r"), state)] if state else [])
        elif key in server.session_revisions():
            [(name, arguments)] = plays(server.tools, 1, n)
            server.call(key, name, arguments)
        assert await audit.look() == [], n
    assert len(server.session_revisions()) > 0


async def test_the_office_is_encoded_ahead() -> None:
    server = OfficeServer()
    owner = install(server)
    for key in "ab":
        server.open(key, SETUP)
        owner.session_started(key, EpisodeId(f"r{key}"))
    for _ in range(2):
        await owner.precopy(HandPace())
    assert owner.status_extra()["precopied_sessions"] == "2"
    server.call("a", "log_visit", {"pages": 0})
    await owner.precopy(HandPace())
    assert owner.status_extra()["precopied_sessions"] == "1"
