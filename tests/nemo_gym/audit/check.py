"""Follows everything a request to a server runs, and reports what it touches.

It starts at `/seed_session`, `/verify`, `/close_session` and every tool route, and follows each *mention* of a
function, method or class of `resources_servers`, the request and response models with their validators included.

Not seen: state inside libraries; what a method of another object does to arguments it is given; names that only exist
as text (`getattr` with a computed name). A library that is not known to be pure is therefore a finding.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.nemo_gym.audit.aliases import Scope, arguments
from tests.nemo_gym.audit.calls import NOTHING, Calls
from tests.nemo_gym.audit.rules import (
    FINDABLE_BUILTINS,
    JUDGE_CALL,
    REFUSED_BUILTINS,
    external,
    is_set,
    memo_of,
    ordered_use,
    set_annotation,
    value_kind,
)
from tests.nemo_gym.audit.sources import (
    MUTATORS,
    Binding,
    Function,
    Module,
    Sources,
    dotted,
    parameters,
    parent,
    root_of,
)

IN_PLACE = (ast.Add, ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor, ast.Mult)
"""The operators that change a list, dict, set or counter in place."""


@dataclass
class Audit:
    """What was seen. refused: with file and line. found: to be accepted word for word. judge: it calls a judge."""

    refused: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)
    judge: bool = False


def audit(sources: Sources, module: str, server: str) -> Audit:
    """Follow one server. Raises LookupError if there is no such class."""
    return _Checker(sources, module, server).run()


class _Checker:
    def __init__(self, sources: Sources, module: str, server: str) -> None:
        self._calls = Calls(sources, module, server)
        self._server = self._calls.server
        self._audit = Audit()
        self._seen: set[tuple[object, ...]] = set()

    def run(self) -> Audit:
        for entry in self._server.entries():
            found = self._server.method(entry)
            if found is not None:
                self._function(*found)
        for refusal in self._server.refusals():
            self._audit.refused.add(refusal)
        for finding in self._server.findings():
            self._audit.found.add(finding)
        for module, node in self._server.config_classes():
            for function in node.body:
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not _validator(function):
                    self._function(module, function, shared=frozenset(one.arg for one in function.args.args[:1]))
        return self._audit

    # ---- reports

    def _refuse(self, module: Module, node: ast.AST, text: str) -> None:
        self._audit.refused.add(f"{module.path}:{getattr(node, 'lineno', 0)}: {text}")

    def _find(self, text: str) -> None:
        self._audit.found.add(text)

    # ---- functions

    def _function(
        self, module: Module, function: Function, shared: frozenset[str] = NOTHING, holders: frozenset[str] = NOTHING
    ) -> None:
        key = (module.path, function.lineno, function.col_offset, shared, holders)
        if key in self._seen:
            return
        self._seen.add(key)
        memo = memo_of(function)
        if memo:
            self._find(f"memo {function.name} ({memo})")
        for default in (*function.args.defaults, *(one for one in function.args.kw_defaults if one)):
            if value_kind(default) != "immutable" and not isinstance(default, ast.Name | ast.Attribute):
                self._refuse(module, default, f"the default of a parameter of {function.name} is kept between calls")
        self._visit(self._calls.scope(module, function, self._server.self_name(function), shared, holders))

    def _visit(self, scope: Scope) -> None:
        sets = self._set_names(scope)
        requests = {one.arg for one in self._parameters(scope) if _is_request(scope, one)}
        for node in ast.walk(scope.function):
            self._changes(scope, node)
            used = ordered_use(node, sets)
            if used is not None:
                self._find(f"order of a set: {ast.unparse(used)}")
            if isinstance(node, ast.Global):
                self._refuse(scope.module, node, f"global {', '.join(node.names)}")
            if isinstance(node, ast.Name):
                if node.id in requests:
                    self._refuse(scope.module, node, f"uses the request: {ast.unparse(parent(node) or node)[:60]}")
                else:
                    self._mention(scope, node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _annotates(node):
                self._text_annotation(scope, node)

    def _parameters(self, scope: Scope) -> Iterator[ast.arg]:
        for node in ast.walk(scope.function):
            if isinstance(node, ast.arguments):
                yield from parameters(node)

    def _set_names(self, scope: Scope) -> set[str]:
        names = {one.arg for one in self._parameters(scope) if set_annotation(one.annotation)}
        for _ in range(2):  # a set made from a set that is found further down
            for node in ast.walk(scope.function):
                if isinstance(node, ast.AnnAssign) and set_annotation(node.annotation):
                    names |= {name.id for name in (node.target,) if isinstance(name, ast.Name)}
                elif isinstance(node, ast.Assign) and (
                    is_set(node.value, names) or self._answers_set(scope, node.value)
                ):
                    names |= {name.id for name in node.targets if isinstance(name, ast.Name)}
                elif isinstance(node, ast.NamedExpr) and is_set(node.value, names):
                    names.add(node.target.id)
        return names

    def _answers_set(self, scope: Scope, value: ast.AST) -> bool:
        called = self._calls.called(scope, value) if isinstance(value, ast.Call) else None
        return called is not None and set_annotation(called[1].returns)

    # ---- what is changed

    def _changes(self, scope: Scope, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if scope.shared(node.value):
                self._refuse(scope.module, node, f"changes {ast.unparse(node)[:60]}")
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, IN_PLACE) and scope.shared(node.target):
            self._refuse(scope.module, node, f"changes {ast.unparse(node.target)[:60]}")
        elif isinstance(node, ast.Call):
            self._call_changes(scope, node)

    def _call_changes(self, scope: Scope, node: ast.Call) -> None:
        given_shared = any(scope.shared(part) for part in node.args)
        if isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            receiver = node.func.value
            unbound = isinstance(receiver, ast.Name) and hasattr(builtins, receiver.id) and given_shared
            if (scope.shared(receiver) or unbound) and not self._own_method(scope, node.func):
                self._refuse(scope.module, node, f"changes {ast.unparse(node)[:60]}")
        elif isinstance(node.func, ast.Name) and node.func.id in ("next", "anext") and given_shared:
            self._refuse(scope.module, node, f"advances {ast.unparse(node)[:60]}")

    def _own_method(self, scope: Scope, node: ast.Attribute) -> bool:
        """A method of the server that merely has the name of a mutator is followed instead."""
        return (
            isinstance(node.value, ast.Name)
            and node.value.id == scope.server
            and self._server.method(node.attr) is not None
        )

    # ---- what is mentioned

    def _mention(self, scope: Scope, node: ast.Name) -> None:
        if node.id == scope.server:
            self._on_server(scope, node)
        elif node.id in scope.imports:
            self._binding(scope, node, *scope.imports[node.id])
        elif node.id in scope.local:
            return
        elif (found := self._calls.resolve(scope.module, node.id)) is not None:
            if node.id in scope.module.changed:
                self._refuse(scope.module, node, f"the module changes its global {node.id}")
            self._binding(scope, node, *found)
        elif node.id == "super":
            self._super(scope, node)
        elif node.id in REFUSED_BUILTINS:
            self._refuse(scope.module, node, f"{node.id}()")
        elif node.id in FINDABLE_BUILTINS:
            self._find(FINDABLE_BUILTINS[node.id])

    def _binding(self, scope: Scope, node: ast.AST, module: Module, binding: Binding) -> None:
        if binding.kind == "function":
            assert isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef)
            self._function(module, binding.node, *self._calls.passed(scope, node, binding.node, bound=False))
        elif binding.kind == "class":
            assert isinstance(binding.node, ast.ClassDef)
            self._class_mention(scope, node, module, binding.node)
        elif binding.kind == "value":
            self._value(scope, node, module, binding)
        else:
            self._external(scope, node, module, binding)

    def _value(self, scope: Scope, node: ast.AST, module: Module, binding: Binding) -> None:
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "?")
        kind = value_kind(binding.node)
        if kind == "table":
            self._find(f"global table {name}")
        elif kind not in ("immutable", "alias"):
            self._find(f"global {name} = {kind}")
        if name in module.changed:
            self._refuse(scope.module, node, f"{module.path} changes its global {name}")
        if binding.node is None or (module.path, "value", name) in self._seen:
            return
        self._seen.add((module.path, "value", name))
        if isinstance(binding.node, ast.expr):
            self._visit(self._calls.scope(module, binding.node))

    def _external(self, scope: Scope, node: ast.AST, module: Module, binding: Binding) -> None:
        own = self._calls.sources.module(binding.source)
        around = parent(node)
        if binding.kind == "module" and own is not None and isinstance(around, ast.Attribute):
            found = self._calls.resolve(own, around.attr)
            if found is not None:
                if around.attr in own.changed:
                    self._refuse(scope.module, node, f"{own.path} changes its global {around.attr}")
                self._binding(scope, around, *found)
                return
        name = ".".join(part for part in (binding.source, binding.attribute) if part)
        while isinstance(around, ast.Attribute):
            name += f".{around.attr}"
            around = parent(around)
        verdict = external(name)
        if verdict == "refused":
            self._refuse(scope.module, node, name)
        elif verdict == "finding":
            self._find(f"library {name}")
        elif verdict == "judge":
            self._audit.judge = True

    def _class_mention(self, scope: Scope, node: ast.AST, module: Module, found: ast.ClassDef) -> None:
        around = parent(node)
        if self._server.is_part(found):
            method = self._server.method(around.attr) if isinstance(around, ast.Attribute) else None
            if method is not None:
                self._function(*method, *self._calls.passed(scope, around, method[1], bound=True))
            elif not _annotation_or_base(node):
                self._refuse(scope.module, node, f"uses the class of the server: {ast.unparse(around or node)[:60]}")
            return
        made = isinstance(around, ast.Call) and around.func is node
        holds = made and any(scope.outlives(part) for part in arguments(around))  # type: ignore[arg-type]
        self._class(module, found, holds=holds)

    def _class(self, module: Module, found: ast.ClassDef, *, holds: bool = False) -> None:
        key = (module.path, found.lineno, "class", holds)
        if key in self._seen:
            return
        self._seen.add(key)
        for node in found.body:
            if isinstance(node, ast.Assign) and value_kind(node.value) == "table":
                self._find(f"class table {found.name}.{ast.unparse(node.targets[0])}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = frozenset(one.arg for one in node.args.args[:1])
                if first == {"cls"} or any(dotted(one) == "classmethod" for one in node.decorator_list):
                    self._function(module, node, shared=first)
                else:
                    self._function(module, node, holders=first if holds else NOTHING)
        if not holds:
            bare = ast.ClassDef(
                name=found.name,
                bases=found.bases,
                keywords=found.keywords,
                decorator_list=found.decorator_list,
                body=[node for node in found.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)],
            )
            self._visit(self._calls.scope(module, ast.copy_location(bare, found)))

    def _text_annotation(self, scope: Scope, node: ast.Constant) -> None:
        for name in re.findall(r"\w+", str(node.value)):
            module, binding = self._calls.resolve(scope.module, name) or (scope.module, None)
            if (
                binding is not None
                and isinstance(binding.node, ast.ClassDef)
                and not self._server.is_part(binding.node)
            ):
                self._class(module, binding.node)

    # ---- the server

    def _on_server(self, scope: Scope, node: ast.Name) -> None:
        use = parent(node)
        if isinstance(use, ast.arg) or not isinstance(use, ast.Attribute):
            self._refuse(scope.module, node, f"passes the server on: {ast.unparse(use or node)[:60]}")
            return
        method = self._server.method(use.attr)
        if method is not None:
            self._function(*method, *self._calls.passed(scope, use, method[1], bound=True))
        elif use.attr == "server_client":
            self._client(scope, use)
        elif use.attr not in ("config", "normalize_tool_name"):
            for module, value in self._server.class_values(use.attr):
                self._visit(self._calls.scope(module, value))
            verdict, text = self._server.attribute(use.attr)
            if verdict == "finding" and _awaited(use):
                verdict, text = "refused", f"awaits self.{use.attr}: what it was set to at start may do anything"
            if verdict == "refused":
                self._refuse(scope.module, use, text)
            elif verdict == "finding":
                self._find(text)

    def _client(self, scope: Scope, node: ast.Attribute) -> None:
        """The client may go to `call_judge` and nowhere else."""
        call = parent(node)
        name = dotted(call.func) if isinstance(call, ast.Call) else None
        found = scope.imports.get(name or "") or self._calls.resolve(scope.module, name or "")
        if found is None or f"{found[1].source}.{found[1].attribute}" != JUDGE_CALL:
            self._refuse(scope.module, node, f"uses the client: {ast.unparse(call or node)[:60]}")

    def _super(self, scope: Scope, node: ast.Name) -> None:
        call = parent(node)
        use = parent(call) if call is not None else None
        if scope.server is not None and isinstance(use, ast.Attribute):
            inherited = self._server.method(use.attr, after=scope.function)
            if inherited is not None:
                self._function(*inherited, *self._calls.passed(scope, use, inherited[1], bound=True))


def _validator(function: Function) -> bool:
    names = (dotted(one.func if isinstance(one, ast.Call) else one) or "" for one in function.decorator_list)
    return any(name.endswith("validator") for name in names)


def _awaited(node: ast.AST) -> bool:
    """Whether what is reached through an attribute is called and awaited."""
    around = parent(node)
    while isinstance(around, ast.Attribute | ast.Subscript | ast.Call):
        around = parent(around)
    return isinstance(around, ast.Await)


def _is_request(scope: Scope, parameter: ast.arg) -> bool:
    name = dotted(parameter.annotation) if parameter.annotation is not None else None
    return name is not None and name.split(".")[-1] in ("Request", "HTTPConnection", "WebSocket")


def _annotates(node: ast.AST) -> bool:
    inner, around = node, parent(node)
    while isinstance(around, ast.Subscript | ast.BinOp | ast.Tuple):
        inner, around = around, parent(around)
    if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
        return around.returns is inner
    return isinstance(around, ast.arg | ast.AnnAssign) and around.annotation is inner


def _annotation_or_base(node: ast.AST) -> bool:
    return _annotates(node) or isinstance(parent(node), ast.ClassDef) or isinstance(root_of(node), ast.Constant)
