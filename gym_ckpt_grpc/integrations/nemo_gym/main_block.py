"""Which class a server's module runs, read without running it."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

from gym_ckpt_grpc.protocol.errors import UsageError

log = logging.getLogger(__name__)

RUN = "run_webserver"


def served_class(file: Path) -> str:
    """Name of the class whose `run_webserver()` the module calls when it is started as a program.

    Whatever else it does then is named in a warning: it is not done here. Raises UsageError if there is not exactly
    one such class.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no Python module: {error}") from error
    started = [
        statement for each in tree.body if isinstance(each, ast.If) and _is_main(each.test) for statement in each.body
    ]
    calls = {statement: name for statement in started if (name := _run(statement))}
    names = sorted(set(calls.values()))
    if len(names) != 1:
        found = f"several: {', '.join(names)}" if names else "none"
        raise UsageError(f"{file} must call `{RUN}()` of one class under `__main__`, and calls {found}. Name the class")
    for statement in started:
        if statement not in calls:
            log.warning("%s:%d of its `__main__` block is not done here", file, statement.lineno)
    return names[0]


def _is_main(test: ast.expr) -> bool:
    """Whether it is `__name__ == "__main__"`."""
    if not isinstance(test, ast.Compare):
        return False
    sides = [test.left, *test.comparators]
    named = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return named and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)


def _run(statement: ast.stmt) -> str:
    """The class of a `Class.run_webserver()`, with or without its result taken; empty for anything else."""
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == RUN:
        return value.func.value.id if isinstance(value.func.value, ast.Name) else ""
    return ""
