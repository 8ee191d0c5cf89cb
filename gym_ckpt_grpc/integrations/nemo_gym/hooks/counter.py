"""The session counter, `resources_servers/example_session_state_mgmt`: a number per session."""

from __future__ import annotations

from typing import Any

from gym_ckpt_grpc.integrations.nemo_gym.hooks.sessions import TableHooks
from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import StateRefused


class CounterHooks(TableHooks):
    """Of `StatefulCounterResourcesServer`. The server itself frees nothing, not even at verify."""

    tables = ("session_id_to_counter",)

    def check(self, table: str, entry: Any) -> None:
        if type(entry) is not int:
            raise StateRefused(f"is {entry!r:.40}, not an integer")
