"""The ledger's routes for the training framework, and the client at their other end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from gym_ckpt_grpc.auth import TokenFile, TokenValue
from gym_ckpt_grpc.capture import CaptureLedger
from gym_ckpt_grpc.integrations import HttpReply, LedgerClient, LedgerRoutes
from gym_ckpt_grpc.integrations.ledger_routes import MAX_BODY, MAX_IDS
from gym_ckpt_grpc.protocol.errors import (
    AdmissionClosed,
    InternalError,
    InvalidArgument,
    StaleAttempt,
    StateCorrupt,
    Unauthenticated,
)
from gym_ckpt_grpc.protocol.ids import EpisodeId
from tests.capture.ledger_rig import ASK, R0, R1, R2, S0, calls, exported, made
from tests.participants.fakes import Answer, App, call

SECRET = "open-sesame"


@dataclass
class Rig:
    """A ledger behind its routes in front of an application, and a client that counts what it sends."""

    ledger: CaptureLedger
    closed: bool = False
    sent: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        async def health(scope: Any, body: bytes) -> tuple[int, Mapping[str, str], Any]:
            return 200, {}, "well"

        self.app = App({"/health": health})
        self.routes = LedgerRoutes(self.ledger, closed=lambda: self.closed, token=TokenValue(SECRET), inner=self.app)
        self.client = LedgerClient(self.send, token=TokenValue(SECRET))

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> HttpReply:
        content = orjson.loads(body) if body else None
        self.sent.append((f"{method} {path}", sum(map(len, content.values())) if content else 0))
        answer = await call(self.routes, path, content, method=method, headers=headers).end()
        return HttpReply(answer.status, answer.body, answer.headers)

    async def call(self, path: str, body: Any = None, *, method: str = "POST", token: str = SECRET) -> Answer:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await call(self.routes, f"/ledger/{path}", body, method=method, headers=headers).end()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(CaptureLedger(tmp_path, sync_rows=False))


async def test_the_client_reads_retires_and_deletes(rig: Rig) -> None:
    for episode in (R0, R1, S0):
        made(rig.ledger, episode, f"c-{episode}")
    assert await rig.client.manifest(R1) == rig.ledger.manifest(R1)
    found = await rig.client.retire([R1, R0, R2, R1])
    assert (found.removed, found.absent) == ((R1, R0), (R2,))
    with pytest.raises(StaleAttempt, match="r-a2 is fenced"):
        await rig.client.manifest(R2)
    await rig.client.delete(["r"])
    assert (await rig.client.manifest(R2))["calls"] == []
    assert calls(rig.ledger, S0) == ["c-s"]


async def test_other_paths_are_the_applications(rig: Rig) -> None:
    assert (await call(rig.routes, "/health", method="GET").end()).json() == "well"
    for method, path in (("GET", "retire"), ("POST", "manifest/r"), ("POST", ""), ("DELETE", "delete")):
        answer = await rig.call(path, method=method)
        assert (answer.status, answer.code) == (404, "STATE_NOT_FOUND")
    seen: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    routes = LedgerRoutes(rig.ledger, closed=lambda: False, token=None, inner=inner)
    await routes({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P257")
@pytest.mark.parametrize(
    ("path", "body", "violation"),
    [
        ("manifest/..", None, "capture_key"),
        ("manifest/", None, "capture_key"),
        ("manifest/r/s", None, "capture_key"),
        ("manifest/r-a99999999999", None, "capture_key"),
        ("retire", {"capture_keys": ["r", "s-a1", "-x"]}, "capture_keys[2]"),
        ("retire", {"capture_keys": [""]}, "capture_keys[0]"),
        ("retire", {"capture_keys": ["r", 7]}, "capture_keys"),
        ("retire", {"capture_keys": "r"}, "capture_keys"),
        ("retire", {"capture_keys": ["r"], "other": 1}, "capture_keys"),
        ("retire", ["r"], "capture_keys"),
        ("retire", None, "capture_keys"),
        ("delete", {"rollout_ids": ["r", "s-a1"]}, "rollout_ids[1]"),
        ("delete", {"capture_keys": ["r"]}, "rollout_ids"),
    ],
)
async def test_a_bad_id_is_400_and_changes_nothing(rig: Rig, path: str, body: Any, violation: str) -> None:
    made(rig.ledger, R0, "one")
    method = "GET" if path.startswith("manifest") else "POST"
    answer = await rig.call(path, body, method=method)
    assert (answer.status, answer.code) == (400, "INVALID_ARGUMENT")
    assert [each["field"] for each in answer.json()["error"]["violations"]] == [violation]
    assert calls(rig.ledger, R0) == ["one"]


@pytest.mark.behaviour("P257")
async def test_at_most_4096_ids_a_call(rig: Rig) -> None:
    made(rig.ledger, EpisodeId("x0"), "one")
    for route, name in (("retire", "capture_keys"), ("delete", "rollout_ids")):
        most = [f"x{number}" for number in range(MAX_IDS)]
        answer = await rig.call(route, {name: [*most, "more"]})
        assert (answer.status, answer.code) == (400, "INVALID_ARGUMENT")
        assert "4097 ids, at most 4096" in answer.json()["error"]["detail"]
        assert (await rig.call(route, {name: most})).status == 200
    longest = [f"{number:04}" + "x" * 252 for number in range(MAX_IDS)]
    assert (await rig.call("delete", {"rollout_ids": longest})).status == 200
    answer = await rig.call("retire", {"capture_keys": ["x" * MAX_BODY]})
    assert (answer.status, answer.code) == (400, "INVALID_ARGUMENT")
    assert exported(rig.ledger, EpisodeId("x0")) == []


@pytest.mark.behaviour("P257")
@pytest.mark.parametrize("path", ["manifest/r", "manifest/..", "retire", "delete", "unheard"])
@pytest.mark.parametrize("token", ["", "wrong", SECRET + "x", "\xe9"])
async def test_a_bad_bearer_is_401_before_anything_else(rig: Rig, path: str, token: str) -> None:
    made(rig.ledger, R0, "one")
    rig.closed = True
    body = {"capture_keys": ["r"]} if path == "retire" else {"rollout_ids": ["r"]}
    method = "GET" if path.startswith("manifest") else "POST"
    answer = await rig.call(path, body, method=method, token=token)
    assert (answer.status, answer.code) == (401, "UNAUTHENTICATED")
    assert SECRET not in answer.body.decode()
    assert calls(rig.ledger, R0) == ["one"]


@pytest.mark.behaviour("P257")
async def test_two_credentials_or_another_scheme_are_401(rig: Rig) -> None:
    for headers in ([b"Basic " + SECRET.encode()], [b"Bearer " + SECRET.encode()] * 2, [SECRET.encode()]):
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/ledger/manifest/r",
            "headers": [(b"Authorization", value) for value in headers],
        }
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        await rig.routes(scope, None, send)  # type: ignore[arg-type]
        assert sent[0]["status"] == 401


async def test_a_token_file_is_read_again(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    token = TokenFile(path)
    routes = LedgerRoutes(rig.ledger, closed=lambda: False, token=token, inner=rig.app)

    async def status(bearer: str) -> int:
        headers = {"authorization": f"bearer {bearer}"}
        return (await call(routes, "/ledger/manifest/r", method="GET", headers=headers).end()).status

    assert (await status("first"), await status("second")) == (200, 401)
    path.write_text("second, and longer")
    path.write_text("second")
    monkeypatch.setattr(token, "stale", lambda: True)  # its time has come
    assert (await status("first"), await status("second")) == (401, 200)


@pytest.mark.behaviour("P257")
async def test_a_retired_attempt_is_409_and_so_is_a_poisoned_manifest(rig: Rig) -> None:
    made(rig.ledger, R0, "one")
    made(rig.ledger, S0, "two", chain_hash="")
    rig.ledger.retire([R0])
    answer = await rig.call("manifest/r", method="GET")
    assert (answer.status, answer.code) == (409, "STALE_ATTEMPT")
    answer = await rig.call("manifest/s", method="GET")
    assert (answer.status, answer.code) == (409, "STATE_CORRUPT")
    with pytest.raises(StateCorrupt, match="two has no chain_hash"):
        await rig.client.manifest(S0)


@pytest.mark.behaviour("P120", "P257")
async def test_removal_while_closed_is_503_and_reading_goes_on(rig: Rig) -> None:
    """What a Commit in between exports is whole; after Resume the same calls work."""
    made(rig.ledger, R0, "one")
    rig.closed = True
    for route, body in (("retire", {"capture_keys": ["r"]}), ("delete", {"rollout_ids": ["r"]})):
        answer = await rig.call(route, body)
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "ADMISSION_CLOSED", "1")
    with pytest.raises(AdmissionClosed) as caught:
        await rig.client.retire([R0])
    assert caught.value.retry_after == 1.0
    with pytest.raises(AdmissionClosed):
        await rig.client.delete(["r"])
    assert [call["call_id"] for call in (await rig.client.manifest(R0))["calls"]] == ["one"]
    assert exported(rig.ledger, R0) == ["one"]
    rig.closed = False
    assert (await rig.client.retire([R0])).removed == (R0,)
    await rig.client.delete(["r"])
    assert rig.ledger.admit(R0, "again", ASK)


@pytest.mark.behaviour("P120")
async def test_a_removal_that_waited_for_its_thread_until_the_close_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(rig.ledger, R0, "one")
    remove = rig.routes._remove

    def close_first(*arguments: Any) -> Any:
        rig.closed = True
        return remove(*arguments)

    monkeypatch.setattr(rig.routes, "_remove", close_first)
    answer = await rig.call("retire", {"capture_keys": ["r"]})
    assert (answer.status, exported(rig.ledger, R0)) == (503, ["one"])


async def test_a_client_that_leaves_removes_nothing(rig: Rig) -> None:
    made(rig.ledger, R0, "one")
    headers = {"authorization": f"Bearer {SECRET}"}
    request = call(rig.routes, "/ledger/delete", {"rollout_ids": ["r"]}, headers=headers, parts=3)
    message = request._messages.get_nowait()
    while not request._messages.empty():
        request._messages.get_nowait()
    request._messages.put_nowait(message)
    request.leave()
    answer = await request.end()
    assert (answer.status, calls(rig.ledger, R0)) == (0, ["one"])


# ---- the client --------------------------------------------------------------------------------------------


@pytest.mark.behaviour("P257")
async def test_the_client_splits_a_list_of_any_length(rig: Rig) -> None:
    episodes = [EpisodeId(f"x{number}", number % 2) for number in range(2 * MAX_IDS + 10)]
    for episode in (episodes[0], episodes[-1]):
        made(rig.ledger, episode, "one")
    found = await rig.client.retire(episodes)
    assert set(found.removed) == {episodes[0], episodes[-1]}
    assert len(found.absent) == len(episodes) - 2
    await rig.client.delete([episode.rollout_id for episode in episodes])
    assert rig.sent == [
        (f"POST /ledger/{route}", count) for route in ("retire", "delete") for count in (MAX_IDS, MAX_IDS, 10)
    ]
    assert (await rig.client.retire([])).removed == ()
    await rig.client.delete([])
    assert len(rig.sent) == 6


@pytest.mark.behaviour("P257")
async def test_the_client_checks_the_whole_list_before_it_sends_any(rig: Rig) -> None:
    good = [f"x{number}" for number in range(MAX_IDS)]
    with pytest.raises(InvalidArgument) as caught:
        await rig.client.delete([*good, "bad/id"])
    assert [violation.field for violation in caught.value.violations] == [f"rollout_ids[{MAX_IDS}]"]
    for bad in ("r", R0, [R0, "r"]):
        with pytest.raises(TypeError):
            await rig.client.retire(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await rig.client.delete("r")
    assert rig.sent == []


async def test_a_wrong_token_or_answer_is_an_error(rig: Rig) -> None:
    with pytest.raises(Unauthenticated):
        await LedgerClient(rig.send).retire([R0])

    async def answers(status: int, body: bytes) -> None:
        async def send(method: str, path: str, headers: Mapping[str, str], sent: bytes) -> HttpReply:
            return HttpReply(status, body)

        with pytest.raises(InternalError, match=f"GET /manifest/r with status {status}"):
            await LedgerClient(send).manifest(R0)

    await answers(502, b"<html>bad gateway</html>")
    await answers(500, b'{"detail": "boom"}')
    await answers(200, b"[]")
    await answers(204, b"")
