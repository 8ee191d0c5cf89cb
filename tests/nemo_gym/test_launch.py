"""The launcher: what it finds, what it changes in its process, and everything that it refuses before it serves."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gym_ckpt_grpc.integrations.nemo_gym import launch as launch_module
from gym_ckpt_grpc.integrations.nemo_gym.classes import mixin_of
from gym_ckpt_grpc.integrations.nemo_gym.launch import CONFIG_VARIABLE, INSTANCE_VARIABLE, Launch, launched
from gym_ckpt_grpc.integrations.nemo_gym.main_block import served_class
from gym_ckpt_grpc.protocol.errors import GymCkptError, InvalidArgument, UsageError

TINY = """
    from typing import ClassVar
    from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
    from {sibling} import WORD  # a sibling, as many of the released servers import theirs

    class Tiny(SimpleResourcesServer):
        config: BaseResourcesServerConfig
        word: ClassVar[str] = WORD

        async def verify(self, body):
            raise NotImplementedError

    class Other(Tiny):
        ray_enabled = True

    if __name__ == "__main__":
        Tiny.run_webserver()
"""
ADDRESS = {"entrypoint": "app.py", "host": "127.0.0.1", "port": 1}
RELAY = {
    "environment_servers": {"legacy_agent": {**ADDRESS, "agent_server": {"type": "responses_api_agents", "name": "a"}}}
}


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of its own, as far as a launch changes one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for variable in (CONFIG_VARIABLE, INSTANCE_VARIABLE):
        monkeypatch.setenv(variable, "")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("resources_servers.tiny"):
            del sys.modules[name]


def server(directory: Path, name: str = "tiny", text: str = TINY) -> None:
    """A resources server of the user's own, below the working directory."""
    place = directory / "resources_servers" / name
    place.mkdir(parents=True)
    sibling = f"words_of_{name}_{abs(hash(directory))}"
    (place / "app.py").write_text(dedent(text).replace("{sibling}", sibling))
    (place / f"{sibling}.py").write_text(f"WORD = {name!r}\n")


def config_of(
    *, block: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None, top: Any = None
) -> dict[str, Any]:
    """A configuration with one instance, `mine`."""
    control = {"control": "127.0.0.1:0"} if options is None else options
    return {
        "gym_ckpt": {"root": "/ckpt", "instances": {"mine": control} if control else {}} if top is None else top,
        "mine": {"resources_servers": {"tiny": {**ADDRESS, **(block or {})}}},
    }


def given(config: Any, instance: str = "mine", **arguments: Any) -> Launch:
    """Launch with this configuration in the environment."""
    os.environ[CONFIG_VARIABLE] = config if isinstance(config, str) else json.dumps(config)
    return launched(instance, **arguments)


# ---- what it finds ---------------------------------------------------------------------------------------


def test_a_participant(tmp_path: Path) -> None:
    server(tmp_path)
    launch = given(config_of())
    assert (launch.server.__name__, launch.server.__qualname__) == ("Tiny", "Tiny")  # cookies are named after it
    assert launch.server.word == "tiny"
    assert launch.server.ray_enabled is False
    assert issubclass(launch.server, mixin_of(launch.server, "resources"))
    assert launch.options is not None
    assert (launch.options.kind, launch.options.service, launch.options.root) == ("resources", "mine", "/ckpt")
    assert launch.server.checkpoint.control == "127.0.0.1:0"


def test_the_process_is_as_the_framework_starts_one(tmp_path: Path) -> None:
    """Servers read files, and import modules, relative to their own directory."""
    server(tmp_path)
    given(config_of())
    here = tmp_path / "resources_servers" / "tiny"
    assert Path.cwd() == here
    assert sys.path[:2] == [str(here), str(tmp_path)]
    assert os.environ[INSTANCE_VARIABLE] == "mine"
    assert "mine" in json.loads(os.environ[CONFIG_VARIABLE])


