"""State hooks refuse by name what they cannot keep or restore; which servers have hooks, and the peculiar ones."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field, PrivateAttr
from resources_servers.blackjack.app import BlackjackEnv
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer
from resources_servers.gymnasium import GymnasiumServer

from gym_ckpt_grpc.control.ports import HookFailed, InvalidState
from gym_ckpt_grpc.integrations.nemo_gym import hooks
from gym_ckpt_grpc.integrations.nemo_gym.hooks import hooks_for
from gym_ckpt_grpc.integrations.nemo_gym.hooks.gymnasium import GymnasiumHooks
from gym_ckpt_grpc.integrations.nemo_gym.hooks.known import KNOWN, Known
from gym_ckpt_grpc.participants import RestoredState
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import decode, encode
from tests.nemo_gym.released import Deployed, rows

COUNTER = ("example_session_state_mgmt", "StatefulCounterResourcesServer")
MCP_WEATHER = ("example_mcp_weather", "ExampleMCPWeatherResourcesServer")
WEATHER = ("example_single_tool_call", "SimpleWeatherResourcesServer")
WORKPLACE = ("workplace_assistant", "WorkbenchResourcesServer")
MULTI_TURN = ("example_multi_turn_gymnasium", "ExampleMultiTurnEnv")
BLACKJACK = ("blackjack", "BlackjackEnv")
WORDLE = ("wordle", "WordleResourcesServer")
INJECTION = ("indirect_prompt_injection", "IPIResourcesServer")
ALL = [COUNTER, MCP_WEATHER, WEATHER, WORKPLACE, MULTI_TURN, BLACKJACK, WORDLE, INJECTION]

BOUND = {
    "resources_session_id": "rs-1",
    "episode_id": {"rollout_id": "task-1", "attempt": 0},
    "task_id": {"taskset": "t", "task_id": "1"},
}


def _game() -> Any:
    from resources_servers.wordle.app import WordleGameState

    return WordleGameState("crane", 5, 6, turn=1, known_greens={2: "a"}, known_yellows={"c"})


FILL: dict[tuple[str, str], Callable[[Any], None]] = {
    COUNTER: lambda server: server.session_id_to_counter.update(s1=3),
    MCP_WEATHER: lambda server: server.session_id_to_state.update(
        s1={"expected_city": "Paris", "weather_calls": [{"city": "Oslo", "weather": "w"}]}
    ),
    MULTI_TURN: lambda server: server.session_turns.update(s1=2),
    BLACKJACK: lambda server: server.session_state.update(
        s1={"player": ["2", "K"], "dealer": ["A", "10"], "rng": random.Random(1)}
    ),
    WORDLE: lambda server: server.session_state.update(s1=_game()),
    INJECTION: lambda server: server.session_id_to_env.update(s1={"inbox": [{"from": "a"}]}),
}


async def _good(deployed: Deployed, which: tuple[str, str]) -> Any:
    """A state that the hooks of a server gave."""
    if which == WORKPLACE:
        deployed.client().ask("/seed_session", rows("workplace_assistant")[0])
        [session_id] = list(deployed.server.session_id_to_tool_env)
        return await deployed.state_of(session_id)
    if which == WEATHER:
        return dict(BOUND)
    FILL[which](deployed.server)
    return await deployed.state_of("s1")


def _changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    at = state
    for step in path[:-1]:
        at = at[step]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return state


@pytest.mark.parametrize(
    ("which", "path", "value", "told"),
    [
        (COUNTER, ("session_id_to_counter",), True, "session_id_to_counter is True, not an integer"),
        (COUNTER, ("session_id_to_counter",), 1.0, "session_id_to_counter is 1.0, not an integer"),
        (COUNTER, ("more",), 1, "unknown fields: more"),
        (COUNTER, ("session_id_to_counter",), KeyError, "lacks session_id_to_counter"),
        (MCP_WEATHER, ("session_id_to_state", "city"), "x", "session_id_to_state has unknown fields: city"),
        (
            MCP_WEATHER,
            ("session_id_to_state", "weather_calls", 0, "city"),
            1,
            "session_id_to_state.weather_calls[0].city",
        ),
        (MCP_WEATHER, ("session_id_to_state", "weather_calls", 0, "city"), KeyError, ".weather_calls[0] lacks city"),
        (MCP_WEATHER, ("session_id_to_state",), [], "session_id_to_state is list, not an object"),
        (WEATHER, ("episode_id", "attempt"), -1, "episode_id cannot be read"),
        (WEATHER, ("episode_id", "rollout_id"), 5, "episode_id cannot be read"),
        (WEATHER, ("task_id",), None, "task_id cannot be read"),
        (WEATHER, ("resources_session_id",), None, "resources_session_id is None"),
        (WORKPLACE, ("tables", "email._emails"), KeyError, "lacks email._emails"),
        (WORKPLACE, ("tables", "email._emails", "columns", 0, "values", 3), 7, "email._emails['email_id'] has values"),
        (WORKPLACE, ("tables", "email._emails", "labels", "values", 0), "id", "email._emails has not the columns"),
        (WORKPLACE, ("tables", "analytics._plots_data", "index"), {}, "analytics._plots_data.index is no index"),
        (MULTI_TURN, ("session_turns",), -1, "session_turns is -1, not a count"),
        (BLACKJACK, ("session_state", "player", 1), "1", "session_state.player[1] is '1', not a card"),
        (BLACKJACK, ("session_state", "dealer"), [], "session_state.dealer is no hand"),
        (BLACKJACK, ("session_state", "rng"), 5, "session_state.rng is no generator"),
        (BLACKJACK, ("session_state", "rng", "version"), 2, "session_state.rng.version is 2"),
        (BLACKJACK, ("session_state", "rng", "internal", 9), "x", "session_state.rng.internal has words out of range"),
        (WORDLE, ("session_state", "fields", "turn"), "1", "session_state.turn is no int"),
        (WORDLE, ("session_state", "fields", "turn"), KeyError, "session_state lacks turn"),
        (WORDLE, ("session_state",), {}, "session_state is dict, not a game"),
        (INJECTION, ("session_id_to_env",), [], "session_id_to_env is list, not an object"),
    ],
)
async def test_a_bad_record_is_refused_by_name_and_nothing_is_installed(
    which: tuple[str, str], path: tuple[Any, ...], value: Any, told: str
) -> None:
    deployed, source = Deployed(*which), Deployed(*which)
    good = encode(await _good(source, which))
    bad = _changed(decode(good), path, value)
    sessions = [
        RestoredState("good", EpisodeId("task-1", 1), decode(good)),
        RestoredState("bad", EpisodeId("task-2", 1), bad),
    ]
    with pytest.raises(InvalidState) as refused:
        await deployed.hooks.restore_sessions(sessions)
    assert str(refused.value).startswith("session bad: ")
    assert told in str(refused.value)
    assert refused.value.episode == EpisodeId("task-2", 1)
    for name in deployed.hooks.tables:
        assert dict(getattr(deployed.server, name)) == {}
    await deployed.hooks.restore_sessions(sessions[:1])
    assert any(getattr(deployed.server, name) for name in deployed.hooks.tables)


@pytest.mark.parametrize("state", [None, 5, [], {}, "text", b"bytes"])
@pytest.mark.parametrize("which", ALL, ids=lambda which: which[0])
async def test_what_is_no_state_at_all_is_refused(which: tuple[str, str], state: Any) -> None:
    deployed = Deployed(*which)
    with pytest.raises(InvalidState, match="session s1: "):
        await deployed.restore("s1", state)


async def test_what_cannot_be_exported_is_told_by_session_and_place() -> None:
    deployed = Deployed(*INJECTION)
    deployed.server.session_id_to_env["s1"] = {"inbox": [{"at": object()}]}
    with pytest.raises(HookFailed, match=r"session s1: session_id_to_env\.inbox\[0\]\.at is of type builtins\.object"):
        await deployed.hooks.export_sessions(["s1"])


async def test_a_table_that_tools_do_not_have_is_not_lost_silently() -> None:
    deployed = Deployed(*WORKPLACE)
    deployed.client().ask("/seed_session", rows("workplace_assistant")[0])
    [(session_id, environment)] = deployed.server.session_id_to_tool_env.items()
    environment["containers"]["email"]._drafts = []
    with pytest.raises(HookFailed, match=f"session {session_id}: email has unknown fields: _drafts"):
        await deployed.hooks.export_sessions([session_id])


@pytest.mark.parametrize("which", [each for each in ALL if each in FILL], ids=lambda which: which[0])
async def test_what_was_exported_does_not_change_with_the_session(which: tuple[str, str]) -> None:
    deployed = Deployed(*which)
    FILL[which](deployed.server)
    states = await deployed.hooks.export_sessions(["s1"])
    taken = encode(states)
    [name] = deployed.hooks.tables
    entry = getattr(deployed.server, name)["s1"]
    if which == BLACKJACK:
        entry["player"].append("3")
        entry["rng"].random()
    elif which == WORDLE:
        entry.guesses.append("crane")
        entry.known_greens[0] = "c"
    elif isinstance(entry, dict):
        next(each for each in entry.values() if isinstance(each, list))[0].clear()
    getattr(deployed.server, name).pop("s1")
    assert encode(states) == taken


async def test_a_session_met_in_a_tool_call_has_no_city_again() -> None:
    deployed, other = Deployed(*MCP_WEATHER), Deployed(*MCP_WEATHER)
    deployed.client().ask("/get_weather", {"city": "Paris"})
    [(session_id, entry)] = deployed.server.session_id_to_state.items()
    await other.restore(session_id, await deployed.state_of(session_id))
    assert other.server.session_id_to_state == {session_id: entry}
    assert "expected_city" not in entry


# ---- the weather server that knows a session by its seed


def _typed_seed(deployed: Deployed) -> Any:
    seed = {**BOUND, "task_data": {}}
    assert deployed.client().ask("/seed_session", seed)[0] == 200
    deployed.hooks.seeded("cookie-1", {"resources_session_id": "rs-1"})
    return seed


async def test_a_typed_session_is_restored_as_the_next_attempt() -> None:
    live, restored, lost = (Deployed(*WEATHER) for _ in range(3))
    seed = _typed_seed(live)
    assert live.hooks.seed_fields == ("resources_session_id",)
    state = await live.state_of("cookie-1")
    await restored.restore("cookie-1", state)
    client, later = restored.client(), {**seed, "episode_id": {"rollout_id": "task-1", "attempt": 1}}
    assert client.ask("/seed_session", seed)[0] == 500  # the attempt before is not bound here
    assert client.ask("/seed_session", later)[0] == 200
    close = {"resources_session_id": "rs-1", "episode_id": later["episode_id"]}
    assert client.ask("/close_session", close)[0] == 200
    # Without its session a stranger's seed would take the place.
    stranger = {**seed, "episode_id": {"rollout_id": "task-9", "attempt": 0}}
    assert lost.client().ask("/seed_session", stranger)[0] == 200
    await restored.hooks.retire_session("cookie-1")
    assert live.client().ask("/seed_session", stranger)[0] == 500


async def test_a_participant_tells_the_hooks_of_each_seed() -> None:
    from resources_servers.example_single_tool_call.app import SimpleWeatherResourcesServer

    from tests.nemo_gym.servers import Participant, client_of, options

    participant = Participant(SimpleWeatherResourcesServer, given=options(instance="weather"))
    async with client_of(participant.app) as client:
        assert (await client.post("/seed_session", json={**BOUND, "task_data": {}})).status_code == 200
    [(session_id, episode)] = participant.sessions().items()
    assert episode == "task-1"
    exported = await participant.owner._state.hooks.export_sessions([session_id])  # type: ignore[union-attr]
    assert exported == {session_id: BOUND}


async def test_an_untyped_seed_may_have_anything_for_an_id() -> None:
    """The server takes it; so do the hooks."""
    from resources_servers.example_single_tool_call.app import SimpleWeatherResourcesServer

    from tests.nemo_gym.servers import Participant, client_of, options

    participant = Participant(SimpleWeatherResourcesServer, given=options(instance="weather"))
    row = {**rows("example_single_tool_call")[0], "_ng_rollout_id": "task-2", "resources_session_id": {"no": "text"}}
    async with client_of(participant.app) as client:
        assert (await client.post("/seed_session", json=row)).status_code == 200
    assert list(participant.sessions().values()) == ["task-2"]


async def test_a_session_of_an_older_client_has_nothing_but_exists() -> None:
    live, restored = Deployed(*WEATHER), Deployed(*WEATHER)
    live.client().ask("/seed_session", rows("example_single_tool_call")[0])
    live.hooks.seeded("cookie-1", {})
    await restored.restore("cookie-1", await live.state_of("cookie-1"))
    assert restored.server._session_episodes == {}
    await restored.hooks.retire_session("cookie-1")


async def test_retire_frees_the_session_of_a_seed() -> None:
    live = Deployed(*WEATHER)
    _typed_seed(live)
    await live.hooks.retire_session("cookie-1")
    await live.hooks.retire_session("cookie-1")
    assert live.server._session_episodes == {}


async def test_sessions_that_the_server_closed_are_not_remembered_for_ever() -> None:
    live = Deployed(*WEATHER)
    client = live.client()
    for at in range(120):
        seed = {**BOUND, "resources_session_id": f"rs-{at}", "task_data": {}}
        client.ask("/seed_session", seed)
        live.hooks.seeded(f"cookie-{at}", seed)
        client.ask("/close_session", {name: seed[name] for name in ("resources_session_id", "episode_id")})
    assert len(live.hooks._ids) < 100


# ---- a user's own server


class Maze(GymnasiumServer):  # type: ignore[misc, unused-ignore]
    """Keeps what plain values do not cover, and one object in two places."""

    ray_enabled: ClassVar[bool | None] = False
    freed: list[Any] = Field(default_factory=list)

    async def step(self, action: Any, metadata: Any, session_id: Any = None) -> Any:
        raise NotImplementedError

    def _cleanup_session(self, session_id: Any) -> None:
        self.freed.append(session_id)
        super()._cleanup_session(session_id)


def _maze() -> Any:
    base = Deployed(*BLACKJACK).server
    return Maze(config=base.config, server_client=base.server_client)


async def test_a_servers_own_session_state_is_kept_by_the_named_hooks() -> None:
    ours, theirs = _maze(), _maze()
    here = [0, 0]
    rng = random.Random(2)
    ours.session_state["s1"] = {"at": here, "walls": {(0, 1), (1, 1)}, "path": [here], 3: "x", "rng": rng}
    states = await GymnasiumHooks(ours).export_sessions(["s1", "gone"])
    assert list(states) == ["s1"]
    await GymnasiumHooks(theirs).restore_sessions(
        [RestoredState("s1", EpisodeId("task-1", 1), decode(encode(states["s1"])))]
    )
    entry = theirs.session_state["s1"]
    assert {**entry, "rng": None} == {**ours.session_state["s1"], "rng": None}
    assert entry["path"][0] is entry["at"]
    assert entry["rng"].random() == rng.random()
    await GymnasiumHooks(theirs).retire_session("s1")
    assert theirs.session_state == {}
    assert theirs.freed == ["s1"]


def test_nobody_knows_what_a_users_own_server_keeps() -> None:
    assert hooks_for(_maze()) is None


# ---- which servers have hooks


@pytest.mark.parametrize("which", ALL, ids=lambda which: which[0])
def test_released_servers_have_hooks(which: tuple[str, str]) -> None:
    deployed = Deployed(*which)
    assert type(deployed.hooks).__module__.startswith(hooks.__name__)


def test_every_known_server_is_tested() -> None:
    assert {f"resources_servers.{directory}.app:{name}" for directory, name in ALL} == set(KNOWN)


class Same(StatefulCounterResourcesServer):  # type: ignore[misc, unused-ignore]
    def setup_webserver(self) -> Any:
        return super().setup_webserver()


class More(StatefulCounterResourcesServer):  # type: ignore[misc, unused-ignore]
    names: dict[str, str] = Field(default_factory=dict)


class Hidden(BlackjackEnv):  # type: ignore[misc, unused-ignore]
    _bets: dict[str, int] = PrivateAttr(default_factory=dict)


def test_a_subclass_that_keeps_no_more_has_the_hooks_of_the_released_class() -> None:
    base = Deployed(*COUNTER).server
    assert hooks_for(Same(config=base.config, server_client=base.server_client)) is not None


@pytest.mark.parametrize(("cls", "which", "name"), [(More, COUNTER, "names"), (Hidden, BLACKJACK, "_bets")])
def test_a_subclass_that_keeps_more_has_none(
    cls: Any, which: tuple[str, str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = Deployed(*which).server
    assert hooks_for(cls(config=base.config, server_client=base.server_client)) is None
    assert f"{cls.__name__} also has {name}" in caplog.text


def test_a_changed_source_has_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    place = "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"
    known = KNOWN[place]
    other = Known(known.module, known.name, {"example_session_state_mgmt": {"app.py": "0" * 64}})
    monkeypatch.setattr(hooks, "KNOWN", {**KNOWN, place: other})
    base = Deployed(*COUNTER)
    assert base.hooks is None
    assert str(Path("example_session_state_mgmt") / "app.py") in caplog.text


def test_nothing_of_the_framework_is_imported_before_a_server_is_asked_for() -> None:
    program = (
        "import sys; from gym_ckpt_grpc.integrations.nemo_gym.hooks import hooks_for; hooks_for(object());"
        "print(*({'nemo_gym', 'resources_servers', 'pandas', 'numpy', 'fastapi', 'pydantic'} & sys.modules.keys()))"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == ""
