"""A call to the policy server and its reply, as an agent's transport sees them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """One call to the policy server. path: prefix included. body: JSON-able."""

    path: str
    body: Any
    headers: Mapping[str, str]
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class PolicyReply:
    """Its reply. body: decoded JSON, JSON-able so that it can be kept in a checkpoint."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)


Transport = Callable[[PolicyRequest], Awaitable[PolicyReply]]
"""Sends a request to the policy server and nowhere else; raises what it likes if it cannot."""
