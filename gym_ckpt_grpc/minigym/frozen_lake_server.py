"""A walk over the frozen lake: the real `FrozenLake-v1`, exported with the generator that makes it slippery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from gym_ckpt_grpc.minigym.generator_state import (
    check_generator,
    check_integer,
    export_generator,
    restored_generator,
)
from gym_ckpt_grpc.minigym.gymnasium_base import GymnasiumServer, Step
from gym_ckpt_grpc.minigym.resources_server import choice_tool
from gym_ckpt_grpc.participants import ResourcesMode, VerifyMode

MAX_STEPS = 8
"""Steps after which a walk is cut off."""
ACTIONS = ("left", "down", "right", "up")
PLACES = 16
SCHEMA_VERSION = 1

TOOLS: tuple[dict[str, Any], ...] = (choice_tool("step", "Walk a step on the ice.", "action", ACTIONS),)
"""The tools as offered to the model."""


class Walk:
    """One walk: the environment, and the steps taken (0..MAX_STEPS)."""

    def __init__(self, seed: int) -> None:
        # The passive checker only warns about environments under development, at a cost per step.
        self.env = gymnasium.make("FrozenLake-v1", map_name="4x4", is_slippery=True, disable_env_checker=True)
        self.lake = cast(FrozenLakeEnv, self.env.unwrapped)
        self.steps = 0
        self.env.reset(seed=seed)

    @property
    def place(self) -> int:
        """Where it stands, 0..15, row by row."""
        return int(self.lake.s)


class FrozenLakeServer(GymnasiumServer[Walk]):
    """Walks on the lake. Setup: `seed` of where the ice lets one slip. The reward is 1 at the goal."""

    checkpoint_mode = ResourcesMode.EXPORTED
    checkpoint_verify = VerifyMode.REPLAY
    name = "frozen_lake"
    tools = TOOLS

    def reset(self, setup: Mapping[str, Any]) -> tuple[Walk, Any]:
        check_integer("seed", setup["seed"], 0, 2**63 - 1)
        walk = Walk(setup["seed"])
        return walk, walk.place

    def step(self, state: Walk, action: Any) -> Step:
        if action not in ACTIONS:
            raise ValueError(f"action is {action!r}, not one of {', '.join(ACTIONS)}")
        _, reward, terminated, _, _ = state.env.step(ACTIONS.index(action))
        state.steps += 1
        return Step(state.place, float(reward), terminated, state.steps >= MAX_STEPS and not terminated)

    def shut(self, state: Walk) -> None:
        state.env.close()

    def encode(self, state: Walk) -> Any:
        return {
            "version": SCHEMA_VERSION,
            "place": state.place,
            "steps": state.steps,
            "generator": export_generator(state.lake.np_random),
        }

    def decode(self, value: Any) -> Walk:
        if not isinstance(value, Mapping) or set(value) != {"version", "place", "steps", "generator"}:
            raise ValueError("state does not have exactly the fields version, place, steps, generator")
        if value["version"] != SCHEMA_VERSION:
            raise ValueError(f"version is {value['version']!r}, not {SCHEMA_VERSION}")
        check_integer("place", value["place"], 0, PLACES - 1)
        check_integer("steps", value["steps"], 0, MAX_STEPS - 1)
        check_generator(value["generator"])
        walk = Walk(0)
        walk.steps = value["steps"]
        walk.lake.s = value["place"]
        walk.lake.np_random = restored_generator(value["generator"])
        return walk
