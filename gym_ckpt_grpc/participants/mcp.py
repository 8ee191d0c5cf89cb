"""Sessions of MCP calls: one POST route for all of them, the session in a signed header token.

    tokens = SessionTokens(key)
    owner = ResourcesOwner(hooks, ResourcesSettings(mode=..., tokens=tokens))
    ...
    tokens.issue(session_id)       # for the client, in the seed's reply
    tokens.read(header_value)      # the session id, in the handler of /mcp

The server that issues and the gate that reads use the same object, so that the two never disagree.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Any, Protocol

import orjson

from gym_ckpt_grpc.protocol.errors import UsageError


class TokenReader(Protocol):
    """What a gate needs of the tokens of a server's MCP route, whoever issues them."""

    def read(self, token: str | None) -> str | None:
        """The session id of a token; None for none, and for one that is not to be trusted."""


SHORTEST_KEY = 16
"""Bytes of a configured key, at least."""
_LONGEST_TOKEN = 4096


class SessionTokens:
    """Issues and reads the tokens of one server: `<payload>.<HMAC-SHA256>`, both base64url; the payload is JSON.

    key: at least 16 bytes. Without one a random key is made, and a token does not outlive the server; a server whose
    clients go on after a restore needs a configured one, the same in every life and process. Raises UsageError for a
    shorter one.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) < SHORTEST_KEY:
            raise UsageError(f"the key of session tokens has {len(key)} bytes, fewer than {SHORTEST_KEY}")
        self._key = key or secrets.token_bytes(32)

    def issue(self, session_id: str) -> str:
        """A token of this session; the same one each time."""
        return self.sign({"session": session_id})

    def sign(self, payload: Any) -> str:
        """Sign any JSON value. `read` takes objects with a `session` only."""
        text = _encoded(orjson.dumps(payload))
        return f"{text}.{self._signature(text)}"

    def read(self, token: str | None) -> str | None:
        """The session id of a token; None for none, an unsigned or undecodable one, or one that is no object."""
        if not token or len(token) > _LONGEST_TOKEN or not token.isascii():
            return None
        text, dot, signature = token.rpartition(".")
        if not dot or not hmac.compare_digest(signature, self._signature(text)):
            return None
        try:
            payload = orjson.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except (binascii.Error, ValueError):
            return None
        session_id = payload.get("session") if isinstance(payload, dict) else None
        return session_id if isinstance(session_id, str) and session_id else None

    def _signature(self, text: str) -> str:
        return _encoded(hmac.digest(self._key, b"gymckpt session " + text.encode(), hashlib.sha256))


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
