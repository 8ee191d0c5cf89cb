"""Requests whose generation is constrained by more than its text, so that it can be neither cut nor continued.

Source: participants section 8.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FREE_TOOL_CHOICES = ("auto", "none")
CONSTRAINING = (
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "structural_tag",
    "structured_outputs",
)
"""Fields that constrain a generation whenever they are not null."""
CHOICES = ("n", "best_of")


def restart_reason(body: Mapping[str, Any]) -> str:
    """Why a call with this effective request starts over after a restore; "" if it can be cut and continued.

    The first of: `tool_choice:<value>` or `tool_choice:constrained`, `response_format:<type>`, the name of a
    constraining field, `choices:<n>`.
    """
    return (
        _tool_choice(body.get("tool_choice"))
        or _response_format(body.get("response_format"))
        or next((name for name in CONSTRAINING if body.get(name) is not None), "")
        or next((f"choices:{body[name]}" for name in CHOICES if _several(body.get(name))), "")
    )


def _tool_choice(choice: Any) -> str:
    if choice is None or choice in FREE_TOOL_CHOICES:
        return ""
    return f"tool_choice:{choice}" if isinstance(choice, str) else "tool_choice:constrained"


def _response_format(wanted: Any) -> str:
    if wanted is None:
        return ""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return ""
    return f"response_format:{kind if isinstance(kind, str) else 'unknown'}"


def _several(choices: Any) -> bool:
    return isinstance(choices, int) and choices > 1