def test_started_in_the_servers_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the framework does, for a server of the user's own too."""
    server(tmp_path)
    monkeypatch.chdir(tmp_path / "resources_servers" / "tiny")
    assert given(config_of()).server.word == "tiny"


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_configuration_file(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported as it stands; what the launcher reads is resolved, what it does not read may be unresolvable."""
    server(tmp_path)
    monkeypatch.setenv("MY_ADDRESS", "127.0.0.1:7")
    config = config_of(options={"control": "${oc.env:MY_ADDRESS}"})
    config["other"] = {"resources_servers": {"x": {"key": "${nowhere}", "missing": "???"}}}
    text = json.dumps(config)
    if suffix == "yaml":
        text = dedent("""
            gym_ckpt:
              root: /ckpt
              instances:
                mine: {control: "${oc.env:MY_ADDRESS}"}
            mine:
              resources_servers:
                tiny: {entrypoint: app.py, host: 127.0.0.1, port: 1}
            other: {resources_servers: {x: {key: "${nowhere}", missing: "???"}}}
        """)
    file = tmp_path / f"config.{suffix}"
    file.write_text(text)
    launch = launched("mine", config_file=Path(file.name))
    assert launch.options is not None
    assert launch.options.control == "127.0.0.1:7"
    assert os.environ[CONFIG_VARIABLE] == text


def test_arguments_stand_in_place_of_the_block(tmp_path: Path) -> None:
    server(tmp_path)
    (tmp_path / "token").write_text("")
    launch = given(
        config_of(options={"control": "127.0.0.1:1", "mode": "exported"}),
        root="here",
        token_file=Path("token"),
        control="127.0.0.1:2",
        service="other",
        mode=None,
    )
    options = launch.options
    assert options is not None
    assert (options.control, options.service, options.mode) == ("127.0.0.1:2", "other", "exported")
    assert (options.root, options.token_file) == (str(tmp_path / "here"), str(tmp_path / "token"))


def test_arguments_alone_make_a_participant(tmp_path: Path) -> None:
    server(tmp_path)
    config = config_of()
    del config["gym_ckpt"]
    options = given(config, root="file:///ckpt", control="127.0.0.1:2").options
    assert options is not None
    assert (options.root, options.control) == ("file:///ckpt", "127.0.0.1:2")


@pytest.mark.parametrize("named", ["Other", "app:Other"])
def test_a_class_by_name(tmp_path: Path, named: str) -> None:
    server(tmp_path)
    assert given(config_of(), server_class=named).server.__name__ == "Other"
    assert given(config_of(options={"control": "127.0.0.1:0", "class": named})).server.ray_enabled is True


def test_the_frameworks_own_entrypoint_setting(tmp_path: Path) -> None:
    """With our `entry.py` as the entrypoint, the server's module is `app.py`."""
    server(tmp_path)
    import gym_ckpt_grpc.integrations.nemo_gym.entry as entry

    relative = os.path.relpath(entry.__file__, tmp_path / "resources_servers" / "tiny")
    assert given(config_of(block={"entrypoint": relative})).server.__name__ == "Tiny"


def test_who_is_no_participant_is_served_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One log line says so. Its name stays, and Ray is not started where it says nothing of Ray."""
    server(tmp_path)
    config = {**config_of(options={}), "relay": RELAY}
    for instance, name in (("mine", "Tiny"), ("relay", "LegacyAgentEnvironmentServer")):
        launch = given(config, instance)
        assert launch.options is None
        assert launch.server.__name__ == launch.server.__qualname__ == name
        assert launch.server.ray_enabled is False
        assert not hasattr(launch.server, "checkpoint")
        served: list[str] = []
        with caplog.at_level(logging.INFO):
            Launch(instance, type(name, (), {"run_webserver": lambda served=served: served.append("ran")}), None).run()
        assert served == ["ran"]
        assert caplog.messages == [f"{instance} ({name}) is served as it is: it is no participant"]
        caplog.clear()
    os.chdir(tmp_path)
    assert given(config, server_class="Other").server.__mro__[0].ray_enabled is True


@pytest.mark.parametrize(("asked", "fits", "ours"), [("0", False, True), ("1", True, False), ("1", False, True)])
def test_somebody_exports_where_exporting_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str, fits: bool, ours: bool
) -> None:
    """The framework's telemetry stays off without a word where nemo-lens lacks what it asks it for, as 0.1.0 does."""
    semconv = pytest.importorskip("nemo.lens.semconv")
    for name in ("NV_DL_RANK", "NV_DL_WORLD_SIZE"):
        if fits:
            monkeypatch.setattr(semconv, name, name, raising=False)
        else:
            monkeypatch.delattr(semconv, name, raising=False)
    monkeypatch.setenv("NEMO_GYM_OTEL_ENABLED", asked)
    monkeypatch.setenv("GYM_CKPT_TELEMETRY", "console")
    exporting: list[str] = []

    def export(name: str) -> contextlib.nullcontext[None]:
        exporting.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(launch_module, "exporting", export)
    Launch("mine", type("Served", (), {"run_webserver": lambda: None}), None).run()
    assert exporting == (["mine"] if ours else [])
    assert ("nemo-lens" in caplog.text) == (asked == "1" and not fits)


# ---- what it refuses -------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, type[GymCkptError], str]] = {
    "no configuration": ("", UsageError, "--config, or set NEMO_GYM_CONFIG_DICT"),
    "no mapping": ("[1, 2]", UsageError, "no mapping"),
    "no text of a configuration": ("{a: [", UsageError, "not usable: .* in line 1, column 6"),
    "unresolved": (config_of(options={"control": "${nowhere}"}), UsageError, "not usable.*nowhere"),
    "no such instance": ({"other": RELAY}, UsageError, "no instance 'mine'; there are: other"),
    "unknown option": (
        config_of(options={"control": "127.0.0.1:0", "colour": 1}),
        InvalidArgument,
        r"gym_ckpt.instances.mine.colour is unknown",
    ),
    "unknown key of the block": (config_of(top={"rot": "/x", "instances": {"mine": {}}}), InvalidArgument, "rot"),
    "a block that is none": (config_of(top="on"), InvalidArgument, "gym_ckpt must be a mapping"),
    "instances that are none": (config_of(top={"instances": ["mine"]}), InvalidArgument, "instances must be"),
    "no control address": (config_of(options={"mode": "exported"}), InvalidArgument, "mine.control is missing"),
    "a relative token file": (
        config_of(top={"root": "/c", "token_file": "token", "instances": {"mine": {"control": "127.0.0.1:0"}}}),
        InvalidArgument,
        "gym_ckpt.token_file is 'token', no absolute path",
    ),
    "several workers": (config_of(block={"num_workers": 2}), InvalidArgument, "mine.num_workers is 2.*without a gate"),
    "several workers, no participant": (config_of(block={"num_workers": 2}, options={}), InvalidArgument, "workers"),
    "workers that are no number": (config_of(block={"num_workers": "2"}), InvalidArgument, "num_workers is '2'"),
    "no entrypoint": (config_of(block={"entrypoint": None}), InvalidArgument, "mine.entrypoint is missing"),
    "an entrypoint elsewhere": (config_of(block={"entrypoint": "../x.py"}), InvalidArgument, "no Python file in"),
    "an entrypoint that is no module": (config_of(block={"entrypoint": "run.sh"}), InvalidArgument, "no Python file"),
    "an entrypoint that is not there": (config_of(block={"entrypoint": "no.py"}), InvalidArgument, "does not exist"),
    "a class that is not there": (
        config_of(options={"control": "127.0.0.1:0", "class": "Nope"}),
        UsageError,
        "no class 'Nope'; there are: Other, .*Tiny",
    ),
    "a server that is nowhere": (
        {"mine": {"resources_servers": {"nowhere": ADDRESS}}},
        UsageError,
        "mine is served by resources_servers/nowhere, which is in none of",
    ),
    "a type of server that is none": ({"mine": {"servers": {"tiny": ADDRESS}}}, InvalidArgument, "must be one of"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused(tmp_path: Path, what: str) -> None:
    """By name, before anything is served."""
    server(tmp_path)
    config, kind, message = WRONG[what]
    with pytest.raises(kind, match=message):
        given(config)


def test_a_wrong_configuration_shows_no_secret(tmp_path: Path) -> None:
    """The parser's own error shows the line around the fault."""
    server(tmp_path)
    for text in ("mine:\n  {api_key: sk-secret, domain: [1, }", '{"mine": {"api_key": "sk-secret" "domain": 1}}'):
        with pytest.raises(UsageError, match=r"not usable: .* in line") as refused:
            given(text)
        assert "sk-" not in "".join(traceback.format_exception(refused.value))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml cannot be read"):
        launched("mine", config_file=tmp_path / "none.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="binary cannot be read"):
        launched("mine", config_file=tmp_path / "binary")


def test_a_server_of_another_kind(tmp_path: Path) -> None:
    server(tmp_path, text=TINY + "    class Plain:\n        run_webserver = None\n")
    with pytest.raises(UsageError, match="mine is of kind resources, but Plain is no SimpleResourcesServer"):
        given(config_of(options={"control": "127.0.0.1:0", "class": "Plain"}))


def test_a_relay_that_is_to_be_a_participant() -> None:
    config = {"relay": RELAY, "gym_ckpt": {"root": "/c", "instances": {"relay": {"control": "127.0.0.1:0"}}}}
    with pytest.raises(UsageError, match=r"relay only passes requests on.*take it out of gym_ckpt.instances"):
        given(config, "relay")


def test_another_server_that_has_its_name(tmp_path: Path) -> None:
    """Two roots with a server of one name: what Python imports is not what the framework would start."""
    server(tmp_path / "first")
    server(tmp_path / "second")
    os.chdir(tmp_path / "first")
    given(config_of())
    os.chdir(tmp_path / "second")
    with pytest.raises(UsageError, match="another server has its name"):
        given(config_of())


def test_without_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"nemo_gym is not installed in .*pip install nemo-gym==0.7.0"):
        launched("mine")


# ---- the class of a module -------------------------------------------------------------------------------


def module(directory: Path, text: str) -> Path:
    file = directory / "app.py"
    file.write_text(dedent(text))
    return file


@pytest.mark.parametrize("test", ["__name__ == '__main__'", "'__main__' == __name__"])
def test_the_class_that_a_module_runs(tmp_path: Path, test: str, caplog: pytest.LogCaptureFixture) -> None:
    file = module(tmp_path, f"if {test}:\n    app = Mine.run_webserver()\nelif x:\n    app = Other.run_webserver()\n")
    assert served_class(file) == "Mine"
    assert not caplog.messages


def test_what_else_a_module_does_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert served_class(module(tmp_path, "if __name__ == '__main__':\n    prepare()\n    A.run_webserver()\n")) == "A"
    (message,) = caplog.messages
    assert "app.py:2 of its `__main__` block is not done here" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A.run_webserver()", "calls none"),
        ("if __name__ == '__main__':\n    main()", "calls none"),
        ("if __name__ == '__main__':\n    make().run_webserver()", "calls none"),
        ("if x == '__main__':\n    A.run_webserver()", "calls none"),
        ("if __name__ == '__main__':\n    A.run_webserver()\n    B.run_webserver()", "calls several: A, B"),
        ("if", "no Python module"),
    ],
)
def test_a_module_that_runs_no_one_class(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        served_class(module(tmp_path, text))


def test_the_released_servers() -> None:
    """All but three run one class from their `app.py`; those three have other entry points."""
    spec = find_spec("nemo_gym")
    assert spec is not None
    assert spec.submodule_search_locations
    installed = Path(next(iter(spec.submodule_search_locations))).parent
    apps = [
        app
        for kind in ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
        for app in installed.glob(f"{kind}/*/app.py")
    ]
    without = set()
    for app in apps:
        try:
            assert served_class(app)
        except UsageError:
            without.add(app.parent.name)
    assert len(apps) > 200
    assert without == {"aviary", "langgraph_agent", "langchain_deepagents_agent"}
