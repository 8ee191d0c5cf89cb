"""Starts one server of NeMo Gym from its configuration, as a participant, without a change to its module.

`gym-ckpt nemo-gym INSTANCE` calls it, and `entry.py` does for the framework's own `gym env start`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from gym_ckpt_grpc.integrations.nemo_gym.classes import checkpointed
from gym_ckpt_grpc.integrations.nemo_gym.main_block import served_class
from gym_ckpt_grpc.integrations.nemo_gym.options import BLOCK, FILES, KINDS, Options, options_of, server_block
from gym_ckpt_grpc.protocol.errors import InvalidArgument, UsageError, Violation
from gym_ckpt_grpc.telemetry import exporting, unwinding_sigterm
from gym_ckpt_grpc.telemetry.configuring import VARIABLE

log = logging.getLogger(__name__)

CONFIG_VARIABLE = "NEMO_GYM_CONFIG_DICT"
INSTANCE_VARIABLE = "NEMO_GYM_CONFIG_PATH"
ROOTS_VARIABLE = "NEMO_GYM_EXTRA_ROOTS"
"""The framework's own variables: the whole configuration, the instance that this process serves, further roots."""

INSTALL = "pip install nemo-gym==0.7.0 (it needs Python 3.13; --ignore-requires-python below 3.13.14)"
DEFAULT_ENTRYPOINT = "app.py"
OWN_ENTRYPOINT = Path(__file__).with_name("entry.py")
BASES: Mapping[str, tuple[str, str]] = {
    "resources": ("nemo_gym.base_resources_server", "SimpleResourcesServer"),
    "agent": ("nemo_gym.base_responses_api_agent", "SimpleResponsesAPIAgent"),
    "environment": ("nemo_gym.base_environment_server", "BaseEnvironmentServer"),
    "policy_model": ("nemo_gym.base_responses_api_model", "SimpleResponsesAPIModel"),
}
"""Kind -> module and name of the framework's base class."""
RELAYS = frozenset({"environment_servers.legacy_agent.app:LegacyAgentEnvironmentServer"})
"""Servers that hold nothing of a rollout: they pass a request on, and its reply back."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that is ready to run. server: its class. options: None where it takes part in no checkpoint."""

    instance: str
    server: Any
    options: Options | None

    def run(self) -> None:
        """Serve until the process is told to end."""
        if self.options is None:
            log.info("%s (%s) is served as it is: it is no participant", self.instance, self.server.__name__)
        else:
            log.info(
                "%s (%s) is %s/%s, its control plane at %s",
                self.instance,
                self.server.__name__,
                self.options.kind,
                self.options.service,
                self.options.control,
            )
        with _exporting(self.options.service if self.options else self.instance):
            self.server.run_webserver()


@contextlib.contextmanager
def _exporting(service: str) -> Iterator[None]:
    """What GYM_CKPT_TELEMETRY asks for, unless the framework exports: its own providers are used then."""
    if not os.environ.get(VARIABLE) or _framework_exports():
        yield
        return
    with unwinding_sigterm(), exporting(service):
        yield


def _framework_exports() -> bool:
    """Whether its telemetry is on, and finds in nemo-lens what it asks it for: else it stays off without a word."""
    from nemo_gym.telemetry import is_telemetry_env_enabled

    if not is_telemetry_env_enabled():
        return False
    with contextlib.suppress(ImportError):
        from nemo.lens.semconv import NV_DL_RANK, NV_DL_WORLD_SIZE  # noqa: F401 - as its init_telemetry does

        return True
    log.warning("NeMo Gym's telemetry is on, and stays off: this nemo-lens lacks what it needs. %s exports", VARIABLE)
    return False


