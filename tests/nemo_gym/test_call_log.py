"""The log of recorded calls: keys, order, divergence, ids that a handler makes itself; and its peers."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from gym_ckpt_grpc.integrations.nemo_gym.call_log import CallLog, ReplayDiverged, key_of
from gym_ckpt_grpc.integrations.nemo_gym.peers import Peers
from gym_ckpt_grpc.integrations.nemo_gym.steps import ReplayingSteps
from gym_ckpt_grpc.protocol.errors import StateCorrupt
from tests.nemo_gym.call_rig import CONFIG, PEERS, record
from tests.participants.fakes import R1, R, spin


def key(path: str, body: Any = None, *, server: str = "world", ids: bool = False) -> Any:
    return key_of("POST", server, path, {"json": body}, fresh_ids=ids)


# ---- keys and the log ------------------------------------------------------------------------------------------


def test_a_key_is_of_what_is_asked_and_not_of_the_attempt() -> None:
    row = {"b": 1, "a": [1.5, None], "_ng_attempt_index": 0, "episode_id": {"rollout_id": "r", "attempt": 0}}
    later = {**row, "_ng_attempt_index": 3, "episode_id": {"rollout_id": "r", "attempt": 3}}
    assert key("/run", row) == key("/run", dict(reversed(later.items())))
    others = [
        key("/run", {**row, "b": 2}),
        key("/run", {**row, "episode_id": {"rollout_id": "s", "attempt": 0}}),
        key("/walk", row),
        key("/run", row, server="judge"),
        key_of("GET", "world", "/run", {"json": row}),
        key_of("POST", "world", "/run", {"json": row, "params": {"a": 1}}),
    ]
    assert len({each.text for each in [key("/run", row), *others]}) == 7
    assert key_of("POST", "w", "/", {"data": "x"}) == key_of("POST", "w", "/", {"data": b"x"})


def test_a_key_is_the_same_where_the_servers_have_other_addresses() -> None:
    moved = Peers({**CONFIG, "world": {"resources_servers": {"x": {"host": "127.0.0.1", "port": 12}}}}, "self")

    def key_at(peers: Peers, url: str) -> str:
        return key_of("POST", "helper", "/seed", {"json": {"base_url": url}}, portable=peers.portable).text

    assert key_at(PEERS, "http://127.0.0.1:1/x") == key_at(moved, "http://127.0.0.1:12/x")
    assert key_at(PEERS, "http://127.0.0.1:12/x") != key_at(moved, "http://127.0.0.1:12/x")
    assert key_at(PEERS, "http://127.0.0.1:2/") != key_at(PEERS, "http://127.0.0.1:1/")
    assert Peers({}, "self").portable(b"http://127.0.0.1:1") == b"http://127.0.0.1:1"


async def test_recorded_replies_are_handed_out_once_equal_calls_in_their_order_and_then_calls_go_out() -> None:
    log = CallLog(R, None)
    for path, body in (("/a", "1"), ("/b", "2"), ("/a", "3")):
        assert await log.recorded(key(path)) is None
        log.add(key(path), record(body))
    boundary = log.pinned()
    log.add(key("/later"), record("4"))
    state = boundary()
    assert [each["body"] for each in state["calls"]] == ["1", "2", "3"]
    again = CallLog(R, state)
    found = [await again.recorded(key(path)) for path in ("/a", "/a", "/b")]
    assert [each and each["body"] for each in found] == ["1", "3", "2"]
    assert await again.recorded(key("/later")) is None
    again.check_spent()


async def test_a_call_that_was_not_recorded_diverges_and_so_does_an_early_end() -> None:
    log = CallLog(R1, {"calls": [record("1", key=key("/a").text)]})
    with pytest.raises(
        ReplayDiverged, match=r"the replay of r-a1 diverged: it called POST world/b .*, with 1 of 1"
    ) as raised:
        await log.recorded(key("/b"))
    assert isinstance(raised.value, StateCorrupt)
    assert raised.value.episodes == (R1,)
    with pytest.raises(ReplayDiverged, match="it ended with 1 of 1 recorded calls to come"):
        log.check_spent()


async def test_a_handler_that_fails_before_its_recorded_calls_were_all_made_has_diverged() -> None:
    async def handler() -> None:
        raise ValueError("broken")

    restored = {"calls": [record("1", key=key("/a").text)]}
    with pytest.raises(ReplayDiverged, match="with 1 of 1 recorded calls to come"):
        await ReplayingSteps(R, PEERS, CallLog(R, restored)).handled(handler)
    with pytest.raises(ValueError, match="broken"):
        await ReplayingSteps(R, PEERS, CallLog(R, None)).handled(handler)


async def test_a_call_that_was_under_way_beside_recorded_ones_goes_out_behind_them() -> None:
    log = CallLog(R, {"calls": [record(each, key=key(f"/{each}").text) for each in "abc"]})
    under_way = asyncio.create_task(log.recorded(key("/under way")))
    await spin()
    for each in "cab":
        assert not under_way.done()
        assert (await log.recorded(key(f"/{each}")) or {})["body"] == each
    assert await under_way is None


@pytest.mark.parametrize("state", [[], {"calls": None}, {"calls": [{"status": 200}]}, {"calls": ["a"]}, {}])
def test_a_boundary_that_is_no_list_of_calls_is_refused(state: Any) -> None:
    with pytest.raises(StateCorrupt, match="the boundary of r is no list of recorded calls"):
        CallLog(R, state)


# ---- fresh ids -------------------------------------------------------------------------------------------------


def test_fresh_ids_are_told_by_their_order_only() -> None:
    one, two, three = str(uuid.uuid4()), uuid.uuid4().hex, str(uuid.uuid4())
    first = key("/a", {"x": one, "y": [two, one]}, ids=True)
    assert first.ids == (one, two)
    assert first.text == key("/a", {"x": three, "y": [one, three]}, ids=True).text
    assert first.text != key("/a", {"x": one, "y": [one, two]}, ids=True).text
    assert key("/a", {"x": one}).text != key("/a", {"x": three}).text
    no_ids = {"sha": "0" * 64, "v1": str(uuid.uuid1())}
    assert key("/a", no_ids, ids=True).ids == ()


async def test_ids_made_in_a_replay_stand_for_the_recorded_ones_from_then_on() -> None:
    old, new = str(uuid.uuid4()), str(uuid.uuid4())
    log = CallLog(R, None, fresh_ids=True)
    log.add(key("/seed", {"id": old}, ids=True), record(f'{{"id": "{old}"}}'))
    again = CallLog(R1, log.pinned()(), fresh_ids=True)
    found = await again.recorded(key("/seed", {"id": new}, ids=True))
    assert found is not None
    assert again.inward(found)["body"] == f'{{"id": "{new}"}}'
    assert again.outward_json({"about": new, "n": 1}) == {"about": old, "n": 1}
    assert again.outward(f"/sessions/{new}") == f"/sessions/{old}"
    assert again.inward(record(f"about {old}"))["body"] == f"about {new}"


async def test_ids_that_are_used_otherwise_than_recorded_diverge() -> None:
    one, two = str(uuid.uuid4()), str(uuid.uuid4())
    log = CallLog(R, None, fresh_ids=True)
    for path, body in (("/a", [one]), ("/b", [two])):
        log.add(key(path, body, ids=True), record("{}"))
    again = CallLog(R1, log.pinned()(), fresh_ids=True)
    mine = str(uuid.uuid4())
    await again.recorded(key("/a", [mine], ids=True))
    with pytest.raises(ReplayDiverged, match="it used its ids in another order"):
        await again.recorded(key("/b", again.outward_json([mine]), ids=True))


# ---- peers -----------------------------------------------------------------------------------------------------


def test_what_a_configuration_says_of_the_peers() -> None:
    assert [PEERS.kind(each) for each in ("world", "policy", "helper", "port", "nowhere")] == [
        "resources",
        "policy_model",
        "agent",
        "",
        "",
    ]
    assert (PEERS.service("policy"), PEERS.service("judge")) == ("the-policy", "judge")
    assert (PEERS.at("http://127.0.0.1:2/v1/x"), PEERS.at("http://127.0.0.1:9/v1")) == ("judge", None)
    assert (PEERS.base_url("world"), PEERS.base_url("nowhere")) == ("http://127.0.0.1:1", None)
