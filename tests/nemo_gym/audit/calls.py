"""What the names and calls of a function lead to."""

from __future__ import annotations

import ast

from tests.nemo_gym.audit.aliases import Scope, passed
from tests.nemo_gym.audit.server_class import ServerClass
from tests.nemo_gym.audit.sources import Binding, Function, Module, Sources, dotted, parent

NOTHING: frozenset[str] = frozenset()
Given = tuple[frozenset[str], frozenset[str]]
"""The parameters that get shared objects, and those that get holders."""


class Calls:
    """Resolves names and calls for one server. Raises LookupError if there is no such class."""

    def __init__(self, sources: Sources, module: str, server: str) -> None:
        self.sources = sources
        self.server = ServerClass(sources, module, server, self.resolve)
        self._returning: set[int] = set()
        self._returned: dict[tuple[object, ...], bool] = {}

    def resolve(self, module: Module, name: str) -> tuple[Module, Binding] | None:
        """What a global name of a module finally is; imports from the servers' own files are followed."""
        binding = module.names.get(name)
        return None if binding is None else self.follow(module, binding)

    def follow(self, module: Module, binding: Binding) -> tuple[Module, Binding]:
        """What a binding finally is, and the module whose names it uses."""
        if binding.kind == "member":
            target = self.sources.module(binding.source)
            if target is not None and binding.attribute in target.names:
                return self.resolve(target, binding.attribute) or (target, binding)
            name = f"{binding.source}.{binding.attribute}"
            if self.sources.module(name) is not None:
                return module, Binding("module", source=name)
        return module, binding

    def scope(
        self,
        module: Module,
        function: Function | ast.ClassDef | ast.expr,
        server: str | None = None,
        shared: frozenset[str] = NOTHING,
        holders: frozenset[str] = NOTHING,
    ) -> Scope:
        """One function with what is shared in it, called with these parameters shared or holding."""
        imports: dict[str, tuple[Module, Binding]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name, binding in self.sources.imports(module, node).items():
                    imports[name] = self.follow(module, binding)

        def resolve(name: str) -> Binding | None:
            found = self.resolve(module, name)
            return None if found is None else found[1]

        scope = Scope(module, function, server, resolve, self.returns_shared, set(shared), set(holders))
        return scope.prepare(imports)

    def passed(self, scope: Scope, node: ast.AST | None, function: Function, *, bound: bool) -> Given:
        """What a function gets where it is mentioned: nothing, unless it is called there."""
        call = parent(node) if node is not None else None
        if not isinstance(call, ast.Call) or call.func is not node:
            return NOTHING, NOTHING
        return passed(scope, call, function, bound=bound and not static(function))

    def called(self, scope: Scope, call: ast.Call) -> tuple[Module, Function] | None:
        """The function or method of the server that a call surely runs."""
        if isinstance(call.func, ast.Attribute) and scope.server and dotted(call.func.value) == scope.server:
            return self.server.method(call.func.attr)
        if isinstance(call.func, ast.Name):
            if call.func.id in scope.nested:
                return scope.module, scope.nested[call.func.id]
            found = self.resolve(scope.module, call.func.id) if call.func.id not in scope.local else None
            if found and isinstance(found[1].node, ast.FunctionDef | ast.AsyncFunctionDef):
                return found[0], found[1].node
        return None

    def returns_shared(self, scope: Scope, call: ast.Call) -> bool:
        """Whether a call hands out a shared object."""
        called = self.called(scope, call)
        if called is None or id(called[1]) in self._returning:
            return False
        module, function = called
        bound = isinstance(call.func, ast.Attribute) and not static(function)
        given = passed(scope, call, function, bound=bound)
        key = (id(function), given)
        if key not in self._returned:
            self._returning.add(id(function))
            inner = self.scope(module, function, self.server.self_name(function), *given)
            answers = (node.value for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield))
            self._returned[key] = any(value is not None and inner.shared(value) for value in answers)
            self._returning.discard(id(function))
        return self._returned[key]


def static(function: Function) -> bool:
    """Whether it is a static method."""
    return any(dotted(decorator) == "staticmethod" for decorator in function.decorator_list)
