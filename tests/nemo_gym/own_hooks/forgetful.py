"""The negative control of the restores: state hooks that put nothing back; for `hooks` of the options."""

from __future__ import annotations

from typing import Any

from gym_ckpt_grpc.integrations.nemo_gym.hooks import hooks_for


class Forgetful:
    """Exports and retires as the server's own hooks do; a restore leaves the server as it is."""

    def __init__(self, server: object) -> None:
        self._known: Any = hooks_for(server)

    async def export_sessions(self, session_ids: Any) -> Any:
        return await self._known.export_sessions(session_ids)

    async def restore_sessions(self, sessions: Any) -> None:
        """Forget them."""

    async def retire_session(self, session_id: str) -> None:
        await self._known.retire_session(session_id)
