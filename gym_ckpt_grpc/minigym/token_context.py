"""Prompts as token ids: what stands before a reply in the token sequence that capture stages.

A message is a role's id, its bytes, and an end. A later turn of a captured conversation begins with exactly the
tokens of its parent, reply included, so only the messages behind the parent's reply are encoded anew. Generation
itself reads the request and not these ids: how a context came about changes no token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from gym_ckpt_grpc.minigym.vocabulary import BYTE_IDS, END_OF_MESSAGE, ROLE_IDS

Message = Mapping[str, Any]


def prompt_ids(messages: Sequence[Message]) -> list[int]:
    """The whole conversation, and the head of the reply to come. Raises ValueError for an unknown role."""
    return [*itertools.chain.from_iterable(map(_encode, messages)), ROLE_IDS["assistant"]]


def following_ids(messages: Sequence[Message]) -> list[int]:
    """What follows the last reply in the conversation: newer messages, and the head of the reply to come."""
    replies = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    newer = messages[replies[-1] + 1 :] if replies else messages
    return [END_OF_MESSAGE, *prompt_ids(newer)]


def _encode(message: Message) -> Iterable[int]:
    role = message.get("role")
    if role not in ROLE_IDS:
        raise ValueError(f"a message has the role {role!r}")
    content = message.get("content")
    text = content.encode() if isinstance(content, str) else orjson.dumps(content)
    calls = message.get("tool_calls")
    said = text + orjson.dumps(calls, option=orjson.OPT_SORT_KEYS) if calls else text
    return [ROLE_IDS[role], *(BYTE_IDS.first + byte for byte in said), END_OF_MESSAGE]
