"""A refusal of the control layer as it travels over HTTP: `{"error": {"code", "detail"}}`.

It is passed through unchanged, and never becomes a failed episode, a reward or a tool result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from gym_ckpt_grpc.participants.names import header
from gym_ckpt_grpc.protocol.errors import ERRORS, ControlError, ErrorCode, error_for

RETRY_AFTER = 1
"""Seconds in a Retry-After when the error names none."""


def refusal_reply(error: ControlError) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and JSON body that answer a ControlError. 503 comes with Retry-After, in whole seconds."""
    row = ERRORS.get(error.code)
    status = row.http_status if row else 409
    headers = {"content-type": "application/json"}
    if status == 503:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or RETRY_AFTER)))
    content: dict[str, Any] = {"code": error.code.name, "detail": error.message}
    if error.episodes:
        content["episodes"] = [episode.capture_key for episode in error.episodes[:100]]
    if error.violations:
        content["violations"] = [{"field": each.field, "description": each.description} for each in error.violations]
    return status, headers, orjson.dumps({"error": content})


def raise_refusal(status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    """Raise the ControlError that a reply carries; do nothing for any other reply, failed ones included.

    body: decoded JSON. headers: for Retry-After.
    """
    if status < 400 or not isinstance(body, Mapping):
        return
    content = body.get("error")
    code = content.get("code") if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not isinstance(code, str) or code not in ErrorCode.__members__:
        return
    after = header(headers or {}, "retry-after")
    raise error_for(
        ErrorCode[code],
        str(content.get("detail", "")),
        retry_after=float(after) if after and after.isdigit() else None,
    )
