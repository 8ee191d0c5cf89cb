"""The conformance kit over minigym's resources servers, with sessions that it keeps and sessions that it may spend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_ckpt_grpc.minigym.blackjack_server import BlackjackServer
from gym_ckpt_grpc.minigym.counter_server import CounterServer
from gym_ckpt_grpc.minigym.frozen_lake_server import FrozenLakeServer
from gym_ckpt_grpc.minigym.inbox_server import InboxServer
from gym_ckpt_grpc.minigym.office_server import OfficeServer
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer
from gym_ckpt_grpc.minigym.tally_server import TallyServer
from gym_ckpt_grpc.minigym.weather_server import WeatherServer
from gym_ckpt_grpc.participants import ResourcesMode
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.testing import Verdict, run_conformance, serve
from tests.minigym.gated import Gated, Message, play, plays

SERVERS: list[tuple[Callable[[], ResourcesServer], dict[str, Any]]] = [
    (CounterServer, {"target": 20}),
    (TallyServer, {"target": 20}),
    (BlackjackServer, {"seed": 1, "games": 6}),
    (WeatherServer, {"cities": 6}),
    (OfficeServer, {"seed": 1, "goal": 20}),
    (InboxServer, {"seed": 1}),
    (FrozenLakeServer, {"seed": 1}),
]
STATE = ("C61", "C78", "C79", "C81", "C74", "C93", "C98", "C130", "C131", "C132", "C133", "C136", "C138", "C145")
"""What is about a server's state: commit, retire, restore, what is pending."""
RESTARTS = ("C61", "C78", "C79", "C81", "C99", "C100")
"""The same of a server whose sessions are restarts."""


@pytest.mark.parametrize(("build", "setup"), SERVERS, ids=lambda each: getattr(each, "name", "setup"))
async def test_it_keeps_every_promise_of_the_kit(
    tmp_path: Path, build: Callable[[], ResourcesServer], setup: dict[str, Any]
) -> None:
    """Nothing is broken or left behind, and the kept session still plays as if nobody had looked."""
    gated, twin = Gated(build(), attach=False), Gated(build())
    spent = [EpisodeId("spare-1"), EpisodeId("spare-2")]
    calls = plays(gated.server.tools, 4, 1)
    told, messages = list[Message](), list[Message]()
    await twin.seed(setup)
    await play(twin, calls, told)
    async with serve(gated.owner, roots=[tmp_path], token="t") as served:
        await gated.seed(setup)
        for episode in spent:
            await gated.seed(setup, session=f"s-{episode}", episode=episode)
        await play(gated, calls[:2], messages)
        # Restarts cannot be restored; so none of them is given to the kit to do so. The office is looked at whole:
        # most of what that adds is the control plane's, which is the same for all.
        restarts = gated.owner.settings.mode is ResourcesMode.RESTART_ONLY
        ids = RESTARTS if restarts else STATE
        report = await run_conformance(
            served.address,
            token="t",
            root=str(tmp_path),
            expendable=[] if restarts else spent,
            only=() if build is OfficeServer else ids,
        )
        assert [str(result) for result in report.of(Verdict.BROKEN)] == []
        assert report.left == ()
        assert set(report.ids(Verdict.HOLDS)) >= set(ids)
        await play(gated, calls[2:], messages)
    assert messages == told
