"""What a deployment says about one server as a participant: the block `gym_ckpt` at the top of its configuration.

    {"gym_ckpt": {"root": "/checkpoints", "token_file": "/run/token",
                  "instances": {"counter": {"control": "127.0.0.1:7001"}}},
     "counter": {"resources_servers": {...}}, ...}

It stands at the top since the framework forbids unknown keys in the block of an environment server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gym_ckpt_grpc.participants import ResourcesMode, VerifyMode
from gym_ckpt_grpc.protocol.errors import InvalidArgument, Violation
from gym_ckpt_grpc.protocol.ids import checkpoint_id_problem

BLOCK = "gym_ckpt"
KINDS: Mapping[str, str] = {
    "resources_servers": "resources",
    "responses_api_agents": "agent",
    "environment_servers": "environment",
    "responses_api_models": "policy_model",
}
"""Type of a server in the framework's configuration -> its kind of participant."""

FILES = ("token_file", "tls_cert", "tls_key", "client_ca", "roles_file", "audit_log")
"""Keys of the deployment that name files, by absolute paths: servers are started in directories of their own."""

_RESOURCES_MODES = tuple(each.value for each in ResourcesMode)
_MODES: Mapping[str, Collection[str]] = {"agent": (ResourcesMode.RESTART_ONLY.value,), "policy_model": ()}
"""What a kind may be told, where it is not all of them."""


@dataclass(frozen=True, slots=True)
class Options:
    """How one server takes part in checkpoints. Raises InvalidArgument naming what is missing or wrong.

    instance: its name in the configuration. kind: a value of KINDS. service: its name in a fleet, the instance's if
    empty. root: where checkpoints are, an absolute path or a URI. control: address of its control server, `host:port`
    or `unix:path`. token_file: the controller's token; None is refused beyond this host. mode, verify: see
    ResourcesMode and VerifyMode; None: what is known of the class. hooks: `module:Class` of its state, made with the
    server as its argument. server_class: name of the class that is served, where a module has several. policy: names
    of the model instances whose calls are an agent's generations. allow_insecure: serve plain text beyond this host.
    tls_cert, tls_key, client_ca: files of the control server, see `auth.ServerTls`. roles_file: which role the names in
    clients' certificates have. audit_log: file that gets a line for each mutating call.
    ends_on_verify: whether a verify that succeeds ends its session; None: what the hooks say, else it does.
    """

    instance: str
    kind: str
    service: str = ""
    root: str = ""
    control: str = ""
    token_file: str | None = None
    mode: str | None = None
    verify: str | None = None
    hooks: str | None = None
    server_class: str | None = None
    policy: tuple[str, ...] = ()
    allow_insecure: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    roles_file: str | None = None
    audit_log: str | None = None
    ends_on_verify: bool | None = None

    def __post_init__(self) -> None:
        if not self.service:
            object.__setattr__(self, "service", self.instance)
        for name, problem in (
            ("instance", None if self.instance else "is empty"),
            ("service", checkpoint_id_problem(self.service)),
            ("kind", _not_among(self.kind, KINDS.values())),
            ("root", _root_problem(self.root)),
            ("control", _address_problem(self.control)),
            ("mode", self.mode and _not_among(self.mode, _MODES.get(self.kind, _RESOURCES_MODES))),
            ("verify", self.verify and _not_among(self.verify, [each.value for each in VerifyMode])),
            ("hooks", self.hooks and _hooks_problem(self.hooks)),
            ("tls_key", None if bool(self.tls_cert) is bool(self.tls_key) else "needs tls_cert, and that needs it"),
            ("client_ca", "needs tls_cert and tls_key" if self.client_ca and not self.tls_cert else None),
            ("roles_file", "needs client_ca" if self.roles_file and not self.client_ca else None),
        ):
            if problem:
                _refuse(name, problem)


def options_of(config: Mapping[str, Any], instance: str) -> Options:
    """The options of one instance, from the framework's whole configuration.

    Raises InvalidArgument naming every key that is unknown, missing or wrong.
    """
    block = _mapping(config.get(BLOCK), BLOCK)
    instances = _mapping(block.get("instances"), f"{BLOCK}.instances")
    _check_keys(block, {"root", *FILES, "allow_insecure", "instances"}, BLOCK)
    for name in instances:
        if name not in config:
            _refuse(f"{BLOCK}.instances.{name}", "names no instance of the configuration")
    place = f"{BLOCK}.instances.{instance}"
    own = _mapping(instances.get(instance), place)
    _check_keys(own, _INSTANCE_KEYS, place)
    server_type, server = server_block(config, instance)
    for key in own:
        if _ONLY_OF.get(key, KINDS[server_type]) != KINDS[server_type]:
            _refuse(f"{place}.{key}", f"is for a server of kind {_ONLY_OF[key]}; this one is {KINDS[server_type]}")
    values: dict[str, Any] = {
        "root": _value(block, "root", BLOCK, str),
        **{name: _value(block, name, BLOCK, str) for name in FILES},
        "allow_insecure": _value(block, "allow_insecure", BLOCK, bool),
        "policy": _policy(own, server, config, place),
    }
    values |= {option: _value(own, key, place, kind) for key, (option, kind) in _INSTANCE_KEYS.items() if kind}
    given = {key: value for key, value in values.items() if value is not None}
    try:
        return Options(instance=instance, kind=KINDS[server_type], **given)
    except InvalidArgument as error:
        (wrong,) = error.violations
        _refuse(f"{BLOCK if wrong.field in ('root', *FILES) else place}.{wrong.field}", wrong.description)


