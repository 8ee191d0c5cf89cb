"""Recorded calls without servers: the steps of protocols and of loops, parallel calls, refusals."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gym_ckpt_grpc.integrations.nemo_gym import NAMES, loop_steps
from gym_ckpt_grpc.integrations.nemo_gym.loop_steps import LoopSteps, PolicyCalls
from gym_ckpt_grpc.integrations.nemo_gym.recorded import RecordedReply
from gym_ckpt_grpc.integrations.nemo_gym.steps import CURRENT, Call, RunSteps
from gym_ckpt_grpc.participants import AgentOwner, EnvironmentOwner, EpisodeContext, SessionContext
from gym_ckpt_grpc.protocol.errors import StaleAttempt
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.protocol.report import BlockerReason
from tests.nemo_gym.call_rig import PEERS, record
from tests.participants.fakes import R1, FakePort, R, close, exported, reopen, restore, spin

# ---- a world of calls ------------------------------------------------------------------------------------------


class Outside:
    """What the calls of a test reach. sent: (server, path, headers, json). holds: (path) -> released by `go`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, Mapping[str, str], Any]] = []
        self.headers: dict[str, dict[str, str]] = {}
        self.errors: dict[str, Exception] = {}
        self.holds: dict[str, asyncio.Event] = {}

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.sent]

    def call(self, server: str, path: str, body: Any = None) -> Awaitable[RecordedReply]:
        """Make a call, as a handler does."""
        steps = CURRENT.get()
        assert steps is not None

        async def send(method: str, path: str, options: Mapping[str, Any]) -> Any:
            if method == "GET":
                if path in self.holds:
                    await self.holds[path].wait()
                return self._reply(server, path, "probed")
            self.sent.append((server, path, dict(options.get("headers") or {}), options.get("json")))
            plain = NAMES.split(path)[1]
            if plain in self.holds:
                await self.holds[plain].wait()
            if plain in self.errors:
                raise self.errors[plain]
            return self._reply(server, plain, str(len(self.sent)))

        return steps.call(Call(server, "POST", path, {"json": body}, send))

    def _reply(self, server: str, path: str, body: str) -> RecordedReply:
        reply = RecordedReply(record(body), "POST", f"http://{server}{path}")
        gate = {NAMES.gate_header: "the-policy/one"} if server == "policy" else {}
        reply.headers = CIMultiDictProxy(CIMultiDict({**self.headers.get(path, {}), **gate}))
        return reply


class Empty:
    """Hooks of sessions without state."""

    async def export_sessions(self, keys: Any) -> dict[str, Any]:
        return {key: {} for key in keys}

    async def restore_sessions(self, sessions: Any) -> None:
        return None

    async def retire_session(self, key: str) -> None:
        return None


Handler = Callable[[RunSteps], Awaitable[Any]]


class Episodes:
    """An environment whose protocol is a handler with recorded calls."""

    def __init__(self, handler: Handler, *, fresh_ids: bool = False) -> None:
        self.owner = EnvironmentOwner()
        self.owner.attach(FakePort())
        self.handler, self.fresh_ids = handler, fresh_ids

    def run(self, episode: EpisodeId = R) -> asyncio.Task[Any]:
        async def protocol(context: EpisodeContext) -> Any:
            steps = RunSteps(context, PEERS, fresh_ids=self.fresh_ids)
            return await steps.run(lambda: self.handler(steps))

        return asyncio.create_task(self.owner.run(episode, {}, protocol))


def blockers(owner: Any) -> list[tuple[BlockerReason, str]]:
    return [(each.reason, each.place) for each in owner.report(9).blockers]


# ---- protocols -------------------------------------------------------------------------------------------------

TURN = [
    ("world", "/seed_session", True),
    ("helper", "/v1/agent_sessions", True),
    ("helper", "/v1/responses", True),
    ("helper", "/v1/agent_sessions/close", False),
    ("world", "/verify", True),
    ("judge", "/v1/responses", False),
    ("world", "/reset", True),
]
"""(server, path, whether a checkpoint leaves the call out), when the seed's reply said replay."""


@pytest.mark.parametrize(("server", "path", "replay"), TURN)
async def test_a_checkpoint_waits_for_what_may_not_be_made_twice(server: str, path: str, replay: bool) -> None:
    outside = Outside()
    outside.headers["/seed_session"] = {NAMES.verify_header: "replay"}
    outside.holds[path] = asyncio.Event()

    async def handler(steps: RunSteps) -> str:
        if path != "/seed_session":
            await outside.call("world", "/seed_session")
        return await (await outside.call(server, path)).text()

    episodes = Episodes(handler)
    running = episodes.run()
    await spin()
    await close(episodes.owner)
    assert blockers(episodes.owner) == ([] if replay else [(BlockerReason.WAIT_STEP, path)])
    outside.holds[path].set()
    await spin()
    records = await exported(episodes.owner)
    running.cancel()
    again = Episodes(handler)
    await restore(again.owner, records)
    await reopen(again.owner)
    made = len(outside.sent)
    assert await again.run(R1) == str(made)  # the recorded reply, or the same call's of now, which is no other number
    assert outside.paths[made:] == []


