"""The released environment servers whose episodes can be captured, each read by a person.

Their `run` has no effect but awaited calls of other servers through the framework's client, draws nothing at random but
uuid4 ids, and keeps nothing outside of its own variables and its cleanup.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gym_ckpt_grpc.integrations.nemo_gym.agent_table import changed_source

_TURN = {
    "environment_servers/single_agent_turn/app.py": "cf9b0658a26257110592f602f65d3b231cc2886281e634355777d4f884ffc6fa",
    "nemo_gym/base_environment_server.py": "031630e8c518fcc6b7c35236d940bda0fe2c8594f152f6269b2d523cb9532ba7",
}

ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "environment_servers.single_agent_turn.app:SingleAgentTurnEnvironmentServer": _TURN,
}
"""`module:class` that defines a `run` -> the audited files, below site-packages, and their sha256."""

log = logging.getLogger(__name__)


def is_replayable(cls: type) -> bool:
    """Whether episodes of an environment server class can be captured: the `run` that it uses was audited.

    A warning says why not. Mixins of ours in front of it do not count.
    """
    place = _place_of_run(cls)
    if place not in ENVIRONMENTS:
        why = "nobody has audited it"
    elif (changed := changed_source(ENVIRONMENTS[place])) is not None:
        why = f"{changed} is not the file that was audited"
    else:
        return True
    log.warning("%s is restart_only, its episodes start over after a crash: %s", place, why)
    return False


def _place_of_run(cls: type) -> str:
    for base in cls.__mro__:
        if "run" in vars(base) and not base.__module__.startswith(f"{__package__}."):
            return f"{base.__module__}:{base.__qualname__}"
    return f"{cls.__module__}:{cls.__qualname__}"
