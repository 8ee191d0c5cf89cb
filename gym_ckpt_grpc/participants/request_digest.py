"""What a request to a policy model asks for, as one digest: equal digests mean interchangeable answers.

One rule for the policy server, which finds a restored cut by it, and for the policy client, which finds a kept
reply by it. Source: participants sections 8.4 and 9.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import orjson

NOT_IN_DIGEST = frozenset({"stream", "stream_options", "user", "metadata", "request_id"})
"""Fields of a request that do not change its answer: the fixed list of participants section 8.4."""


def request_digest(body: Any, path: str = "") -> str:
    """SHA-256, in lower-case hex, of a request without the fields that change no answer.

    body: JSON-able; a policy server gives the effective request, after its defaults. path: for callers to whom the
    same body means something else elsewhere. Raises TypeError for a body that is no JSON.
    """
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name not in NOT_IN_DIGEST}
    return hashlib.sha256(path.encode() + b"\0" + _canonical(body)).hexdigest()


def _canonical(body: Any) -> bytes:
    """JSON with sorted keys and no spaces. What the fast encoder refuses (integers beyond 64 bits, lone surrogates)
    goes the slow way: it came in as JSON and must not fail the call."""
    try:
        return orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
