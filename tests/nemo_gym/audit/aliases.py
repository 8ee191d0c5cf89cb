"""Which local names of a function stand for an object that outlives the request.

*shared*: the object itself outlives it (a module global, part of the config, an attribute of the server).
*holder*: made in this request, but with a shared object inside: changing it is fine, changing what it holds is not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.nemo_gym.audit.rules import value_kind
from tests.nemo_gym.audit.sources import (
    MUTATORS,
    Binding,
    Function,
    Module,
    local_names,
    parameters,
    parent,
    root_of,
)

PICKERS = frozenset("get pop popitem setdefault values items keys __getitem__ popleft most_common elements".split())
"""Methods that hand out what their object holds."""
PICKING_BUILTINS = frozenset("next max min cast".split())


@dataclass(eq=False)
class Scope:
    """One function, as called with some shared or holding arguments.

    server: the name of its parameter that is the server (`self`, `cls`), if it is a method of the server.
    returns_shared: whether a call hands out a shared object of the function that it calls.
    """

    module: Module
    function: Function | ast.ClassDef | ast.expr
    server: str | None
    resolve: Callable[[str], Binding | None]
    returns_shared: Callable[[Scope, ast.Call], bool]
    shared_names: set[str] = field(default_factory=set)
    holder_names: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    nested: dict[str, Function] = field(default_factory=dict)
    imports: dict[str, tuple[Module, Binding]] = field(default_factory=dict)

    def prepare(self, imports: dict[str, tuple[Module, Binding]]) -> Scope:
        """Find the local names, and which of them are shared or holders. imports: what the function imports itself."""
        self.imports = imports
        self.local = local_names(self.function)
        for node in ast.walk(self.function):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node is not self.function:
                self.nested[node.name] = node
        before = -1
        while before != len(self.shared_names) + len(self.holder_names):
            before = len(self.shared_names) + len(self.holder_names)
            for node in ast.walk(self.function):
                self._flow(node)
        return self

    def shared(self, node: ast.AST) -> bool:
        """Whether an expression is an object that outlives the request."""
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            return self.shared(node.value) or self.holder(node.value)
        if isinstance(node, ast.Await | ast.NamedExpr):
            return self.shared(node.value)
        if isinstance(node, ast.BoolOp):
            return any(self.shared(part) for part in node.values)
        if isinstance(node, ast.IfExp):
            return self.shared(node.body) or self.shared(node.orelse)
        if isinstance(node, ast.Call):
            return self._call(node)
        return False

    def holder(self, node: ast.AST) -> bool:
        """Whether an expression is an object with a shared object inside."""
        if isinstance(node, ast.Name):
            return node.id in self.holder_names
        if isinstance(node, ast.Await | ast.NamedExpr | ast.Starred):
            return self.holder(node.value)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and self._object(node.func.value) and not _deep(node):
                return True
            return any(self.outlives(part) for part in arguments(node))
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            parts = [*node.elts]
        elif isinstance(node, ast.Dict | ast.BoolOp):
            parts = [*node.values]
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BinOp):
            parts = [node.left, node.right]
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            parts = [node.elt]
        elif isinstance(node, ast.DictComp):
            parts = [node.value]
        return any(part is not None and self.outlives(part) for part in parts)

    def outlives(self, node: ast.AST) -> bool:
        """Shared, or a holder."""
        return self.shared(node) or self.holder(node)

    def _object(self, node: ast.expr) -> bool:
        """Outlives, and is a value: not the server itself, a module, a class or a function."""
        if not isinstance(node, ast.Name) or not self.outlives(node):
            return self.outlives(node) and not isinstance(self._binding(root_of(node)), Binding)
        binding = self._binding(node)
        return node.id != self.server and (binding is None or binding.kind == "value")

    def _binding(self, node: ast.AST) -> Binding | None:
        if not isinstance(node, ast.Name) or (node.id in self.local and node.id not in self.imports):
            return None
        return self.imports[node.id][1] if node.id in self.imports else self.resolve(node.id)

    def _name(self, node: ast.Name) -> bool:
        if node.id in self.shared_names or node.id == self.server:
            return True
        if node.id in self.local and node.id not in self.imports:
            return False
        binding = self._binding(node)
        if binding is None:
            return False
        return binding.kind != "value" or value_kind(binding.node) != "immutable"

    def _call(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Attribute) and node.func.attr in PICKERS and self.outlives(node.func.value):
            return True
        if isinstance(node.func, ast.Name) and node.func.id in PICKING_BUILTINS and self.holder(node):
            return True
        return self.returns_shared(self, node)

    def _flow(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._give(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._give(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and self.outlives(node.value):
            self.holder_names |= _names(node.target)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension) and self.outlives(node.iter):
            self.shared_names |= _names(node.target)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            if self.outlives(node.context_expr):
                self.shared_names |= _names(node.optional_vars)
        elif isinstance(node, ast.Match) and self.outlives(node.subject):
            for case in node.cases:
                self.shared_names |= local_names(case)
        elif isinstance(node, ast.Call):
            self._flow_call(node)

    def _flow_call(self, node: ast.Call) -> None:
        if not any(self.outlives(part) for part in arguments(node)):
            return
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
            and isinstance(node.func.value, ast.Name)
        ):
            self.holder_names.add(node.func.value.id)
        for part in (node.func, *arguments(node)):
            called: Function | ast.Lambda | None = None
            if isinstance(part, ast.Lambda):
                called = part
            elif isinstance(part, ast.Name):
                called = self.nested.get(part.id)
            if called is not None:
                self.shared_names |= {one.arg for one in parameters(called.args)}

    def _give(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Attribute | ast.Subscript):
            if self.outlives(value) and isinstance(target.value, ast.Name):
                self.holder_names.add(target.value.id)
        elif self.shared(value) or (not isinstance(target, ast.Name) and self.holder(value)):
            self.shared_names |= _names(target)
        elif self.holder(value):
            self.holder_names |= _names(target)


def arguments(node: ast.Call) -> Iterator[ast.expr]:
    """All arguments of a call."""
    yield from node.args
    yield from (keyword.value for keyword in node.keywords)


def passed(scope: Scope, node: ast.Call, function: Function, *, bound: bool) -> tuple[frozenset[str], frozenset[str]]:
    """The parameters of a called function that get shared objects, and those that get holders."""
    positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)][1 if bound else 0 :]
    every = {one.arg for one in parameters(function.args)}
    shared: set[str] = set()
    holders: set[str] = set()
    for index, argument in enumerate(node.args):
        names = {positional[index]} if index < len(positional) else every
        if isinstance(argument, ast.Starred):
            names = every
        if scope.shared(argument):
            shared |= names
        elif scope.holder(argument):
            holders |= names
    for keyword in node.keywords:
        names = {keyword.arg} if keyword.arg in every and keyword.arg else every
        if scope.shared(keyword.value):
            shared |= names
        elif scope.holder(keyword.value):
            holders |= names
    return frozenset(shared), frozenset(holders)


def _names(target: ast.AST) -> set[str]:
    return {
        node.id
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and not isinstance(parent(node), ast.Attribute | ast.Subscript)
    }


def _deep(node: ast.Call) -> bool:
    return any(
        keyword.arg == "deep" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in node.keywords
    ) or (isinstance(node.func, ast.Attribute) and node.func.attr in ("deepcopy", "model_dump", "model_dump_json"))
