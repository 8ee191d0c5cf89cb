"""The released agents whose episodes can be captured, each read by a person: see `Agent`.

Nothing of the framework is imported: the sources are read as files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

from gym_ckpt_grpc.integrations.nemo_gym.classes import released_class

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agent:
    """An audited agent class: its handlers have no effect but awaited calls of other servers, through the framework's
    client or the functions of `requests`; they draw nothing at random but uuid4 ids (fresh_ids), read the clock for
    observations only, and keep nothing between requests but agent sessions as SimpleAgent's.

    requests: names under which its module imported the framework's `request` function. sources: the audited files, as
    below site-packages -> sha256.
    """

    sources: Mapping[str, str]
    requests: tuple[str, ...] = ()
    fresh_ids: bool = False


_SHARED = {
    "nemo_gym/base_responses_api_agent.py": "404532538a5b0e2451119fc4403766db25d14e59ff0ad4bd31508f8cfff1785e",
    "nemo_gym/server_utils.py": "d68698e42bc1db11ac39ac6414fa22d53926c80f415382546dabb638c635e656",
}


_GYMNASIUM = {
    "resources_servers/gymnasium/__init__.py": "d2b2ee20f2fd31d0b991ca1212a31517936026a159658d822a11528f4b57cae1",
    "resources_servers/gymnasium/base.py": "d32a1aa94d83590ebd04a8c14f294beacd68492f16081084b10ccdd7320dbe55",
}


def _sources(implementation: str, digest: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {f"responses_api_agents/{implementation}/app.py": digest, **_SHARED, **(more or {})}


AGENTS: Mapping[str, Agent] = {
    "responses_api_agents.simple_agent.app:SimpleAgent": Agent(
        _sources("simple_agent", "82130dc8b5e94389e23c5a8c4649a8d21f6dc001cb15553bc21aea5952b9ac99"),
        requests=("http_request",),
    ),
    "responses_api_agents.proof_refinement_agent.app:ProofRefinementAgent": Agent(
        _sources("proof_refinement_agent", "2685f4a91d1cc82862c069ae537cbd77b0327942776a4846217e2fb36166a56c")
    ),
    "responses_api_agents.non_executing_simple_agent.app:NonExecutingSimpleAgent": Agent(
        _sources("non_executing_simple_agent", "d6463b26b179bddd4ce4658be0b54c427eb28b9fdb0c6b8ef1b641f860b93d66")
    ),
    "responses_api_agents.tool_simulation_agent.app:ToolSimulationAgent": Agent(
        _sources("tool_simulation_agent", "9c76a2701bc6bf9c00414d04ead17be0630f5971933fab93cac91d127f6979ce")
    ),
    "responses_api_agents.gymnasium_agent.app:GymnasiumAgent": Agent(
        _sources("gymnasium_agent", "cf52a88d5114ea2f3c98a6b9d5e0272455bb51a8ff4d6a84c34207fbf4995456", _GYMNASIUM),
        fresh_ids=True,
    ),
    "responses_api_agents.speed_bench_agent.app:SpeedBenchAgent": Agent(
        _sources("speed_bench_agent", "7648831017540ea4b417747399167511c8d91c3e7d8c64b7f80b290c6dc77433")
    ),
}
"""`module:class` -> what the audit found. Other agents start over after a crash."""


def agent_of(cls: type) -> Agent | None:
    """What is known of an agent class; None, and one warning, if it is not audited or is not what was audited.

    A subclass that changes something is not what was audited; a mixin of ours, and options, change nothing.
    """
    released = _unchanged(cls)
    place = f"{released.__module__}:{released.__qualname__}"
    agent = AGENTS.get(place)
    if agent is None:
        _warn(place, "nobody has audited it")
        return None
    changed = changed_source(agent.sources)
    if changed is not None:
        _warn(place, f"{changed} is not the file that was audited")
        return None
    return agent


def _unchanged(cls: type) -> type:
    """The class that this one is but for its mixin and its options; itself if it changes more."""
    cls = released_class(cls)
    for base in cls.__mro__:
        if base.__module__.startswith(f"{__package__}."):
            continue
        if f"{base.__module__}:{base.__qualname__}" in AGENTS:
            return base
        if getattr(base, "model_fields", {}).keys() != getattr(cls, "model_fields", {}).keys() or _own(base):
            break
    return cls


def _own(cls: type) -> bool:
    """Whether a class has code of its own."""
    return any(
        isinstance(value, FunctionType | property | classmethod | staticmethod) and not name.startswith("__")
        for name, value in vars(cls).items()
        if name not in ("checkpointed_class", "model_post_init")
    )


@cache
def _warn(place: str, why: str) -> None:
    log.warning("%s is restart_only, its rollouts start over after a crash: %s", place, why)


def changed_source(sources: Mapping[str, str], root: Path | None = None) -> str | None:
    """The first of some files that is missing or has another digest; None if there is none.

    root: below which they are, instead of where their packages are installed.
    """
    for path, digest in sources.items():
        file = root / path if root is not None else _installed(path)
        if file is None or not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            return path
    return None


def _installed(path: str) -> Path | None:
    package, _, rest = path.partition("/")
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return next((Path(place, rest) for place in places or () if Path(place, rest).is_file()), None)
