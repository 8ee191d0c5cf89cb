"""The source files of a released server: parsed, with what each name of a module is bound to."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PACKAGE = "resources_servers"
Function = ast.FunctionDef | ast.AsyncFunctionDef
MUTATORS = frozenset(
    "append extend insert remove pop popitem clear update setdefault add discard sort reverse appendleft popleft "
    "extendleft rotate move_to_end subtract intersection_update difference_update symmetric_difference_update put "
    "put_nowait write writelines __setitem__ __delitem__ __setattr__ __delattr__ __setstate__ __init__ __iadd__ "
    "__next__ send throw".split()
)
"""Methods that change the object they are called on."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What a name stands for: something of this module (node), or `attribute` of the module `source`."""

    kind: Literal["function", "class", "value", "module", "member"]
    node: ast.AST | None = None
    source: str = ""
    attribute: str = ""


@dataclass(eq=False)
class Module:
    """One parsed file. changed: its globals that some function of the file changes."""

    name: str
    path: str
    tree: ast.Module
    package: bool
    names: dict[str, Binding] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)


def parent(node: ast.AST) -> ast.AST | None:
    """The node around this one."""
    found = getattr(node, "parent", None)
    return found if isinstance(found, ast.AST) else None


def dotted(node: ast.AST) -> str | None:
    """The text `a.b.c` of a chain of attributes that starts at a name; None for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else None


def root_of(node: ast.AST) -> ast.AST:
    """Where a chain of attributes and items starts."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """Every parameter, `*` and `**` included."""
    more = [one for one in (arguments.vararg, arguments.kwarg) if one]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *more]


def local_names(function: ast.AST) -> set[str]:
    """The names that are local to a function or to something nested in it."""
    names: set[str] = set()
    declared_global: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names |= {one.arg for one in parameters(node.args)}
            names |= {node.name} if not isinstance(node, ast.Lambda) and node is not function else set()
        elif isinstance(node, ast.ClassDef):
            names |= {node.name} if node is not function else set()
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        elif isinstance(node, ast.Global):
            declared_global |= set(node.names)
    return names - declared_global


class Sources:
    """Reads and parses the files under `root`, the directory that holds `resources_servers`.

    texts: what to read instead of some files, by path under root; may name files that do not exist.
    """

    def __init__(self, root: Path, texts: Mapping[str, str] | None = None) -> None:
        self.root = root
        self._texts = dict(texts or {})
        self._modules: dict[str, Module | None] = {}

    def read(self, path: str) -> bytes | None:
        """The bytes of a file, None if there is none."""
        if path in self._texts:
            return self._texts[path].encode()
        file = self.root / path
        return file.read_bytes() if file.is_file() else None

    def module(self, name: str) -> Module | None:
        """The module of a dotted name below `resources_servers`; None if there is no such file."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def closure(self, name: str) -> dict[str, str]:
        """Path -> sha256 of each file of `resources_servers` that is imported with a module, or later by its code."""
        found: dict[str, str] = {}
        waiting = [name]
        while waiting:
            current = waiting.pop()
            for package in self._packages(current):
                waiting.append(package)
            module = self.module(current)
            if module is None or module.path in found:
                continue
            found[module.path] = hashlib.sha256(self.read(module.path) or b"").hexdigest()
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    waiting += self._imported(module, node)
        return dict(sorted(found.items()))

    def _imported(self, module: Module, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (self._sibling(module, alias.name) for alias in node.names)
        for binding in self.imports(module, node).values():
            yield from (binding.source, f"{binding.source}.{binding.attribute}")

    def imports(self, module: Module, node: ast.Import | ast.ImportFrom) -> dict[str, Binding]:
        """What an import statement binds."""
        if isinstance(node, ast.Import):
            return dict(self._plain_import(module, alias) for alias in node.names)
        source = node.module or ""
        if node.level:
            package = module.name.split(".")[: None if module.package else -1]
            package = package[: len(package) - (node.level - 1)]
            source = ".".join([*package, *([node.module] if node.module else [])])
        else:
            source = self._sibling(module, source)
        return {
            alias.asname or alias.name: Binding("member", source=source, attribute=alias.name) for alias in node.names
        }

    def _plain_import(self, module: Module, alias: ast.alias) -> tuple[str, Binding]:
        found = self._sibling(module, alias.name)
        if alias.asname or found != alias.name:
            return alias.asname or alias.name, Binding("module", source=found)
        return alias.name.split(".")[0], Binding("module", source=alias.name.split(".")[0])

    def _sibling(self, module: Module, source: str) -> str:
        """Servers are started with their own directory on sys.path: `utils` may stand beside `app.py`."""
        if source.split(".")[0] == PACKAGE:
            return source
        beside = ".".join(module.name.split(".")[: None if module.package else -1])
        server = ".".join(module.name.split(".")[:2])
        for name in (f"{beside}.{source}", f"{server}.{source}"):
            if self._file(name):
                return name
        return source

    def _packages(self, name: str) -> Iterator[str]:
        parts = name.split(".")
        for count in range(1, len(parts)):
            yield ".".join(parts[:count])

    def _file(self, name: str) -> tuple[str, bool] | None:
        if name.split(".")[0] != PACKAGE:
            return None
        base = name.replace(".", "/")
        for path, package in ((f"{base}.py", False), (f"{base}/__init__.py", True)):
            if self.read(path) is not None:
                return path, package
        return None

    def _load(self, name: str) -> Module | None:
        file = self._file(name)
        if file is None:
            return None
        path, package = file
        tree = ast.parse(self.read(path) or b"", filename=path)
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                child.parent = node  # type: ignore[attr-defined]
        module = Module(name, path, tree, package)
        self._modules[name] = module
        self._bind(module, tree.body)
        module.changed = _changed_globals(tree)
        return module

    def _bind(self, module: Module, body: Sequence[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                module.names[node.name] = Binding("function", node)
            elif isinstance(node, ast.ClassDef):
                module.names[node.name] = Binding("class", node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                module.names.update(self.imports(module, node))
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            module.names[name.id] = Binding("value", node.value)
                if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                    module.names[node.target.id] = Binding("value", node)
            else:
                self._bind_inside(module, node)

    def _bind_inside(self, module: Module, node: ast.stmt) -> None:
        """`if`, `try`, `with`, loops at module level: their names are the module's."""
        for part in ("body", "orelse", "finalbody"):
            self._bind(module, getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            self._bind(module, handler.body)
        for target in (getattr(node, "target", None), *(i.optional_vars for i in getattr(node, "items", []))):
            for name in ast.walk(target) if target is not None else ():
                if isinstance(name, ast.Name):
                    module.names[name.id] = Binding("value", node)


def _changed_globals(tree: ast.Module) -> set[str]:
    changed: set[str] = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        local = local_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                changed |= set(node.names)
            target: ast.AST | None = None
            if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
                target = root_of(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                target = root_of(node.func)
            if isinstance(target, ast.Name) and target.id not in local:
                changed.add(target.id)
    return changed
