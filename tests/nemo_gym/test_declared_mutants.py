"""The audit itself: each kind of state, chance, clock or I/O put into a clean server is refused or found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from gym_ckpt_grpc.integrations.nemo_gym.audited import TABLE
from tests.nemo_gym.audit.check import Audit, audit
from tests.nemo_gym.audit.sources import Sources

ROOT = Path(str(metadata.distribution("nemo-gym").locate_file("")))
PLACE = "resources_servers/synthetic"

CLEAN = """
import json
import re
from typing import ClassVar, Optional
from fastapi import FastAPI
from pydantic import BaseModel, Field, field_validator
from nemo_gym.base_resources_server import BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer
from nemo_gym.config_types import ModelServerRef
from nemo_gym.judge import call_judge
from nemo_gym.openai_utils import NeMoGymResponse
from resources_servers.synthetic.scoring import score
#TOP
PATTERN = re.compile("x+")
LEVELS = ("low", "high")


class Config(BaseResourcesServerConfig):
    weight: float = 1.0
    tags: list = []
    judge: ModelServerRef
    params: dict = {}

    def scaled(self, value):
        #CONFIG
        return self.weight * value


class Request(BaseModel):
    pass


class VerifyRequest(BaseVerifyRequest):
    words: list[str] = Field(default_factory=list)

    @field_validator("words")
    @classmethod
    def check(cls, value):
        #VALIDATOR
        return value


class Reply(BaseVerifyResponse):
    seen: Optional[list] = None


class Counter(BaseModel):
    items: list = []

    def count(self, word):
        #METHOD
        self.items.append(word)
        return len(self.items)


def first(words):
    #HELPER
    return words[0] if words else LEVELS[0]


class Server(SimpleResourcesServer):
    ray_enabled = False
    config: Config
    KINDS: ClassVar[tuple] = ("a", "b")
    #FIELD

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/tool")(self.tool)
        #ROUTES
        return app

    async def tool(self, body: dict) -> dict:
        #TOOL
        return body

    def _weigh(self, words):
        #INNER
        return self.config.scaled(len(words))

    async def verify(self, body: VerifyRequest) -> Reply:
        words = [word for word in body.words if PATTERN.search(word)]
        #VERIFY
        counter = Counter()
        counter.count(first(words))
        total = self._weigh(words) + score(words, self.config.tags)
        await call_judge(self.server_client, server_name=self.config.judge.name, url_path="/v1", json={}, response_model=NeMoGymResponse)
        return Reply(**body.model_dump(), reward=total, seen=sorted({word for word in words}))

    def compute_metrics(self, tasks):
        return {}
"""  # noqa: E501
HELPER = """
import math
#TOP

def score(words, tags):
    #SCORE
    return math.sqrt(len(words)) + len(tags)
