"""The framework's own check of a session's life gives with our mixin what it gives on the bare server, to the word."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import yaml
from nemo_gym.base_resources_server import ResourcesSeedSessionRequest
from nemo_gym.testing.session_conformance import check_resources_session_contract

from gym_ckpt_grpc.integrations.nemo_gym import checkpointed
from gym_ckpt_grpc.integrations.nemo_gym.main_block import served_class
from gym_ckpt_grpc.integrations.nemo_gym.participant import found
from tests.nemo_gym.servers import RELEASED, build, options

STATEFUL = (
    "blackjack",
    "conversational_tool_use_simulation",
    "critpt",
    "example_mcp_weather",
    "example_multi_turn_gymnasium",
    "example_session_state_mgmt",
    "example_single_tool_call",
    "genrm_compare",
    "indian_banking",
    "indirect_prompt_injection",
    "interactive_browser",
    "longmt_eval",
    "nemo_user_sim",
    "osworld",
    "proof_genselect",
    "proof_judge",
    "proof_verification",
    "speed_bench",
    "swebench_pro",
    "verifif",
    "wordle",
    "workplace_assistant",
)
"""Released servers with state of a session, or outside of it, that can be built with what the framework brings."""
STATELESS = ("arc_agi", "circle_click", "mcqa", "ruler")
PASSES = "passes"
WHERE = ("entrypoint", "host", "port", "domain")


def _seed() -> ResourcesSeedSessionRequest:
    return ResourcesSeedSessionRequest.model_validate(
        {
            "resources_session_id": "s1",
            "episode_id": {"rollout_id": "r"},
            "task_id": {"taskset": "t", "task_id": "1"},
            "task_data": {},
        }
    )


def _config(name: str) -> dict[str, Any]:
    """What the server's own first configuration says, but for where it is."""
    for path in sorted((RELEASED / name / "configs").glob("*.yaml")):
        for block in yaml.safe_load(path.read_text()).values():
            if isinstance(block, dict) and "resources_servers" in block:
                said = next(iter(block["resources_servers"].values()))
                return {key: value for key, value in said.items() if key not in WHERE}
    return {}


def _outcome(server: Any, *, keeps_state: bool) -> str:
    try:
        check_resources_session_contract(server.setup_webserver(), _seed(), keeps_state=keeps_state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return PASSES


def _servers(name: str, monkeypatch: Any, **given: Any) -> tuple[Any, Any]:
    """The bare server and ours, each new."""
    monkeypatch.chdir(RELEASED / name)  # where the framework starts it: some read files from there
    module = importlib.import_module(f"resources_servers.{name}.app")
    cls = getattr(module, served_class(RELEASED / name / "app.py"))
    config = _config(name)
    ours = checkpointed(cls, options(instance=name, **given))
    return build(cls, name=name, **config), build(ours, name=name, **config)


@pytest.mark.parametrize("keeps_state", [True, False])
@pytest.mark.parametrize("name", [*STATEFUL, *STATELESS])
def test_the_check_says_of_ours_what_it_says_of_the_bare_server(name: str, keeps_state: bool, monkeypatch: Any) -> None:
    bare, ours = _servers(name, monkeypatch)
    expected = _outcome(bare, keeps_state=keeps_state)
    assert _outcome(ours, keeps_state=keeps_state) == expected
    if name == "example_single_tool_call" or (name in STATELESS and not keeps_state):
        assert expected == PASSES


@pytest.mark.parametrize("mode", ["exported", "stateless", "restart_only"])
def test_it_says_the_same_in_every_mode_and_no_session_is_left(mode: str, monkeypatch: Any) -> None:
    bare, ours = _servers("example_single_tool_call", monkeypatch, mode=mode)
    assert _outcome(ours, keeps_state=True) == _outcome(bare, keeps_state=True) == PASSES
    owner = found(ours).owner
    assert (owner.settings.mode, owner.report(9).counts["inflight"], len(owner._sessions)) == (mode, 0, 0)