def launched(
    instance: str,
    *,
    config_file: Path | None = None,
    server_class: str | None = None,
    root: str | None = None,
    token_file: Path | None = None,
    **own: Any,
) -> Launch:
    """Find, check and import the server of an instance. Changes the process as the framework does when it starts one:
    its variables, the working directory and `sys.path`.

    config_file: JSON or YAML; else the configuration stands in NEMO_GYM_CONFIG_DICT. server_class: `Class`, or
    `module:Class` for another module in the server's directory. root, token_file, own (keys of the instance's block):
    in place of what the block `gym_ckpt` says.

    Raises UsageError, InvalidArgument naming what is missing, unknown or wrong. Nothing is served then.
    """
    installed = _framework()
    text = _config_text(config_file)
    os.environ[CONFIG_VARIABLE], os.environ[INSTANCE_VARIABLE] = text, instance
    config = _config(text, instance)
    given = {"root": root and _absolute_root(root), "token_file": token_file and str(token_file.absolute())}
    options = _options(config, instance, given, own)
    named = server_class or (options.server_class if options else None)
    place = _place(config, instance, named, installed)
    _enter(place)
    server = _server(place, named)
    return _ready(instance, server, options, KINDS[server_block(config, instance)[0]])


def launch(instance: str, **arguments: Any) -> None:
    """Find the server of an instance and serve it; see `launched`."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    log.setLevel(logging.INFO)
    launched(instance, **arguments).run()


# ---- the configuration -----------------------------------------------------------------------------------


def _framework() -> Path:
    """Where the framework's own servers are. Raises UsageError if it is not installed."""
    found = importlib.util.find_spec("nemo_gym")
    if found is None or not found.submodule_search_locations:
        raise UsageError(f"nemo_gym is not installed in {sys.prefix}: {INSTALL}")
    return Path(next(iter(found.submodule_search_locations))).parent


def _config_text(config_file: Path | None) -> str:
    if config_file is not None:
        try:
            return config_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the configuration {config_file} cannot be read: {error}") from error
    text = os.environ.get(CONFIG_VARIABLE, "")
    if not text.strip():
        raise UsageError(f"name the configuration with --config, or set {CONFIG_VARIABLE}")
    return text


def _config(text: str, instance: str) -> dict[str, Any]:
    """The configuration as plain data, interpolations resolved where they are needed: a value may be missing yet."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        whole = OmegaConf.create(text)
        if not isinstance(whole, DictConfig):
            raise UsageError("the configuration is no mapping")
        config: dict[str, Any] = {str(name): None for name in whole}
        for name in config:
            needed = name in (BLOCK, instance)
            node = whole._get_node(name)
            config[name] = OmegaConf.to_container(node, resolve=needed) if OmegaConf.is_config(node) else node._value()
    except OmegaConfBaseException as error:
        raise UsageError(f"the configuration is not usable: {error}") from error
    except YAMLError as error:
        # Not its own text, nor the error itself: they show the line, where a key of a model's API may stand.
        raise UsageError(f"the configuration is not usable: {_yaml_problem(error)}") from None
    if instance not in config:
        known = ", ".join(sorted(name for name, block in config.items() if _is_server(block)))
        raise UsageError(f"the configuration has no instance {instance!r}; there are: {known or 'none'}")
    return config


def _yaml_problem(error: Exception) -> str:
    """What is wrong with a YAML text and where, without a word of it."""
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{getattr(error, 'problem', None) or 'it is no YAML'}{where}"


def _is_server(block: Any) -> bool:
    return isinstance(block, Mapping) and next(iter(block), "") in KINDS


def _options(config: dict[str, Any], instance: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> Options | None:
    """The instance's options; None where neither the configuration nor the command line makes it a participant."""
    block = config.get(BLOCK) or {}
    chosen = {key: value for key, value in own.items() if value is not None}
    if isinstance(block, Mapping) and isinstance(block.get("instances") or {}, Mapping):
        instances = dict(block.get("instances") or {})
        if instance not in instances and not chosen:
            return None
        if chosen or any(given.values()):
            instances[instance] = {**(instances.get(instance) or {}), **chosen}
            block = {**block, **{key: value for key, value in given.items() if value}, "instances": instances}
    options = options_of({**config, BLOCK: block}, instance)
    for name in FILES:
        file = getattr(options, name)
        if file is not None and not os.path.isabs(file):
            _refuse(f"{BLOCK}.{name}", f"is {file!r:.200}, no absolute path")
    return options


def _absolute_root(root: str) -> str:
    return root if "://" in root else str(Path(root).absolute())


# ---- the server ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a server's module is, `<root>/<package>/.../<stem>.py`, and the directory in which it is started."""

    root: Path
    directory: Path
    file: Path

    @property
    def module(self) -> str:
        return ".".join(self.file.relative_to(self.root).with_suffix("").parts)