"""

# What is put in: place -> code. A place is a `#MARK` of the texts above, SCORE and SCORE_TOP are the helper file's.
REFUSED: dict[str, Mapping[str, str]] = {
    # chance
    "random": {"TOP": "import random", "VERIFY": "_ = random.random()"},
    "random under another name": {"TOP": "from random import random as r", "VERIFY": "_ = r()"},
    "an import inside": {"VERIFY": "import random as q; _ = q.random()"},
    "a dotted import": {"TOP": "import os.path", "VERIFY": "_ = os.path.exists('x')"},
    "uuid": {"TOP": "from uuid import uuid4", "VERIFY": "_ = uuid4()"},
    "uuid as a default of the request": {"TOP": "import uuid", "VALIDATOR": "_ = uuid.uuid4()"},
    "secrets in a lambda": {"TOP": "import secrets", "VERIFY": "_ = (lambda: secrets.token_hex())()"},
    "random in the helper file": {"SCORE_TOP": "import random", "SCORE": "_ = random.random()"},
    "random in the helper file, imported inside": {
        "SCORE_TOP": "import random as rnd\ndef other(): return rnd.random()",
        "VERIFY": "from resources_servers.synthetic.scoring import other\n        other()",
    },
    "random two functions down": {"TOP": "import random\ndef b(): return random.random()", "HELPER": "_ = b()"},
    "random in a decorator": {
        "TOP": "import random\ndef d(f): return random.choice([f])\n@d\ndef g(): pass",
        "VERIFY": "g()",
    },
    "a callable kept in a table": {"TOP": "import random\nTABLE = {'r': random.random}", "VERIFY": "_ = TABLE['r']()"},
    "id()": {"VERIFY": "_ = id(body)"},
    # clock
    "time": {"TOP": "import time", "VERIFY": "_ = time.time()"},
    "now": {"TOP": "from datetime import datetime", "VERIFY": "_ = datetime.now()"},
    "now, not called": {"TOP": "import datetime as d", "VERIFY": "f = d.datetime.utcnow"},
    "the loop's clock": {"TOP": "import asyncio", "VERIFY": "_ = asyncio.get_event_loop().time()"},
    "sleep": {"TOP": "import asyncio", "VERIFY": "await asyncio.sleep(1)"},
    # I/O
    "open": {"VERIFY": "open('/tmp/x')"},
    "a path": {"TOP": "from pathlib import Path", "VERIFY": "Path('x').read_text()"},
    "the environment": {"TOP": "import os", "HELPER": "_ = os.environ.get('X')"},
    "a subprocess": {"TOP": "import subprocess", "VERIFY": "subprocess.run(['x'])"},
    "another client": {"TOP": "import aiohttp", "VERIFY": "aiohttp.ClientSession()"},
    "the client itself": {"VERIFY": "await self.server_client.post(server_name='tools', url_path='/x')"},
    "the client under another name": {"VERIFY": "client = self.server_client"},
    "eval": {"VERIFY": "eval('1')"},
    "exec in the helper file": {"SCORE": "exec('x = 1')"},
    "__import__": {"VERIFY": "__import__('random')"},
    "importlib": {"TOP": "import importlib", "VERIFY": "importlib.import_module('random')"},
    "I/O by an object that was made at start": {
        "FIELD": "def model_post_init(self, context):\n        self._box = context",
        "VERIFY": "_ = await self._box.run(body)",
    },
    # the server itself
    "writes self": {"VERIFY": "self.n = 1"},
    "adds to self": {"VERIFY": "self.n += 1"},
    "reads a field": {"FIELD": "seen: int = 0", "VERIFY": "_ = self.seen"},
    "changes a field": {"FIELD": "seen: dict = {}", "VERIFY": "self.seen['x'] = 1"},
    "changes a class attribute": {"FIELD": "seen = []", "VERIFY": "self.seen.append(1)"},
    "changes the class": {"VERIFY": "Server.n = 1"},
    "changes the class of self": {"VERIFY": "type(self).n = 1"},
    "changes an attribute of a method": {"VERIFY": "self.verify.n = 1"},
    "passes self on": {"TOP": "def helper(s): return s.__dict__", "VERIFY": "helper(self)"},
    "self under another name": {"VERIFY": "me = self\nme.n = 1"},
    "self through getattr": {"VERIFY": "getattr(self, 'x')"},
    "self through vars": {"VERIFY": "vars()['self'].n = 1"},
    "self through setattr": {"VERIFY": "setattr(self, 'n', 1)"},
    "self.__dict__": {"VERIFY": "self.__dict__['n'] = 1"},
    "an inner method writes": {"INNER": "self.n = 1"},
    "the tool route writes": {"TOOL": "self.n = 1"},
    "the tool route fills a global": {"TOP": "SEEN = []", "TOOL": "SEEN.append(1)"},
    "the tool route has chance": {"TOP": "import random", "TOOL": "random.random()"},
    "metrics write what verify reads": {
        "FIELD": "n: int = 0",
        "VERIFY": "_ = self.n",
        "ROUTES": "self.n = 1",
        "TOOL": "self.n = 2",
    },
    "a route defined in place": {"ROUTES": "app.post('/x')(lambda: 1)"},
    "seed": {"FIELD": "async def seed_session(self, body: dict):\n        self.x = 1"},
    "close": {
        "FIELD": "async def close_resources_session(self, body: dict):\n        SEEN.add(1)",
        "TOP": "SEEN = set()",
    },
    "the session": {
        "TOP": "import fastapi",
        "FIELD": "async def seed_session(self, request: fastapi.Request):\n        _ = request.session",
    },
    "the request": {
        "TOP": "import fastapi",
        "FIELD": "async def seed_session(self, request: fastapi.Request):\n        _ = request.headers",
    },
    "a method that no request is known to call writes": {
        "FIELD": "def compute_repeat_metrics(self, tasks):\n        self.n = 1",
    },
    "a method that no request is known to call reads the session": {
        "FIELD": "async def later(self, body):\n        return body.session",
    },
    # module globals
    "a global made by the request": {"VERIFY": "global LAST\n        LAST = words"},
    "a global that other code of the file changes": {
        "TOP": "SEEN = {}\ndef unused(): SEEN['x'] = 1",
        "VERIFY": "_ = SEEN.get('x')",
    },
    "global": {"TOP": "N = 0\ndef bump():\n    global N\n    N += 1", "VERIFY": "bump()"},
    "a global dict": {"TOP": "SEEN = {}", "VERIFY": "SEEN['x'] = 1"},
    "a global list in a helper": {"TOP": "SEEN = []", "HELPER": "SEEN.append(1)"},
    "a global of the helper file": {"SCORE_TOP": "SEEN = []", "SCORE": "SEEN.append(1)"},
    "a global of the helper file, from here": {
        "SCORE_TOP": "SEEN = []",
        "TOP": "from resources_servers.synthetic.scoring import SEEN",
        "VERIFY": "SEEN.append(1)",
    },
    "the helper module's attribute": {"TOP": "import resources_servers.synthetic.scoring as s", "VERIFY": "s.LAST = 1"},
    "a global under a local name": {"TOP": "SEEN = []", "VERIFY": "x = SEEN; x.append(1)"},
    "a global under another global name": {"TOP": "SEEN = []\nALSO = SEEN", "VERIFY": "x = ALSO; x.append(1)"},
    "what a global holds": {"TOP": "SEEN = {'a': []}", "VERIFY": "SEEN.get('a').append(1)"},
    "what a global holds, in a loop": {
        "TOP": "SEEN = {'a': []}",
        "VERIFY": "for x in SEEN.values():\n            x.append(1)",
    },
    "a global through a parameter": {"TOP": "SEEN = []\ndef keep(xs): xs.append(1)", "VERIFY": "keep(SEEN)"},
    "a global through a nested function": {
        "TOP": "SEEN = []",
        "VERIFY": "def keep(xs): xs.append(1)\n        keep(SEEN)",
    },
    "a global through a lambda": {"TOP": "SEEN = []", "VERIFY": "(lambda xs: xs.append(1))(SEEN)"},
    "a global through a returned value": {"TOP": "SEEN = []\ndef table(): return SEEN", "VERIFY": "table().append(1)"},
    "a global inside a list": {"TOP": "SEEN = []", "VERIFY": "xs = [SEEN]; xs[0].append(1)"},
    "a global through list.append": {"TOP": "SEEN = []", "VERIFY": "list.append(SEEN, 1)"},
    "a global list added to": {"TOP": "SEEN = []", "VERIFY": "x = SEEN; x += [1]"},
    "a global iterator": {"TOP": "import itertools\nIDS = itertools.count()", "VERIFY": "_ = next(IDS)"},
    "an attribute of a function": {"VERIFY": "first.n = 1"},
    "an attribute of a library": {"VERIFY": "json.n = 1"},
    "an attribute of another class": {"VERIFY": "Counter.n = 1"},
    "a class attribute by cls": {"VALIDATOR": "cls.n = 1", "TOP": "class X:\n    seen = []"},
    "a kept default": {"TOP": "def memo(k, c={}):\n    c[k] = 1", "VERIFY": "memo(1)"},
    "a global deleted from": {"TOP": "SEEN = {'a': 1}", "VERIFY": "del SEEN['a']"},
    "a global in a with": {
        "TOP": "from contextlib import nullcontext\nSEEN = []",
        "VERIFY": "with nullcontext(SEEN) as s:\n            s.append(1)",
    },
    "a global by a match": {
        "TOP": "SEEN = {'a': []}",
        "VERIFY": "match SEEN:\n            case {'a': xs}:\n                xs.append(1)",
    },
    # the config
    "writes the config": {"VERIFY": "self.config.name = 'x'"},
    "adds to the config": {"VERIFY": "self.config.tags.append(1)"},
    "the config under a local name": {"VERIFY": "c = self.config\nc.weight = 2"},
    "what the config holds, under a local name": {"VERIFY": "p = self.config.params\np['x'] = 1"},
    "what the config holds, by unpacking": {"VERIFY": "p, q = self.config.params, 1\np['x'] = 1"},
    "what the config holds, in the helper file": {"SCORE": "tags.append(1)"},
    "what the config holds, in a copy": {"VERIFY": "p = dict(self.config.params)\np['x'].append(1)"},
    "what the config holds, in a shallow copy": {"VERIFY": "p = self.config.model_copy()\np.tags.append(1)"},
    "a method of the config": {"CONFIG": "self.weight = 2"},
    "a method of the config with chance": {"TOP": "import random", "CONFIG": "return random.random()"},
}
FOUND: dict[str, Mapping[str, str]] = {
    "order of a set": {"VERIFY": "_ = ','.join({w for w in words})"},
    "order of a set, later": {"VERIFY": "s: set[str] = set()\n_ = [w for w in s]"},
    "order of a set, in a reply": {"VERIFY": "return Reply(reward=1, seen={w for w in words})"},
    "order of a set, popped": {"VERIFY": "s = set(words)\n_ = s.pop()"},
    "order of a set, as text": {"VERIFY": "s = set(words)\n_ = f'{s}'"},
    "sorted by a key": {"VERIFY": "_ = sorted(set(words), key=len)"},
    "a sum over a set": {"VERIFY": "_ = sum(0.1 * len(w) for w in set(words))"},
    "hash()": {"VERIFY": "_ = hash('x')"},
    "memo": {"TOP": "import functools\n@functools.lru_cache\ndef m(x): return x", "VERIFY": "m(1)"},
    "global table": {"TOP": "TABLE = {'a': 1}", "VERIFY": "_ = TABLE['a']"},
    "a closure kept in a global": {
        "TOP": "def mk():\n    n = [0]\n    def inc():\n        n[0] += 1\n    return inc\nCOUNT = mk()",
        "VERIFY": "_ = COUNT()",
    },
    "an object kept in a global": {"TOP": "SHARED = Counter_()", "VERIFY": "SHARED.count(1)"},
    "an attribute set at start": {
        "FIELD": "def model_post_init(self, c):\n        self._p = 1",
        "VERIFY": "_ = self._p",
    },
    "an unknown library": {"TOP": "import sympy", "VERIFY": "_ = sympy.S(1)"},
    "a part of the framework": {"TOP": "from nemo_gym.server_utils import request", "VERIFY": "await request()"},
    "a class table": {"TOP": "class X:\n    seen = []", "VERIFY": "X()"},
    "setup does more": {"ROUTES": "app.add_middleware(object)"},
    "print": {"VERIFY": "print(words)"},
}


def indent_of(text: str, mark: str) -> str:
    found = re.search(rf"^( *)#{mark}$", text, re.MULTILINE)
    assert found is not None, mark
    return found[1]


def put(text: str, mark: str, code: str) -> str:
    """Write code at a mark, at its indentation; lines of the code that are indented keep theirs."""
    indent = indent_of(text, mark)
    lines = [line if line.startswith("  " * 2) and mark != "TOP" else indent + line for line in code.split("\n")]
    return re.sub(rf"^ *#{mark}$", lambda _: "\n".join(lines), text, count=1, flags=re.MULTILINE)


def audited(changes: Mapping[str, str]) -> Audit:
    app, helper = CLEAN, HELPER
    for mark, code in changes.items():
        if mark.startswith("SCORE"):
            helper = put(helper, "TOP" if mark == "SCORE_TOP" else mark, code)
        else:
            app = put(app, mark, code)
    texts = {f"{PLACE}/app.py": app, f"{PLACE}/scoring.py": helper}
    compile(app, "app.py", "exec")
    return audit(Sources(ROOT, texts), "resources_servers.synthetic.app", "Server")


def test_the_clean_server_passes() -> None:
    """Nothing is refused and nothing found; that it asks a judge is seen."""
    assert audited({}) == Audit(judge=True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_violation_is_refused(name: str) -> None:
    assert audited(REFUSED[name]).refused


@pytest.mark.parametrize("name", FOUND)
def test_what_needs_a_person_is_found(name: str) -> None:
    """It is not refused, and would have to stand in the table."""
    seen = audited(FOUND[name])
    assert not seen.refused
    assert seen.found


# In real sources: server, file, a piece of its text, what stands there instead.
REAL = [
    ("circle_count", "app.py", "        correct = pred", "        type(self).seen = 1\n        correct = pred"),
    ("calendar", "utils.py", "import json\n", "import json\nSEEN = []\n"),
    ("calendar", "utils.py", "        events_dict = {}\n", "        events_dict = SEEN\n"),
    (
        "calendar",
        "utils.py",
        "        hours, minutes = map",
        "        import random\n        random.random()\n        hours, minutes = map",
    ),
    ("abstention", "app.py", "model_copy(deep=True)", "__class__"),
    ("abstention", "app.py", "judge_responses_create_params.model_copy(deep=True)", "judge_responses_create_params"),
    ("inverse_if", "app.py", "        criteria = item.get", "        self.last = item\n        criteria = item.get"),
    ("gpqa_diamond", "../mcqa/app.py", "    letters: set[str] = set()\n", "    letters = CACHE\n"),
    ("gpqa_diamond", "../mcqa/app.py", '    return " ".join(s.lower', '    open(s)\n    return " ".join(s.lower'),
    (
        "single_step_tool_use_with_argument_comparison",
        "common/verification_utils.py",
        "        expected_count = len(expected_calls)\n",
        "        expected_count = len(expected_calls)\n        self.config.allow_subset = True\n",
    ),
    (
        "single_step_tool_use_with_argument_comparison",
        "common/response_utils.py",
        "    tool_calls: list[FunctionCallAction] = []\n",
        "    import time\n    tool_calls = [time.time()]\n",
    ),
    (
        "math_advanced_calculations",
        "math_advanced_calculations_tools.py",
        "    return 1.1 * a",
        "    open(str(a))\n    return 1.1 * a",
    ),
    (
        "math_advanced_calculations",
        "app.py",
        "        if not func:\n",
        "        self._function_map[path] = func\n        if not func:\n",
    ),
    ("generative_reward_model", "score_parser.py", "    valid_dicts = []\n", "    valid_dicts = globals()\n"),
    (
        "equivalence_llm_judge",
        "app.py",
        "        prompt_template = self._judge",
        "        self._judge_prompt_template = prompt_template = self._judge",
    ),
    (
        "deepsearchqa",
        "app.py",
        "        matched = sum(",
        "        self.config.judge_responses_create_params.input = []\n        matched = sum(",
    ),
    (
        "simpleqa",
        "app.py",
        "await call_judge(\n            self.server_client,",
        "await self.server_client.post(\n            1,",
    ),
]


@pytest.mark.parametrize(
    ("server", "file", "old", "new"), REAL, ids=[f"{row[0]} {row[1]} {n}" for n, row in enumerate(REAL)]
)
def test_a_violation_in_a_released_server_is_seen(server: str, file: str, old: str, new: str) -> None:
    """Its digest changes in any case; the audit alone would not accept it either."""
    path = (Path("resources_servers") / server / file).as_posix().replace(f"{server}/../", "")
    text = (ROOT / path).read_text()
    assert old in text
    changed = text.replace(old, new, 1)
    if "SEEN" in new and "SEEN = []" not in new:
        changed = changed.replace("import json\n", "import json\nSEEN = {}\n", 1)
    if "CACHE" in new:
        changed = changed.replace("import unicodedata\n", "import unicodedata\nCACHE = set()\n", 1)
    (declaration,) = (one for one in TABLE.servers.values() if one.module == f"resources_servers.{server}.app")
    sources = Sources(ROOT, {path: changed})
    assert sources.closure(declaration.module)[path] != declaration.sources[path]
    seen = audit(sources, declaration.module, declaration.server)
    unused_global = new == "import json\nSEEN = []\n"  # nothing uses it: only the digest tells
    assert unused_global or seen.refused