async def test_verify_waits_unless_the_seed_said_otherwise_and_each_server_speaks_for_itself() -> None:
    outside = Outside()
    outside.headers["/reset"] = {NAMES.verify_header: "replay"}
    outside.holds["/verify"] = asyncio.Event()

    async def handler(steps: RunSteps) -> None:
        await outside.call("elsewhere", "/reset")
        await outside.call("world", "/verify")

    episodes = Episodes(handler)
    running = episodes.run()
    await spin()
    await close(episodes.owner)
    assert blockers(episodes.owner) == [(BlockerReason.WAIT_STEP, "/verify")]
    outside.holds["/verify"].set()
    await reopen(episodes.owner)
    await running


async def test_calls_carry_the_episode_where_it_is_understood_and_activations_their_index() -> None:
    outside = Outside()

    async def handler(steps: RunSteps) -> None:
        for server, path in (("world", "/add"), ("policy", "/v1/responses"), ("policy", "/tokenize")):
            await outside.call(server, path)
        for server, path in (("judge", "/v1/responses"), ("helper", "/v1/agent_sessions"), ("elsewhere", "/x")):
            await outside.call(server, path)
        for _ in range(2):
            await outside.call("helper", "/training-token-capture/v1/responses")

    await Episodes(handler).run(R1)
    tagged = "/ng-rollout/r-a1"
    assert outside.paths == [
        f"{tagged}/add",
        f"{tagged}/v1/responses",
        "/tokenize",
        "/v1/responses",
        "/v1/agent_sessions",
        "/x",
        *[f"{tagged}/training-token-capture/v1/responses"] * 2,
    ]
    assert [headers.get(NAMES.activation_header) for _, _, headers, _ in outside.sent] == [None] * 6 + ["1", "2"]


async def test_a_refusal_survives_a_handler_that_catches_everything() -> None:
    """It makes no further call, and what it makes of the refusal is not the result."""
    outside = Outside()
    refusal = StaleAttempt("gone", episodes=[R])
    outside.errors["/add"] = refusal
    caught: list[Exception] = []

    async def handler(steps: RunSteps) -> str:
        for path in ("/add", "/get"):
            try:
                await outside.call("world", path)
            except Exception as error:
                caught.append(error)
        return "all is well"

    with pytest.raises(StaleAttempt, match="gone"):
        await Episodes(handler).run()
    assert (caught, outside.paths) == ([refusal, refusal], ["/ng-rollout/r/add"])

    async def changes_it(steps: RunSteps) -> None:
        try:
            await outside.call("world", "/add")
        except StaleAttempt as error:
            raise RuntimeError("failed") from error

    with pytest.raises(StaleAttempt, match="gone"):
        await Episodes(changes_it).run()


async def test_calls_of_the_cleanup_are_made_again_and_not_recorded() -> None:
    outside = Outside()

    async def handler(steps: RunSteps) -> str:
        await outside.call("world", "/add")
        steps.cleaning()
        outside.errors["/close_session"] = StaleAttempt("freed")
        with pytest.raises(StaleAttempt):
            await outside.call("world", "/close_session")
        return "done"

    episodes = Episodes(handler)
    outside.holds["/add"] = asyncio.Event()
    running = episodes.run()
    await spin()
    await close(episodes.owner)
    outside.holds["/add"].set()
    await spin()
    records = await exported(episodes.owner)
    running.cancel()
    assert [each["key"].split()[1] for each in records[0].decode("boundary")["calls"]] == ["world/add"]
    again = Episodes(handler)
    await restore(again.owner, records)
    await reopen(again.owner)
    assert await again.run(R1) == "done"
    assert outside.paths == ["/ng-rollout/r/add", "/ng-rollout/r/close_session", "/ng-rollout/r-a1/close_session"]


async def test_fresh_ids_of_a_protocol_are_the_recorded_ones_after_a_restore() -> None:
    outside = Outside()
    outside.holds["/use"] = asyncio.Event()

    async def handler(steps: RunSteps) -> None:
        mine = str(uuid.uuid4())
        await outside.call("world", "/seed_session", {"id": mine})
        await outside.call("world", "/use", {"id": mine})
        steps.cleaning()
        await outside.call("world", f"/close/{mine}", {"id": mine})

    episodes = Episodes(handler, fresh_ids=True)
    running = episodes.run()
    await spin()
    await close(episodes.owner)
    outside.holds["/use"].set()
    await spin()
    records = await exported(episodes.owner)
    state = records[0].decode("boundary")
    assert len(state["calls"]) == 2
    running.cancel()
    state["calls"].pop()  # as if the checkpoint had come before the second call
    again = Episodes(handler, fresh_ids=True)
    await restore(again.owner, [_with_boundary(records[0], state)])
    await reopen(again.owner)
    await again.run(R1)
    ids = [body["id"] for _, _, _, body in outside.sent]
    tagged = "/ng-rollout/r-a1"
    assert (outside.paths[3:], set(ids)) == ([f"{tagged}/use", f"{tagged}/close/{ids[0]}"], {ids[0]})


