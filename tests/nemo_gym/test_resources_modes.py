"""What a resources server promises: by its options, its class, its hooks, or what is known of it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import pytest
from pydantic import Field
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer
from resources_servers.mcqa.app import MCQAResourcesServer

from gym_ckpt_grpc.participants import ResourcesMode, VerifyMode
from gym_ckpt_grpc.protocol.errors import UsageError
from tests.nemo_gym.servers import Participant, client_of, options, rows
from tests.participants.fakes import close

SEED = {**rows("example_session_state_mgmt")[0], "_ng_task_index": 7, "_ng_rollout_index": 0}


class Unknown(StatefulCounterResourcesServer):  # type: ignore[misc]
    """A server that nobody said anything about: it keeps more than the one it derives from."""

    more: dict[str, int] = Field(default_factory=dict)


class Derived(MCQAResourcesServer):  # type: ignore[misc]
    """What is declared of its parent is not declared of it."""


class Stated(Unknown):
    checkpoint_mode: ClassVar = ResourcesMode.EXPORTED
    checkpoint_verify: ClassVar = VerifyMode.REPLAY

    async def export_sessions(self, session_ids: Any) -> Any:
        return dict.fromkeys(session_ids, 1)

    async def restore_sessions(self, sessions: Any) -> None: ...

    async def retire_session(self, session_id: str) -> None: ...


class Child(Stated):
    """Its parent's promise is not its own."""


class Hooked(Unknown):
    """Hooks alone are a promise as well."""

    async def export_sessions(self, session_ids: Any) -> Any: ...

    async def restore_sessions(self, sessions: Any) -> None: ...

    async def retire_session(self, session_id: str) -> None: ...


class Heir(Hooked):
    """Its parent's hooks may not know of all that it keeps."""


class HalfHooked(Unknown):
    async def export_sessions(self, session_ids: Any) -> Any: ...


class Half(Unknown):
    checkpoint_mode: ClassVar = ResourcesMode.EXPORTED

    async def export_sessions(self, session_ids: Any) -> Any: ...


class OwnHooks:
    """Hooks apart from the server."""

    def __init__(self, server: Any) -> None:
        self.server = server

    async def export_sessions(self, session_ids: Any) -> Any: ...

    async def restore_sessions(self, sessions: Any) -> None: ...

    async def retire_session(self, session_id: str) -> None: ...


OWN = f"{__name__}:OwnHooks"


@pytest.mark.parametrize(
    ("cls", "given", "mode", "verify", "warned"),
    [
        (StatefulCounterResourcesServer, {}, "exported", "wait", ""),
        (StatefulCounterResourcesServer, {"mode": "restart_only"}, "restart_only", "wait", ""),
        (StatefulCounterResourcesServer, {"mode": "stateless", "verify": "replay"}, "stateless", "replay", ""),
        (MCQAResourcesServer, {}, "stateless", "replay", ""),
        (MCQAResourcesServer, {"verify": "wait"}, "stateless", "wait", ""),
        (MCQAResourcesServer, {"mode": "restart_only"}, "restart_only", "wait", ""),
        (Derived, {}, "restart_only", "wait", "restart_only"),
        (Unknown, {}, "restart_only", "wait", "restart_only"),
        (Unknown, {"hooks": OWN}, "exported", "wait", ""),
        (Stated, {}, "exported", "replay", ""),
        (Stated, {"verify": "wait"}, "exported", "wait", ""),
        (Child, {}, "restart_only", "wait", "does not restate"),
        (Hooked, {}, "exported", "wait", ""),
        (Heir, {}, "restart_only", "wait", "restart_only"),
        (Heir, {"mode": "exported"}, "exported", "wait", ""),
    ],
)
async def test_the_mode_is_what_options_say_else_the_class_else_what_is_known_of_it(
    caplog: Any, cls: type, given: dict[str, Any], mode: str, verify: str, warned: str
) -> None:
    with caplog.at_level(logging.WARNING, "gym_ckpt_grpc"):
        settings = Participant(cls, given=options(**given)).owner.settings
    assert (settings.mode, settings.verify) == (mode, verify)
    assert warned in caplog.text if warned else "restart_only" not in caplog.text


@pytest.mark.parametrize(
    ("cls", "given", "told"),
    [
        (Half, {}, "restore_sessions, retire_session"),
        (HalfHooked, {}, "restore_sessions, retire_session"),
        (Unknown, {"mode": "exported"}, "export_sessions"),
        (Unknown, {"hooks": "no.such.module:Hooks"}, "no.such.module:Hooks"),
        (Unknown, {"hooks": f"{__name__}:NoSuchHooks"}, "NoSuchHooks"),
        (Unknown, {"hooks": OWN, "mode": "stateless"}, "only an exported server"),
    ],
)
def test_a_promise_that_cannot_be_kept_stops_the_start(cls: type, given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Participant(cls, given=options(**given))


async def test_a_restart_only_server_says_so_in_its_seeds_and_goes_on_while_closed() -> None:
    unknown = Participant(Unknown)
    async with client_of(unknown.app) as client:
        seed = await client.post("/seed_session", json=SEED)
        assert seed.headers["x-gymckpt-restart"] == "1"
        await close(unknown.owner)
        async with asyncio.timeout(30):
            assert (await client.post("/get_counter_value", json={})).json() == {"count": 3}
