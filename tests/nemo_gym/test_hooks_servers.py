"""Released servers, cut in the middle of a task: a fresh one that was restored answers as the one that went on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from gym_ckpt_grpc.integrations.nemo_gym.hooks import workplace as hooks_of_workplace
from gym_ckpt_grpc.storage import encode
from gym_ckpt_grpc.testing import RevisionAudit
from tests.nemo_gym.released import Client, Deployed, called, response, rows, said
from tests.nemo_gym.shown_table import shown_table

# What pandas says about the tools would come to the model as an error of the tool.
pytestmark = pytest.mark.filterwarnings("ignore")

Step = tuple[str, Mapping[str, Any]]

SERVERS = {
    "counter": ("example_session_state_mgmt", "StatefulCounterResourcesServer"),
    "mcp_weather": ("example_mcp_weather", "ExampleMCPWeatherResourcesServer"),
    "workplace": ("workplace_assistant", "WorkbenchResourcesServer"),
    "multi_turn": ("example_multi_turn_gymnasium", "ExampleMultiTurnEnv"),
    "blackjack": ("blackjack", "BlackjackEnv"),
    "wordle": ("wordle", "WordleResourcesServer"),
    "injection": ("indirect_prompt_injection", "IPIResourcesServer"),
}
TABLES = {
    "counter": ["session_id_to_counter"],
    "mcp_weather": ["session_id_to_state"],
    "workplace": ["session_id_to_tool_env"],
    "multi_turn": ["session_turns"],
    "blackjack": ["session_state"],
    "wordle": ["session_state"],
    "injection": ["session_id_to_env"],
}


@dataclass
class Task:
    """Requests of one rollout. cut: how many of them come before the checkpoint."""

    server: str
    steps: list[Step]
    cut: int

    def __str__(self) -> str:
        return f"{self.server}-{len(self.steps)}-{self.cut}"


def play(client: Client, steps: Sequence[Step]) -> list[Any]:
    return [client.ask(path, body) for path, body in steps]


def session_in(deployed: Deployed, server: str) -> str:
    [session_id] = {key for name in TABLES[server] for key in dict.keys(getattr(deployed.server, name))}
    return str(session_id)


def counter() -> list[Task]:
    tasks = []
    for row in rows("example_session_state_mgmt"):
        missing = row["expected_count"] - row["initial_count"]
        steps: list[Step] = [
            ("/seed_session", row),
            ("/increment_counter", {"count": 1}),
            ("/increment_counter", {"count": missing - 1}),
            ("/get_counter_value", {}),
            ("/verify", {**row, "response": response([said("done")])}),
        ]
        tasks += [Task("counter", steps, cut) for cut in (1, 2, 3)]
    return tasks


def mcp_weather() -> list[Task]:
    tasks = []
    for row in rows("example_mcp_weather"):
        city = row["verifier_metadata"]["expected_city"]
        told = response([said(f"The weather in {city} is sunny and 72 F.")])
        calls = [("/get_weather", {"city": city}), ("/get_weather", {"city": "Elsewhere"})]
        tasks.append(Task("mcp_weather", [("/seed_session", row), *calls, ("/verify", {**row, "response": told})], 2))
    return tasks


def workplace() -> list[Task]:
    tasks = []
    for row in rows("workplace_assistant"):
        truth = row["ground_truth"]
        calls = [(f"/{each['name']}", json.loads(each["arguments"])) for each in truth]
        output = [called(each["name"], each["arguments"], f"c{at}") for at, each in enumerate(truth)]
        steps = [("/seed_session", row), *calls, *LOOKS, ("/verify", {**row, "response": response(output)})]
        tasks.append(Task("workplace", steps, 1 + len(calls) // 2))
    return tasks


EMAIL = "leila.azizi@atlas.com"
LOOKS: list[Step] = [
    ("/customer_relationship_manager_search_customers", {"status": "Lead", "page": 3}),
    ("/analytics_get_visitor_information_by_id", {"visitor_id": "0860"}),
    ("/project_management_search_tasks", {"assigned_to_email": EMAIL}),
]
WEAR: list[Step] = [
    # Columns of texts turn into columns of objects, with None beside NaN; labels come twice, and get gaps.
    (
        "/customer_relationship_manager_add_customer",
        {"customer_name": "A B", "assigned_to_email": "x@y.z", "status": "Lead"},
    ),
    (
        "/customer_relationship_manager_add_customer",
        {
            "customer_name": "C D",
            "assigned_to_email": "x@y.z",
            "status": "Lead",
            "customer_phone": 5551234,
            "notes": ["l", {"k": 1}],
            "follow_up_by": 1.5,
        },
    ),
    ("/customer_relationship_manager_delete_customer", {"customer_id": "00000007"}),
    (
        "/calendar_create_event",
        {
            "event_name": "e",
            "participant_email": "a@b.c",
            "event_start": "2023-12-01 09:00:00",
            "duration": "30",
        },
    ),
    (
        "/calendar_create_event",
        {"event_name": "f", "participant_email": "a@b.c", "event_start": "2023-12-01 10:00:00", "duration": 45},
    ),
    (
        "/analytics_create_plot",
        {"time_min": "2023-10-01", "time_max": "2023-10-02", "value_to_plot": "total_visits", "plot_type": "bar"},
    ),
    ("/analytics_get_average_session_duration", {}),
]
AFTER_WEAR: list[Step] = [
    *LOOKS,
    ("/email_send_email", {"recipient": "q@w.er", "subject": "s", "body": "b"}),
    ("/email_search_emails", {"query": "update"}),
    ("/calendar_search_events", {"query": "e", "page": 2}),
    ("/customer_relationship_manager_search_customers", {"customer_name": "A B"}),
    ("/customer_relationship_manager_search_customers", {"customer_name": "C D"}),
    (
        "/customer_relationship_manager_update_customer",
        {"customer_id": "00000201", "field": "customer_phone", "new_value": "7"},
    ),
    ("/calendar_search_events", {"query": "a@b.c"}),
    ("/calendar_update_event", {"event_id": "00000300", "field": "duration", "new_value": "90"}),
    ("/analytics_total_visits_count", {}),
    ("/analytics_get_average_session_duration", {"time_min": "2023-10-01"}),
]


def multi_turn() -> list[Task]:
    tasks = []
    for row in rows("example_multi_turn_gymnasium"):
        step = ("/step", {**row, "response": response([said(f"it is {row['expected_answer']}")])})
        turns = len(row["follow_ups"])
        tasks += [Task("multi_turn", [("/reset", row)] + [step] * (turns + 1), cut) for cut in range(2, turns + 2)]
    return tasks


def wordle() -> list[Task]:
    tasks = []
    for row in rows("wordle"):
        guess = [("/step", {**row, "response": response([_guess(word)])}) for word in ("crane", row["custom_target"])]
        look = ("/step", {**row, "response": response([called("get_game_state", "{}")])})
        tasks.append(Task("wordle", [("/reset", row), guess[0], look, guess[1]], 2))
    return tasks


def _guess(word: str) -> dict[str, Any]:
    return called("submit_guess", json.dumps({"guess": word}))


TASKS = [*counter(), *mcp_weather(), *workplace(), *multi_turn(), *wordle()]


@pytest.fixture(scope="module", autouse=True)
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The wheel has no list of words for wordle: those of its rows, and one to guess wrong with."""
    from resources_servers.wordle import app

    path = tmp_path_factory.mktemp("wordle") / "guesses.txt"
    path.write_text("\n".join(["crane", *(row["custom_target"] for row in rows("wordle"))]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "GUESSES_PATH", path)
        app.valid_guesses.cache_clear()
        yield
        app.valid_guesses.cache_clear()


@pytest.fixture(scope="module")
def fresh() -> Any:
    """A server of a kind, without sessions of an earlier test; its application is built once."""
    made: dict[str, list[Deployed]] = {}

    def take(server: str) -> tuple[Deployed, Deployed, Deployed]:
        one, two, three = made.setdefault(server, [Deployed(*SERVERS[server]) for _ in range(3)])
        for each in (one, two, three):
            for name in TABLES[server]:
                getattr(each.server, name).clear()
        return one, two, three

    return take


@pytest.mark.parametrize("task", TASKS, ids=str)
async def test_a_restored_session_goes_on_as_the_one_that_was_not_interrupted(task: Task, fresh: Any) -> None:
    live, restored, lost = fresh(task.server)
    client = live.client()
    play(client, task.steps[: task.cut])
    session_id = session_in(live, task.server)
    state = await live.state_of(session_id)
    expected = play(client, task.steps[task.cut :])
    assert all(status == 200 for status, _ in expected)
    assert expected[-1][1]["reward"] > 0

    # The live session has gone on since: what was exported is of the moment of the cut.
    await restored.restore(session_id, state)
    assert play(restored.client(client), task.steps[task.cut :]) == expected

    # The negative control: without the session the same requests are answered otherwise.
    assert play(lost.client(client), task.steps[task.cut :]) != expected


# ---- Workplace Assistant


async def test_worn_tables_answer_and_stay_the_same(fresh: Any) -> None:
    live, restored, untouched = fresh("workplace")
    row = rows("workplace_assistant")[0]
    client, other = live.client(), untouched.client()
    play(client, [("/seed_session", row), *WEAR])
    play(other, [("/seed_session", row), *WEAR])
    session_id = session_in(live, "workplace")
    state = await live.state_of(session_id)
    await restored.restore(session_id, state)
    assert_same_tables(live, restored, session_id)

    expected = play(client, AFTER_WEAR)
    assert play(restored.client(client), AFTER_WEAR) == expected
    assert_same_tables(live, restored, session_id)
    # One that was never exported: exporting changed nothing.
    assert play(other, AFTER_WEAR) == expected
    never = tables_of(untouched, session_in(untouched, "workplace"))
    assert {name: shown_table(table) for name, table in never.items()} == {
        name: shown_table(table) for name, table in tables_of(live, session_id).items()
    }
    wrong = [text for _, reply in expected if "Error" in (text := str(reply["output"]))]
    assert wrong == []


def tables_of(deployed: Deployed, session_id: str) -> dict[str, Any]:
    containers = dict.__getitem__(deployed.server.session_id_to_tool_env, session_id)["containers"]
    return {f"{name}.{each}": table for name, held in containers.items() for each, table in vars(held).items()}


def assert_same_tables(one: Deployed, other: Deployed, session_id: str) -> None:
    ours, theirs = tables_of(one, session_id), tables_of(other, session_id)
    assert list(ours) == list(theirs)
    for name, table in ours.items():
        assert shown_table(table) == shown_table(theirs[name]), name


async def test_a_tool_called_while_tables_are_written_is_in_no_part_of_them(
    fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of a checkpoint sessions are exported while requests go on; writing happens in a thread."""
    live, *_ = fresh("workplace")
    client = live.client()
    play(client, [("/seed_session", rows("workplace_assistant")[0])])
    session_id = session_in(live, "workplace")
    before = encode(await live.state_of(session_id))
    begun, go_on, write = threading.Event(), threading.Event(), hooks_of_workplace._written

    def held(tables: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return write(tables)

    monkeypatch.setattr(hooks_of_workplace, "_written", held)
    writing = asyncio.create_task(live.hooks.export_sessions([session_id]))
    assert await asyncio.to_thread(begun.wait, 30)
    in_place = {"customer_id": "00000009", "field": "notes", "new_value": "changed meanwhile"}
    [(_, reply)] = play(client, [("/customer_relationship_manager_update_customer", in_place)])
    assert reply == {"output": "Customer updated successfully."}
    go_on.set()
    assert encode((await writing)[session_id]) == before
    monkeypatch.undo()
    assert encode(await live.state_of(session_id)) != before


@pytest.mark.parametrize(
    ("version", "option", "shared"), [("2.3.3", False, False), ("2.3.3", True, True), ("3.0.0", None, True)]
)
async def test_tables_are_copied_whole_where_pandas_does_not_copy_on_write(
    fresh: Any, monkeypatch: pytest.MonkeyPatch, version: str, option: bool | None, shared: bool
) -> None:
    """pandas before 3 changes what a shallow copy shows: nobody pins it, and the other test runs with one of them."""
    import numpy
    import pandas

    live, *_ = fresh("workplace")
    play(live.client(), [("/seed_session", rows("workplace_assistant")[0])])
    session_id = session_in(live, "workplace")
    taken: list[Any] = []
    monkeypatch.setattr(hooks_of_workplace, "_written", taken.append)
    monkeypatch.setattr(pandas, "__version__", version)
    monkeypatch.setattr(pandas, "options", SimpleNamespace(mode=SimpleNamespace(copy_on_write=option)))
    await live.hooks.export_sessions([session_id])
    tables = (taken[0]["analytics"]["_analytics_data"], tables_of(live, session_id)["analytics._analytics_data"])
    assert numpy.shares_memory(*(table["user_engaged"].to_numpy() for table in tables)) is shared


async def test_two_sessions_of_one_state_share_no_table(fresh: Any) -> None:
    live, restored, _ = fresh("workplace")
    client = live.client()
    play(client, [("/seed_session", rows("workplace_assistant")[0])])
    session_id = session_in(live, "workplace")
    state = await live.state_of(session_id)
    await restored.restore(session_id, state)
    await restored.restore("twin", state)
    untouched = {name: table.copy() for name, table in tables_of(restored, "twin").items()}
    assert all(status == 200 for status, _ in play(restored.client(client), WEAR))
    for name, table in tables_of(restored, "twin").items():
        assert table.equals(untouched[name]), name
    ours, theirs = (dict.__getitem__(restored.server.session_id_to_tool_env, key) for key in (session_id, "twin"))
    assert ours.keys() == theirs.keys() == {"containers", "functions", "schemas"}
    for name, function in ours["functions"].items():
        assert function.__self__ in ours["containers"].values()
        assert function.__self__ is not theirs["functions"][name].__self__
    # What the server shares among all sessions is shared still.
    assert ours["schemas"][0] is theirs["schemas"][0]
    seeded = restored.client()
    play(seeded, [("/seed_session", {"responses_create_params": {"input": []}})])
    assert len(restored.server.session_id_to_tool_env) == 3
    [new] = restored.server.session_id_to_tool_env.keys() - {session_id, "twin"}
    made = dict.__getitem__(restored.server.session_id_to_tool_env, new)
    assert made["functions"].keys() == ours["functions"].keys()
    assert made["schemas"] == ours["schemas"]


# ---- blackjack


def hand(action: str) -> Step:
    row = rows("blackjack")[0]
    return "/step", {**row, "response": response([said(f"<action>{action}</action>")])}


def player_plays(client: Client, first: Any) -> list[Any]:
    """Hit below 17, then stand: a policy that sees what the server tells it."""
    status, told = first
    seen: list[Any] = []
    while status == 200 and not told.get("terminated"):
        value = int(told["observation"].split("= ")[1].split("\n")[0])
        status, told = client.ask(*hand("hit" if value < 17 else "stand"))
        seen.append((status, told))
    return seen


async def test_a_restored_hand_draws_the_same_cards(fresh: Any) -> None:
    for _ in range(8):
        live, restored, lost = fresh("blackjack")
        client = live.client()
        [dealt] = play(client, [("/reset", rows("blackjack")[0])])
        session_id = session_in(live, "blackjack")
        state = await live.state_of(session_id)
        expected = player_plays(client, dealt)
        await restored.restore(session_id, state)
        assert player_plays(restored.client(client), dealt) == expected
        # The last step ended the session, here as there.
        assert session_id not in restored.server.session_state
        assert session_id not in live.server.session_state
        # Without its session the server plays on with an empty hand, or fails.
        assert player_plays(lost.client(client), dealt) != expected


async def test_the_generator_is_restored_and_not_only_the_hands(fresh: Any) -> None:
    live, restored, _ = fresh("blackjack")
    client = live.client()
    play(client, [("/reset", rows("blackjack")[0])])
    session_id = session_in(live, "blackjack")
    await restored.restore(session_id, await live.state_of(session_id))
    ours, theirs = (dict.__getitem__(each.server.session_state, session_id) for each in (live, restored))
    assert ours["rng"].getstate() == theirs["rng"].getstate()
    assert ours["rng"] is not theirs["rng"]
    assert [ours["rng"].random() for _ in range(1000)] == [theirs["rng"].random() for _ in range(1000)]


# ---- indirect prompt injection


@pytest.mark.parametrize("row", rows("indirect_prompt_injection"), ids=lambda row: row["domain"])
async def test_an_environment_goes_on_as_tools_left_it(row: dict[str, Any], fresh: Any) -> None:
    live, restored, lost = fresh("injection")
    client = live.client()
    play(client, [("/seed_session", row)])
    session_id = session_in(live, "injection")
    dict.__getitem__(live.server.session_id_to_env, session_id)["left"] = {"by": ["a tool"]}
    message = {"recipient": "a@b.c", "to": "a@b.c", "recipients": ["a@b.c"], "subject": "s", "body": "b"}
    play(client, [("/send_message", message), ("/send_email", message)])
    state = await live.state_of(session_id)
    output = [called(name, "{}", f"c{at}") for at, name in enumerate(row["required_tools"])]
    reading: list[Step] = [
        (f"/{each['name']}", {}) for each in row["responses_create_params"]["tools"] if "get_" in each["name"]
    ]
    steps: list[Step] = [*reading, ("/verify", {**row, "response": response([*output, said("d")])})]
    before = json.dumps(dict.__getitem__(live.server.session_id_to_env, session_id))
    await restored.restore(session_id, state)
    assert json.dumps(dict.__getitem__(restored.server.session_id_to_env, session_id)) == before
    expected = play(client, steps)
    assert play(restored.client(client), steps) == expected
    assert expected[-1][1]["reward"] == 1.0
    lost_replies = play(lost.client(client), steps)
    assert [status for status, _ in lost_replies[:-1]] == [400] * len(reading)
    assert reading


# ---- of all servers


@pytest.mark.parametrize("server", SERVERS)
async def test_retire_frees_all_of_one_session_and_nothing_of_another(server: str, fresh: Any) -> None:
    live, *_ = fresh(server)
    ids = []
    for _ in range(2):
        client = live.client()
        [(status, _)] = play(client, [_opening(server)])
        assert status == 200
        ids.append(next(key for name in TABLES[server] for key in getattr(live.server, name) if key not in ids))
    await live.hooks.retire_session(ids[0])
    await live.hooks.retire_session(ids[0])
    await live.hooks.retire_session("never seen")
    for name in TABLES[server]:
        assert list(getattr(live.server, name)) == [ids[1]]
    assert list(await live.hooks.export_sessions(ids)) == [ids[1]]


def _opening(server: str) -> Step:
    directory, _ = SERVERS[server]
    path = "/reset" if server in ("multi_turn", "blackjack", "wordle") else "/seed_session"
    return path, rows(directory)[0]


async def test_revisions_miss_no_change(fresh: Any) -> None:
    """Each request that may have changed a session gives it another number, and none of them changes it later."""
    live, *_ = fresh("workplace")
    audit, client = RevisionAudit(live.hooks), live.client()
    for step in [("/seed_session", rows("workplace_assistant")[0]), *WEAR, *LOOKS]:
        client.ask(*step)
        assert await audit.look() == []


async def test_revisions_of_a_hand_and_of_an_environment(fresh: Any) -> None:
    row = rows("indirect_prompt_injection")[0]
    message = {"recipient": "a@b.c", "subject": "s", "body": "b"}
    played: dict[str, list[Step]] = {
        "blackjack": [("/reset", rows("blackjack")[0]), hand("hit"), hand("hit"), hand("stand")],
        "injection": [
            ("/seed_session", row),
            ("/send_message", message),
            ("/get_messages", {}),
            ("/send_message", message),
        ],
    }
    for server, steps in played.items():
        live, *_ = fresh(server)
        audit, client = RevisionAudit(live.hooks), live.client()
        seen = set()
        for step in steps:
            client.ask(*step)
            for state in dict.values(getattr(live.server, TABLES[server][0])):
                state["player"] = ["2", "2"]  # the first hit cannot end the game
            assert await audit.look() == []
            seen |= set(live.hooks.session_revisions().values())
        assert len(seen) >= 2


async def test_exporting_is_no_change(fresh: Any) -> None:
    live, *_ = fresh("workplace")
    play(live.client(), [("/seed_session", rows("workplace_assistant")[0])])
    before = dict(live.hooks.session_revisions())
    await live.state_of(session_in(live, "workplace"))
    assert dict(live.hooks.session_revisions()) == before != {}
