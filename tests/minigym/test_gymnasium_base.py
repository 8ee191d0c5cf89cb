"""The Gymnasium base: sessions begin at reset and end at the last step; a subclass says whether they are exported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.control.ports import InvalidState
from gym_ckpt_grpc.minigym.frozen_lake_server import ACTIONS, MAX_STEPS, FrozenLakeServer
from gym_ckpt_grpc.minigym.gymnasium_base import GymnasiumServer, Step
from gym_ckpt_grpc.minigym.resources_server import install
from gym_ckpt_grpc.participants import ResourcesMode, RestoredState, VerifyMode
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from tests.minigym.gated import Gated, Message, life, play, plays
from tests.participants.fakes import R1, R, S, close, exported, reopen, retire

SETUP = {"left": 4}


class Countdown(GymnasiumServer[dict[str, Any]]):
    """Counts down; each step pays a tenth of its action. Truncated at an action of 9. shut_down: states freed."""

    name = "countdown"
    tools = ()

    def __init__(self) -> None:
        super().__init__()
        self.shut_down: list[dict[str, Any]] = []

    def reset(self, setup: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        return {"left": setup["left"], "seen": []}, setup["left"]

    def step(self, state: dict[str, Any], action: Any) -> Step:
        if type(action) is not int:
            raise ValueError(f"action is {action!r}")
        state["left"] -= 1
        state["seen"].append(action)
        return Step(state["left"], action / 10, terminated=state["left"] == 0, truncated=action == 9)

    def shut(self, state: dict[str, Any]) -> None:
        self.shut_down.append(state)


class Exported(Countdown):
    """The same, exported."""

    checkpoint_mode = ResourcesMode.EXPORTED
    checkpoint_verify = VerifyMode.REPLAY


async def reset(gated: Gated, session: str = "k", episode: Any = R, left: int = 4) -> Any:
    answer = await gated.post("/reset", {"left": left}, session=session, episode=episode)
    assert answer.status == 200, answer.body
    return answer


def stepped(*actions: int) -> list[tuple[str, dict[str, Any]]]:
    return [("step", {"action": action}) for action in actions]


@pytest.mark.behaviour("P327")
async def test_the_shared_setup_installs_the_owner_once() -> None:
    """With what the class states; what a parent states is not inherited."""
    server = Countdown()
    owner = install(server)
    assert (install(server), server.owner) == (owner, owner)
    assert (owner.settings.mode, owner.settings.verify) == (ResourcesMode.RESTART_ONLY, VerifyMode.WAIT)
    assert install(Exported()).settings.mode is ResourcesMode.EXPORTED


@pytest.mark.behaviour("P327")
async def test_it_is_restart_only_by_default_and_steps_run_while_closed() -> None:
    gated, messages = Gated(Countdown()), list[Message]()
    seeded = await reset(gated)
    assert (seeded.headers["x-gymckpt-restart"], seeded.json()["observation"]) == ("1", 4)
    await close(gated.owner)
    held = gated.call("/reset", SETUP, session="m", episode=S)
    await play(gated, stepped(1, 2), messages)
    assert (len(messages), gated.owner.is_ready(), gated.owner.report(9).restarts) == (2, True, (R,))
    assert (await exported(gated.owner), held.answer.status) == ([], 0)
    await reopen(gated.owner)
    assert (await held.end()).status == 200
    assert gated.owner.report(9).restarts == (R, S)


@pytest.mark.behaviour("P327")
async def test_an_exported_subclass_continues_to_the_same_reward(tmp_path: Path) -> None:
    twin, told, messages = Gated(Exported()), list[Message](), list[Message]()
    await reset(twin)
    await play(twin, stepped(1, 2, 3, 1), told)
    expected = (await twin.post("/verify", {"messages": told})).json()
    async with life(Exported(), tmp_path) as (gated, client):
        await reset(gated)
        await play(gated, stepped(1, 2), messages)
        await client.prepare("c")
        assert (await client.commit("c", [R])).record_count == 1
    async with life(Exported(), tmp_path) as (gated, client):
        await client.restore("r", [R], source="c")
        await client.resume("r")
        await play(gated, stepped(3, 1), messages)
        assert ((await gated.post("/verify", {"messages": messages})).json(), messages) == (expected, told)
        assert expected["reward"] == pytest.approx(0.7)


@pytest.mark.behaviour("P327")
@pytest.mark.parametrize("actions", [(1, 1, 1, 1), (1, 9)], ids=["terminated", "truncated"])
@pytest.mark.parametrize("kind", [Countdown, Exported])
async def test_an_ended_session_is_untracked(kind: type[Countdown], actions: tuple[int, ...]) -> None:
    server = kind()
    gated, messages = Gated(server), list[Message]()
    await reset(gated)
    await play(gated, stepped(*actions[:-1]), messages)
    assert gated.tracked == 1
    await play(gated, stepped(actions[-1]), messages)
    assert (gated.tracked, gated.owner.report(9).restarts, len(server.shut_down)) == (0, (), 1)
    assert (await gated.checkpoint(), (await gated.post("/step", {"action": 1})).status) == ([], 404)
    assert (await reset(gated)).json()["observation"] == 4
    assert gated.tracked == 1


@pytest.mark.behaviour("P327")
async def test_a_replayed_verify_of_a_game_that_goes_on_frees_nothing_that_is_exported() -> None:
    gated = Gated(Exported())
    await reset(gated)
    await close(gated.owner)
    assert (await gated.post("/verify", {"messages": []})).json()["reward"] == 0
    assert [each.decode("state") for each in await exported(gated.owner)] == [{"left": 4, "seen": []}]
    await reopen(gated.owner)
    await gated.post("/close_session")
    assert gated.server.states == {}  # type: ignore[attr-defined]


@pytest.mark.behaviour("P328")
async def test_one_bad_session_of_many_installs_none() -> None:
    """What was converted before it is freed."""

    class Checked(Exported):
        def decode(self, value: Any) -> dict[str, Any]:
            if value["left"] < 0:
                raise ValueError("left is negative")
            return super().decode(value)

    server, good = Checked(), {"left": 2, "seen": []}
    with pytest.raises(InvalidState, match="session bad: left is negative") as caught:
        await server.restore_sessions(
            [
                RestoredState("a", R1, good),
                RestoredState("bad", S, {"left": -1, "seen": []}),
                RestoredState("c", R1, good),
            ]
        )
    assert (caught.value.episode, server.states, server.shut_down) == (S, {}, [good])


@pytest.mark.behaviour("P328")
async def test_a_retired_session_is_freed_and_its_late_step_is_stale() -> None:
    server = Exported()
    gated = Gated(server)
    await reset(gated)
    await reset(gated, "other", S)
    await retire(gated.owner, gated.port, R)
    late = [await gated.post("/step", {"action": 1}), await reset_status(gated)]
    assert [each.code for each in late] == ["STALE_ATTEMPT", "STALE_ATTEMPT"]
    assert (set(server.states), len(server.shut_down), gated.tracked) == ({"other"}, 1, 1)


async def reset_status(gated: Gated) -> Any:
    return await gated.post("/reset", SETUP, episode=R)


@pytest.mark.behaviour("P328")
async def test_a_dropped_session_is_left_out(tmp_path: Path) -> None:
    """Named in the Commit's reply, which succeeds with the others."""
    server = Exported()
    async with life(server, tmp_path) as (gated, client):
        await reset(gated)
        await reset(gated, "other", S)
        del server.states["k"]
        await client.prepare("c")
        reply = await client.commit("c", [R, S])
        assert (reply.record_count, list(wire.episodes_from(reply.left_out))) == (1, [R])
        await client.resume("c")
        assert gated.tracked == 1


