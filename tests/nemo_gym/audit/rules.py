"""What the audited code may mention, and how the parts of an expression are judged.

A *refusal* can never be accepted. A *finding* needs a person, who lists it in the table word for word. What is neither
must be allowed here by name: an unknown library is a finding.
"""

from __future__ import annotations

import ast
from typing import Literal

from tests.nemo_gym.audit.sources import Function, dotted, parent

PURE_MODULES = frozenset(
    "__future__ abc base64 binascii cmath collections copy csv dataclasses decimal difflib enum fractions hashlib html "
    "itertools json math numbers pydantic pydantic_core re statistics string textwrap types typing typing_extensions "
    "unicodedata fastapi".split()
)
PURE_MEMBERS = frozenset(
    {"functools.partial", "functools.reduce", "functools.wraps", "contextlib.suppress", "contextlib.nullcontext"}
)
REFUSED_MODULES = frozenset(
    "aiofiles aiohttp anyio asyncio atexit boto3 builtins cffi concurrent contextvars ctypes curses datasets dbm "
    "docker faker fcntl fileinput gc getpass glob grpc http httpx huggingface_hub importlib inspect io linecache "
    "locale mmap multiprocessing nltk os pathlib pickle pkgutil platform pwd queue random ray redis requests resource "
    "runpy sched secrets select selectors shelve shutil signal site socket socketserver sqlite3 ssl subprocess sys "
    "tempfile threading time tracemalloc urllib urllib3 uuid uvicorn weakref xmlrpc zipfile".split()
)
FINDABLE = frozenset(
    {"asyncio.gather", "asyncio.CancelledError", "asyncio.TimeoutError", "io.StringIO", "io.BytesIO", "os.path.join"}
)
"""Of the refused modules, what a person may accept."""
CLOCKS = frozenset({"now", "today", "utcnow", "fromtimestamp", "ctime"})
FRAMEWORK = ("nemo_gym.base_resources_server.", "nemo_gym.config_types.", "nemo_gym.episode_types.")
JUDGE_CALL = "nemo_gym.judge.call_judge"
JUDGE_ERROR = "nemo_gym.judge.JudgeError"
REFUSED_BUILTINS = frozenset(
    "open input exec eval compile __import__ globals locals breakpoint id vars setattr delattr __builtins__ __loader__ "
    "__spec__ memoryview".split()
)
FINDABLE_BUILTINS = {"hash": "hash() depends on PYTHONHASHSEED", "print": "print()"}
IMMUTABLE_CALLS = frozenset(
    "frozenset tuple str int float bool bytes re.compile compile TypeVar ConfigDict MappingProxyType "
    "types.MappingProxyType Decimal NewType dedent textwrap.dedent".split()
)
TEXT_METHODS = (".join", ".strip", ".format", ".lower", ".upper", ".replace")
MEMOS = frozenset({"lru_cache", "cache", "cached_property", "singledispatch", "alru_cache"})

Verdict = Literal["allowed", "judge", "finding", "refused"]


def external(name: str) -> Verdict:
    """What a mention of `library.member` from outside the servers is."""
    top = name.split(".")[0]
    if name == JUDGE_CALL:
        return "judge"
    if top == "nemo_gym":
        models = name.startswith("nemo_gym.openai_utils.NeMoGym") and "Async" not in name
        return "allowed" if name == JUDGE_ERROR or models or name.startswith(FRAMEWORK) else "finding"
    if any(part in CLOCKS for part in name.split(".")[1:]):
        return "refused"
    if name in PURE_MEMBERS:
        return "allowed"
    if name in FINDABLE:
        return "finding"
    if top in REFUSED_MODULES:
        return "refused"
    return "allowed" if top in PURE_MODULES else "finding"


