"""Gymnasium-style servers, `resources_servers/gymnasium`: `session_state`, and what a subclass has beside it."""

from __future__ import annotations

from typing import Any

from gym_ckpt_grpc.integrations.nemo_gym.hooks.sessions import TableHooks
from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import StateRefused


class GymnasiumHooks(TableHooks):
    """Of a subclass of `GymnasiumServer` that keeps all of a session in `session_state`, as plain values, tuples, sets,
    dicts with other keys, and `random.Random`.

    Nobody but the author of a subclass can tell that it keeps nothing elsewhere. So it is used for none by itself: name
    it as the `hooks` of an instance. A subclass of it names further dicts in `tables`, and dataclasses in `classes`.
    """

    tables = ("session_state",)

    def free(self, session_id: str) -> None:
        """As the server itself does at the end of a session: a subclass may hold more than its entries."""
        self.server._cleanup_session(session_id)
        super().free(session_id)


class MultiTurnHooks(TableHooks):
    """Of `ExampleMultiTurnEnv`: the number of follow-ups that were sent. It leaves `session_state` empty."""

    tables = ("session_turns",)

    def check(self, table: str, entry: Any) -> None:
        if type(entry) is not int or entry < 0:
            raise StateRefused(f"is {entry!r:.40}, not a count")
