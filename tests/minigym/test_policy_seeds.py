"""The seed of a call that names none, on its way from the policy model server to a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_ckpt_grpc.protocol import EpisodeId
from tests.minigym.policy_rig import policy_rig

ASKED = {"messages": [{"role": "user", "content": "count to nine"}], "request_id": "same"}


@pytest.mark.behaviour("P319")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_without_a_seed_has_the_reply_of_its_rollout_in_every_attempt(
    tmp_path: Path, stream: bool
) -> None:
    """So a call that a crash lost is made again to the same end; another rollout has another reply."""
    async with policy_rig(tmp_path) as rig:
        replies = [await rig.ask(EpisodeId("r", attempt), **ASKED, stream=stream) for attempt in range(3)]
        other = await rig.ask(EpisodeId("other"), **ASKED, stream=stream)
    ids = [reply["token_ids"] for reply in replies]
    assert ids == [ids[0]] * 3
    assert other["token_ids"] != ids[0]
    assert {reply["status"] for reply in (*replies, other)} == {200}