def _place(config: Mapping[str, Any], instance: str, named: str | None, installed: Path) -> _Place:
    server_type, block = server_block(config, instance)
    workers = block.get("num_workers")
    if workers is not None and (type(workers) is not int or workers > 1):
        _refuse(
            f"{instance}.num_workers",
            f"is {workers!r:.40}: the framework's workers would serve the module without a gate. Set it to 1",
        )
    implementation = next(iter(config[instance][server_type]))
    part = Path(server_type, implementation)
    cwd = Path.cwd()
    roots = [Path(each) for each in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if each]
    if cwd.parts[-2:] == part.parts:
        roots.append(cwd.parent.parent)  # the framework starts a server there
    roots += [cwd, installed]
    for root in roots:
        directory = (root / part).resolve()
        if directory.is_dir():
            file = directory / _entrypoint(block, instance, directory, named)
            if not file.is_file():
                _refuse(f"{instance}.entrypoint", f"{file} does not exist")
            return _Place(root.resolve(), directory, file)
    searched = ", ".join(str(root) for root in roots)
    raise UsageError(f"{instance} is served by {part}, which is in none of {searched}")


def _entrypoint(block: Mapping[str, Any], instance: str, directory: Path, named: str | None) -> str:
    """The server's own module, relative to its directory."""
    if named and ":" in named:
        return f"{named.partition(':')[0].replace('.', '/')}.py"
    entrypoint = block.get("entrypoint")
    if not isinstance(entrypoint, str) or not entrypoint:
        _refuse(f"{instance}.entrypoint", "is missing")
    if (directory / entrypoint).resolve() == OWN_ENTRYPOINT.resolve():
        return DEFAULT_ENTRYPOINT
    path = Path(entrypoint)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
        _refuse(f"{instance}.entrypoint", f"is {entrypoint!r:.200}, no Python file in the server's directory")
    return entrypoint


def _enter(place: _Place) -> None:
    """Be where the framework starts a server: many import siblings, and read files, from their own directory."""
    os.chdir(place.directory)
    for path in (str(place.root), str(place.directory)):
        if path in sys.path:
            sys.path.remove(path)
    sys.path[:0] = [str(place.directory), str(place.root)]


def _server(place: _Place, named: str | None) -> Any:
    name = named.rpartition(":")[2] if named else served_class(place.file)
    module = importlib.import_module(place.module)
    if Path(module.__file__ or "").resolve() != place.file.resolve():
        raise UsageError(f"{place.module} is {module.__file__}, not {place.file}: another server has its name")
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = sorted(key for key, value in vars(module).items() if hasattr(value, "run_webserver"))
        raise UsageError(f"{place.module} has no class {name!r}; there are: {', '.join(classes) or 'none'}")
    return found


def _ready(instance: str, server: Any, options: Options | None, kind: str) -> Launch:
    module, name = BASES[kind]
    base = getattr(importlib.import_module(module), name)
    if not issubclass(server, base):
        raise UsageError(f"{instance} is of kind {kind}, but {server.__qualname__} is no {base.__qualname__}")
    if any(f"{each.__module__}:{each.__qualname__}" in RELAYS for each in server.__mro__):
        if options is not None:
            raise UsageError(
                f"{instance} only passes requests on and holds nothing of a rollout: take it out of {BLOCK}.instances"
            )
        return Launch(instance, _without_ray(server), None)
    if options is None:
        return Launch(instance, _without_ray(server), None)
    return Launch(instance, checkpointed(server, replace(options, server_class=None)), options)


def _without_ray(server: Any) -> Any:
    """The class itself, or, where it says nothing of Ray, one of its name that does not start it."""
    if getattr(server, "ray_enabled", False) is not None:
        return server
    said = {
        "__module__": server.__module__,
        "__qualname__": server.__qualname__,
        "__annotations__": {"ray_enabled": ClassVar[bool]},
        "ray_enabled": False,
    }
    return type(server)(server.__name__, (server,), said)


def _refuse(place: str, problem: str) -> NoReturn:
    raise InvalidArgument(f"{place} {problem}", violations=[Violation(place, problem)])
