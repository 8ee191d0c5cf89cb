"""Indirect prompt injection, `resources_servers/indirect_prompt_injection`: the row's environment, as tools left it."""

from __future__ import annotations

from typing import Any

from gym_ckpt_grpc.integrations.nemo_gym.hooks.sessions import WatchedHooks
from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import StateRefused


class InjectionHooks(WatchedHooks):
    """Of `IPIResourcesServer`."""

    tables = ("session_id_to_env",)

    def check(self, table: str, entry: Any) -> None:
        if type(entry) is not dict:
            raise StateRefused(f"is {type(entry).__name__}, not an object")