def value_kind(value: ast.AST | None) -> str:
    """`immutable`, `table` (a mutable literal), `alias` of something else, or the text of a call."""
    if value is None or isinstance(value, ast.Constant | ast.JoinedStr | ast.Lambda | ast.Compare):
        return "immutable"
    if isinstance(value, ast.Tuple | ast.BinOp | ast.UnaryOp | ast.BoolOp):
        parts = {value_kind(part) for part in _operands(value)}
        calls = [part for part in parts if part not in ("immutable", "table", "alias")]
        return calls[0] if calls else "immutable" if parts <= {"immutable"} else "table"
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.SetComp | ast.DictComp):
        return "table"
    if isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.Starred):
        return "alias"
    if isinstance(value, ast.Call):
        name = dotted(value.func) or "?"
        if name in IMMUTABLE_CALLS or (isinstance(value.func, ast.Attribute) and name.endswith(TEXT_METHODS)):
            return "immutable"
        return "table" if name in ("dict", "list", "set", "sorted", "defaultdict", "OrderedDict") else f"{name}()"
    return type(value).__name__


def _operands(value: ast.Tuple | ast.BinOp | ast.UnaryOp | ast.BoolOp) -> list[ast.expr]:
    if isinstance(value, ast.Tuple):
        return value.elts
    if isinstance(value, ast.BoolOp):
        return value.values
    return [value.left, value.right] if isinstance(value, ast.BinOp) else [value.operand]


def memo_of(function: Function) -> str | None:
    """The decorator that keeps what a function answered, if any."""
    for decorator in function.decorator_list:
        name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator) or ""
        if name.split(".")[-1] in MEMOS:
            return name
    return None


def set_annotation(annotation: ast.AST | None) -> bool:
    """Whether an annotation says that a value is a set."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value.split("[")[0].strip() in ("set", "frozenset", "Set", "FrozenSet")
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    name = dotted(base) if base is not None else None
    return (name or "").split(".")[-1] in ("set", "frozenset", "Set", "FrozenSet", "AbstractSet")


def is_set(value: ast.AST, names: set[str]) -> bool:
    """Whether an expression is surely a set; names: the local names that are."""
    if isinstance(value, ast.Name):
        return value.id in names
    if isinstance(value, ast.Set | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Name):
            return value.func.id in ("set", "frozenset")
        union = isinstance(value.func, ast.Attribute) and value.func.attr in (
            "union",
            "intersection",
            "difference",
            "symmetric_difference",
            "copy",
        )
        return union and is_set(value.func.value, names)  # type: ignore[attr-defined]
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitAnd | ast.BitOr | ast.Sub | ast.BitXor):
        return is_set(value.left, names) or is_set(value.right, names)
    if isinstance(value, ast.IfExp):
        return is_set(value.body, names) or is_set(value.orelse, names)
    return False


def ordered_use(node: ast.AST, names: set[str]) -> ast.AST | None:
    """The set whose order (it depends on PYTHONHASHSEED) this node uses, if it does."""
    used: ast.AST | None = None
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        used = node.iter
    elif isinstance(node, ast.FormattedValue | ast.Starred):
        used = node.value
    elif isinstance(node, ast.Call):
        text = dotted(node.func) or ""
        builtin = text in (
            "list",
            "tuple",
            "iter",
            "enumerate",
            "zip",
            "map",
            "filter",
            "str",
            "repr",
            "sum",
            "reversed",
        )
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        keyed = text in ("sorted", "min", "max") and bool(node.keywords)
        for argument in node.args if builtin or keyed or attribute in ("join", "format", "extend", "dumps") else ():
            if is_set(argument, names):
                return argument
        if isinstance(node.func, ast.Attribute) and attribute == "pop" and not node.args:
            used = node.func.value
    elif isinstance(node, ast.keyword) and _into_an_object(node):
        used = node.value
    if used is None or not is_set(used, names):
        return None
    return None if isinstance(node, ast.comprehension) and _order_free(node) else used


def _into_an_object(node: ast.keyword) -> bool:
    """Whether a value goes into a reply, as far as one sees: its call is of a class."""
    call = parent(node)
    name = (dotted(call.func) or "").split(".")[-1] if isinstance(call, ast.Call) else ""
    return name.lstrip("_")[:1].isupper()


def _order_free(node: ast.comprehension) -> bool:
    around = parent(node)
    if isinstance(around, ast.SetComp):
        return True
    call = parent(around) if around is not None else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        return False
    return call.func.id in ("sorted", "all", "any", "len", "min", "max", "set", "frozenset")
