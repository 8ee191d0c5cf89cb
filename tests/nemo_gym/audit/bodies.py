"""Bodies for `/verify`: a server's own example tasks with the answers recorded for them, and some made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
LIMIT = 5
"""Recorded answers per server; more prove nothing more."""
NOT_ROLLOUTS = ("materialized", "profiling", "aggregate")


def bodies_of(directory: Path) -> list[dict[str, Any]]:
    """Recorded answers, one that helps nobody, and one made from the ground truth where none recorded is right."""
    tasks = [row for file in _files(directory, "example") for row in _rows(file) if "responses_create_params" in row]
    bodies = list(_recorded(directory, tasks))[:LIMIT]
    bodies.append(_body(tasks[0], [_message("No idea.")]))
    right = RIGHT_ANSWERS.get(directory.name)
    if right is not None:
        bodies.append(_body(tasks[0], right(tasks[0])))
    return bodies


def _files(directory: Path, kind: str) -> list[Path]:
    found = sorted((directory / "data").glob(f"*{kind}*.jsonl"))
    if kind == "example":
        return [file for file in found if "rollout" not in file.name]
    return [file for file in found if not any(part in file.name for part in NOT_ROLLOUTS)]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        if line.strip():
            yield json.loads(line)


def _recorded(directory: Path, tasks: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A rollout row is a reply: the request it answered is the task with the same prompt, else the one of its place."""
    for file in _files(directory, "rollouts"):
        for index, rollout in enumerate(_rows(file)):
            same = [task for task in tasks if _prompt(task) == _prompt(rollout)]
            if not same and index < len(tasks):
                same = [tasks[index]]
            if same and "response" in rollout:
                recorded = rollout["response"]
                body = _body(same[0], [_item(item) for item in recorded.get("output") or []])
                if recorded.get("incomplete_details"):
                    body["response"]["incomplete_details"] = recorded["incomplete_details"]
                yield body


def _prompt(row: Row) -> str:
    given = (row.get("responses_create_params") or {}).get("input")
    if isinstance(given, list):
        given = [one.get("content") for one in given if isinstance(one, dict) and one.get("role") == "user"][:1]
    return json.dumps(given)


def _body(task: Row, output: Sequence[Row]) -> dict[str, Any]:
    response = {"id": "r1", "created_at": 1.0, "model": "policy", "object": "response", "output": list(output)}
    return {**task, "response": {**response, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}}


def _item(item: Row) -> dict[str, Any]:
    """A recorded output item as an agent sends it: without nulls, with the annotations that text has to have."""
    plain: dict[str, Any] = _without_nulls(item)
    if plain.get("type") == "message" and isinstance(plain.get("content"), list):
        for part in plain["content"]:
            if part.get("type") == "output_text":
                part.setdefault("annotations", [])
    return plain


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "m1", "type": "message", "role": "assistant", "status": "completed", "content": content}


def _node_list(task: Row) -> list[dict[str, Any]]:
    return [_message(f"Final Answer: [{', '.join(json.loads(task['expected_answer']))}]")]


def _every_text(task: Row) -> list[dict[str, Any]]:
    return [_message(" ".join(task["outputs"]))]


def _tool_outputs(task: Row) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": f"c{index}", "output": json.dumps({"solution": value})}
        for index, value in enumerate(json.loads(task["ground_truth"]))
    ]


RIGHT_ANSWERS = {"graphwalks": _node_list, "ruler": _every_text, "math_advanced_calculations": _tool_outputs}
"""Servers whose recorded answers are all wrong."""