_INSTANCE_KEYS: Mapping[str, tuple[str, type | None]] = {
    "control": ("control", str),
    "service": ("service", str),
    "mode": ("mode", str),
    "verify": ("verify", str),
    "hooks": ("hooks", str),
    "class": ("server_class", str),
    "ends_on_verify": ("ends_on_verify", bool),
    "policy": ("policy", None),
}
_ONLY_OF: Mapping[str, str] = {
    "verify": "resources",
    "hooks": "resources",
    "ends_on_verify": "resources",
    "policy": "agent",
}
"""Keys that mean something for one kind only."""


def server_block(config: Mapping[str, Any], instance: str) -> tuple[str, Mapping[str, Any]]:
    """The type of an instance's server (a key of KINDS), and the innermost block of its configuration."""
    outer = _mapping(config.get(instance), instance)
    server_type = next(iter(outer), "")
    if server_type not in KINDS:
        _refuse(f"{instance}.{server_type}", f"must be one of {', '.join(KINDS)}")
    middle = _mapping(outer[server_type], f"{instance}.{server_type}")
    name = next(iter(middle), "")
    return server_type, _mapping(middle.get(name), f"{instance}.{server_type}.{name}")


def _policy(
    own: Mapping[str, Any], server: Mapping[str, Any], config: Mapping[str, Any], place: str
) -> tuple[str, ...] | None:
    found = own.get("policy")
    if found is None:
        model = server.get("model_server")
        return (str(model["name"]),) if isinstance(model, Mapping) and "name" in model else None
    names = [found] if isinstance(found, str) else found
    if not isinstance(names, Sequence) or not names or not all(isinstance(each, str) and each for each in names):
        _refuse(f"{place}.policy", "must be a name, or a list of names, of model instances")
    for name in names:
        block = config.get(name)
        if not isinstance(block, Mapping) or KINDS.get(next(iter(block), "")) != "policy_model":
            _refuse(f"{place}.policy", f"names {name!r:.80}, which is no model instance of the configuration")
    return tuple(names)


# ---- checks ----------------------------------------------------------------------------------------------


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if value is None:
        _refuse(place, "is missing")
    if not isinstance(value, Mapping):
        _refuse(place, "must be a mapping")
    return value


def _check_keys(block: Mapping[str, Any], known: Collection[str], place: str) -> None:
    for key in block:
        if key not in known:
            _refuse(f"{place}.{key}", f"is unknown; there are {', '.join(sorted(known))}")


def _value(block: Mapping[str, Any], key: str, place: str, kind: type | None) -> Any:
    value = block.get(key)
    if value is None or (kind is not None and type(value) is kind and value != ""):
        return value
    _refuse(f"{place}.{key}", f"is {value!r:.80}, which is no {'text' if kind is str else 'truth value'}")


def _not_among(value: str, known: Collection[str]) -> str | None:
    if value in known:
        return None
    return f"is {value!r:.80}, " + (f"not one of {', '.join(known)}" if known else "which means nothing here")


def _root_problem(root: str) -> str | None:
    if not root:
        return "is missing"
    # The framework starts servers in directories of their own.
    return None if root.startswith("/") or "://" in root else f"is {root!r:.200}, no absolute path or URI"


def _address_problem(address: str) -> str | None:
    if not address:
        return "is missing"
    if address.startswith(("unix:", "unix-abstract:")):
        return None
    host, _, port = address.rpartition(":")
    legal = host and port.isascii() and port.isdigit() and int(port) < 1 << 16
    return None if legal else f"is {address!r:.200}, neither host:port nor unix:path"


def _hooks_problem(hooks: str) -> str | None:
    module, colon, name = hooks.partition(":")
    return None if module and colon and name else f"is {hooks!r:.200}, not module:Class"


def _refuse(place: str, problem: str) -> NoReturn:
    raise InvalidArgument(f"{place} {problem}", violations=[Violation(place, problem)])
