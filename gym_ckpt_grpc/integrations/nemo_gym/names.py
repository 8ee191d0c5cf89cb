"""How NeMo Gym names a rollout on its data plane: in paths, in bodies, in MCP tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_ckpt_grpc.participants import DataPlaneNames
from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.ids import EpisodeId

NAMES = DataPlaneNames(rollout_prefix="/ng-rollout", session_header="x-nemo-gym-session-token")
"""Names of the data plane; the framework fixes the prefix and the header of its MCP tokens."""

BYPASS = (
    "/",
    "/aggregate_metrics",
    "/reverify_mode",
    "/stats",
    "/openapi.json",
    "/docs",
    "/docs/*",
    "/redoc",
    "/training-token-capture/control/*",
)
"""Routes that belong to no episode, besides those of liveness."""

UNTAGGED_HEADER = "x-gymckpt-untagged"
"""A call to a model server with `1` here belongs to no episode, whatever its path says: a judge's, for instance."""

_TOKEN_SALT = "nemo-gym-mcp-session-token"


def episode_of_body(body: Mapping[str, Any]) -> EpisodeId | None:
    """The episode that a request's JSON object names: typed in `episode_id`, else in the `_ng_*` fields of a row.

    None if it names none. Raises InvalidArgument naming the field that is illegal.
    """
    typed = body.get("episode_id")
    if isinstance(typed, Mapping):
        return _typed(typed)
    return _of_row(body)


def _typed(typed: Mapping[str, Any]) -> EpisodeId:
    rollout_id, attempt = typed.get("rollout_id"), typed.get("attempt", 0)
    if not isinstance(rollout_id, str):
        raise _illegal("episode_id.rollout_id", f"is {rollout_id!r:.80}, not text")
    if type(attempt) is not int:
        raise _illegal("episode_id.attempt", f"is {attempt!r:.80}, not an integer")
    try:
        return EpisodeId(rollout_id, attempt)
    except ValueError as error:
        raise _illegal("episode_id", f"{error}") from None


def _of_row(row: Mapping[str, Any]) -> EpisodeId | None:
    key, field = row.get("_ng_rollout_id"), "_ng_rollout_id"
    if key is None:
        task, rollout = row.get("_ng_task_index"), row.get("_ng_rollout_index")
        if task is None or rollout is None:
            return None
        key, field = f"{task}-{rollout}", "_ng_task_index"
    elif not isinstance(key, str):
        raise _illegal(field, f"is {key!r:.80}, not text")
    attempt = _attempt(row.get("_ng_attempt_index"))
    try:
        # An explicit id may itself end in an attempt: paths carry the same text, and it must mean the same there.
        return EpisodeId.from_capture_key(f"{key}-a{attempt}" if attempt else key)
    except ValueError as error:
        raise _illegal(field, f"{error}") from None


def _attempt(value: Any) -> int:
    if value is None:
        return 0
    try:
        if not isinstance(value, bool):
            return max(0, int(value))
    except (TypeError, ValueError, OverflowError):  # the last for an infinite number
        pass
    raise _illegal("_ng_attempt_index", f"is {value!r:.80}, not an integer")


def _illegal(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"the body names no rollout: {field} {problem}", violations=[Violation(field, problem)])


class NemoTokens:
    """Reads the session tokens of a server's MCP route.

    secret: the key of the server's session cookies, with which the framework signs them.
    """

    def __init__(self, secret: str) -> None:
        from itsdangerous import BadData, URLSafeSerializer

        self._serializer = URLSafeSerializer(secret, salt=_TOKEN_SALT)
        self._bad = BadData

    def read(self, token: str | None) -> str | None:
        """The session id of a token; None for none, a forged one, or one that names no session."""
        if not token:
            return None
        try:
            payload = self._serializer.loads(token)
        except self._bad:
            return None
        session_id = payload.get("sid") if isinstance(payload, dict) else None
        return session_id if isinstance(session_id, str) and session_id else None