def _with_boundary(record: Any, state: Any) -> Any:
    from msgspec.structs import replace

    from gym_ckpt_grpc.storage import encode

    return replace(record, payloads={**record.payloads, "boundary": encode(state)})


# ---- loops -----------------------------------------------------------------------------------------------------


class Loops:
    """An agent session whose loop is a handler with recorded calls."""

    def __init__(self, handler: Callable[[], Awaitable[Any]], calls: PolicyCalls | None = None) -> None:
        self.calls = calls or PolicyCalls(PEERS.service("policy"))
        self.owner = AgentOwner(Empty(), names=NAMES)
        self.owner.attach(FakePort())
        self.handler = handler

    async def start(self, episode: EpisodeId = R) -> asyncio.Task[Any]:
        async def build() -> None:
            return None

        await self.owner.seed(episode, "s", {}, build)
        clients = {"policy": self.calls}

        async def loop(session: SessionContext, state: Any) -> Any:
            return await LoopSteps(session, state, PEERS, clients).run(self.handler)

        return asyncio.create_task(self.owner.invoke(episode, "s", loop))


async def test_the_first_calls_of_a_process_hold_up_no_checkpoint() -> None:
    """All of them wait until the gate of the policy has been seen."""
    outside = Outside()
    outside.holds["/v1/responses"] = asyncio.Event()
    calls = PolicyCalls("the-policy")

    async def handler() -> str:
        return await (await outside.call("policy", "/v1/responses", {"data": "x"})).text()

    rigs = [Loops(handler, calls) for _ in range(3)]
    running = [await each.start() for each in rigs]
    await spin()
    for each in rigs:
        await close(each.owner)
    assert [blockers(each.owner) for each in rigs] == [[], [], []]
    assert [headers[NAMES.waiting_header] for _, _, headers, _ in outside.sent] == ["1"] * 3
    outside.holds["/v1/responses"].set()
    for each in rigs:
        await reopen(each.owner)
    await asyncio.gather(*running)


async def test_a_policy_that_does_not_answer_its_health_route_is_called_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The framework's client tries for ever; the calls wait for it once, and not for ever."""
    monkeypatch.setattr(loop_steps, "PROBED_WITHIN", 0.0)
    outside = Outside()
    outside.holds["/health"] = asyncio.Event()

    async def handler() -> str:
        return await (await outside.call("policy", "/v1/responses", {"data": "x"})).text()

    assert await (await Loops(handler).start()) == "1"
    assert [each.getMessage() for each in caplog.records if "health route" in each.getMessage()] == [
        "policy model the-policy has not answered its health route in 0 s"
    ]


async def test_parallel_policy_calls_stand_at_one_boundary_and_are_replayed() -> None:
    outside = Outside()
    outside.holds["/v1/responses"] = asyncio.Event()

    async def handler() -> list[str]:
        replies = await asyncio.gather(*(outside.call("policy", "/v1/responses", {"n": n % 2}) for n in range(3)))
        return [await each.text() for each in replies]

    loops = Loops(handler)
    running = await loops.start()
    await spin()
    await close(loops.owner)
    assert (blockers(loops.owner), len(outside.sent)) == ([], 3)
    outside.holds["/v1/responses"].set()
    await spin()
    await reopen(loops.owner)
    assert await running == ["3", "3", "3"]


async def test_a_tool_call_waits_for_parallel_policy_calls_and_the_checkpoint_for_the_tool_call() -> None:
    """While it is under way no policy call beside it may say that the session stands still."""
    outside = Outside()
    outside.holds = {"/v1/responses": asyncio.Event(), "/add": asyncio.Event()}

    async def handler() -> list[str]:
        policy, tool = outside.call("policy", "/v1/responses"), outside.call("world", "/add")
        late = outside.call("policy", "/v1/responses", {"late": True})
        return [await each.text() for each in await asyncio.gather(policy, tool, late)]

    loops = Loops(handler)
    running = await loops.start()
    await spin()
    assert outside.paths == ["/ng-rollout/r/v1/responses"]
    outside.holds["/v1/responses"].set()
    await spin()
    assert outside.paths[1:] == ["/ng-rollout/r/add"]
    await close(loops.owner)
    assert blockers(loops.owner) == [(BlockerReason.RUNNING, "")]
    outside.holds["/add"].set()
    await spin()
    (record,) = await exported(loops.owner)
    assert [each["key"].split()[1] for each in record.decode("boundary")["calls"]] == [
        "policy/v1/responses",
        "world/add",
    ]
    await reopen(loops.owner)
    assert await running == ["1", "2", "3"]
