"""The one POST route of an MCP server: JSON-RPC 2.0 over HTTP, without streams. Sessions are found by the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

PROTOCOL_VERSION = "2025-06-18"

Call = Callable[[str, str, Mapping[str, Any]], Mapping[str, Any]]
"""(session id, tool, arguments) -> result. Raises LookupError for an unknown session, ValueError for bad arguments."""


def mcp_reply(
    server_name: str, tools: Sequence[Mapping[str, Any]], call: Call, session_id: str | None, raw: bytes
) -> tuple[int, Any]:
    """Answer one message: HTTP status and body, None for a notification. A call without a session is 404."""
    try:
        message = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return 400, _failed(None, -32700, "the body is no JSON")
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return 400, _failed(None, -32600, "the body is no request")
    number, method, asked = message.get("id"), message["method"], message.get("params") or {}
    if number is None:
        return 202, None
    if method == "initialize":
        info = {"name": server_name, "version": "1"}
        result = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {"tools": {}}, "serverInfo": info}
        return 200, _done(number, result)
    if method == "tools/list":
        return 200, _done(number, {"tools": [_described(tool["function"]) for tool in tools]})
    if method != "tools/call":
        return 200, _failed(number, -32601, f"no method {method}")
    if session_id is None:
        return 404, _failed(number, -32001, "the call names no session")
    return _called(number, call, session_id, asked)


def _called(number: Any, call: Call, session_id: str, asked: Any) -> tuple[int, Any]:
    if not isinstance(asked, dict) or not isinstance(asked.get("name"), str):
        return 200, _failed(number, -32602, "params have no tool name")
    try:
        result, failed = dict(call(session_id, asked["name"], asked.get("arguments") or {})), False
    except LookupError as error:
        return 404, _failed(number, -32001, str(error))
    except ValueError as error:
        result, failed = {"error": str(error)}, True
    text = orjson.dumps(result, option=orjson.OPT_SORT_KEYS).decode()
    content = [{"type": "text", "text": text}]
    return 200, _done(number, {"content": content, "structuredContent": result, "isError": failed})


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": function["name"],
        "description": function["description"],
        "inputSchema": function["parameters"],
    }


def _done(number: Any, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _failed(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
