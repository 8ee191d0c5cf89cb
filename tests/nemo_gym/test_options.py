"""The block `gym_ckpt` of a configuration: what is read of it, and how each mistake is named."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from gym_ckpt_grpc.integrations.nemo_gym import Options, options_of
from gym_ckpt_grpc.protocol.errors import InvalidArgument

CONFIG: dict[str, Any] = {
    "gym_ckpt": {
        "root": "/checkpoints",
        "token_file": "/run/token",
        "instances": {
            "counter": {"control": "127.0.0.1:7001"},
            "agent": {"control": "unix:/run/agent", "service": "solver"},
            "policy": {"control": "10.0.0.1:7003"},
            "turn": {"control": "[::1]:7004"},
        },
    },
    "counter": {"resources_servers": {"example": {"entrypoint": "app.py"}}},
    "agent": {
        "responses_api_agents": {
            "simple_agent": {"model_server": {"type": "responses_api_models", "name": "policy"}, "num_workers": 1}
        }
    },
    "policy": {"responses_api_models": {"openai_model": {}}},
    "turn": {"environment_servers": {"single_agent_turn": {}}},
    "head_server": {"host": "127.0.0.1", "port": 1},
}


def changed(place: str, value: Any) -> dict[str, Any]:
    """The configuration with one more, or another, value; None takes it out."""
    config = copy.deepcopy(CONFIG)
    *path, last = place.split(".")
    block = config
    for each in path:
        block = block[each]
    if value is None:
        del block[last]
    else:
        block[last] = value
    return config


@pytest.mark.parametrize("given", [CONFIG, OmegaConf.create(CONFIG)], ids=["dict", "omegaconf"])
def test_each_kind_is_read_from_where_its_server_stands(given: Any) -> None:
    common: dict[str, Any] = {"root": "/checkpoints", "token_file": "/run/token"}
    assert options_of(given, "counter") == Options(
        instance="counter", kind="resources", service="counter", control="127.0.0.1:7001", **common
    )
    assert options_of(given, "agent") == Options(
        instance="agent", kind="agent", service="solver", control="unix:/run/agent", policy=("policy",), **common
    )
    assert [options_of(given, name).kind for name in ("policy", "turn")] == ["policy_model", "environment"]


@pytest.mark.parametrize(
    ("key", "option", "value"),
    [
        ("service", "service", "other"),
        ("mode", "mode", "stateless"),
        ("verify", "verify", "replay"),
        ("hooks", "hooks", "my.module:Hooks"),
        ("class", "server_class", "MyServer"),
        ("ends_on_verify", "ends_on_verify", False),
    ],
)
def test_an_instance_may_say_more(key: str, option: str, value: Any) -> None:
    found = options_of(changed(f"gym_ckpt.instances.counter.{key}", value), "counter")
    assert getattr(found, option) == value


@pytest.mark.parametrize(
    ("value", "policy"), [("a", ("a",)), (["a", "b"], ("a", "b")), (OmegaConf.create(["a"]), ("a",))]
)
def test_an_agents_policy_may_be_named(value: Any, policy: tuple[str, ...]) -> None:
    config = changed("gym_ckpt.instances.agent.policy", value)
    config |= {"a": config["policy"], "b": config["policy"]}
    assert options_of(config, "agent").policy == policy


@pytest.mark.parametrize("value", [None, "other"])
def test_the_token_and_the_leave_to_do_without_tls_are_the_deployments(value: str | None) -> None:
    assert options_of(changed("gym_ckpt.token_file", value), "counter").token_file == value
    assert options_of(changed("gym_ckpt.allow_insecure", True), "counter").allow_insecure


def test_certificates_roles_and_the_audit_log_are_the_deployments() -> None:
    files = {name: f"/run/{name}" for name in ("tls_cert", "tls_key", "client_ca", "roles_file", "audit_log")}
    config = copy.deepcopy(CONFIG)
    config["gym_ckpt"] |= files
    found = options_of(config, "counter")
    assert {name: getattr(found, name) for name in files} == files


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("gym_ckpt", None, "gym_ckpt"),
        ("gym_ckpt", "text", "gym_ckpt"),
        ("gym_ckpt.instances", None, "gym_ckpt.instances"),
        ("gym_ckpt.instances.counter", None, "gym_ckpt.instances.counter"),
        ("gym_ckpt.instances.counter", ["x"], "gym_ckpt.instances.counter"),
        ("gym_ckpt.instances.countr", {"control": "127.0.0.1:1"}, "gym_ckpt.instances.countr"),
        ("gym_ckpt.rot", "/x", "gym_ckpt.rot"),
        ("gym_ckpt.root", None, "gym_ckpt.root"),
        ("gym_ckpt.root", "checkpoints", "gym_ckpt.root"),
        ("gym_ckpt.root", 3, "gym_ckpt.root"),
        ("gym_ckpt.token_file", "", "gym_ckpt.token_file"),
        ("gym_ckpt.token_file", 3, "gym_ckpt.token_file"),
        ("gym_ckpt.tls_cert", "/x", "gym_ckpt.tls_key"),
        ("gym_ckpt.tls_key", "/x", "gym_ckpt.tls_key"),
        ("gym_ckpt.client_ca", "/x", "gym_ckpt.client_ca"),
        ("gym_ckpt.roles_file", "/x", "gym_ckpt.roles_file"),
        ("gym_ckpt.audit_log", 3, "gym_ckpt.audit_log"),
        ("gym_ckpt.allow_insecure", "yes", "gym_ckpt.allow_insecure"),
        ("gym_ckpt.instances.counter.contrl", "x", "gym_ckpt.instances.counter.contrl"),
        ("gym_ckpt.instances.counter.control", None, "gym_ckpt.instances.counter.control"),
        ("gym_ckpt.instances.counter.control", "7001", "gym_ckpt.instances.counter.control"),
        ("gym_ckpt.instances.counter.control", "127.0.0.1:x", "gym_ckpt.instances.counter.control"),
        ("gym_ckpt.instances.counter.control", "127.0.0.1:70000", "gym_ckpt.instances.counter.control"),
        ("gym_ckpt.instances.counter.control", 7001, "gym_ckpt.instances.counter.control"),
        ("gym_ckpt.instances.counter.service", "a/b", "gym_ckpt.instances.counter.service"),
        ("gym_ckpt.instances.counter.mode", "stateful", "gym_ckpt.instances.counter.mode"),
        ("gym_ckpt.instances.counter.verify", "twice", "gym_ckpt.instances.counter.verify"),
        ("gym_ckpt.instances.counter.hooks", "Hooks", "gym_ckpt.instances.counter.hooks"),
        ("gym_ckpt.instances.counter.hooks", ":Hooks", "gym_ckpt.instances.counter.hooks"),
        ("gym_ckpt.instances.counter.ends_on_verify", 1, "gym_ckpt.instances.counter.ends_on_verify"),
        ("gym_ckpt.instances.counter.policy", [], "gym_ckpt.instances.counter.policy"),
        ("gym_ckpt.instances.counter.policy", [3], "gym_ckpt.instances.counter.policy"),
        ("gym_ckpt.instances.counter.policy", {"a": 1}, "gym_ckpt.instances.counter.policy"),
        ("counter", {"other_servers": {"x": {}}}, "counter.other_servers"),
        ("counter", {"resources_servers": {}}, "counter.resources_servers."),
    ],
)
def test_every_mistake_is_refused_by_its_place(place: str, value: Any, named: str) -> None:
    """Nothing is passed over: a misspelled option would be one that nobody heeds."""
    with pytest.raises(InvalidArgument) as refused:
        options_of(changed(place, value), "counter")
    assert [each.field for each in refused.value.violations] == [named]
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("instance", "key", "value", "problem"),
    [
        ("agent", "mode", "stateless", "not one of restart_only"),
        ("policy", "mode", "restart_only", "means nothing here"),
        ("agent", "verify", "replay", "for a server of kind resources; this one is agent"),
        ("turn", "hooks", "my.module:Hooks", "for a server of kind resources; this one is environment"),
        ("policy", "ends_on_verify", False, "for a server of kind resources; this one is policy_model"),
        ("counter", "policy", "policy", "for a server of kind agent; this one is resources"),
        ("agent", "policy", ["policy", "polcy"], "names 'polcy', which is no model instance"),
        ("agent", "policy", "counter", "names 'counter', which is no model instance"),
        ("agent", "policy", [], "must be a name"),
        ("agent", "policy", [3], "must be a name"),
        ("agent", "policy", {"a": 1}, "must be a name"),
    ],
)
def test_what_means_nothing_for_a_server_is_refused(instance: str, key: str, value: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as refused:
        options_of(changed(f"gym_ckpt.instances.{instance}.{key}", value), instance)
    assert [each.field for each in refused.value.violations] == [f"gym_ckpt.instances.{instance}.{key}"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"instance": ""}, "instance"),
        ({"kind": "judge"}, "kind"),
        ({"root": ""}, "root"),
        ({"control": ""}, "control"),
        ({"mode": "x"}, "mode"),
    ],
)
def test_options_made_by_hand_are_checked_as_well(given: dict[str, Any], named: str) -> None:
    right: dict[str, Any] = {"instance": "counter", "kind": "resources", "root": "file:///r", "control": "127.0.0.1:0"}
    assert Options(**right).service == "counter"
    with pytest.raises(InvalidArgument) as refused:
        Options(**{**right, **given})
    assert [each.field for each in refused.value.violations] == [named]


def test_what_needs_nothing_of_the_framework_imports_nothing_of_it() -> None:
    code = (
        "import sys, gym_ckpt_grpc.integrations.nemo_gym, gym_ckpt_grpc.integrations.nemo_gym.declared\n"
        "names = ('nemo_gym', 'resources_servers', 'starlette', 'fastapi', 'aiohttp', 'pandas', 'itsdangerous')\n"
        "print([name for name in names if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"