@pytest.mark.parametrize("state", [{"left": float("nan")}, {"left": (1,)}, {"left": {1: 2}}, {"left": {1}}])
async def test_state_that_is_no_json_is_not_exported(state: dict[str, Any]) -> None:
    server = Exported()
    server.states["k"] = state
    with pytest.raises(ValueError, match=r"state\.left"):
        await server.export_sessions(["k"])


async def test_what_is_exported_is_a_copy() -> None:
    server = Exported()
    server.open("k", SETUP)
    taken = (await server.export_sessions(["k"]))["k"]
    server.call("k", "step", {"action": 1})
    assert taken == {"left": 4, "seen": []}


async def test_a_bad_action_changes_nothing() -> None:
    server = Exported()
    gated = Gated(server)
    await reset(gated)
    for body in ({"action": "x"}, {}):
        assert (await gated.post("/step", body)).status == 400
    assert server.states["k"] == {"left": 4, "seen": []}


def test_a_subclass_that_does_not_restate_its_mode_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(Exported):
        pass

    with caplog.at_level(logging.WARNING):
        assert install(Forgetful()).settings.mode is ResourcesMode.RESTART_ONLY
    assert "'exported'" in caplog.messages[0]


# ---- the real environment


@pytest.mark.parametrize("seed", range(4))
def test_a_walk_on_the_lake_goes_on_like_its_twin(seed: int) -> None:
    """Cut at every step: places, slips and the end are the same."""
    twin, moving = FrozenLakeServer(), FrozenLakeServer()
    for server in (twin, moving):
        server.open("k", {"seed": seed})
    for _, arguments in plays(twin.tools, MAX_STEPS, seed):
        if "k" not in twin.states:
            break
        moving.states["k"] = moving.decode(moving.encode(moving.states["k"]))
        assert moving.call("k", "step", arguments) == twin.call("k", "step", arguments)
    assert set(moving.states) == set(twin.states) == set()


def test_a_walk_is_cut_off_at_its_limit_or_ends_before() -> None:
    server, last = FrozenLakeServer(), {}
    server.open("k", {"seed": 3})
    for number in range(MAX_STEPS):
        last = dict(server.call("k", "step", {"action": ACTIONS[number % 2 * 2]}))
        if last["done"]:
            break
    assert (last["done"], last["terminated"] != last["truncated"]) == (True, True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"place": 16}, "place is 16"),
        ({"place": True}, "place is True"),
        ({"steps": MAX_STEPS}, "steps is 8"),
        ({"version": 2}, "version is 2"),
        ({"generator": {}}, "generator is None"),
        ({"more": 1}, "exactly the fields"),
    ],
)
async def test_an_impossible_walk_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    class Broken(FrozenLakeServer):
        checkpoint_mode = ResourcesMode.EXPORTED

        def encode(self, state: Any) -> Any:
            return {**super().encode(state), **change}

    async with life(Broken(), tmp_path) as (gated, client):
        await gated.seed({"seed": 1})
        await client.prepare("c")
        await client.commit("c", [R])
    server = FrozenLakeServer()
    async with life(server, tmp_path) as (_, client):
        with pytest.raises(StateCorrupt, match=problem):
            await client.restore("r", [R], source="c")
        assert server.states == {}
