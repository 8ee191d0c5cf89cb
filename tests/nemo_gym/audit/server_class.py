"""The class of a server with its bases, as far as they stand in `resources_servers`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Literal

from tests.nemo_gym.audit.rules import value_kind
from tests.nemo_gym.audit.sources import MUTATORS, Binding, Function, Module, Sources, dotted, parent

START = frozenset({"__init__", "model_post_init", "setup_webserver"})
"""They run before the first request."""
ENTRIES = ("verify", "seed_session", "close_resources_session", "mcp_tools", "mcp_allowed_tools_for_session")
VERBS = frozenset({"get", "post", "put", "delete", "patch"})
GYMNASIUM = "GymnasiumServer"

Resolve = Callable[[Module, str], tuple[Module, Binding] | None]


class ServerClass:
    """The server's own class and those it inherits from. Raises LookupError if there is none."""

    def __init__(self, sources: Sources, module: str, name: str, resolve: Resolve) -> None:
        found = sources.module(module)
        if found is None:
            raise LookupError(f"no module {module}")
        self._resolve = resolve
        self._parts = list(self._line(found, name))
        if not self._parts:
            raise LookupError(f"no class {name} in {module}")

    def _line(self, module: Module, name: str) -> Iterator[tuple[Module, ast.ClassDef]]:
        found = self._resolve(module, name)
        if found is None or not isinstance(found[1].node, ast.ClassDef):
            return
        module, node = found[0], found[1].node
        yield module, node
        for base in node.bases:
            text = dotted(base.value if isinstance(base, ast.Subscript) else base)
            if text:
                yield from self._line(module, text.split(".")[-1])

    def is_part(self, node: ast.ClassDef) -> bool:
        """Whether a class is the server's own or one of its bases."""
        return any(node is part for _, part in self._parts)

    def method(self, name: str, after: ast.AST | None = None) -> tuple[Module, Function] | None:
        """A method by name; after: that of the classes behind the one that defines this function."""
        parts = self._parts
        if after is not None:
            places = [index for index, (_, node) in enumerate(parts) if after in node.body]
            parts = parts[places[0] + 1 :] if places else []
        for module, node in parts:
            for function in node.body:
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name == name:
                    return module, function
        return None

    def self_name(self, function: Function) -> str | None:
        """The parameter that is the server, if this is one of its methods."""
        if not any(function in node.body for _, node in self._parts):
            return None
        if any(dotted(one) == "staticmethod" for one in function.decorator_list):
            return None
        first = [*function.args.posonlyargs, *function.args.args]
        return first[0].arg if first else None

    def entries(self) -> Iterator[str]:
        """Names of the methods that requests call: the framework's own, and every route of the class."""
        yield from ENTRIES
        for _, function in self._methods():
            if function.name in START:
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and _is_self(node.value, function):
                        yield node.attr

    def config_classes(self) -> Iterator[tuple[Module, ast.ClassDef]]:
        """The class of `self.config`, with its bases."""
        for module, node in self._parts:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and dotted(field.target) == "config":
                    name = dotted(field.annotation)
                    if name:
                        yield from self._line(module, name.split(".")[-1])

    def attribute(self, name: str) -> tuple[Literal["allowed", "finding", "refused"], str]:
        """What reading `self.<name>` is: a constant of the class, set at start only, or state."""
        for field in self._fields(name):
            constant = isinstance(field, ast.Assign) or "ClassVar" in ast.unparse(field.annotation)
            if constant and value_kind(field.value) == "immutable":
                return "allowed", ""
            if constant and self._history(name) != "state":
                return "finding", f"class constant {name}"
        history = self._history(name)
        if history == "start":
            return "finding", f"self.{name} (set at start only)"
        if history == "gate":
            return "finding", f"self.{name} (semaphore gate)"
        return "refused", f"self.{name}"

    def class_values(self, name: str) -> Iterator[tuple[Module, ast.expr]]:
        """What the class gives an attribute, to be followed: a table may hold functions."""
        for module, node in self._parts:
            for field in self._fields(name):
                if field in node.body and field.value is not None:
                    yield module, field.value

    def _fields(self, name: str) -> Iterator[ast.Assign | ast.AnnAssign]:
        for _, node in self._parts:
            for field in node.body:
                if isinstance(field, ast.Assign | ast.AnnAssign):
                    targets = field.targets if isinstance(field, ast.Assign) else [field.target]
                    if name in [dotted(target) for target in targets]:
                        yield field

    def _history(self, name: str) -> Literal["start", "gate", "state", "never"]:
        uses: list[tuple[str, ast.AST]] = []
        writes: list[str] = []
        for _, function in self._methods():
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr == name and _is_self(node.value, function):
                    if isinstance(node.ctx, ast.Load):
                        uses.append((function.name, node))
                        writes += [function.name] if _changed(node) else []
                    else:
                        writes.append(function.name)
        if any(where not in START for where in writes):
            return "state"
        if uses and all(where in START or isinstance(parent(node), ast.withitem) for where, node in uses):
            return "gate" if writes else "never"
        return "start" if writes else "never"

    def refusals(self) -> Iterator[str]:
        """What makes the whole class stateful, wherever it stands."""
        for module, part in self._parts:
            if part.name == GYMNASIUM:
                yield f"{module.path}:{part.lineno}: is a {GYMNASIUM}: its sessions live in step()"
        for module, function in self._methods():
            for node in ast.walk(function):
                text = _state_in(function, node)
                if text:
                    yield f"{module.path}:{getattr(node, 'lineno', 0)}: {text}"

    def findings(self) -> Iterator[str]:
        """What `setup_webserver` does beside adding routes."""
        for _, function in self._methods():
            if function.name == "setup_webserver":
                for statement in function.body:
                    if not _ordinary(statement):
                        yield f"setup_webserver: {ast.unparse(statement)[:80]}"

    def _methods(self) -> Iterator[tuple[Module, Function]]:
        for module, node in self._parts:
            for function in node.body:
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield module, function


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _is_self(node: ast.AST, function: Function) -> bool:
    first = [*function.args.posonlyargs, *function.args.args]
    return isinstance(node, ast.Name) and bool(first) and node.id == first[0].arg


def _state_in(function: Function, node: ast.AST) -> str | None:
    """Why one node of a method means that the server keeps state."""
    if isinstance(node, ast.Attribute):
        if node.attr == "session":
            return f"{function.name}() reads the session"
        if function.name not in START and _is_self(node.value, function) and not isinstance(node.ctx, ast.Load):
            return f"{function.name}() writes self.{node.attr}"
    if function.name in START and node is not function and isinstance(node, FUNCTIONS):
        return f"a function inside {function.name}() may be a route"
    return None


def _changed(node: ast.Attribute) -> bool:
    """Whether the object behind an attribute is changed where it is read."""
    around = parent(node)
    while isinstance(around, ast.Attribute | ast.Subscript):
        if not isinstance(around.ctx, ast.Load):
            return True
        if isinstance(around, ast.Attribute) and around.attr in MUTATORS and isinstance(parent(around), ast.Call):
            return True
        around = parent(around)
    return False


def _ordinary(statement: ast.stmt) -> bool:
    text = ast.unparse(statement)
    if text in ("app = super().setup_webserver()", "return app", "return super().setup_webserver()"):
        return True
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Call) or len(call.args) != 1 or call.keywords:
        return False
    route = dotted(call.func.func) or ""
    return route in {f"app.{verb}" for verb in VERBS} and (dotted(call.args[0]) or "").startswith("self.")
