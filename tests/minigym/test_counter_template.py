"""The counter server is the template for authors: what it must know of checkpoints, and nothing more."""

from __future__ import annotations

import ast
import inspect

import pytest

from gym_ckpt_grpc.minigym import counter_server, resources_server
from gym_ckpt_grpc.minigym.counter_server import CounterServer
from gym_ckpt_grpc.participants import RestoredState
from gym_ckpt_grpc.protocol import EpisodeId

HOOKS = {"export_sessions", "restore_sessions", "retire_session"}
DECLARATIONS = {"checkpoint_mode", "checkpoint_verify"}
ROUTES = {"open", "call", "judge", "close"}
ABOUT_CHECKPOINTS = ("checkpoint", "restore", "export", "resume", "admission", "gymckpt", "grpc.control")


@pytest.mark.behaviour("P323")
def test_it_has_no_line_about_checkpoints_beyond_hooks_and_declarations() -> None:
    """Its methods are the tools' own and the hooks; outside hooks and declarations nothing speaks of checkpoints."""
    [server] = [n for n in ast.parse(inspect.getsource(counter_server)).body if isinstance(n, ast.ClassDef)]
    methods = {n.name: n for n in server.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert set(methods) - {"__init__"} - ROUTES <= HOOKS
    for name in {"__init__", *ROUTES}:
        assert not [word for word in ABOUT_CHECKPOINTS if word in ast.unparse(methods[name]).lower()], name
    declared = {t.id for n in server.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    assert {name for name in declared if "checkpoint" in name} == DECLARATIONS
    routes = inspect.getsource(resources_server.ResourcesServer.build_app)
    assert not [word for word in ABOUT_CHECKPOINTS if word in routes.lower()]


@pytest.mark.behaviour("P323")
async def test_the_count_continues_after_a_restore() -> None:
    """What one server exported, another goes on from; a bad session among many installs none."""
    first, second = CounterServer(), CounterServer()
    first.open("s", {"target": 10})
    first.call("s", "increment", {"by": 4})
    state = (await first.export_sessions(["s"]))["s"]
    with pytest.raises(ValueError, match="count"):
        await second.restore_sessions(
            [
                RestoredState("s", EpisodeId("r", 1), state),
                RestoredState("t", EpisodeId("q", 1), {**state, "count": -1}),
            ]
        )
    await second.restore_sessions([RestoredState("s", EpisodeId("r", 1), state)])
    assert second.call("s", "increment", {"by": 1}) == {"count": 5}
    assert second.judge("s", {"target": 10})[0] == 0.5
