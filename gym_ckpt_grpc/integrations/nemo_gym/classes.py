"""`checkpointed`: the subclass of a released server class that takes part in checkpoints."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from gym_ckpt_grpc.integrations.nemo_gym.options import Options
from gym_ckpt_grpc.protocol.errors import UsageError

MIXINS = {
    "resources": ("gym_ckpt_grpc.integrations.nemo_gym.resources", "ResourcesMixin"),
    "agent": ("gym_ckpt_grpc.integrations.nemo_gym.agent", "AgentMixin"),
    "environment": ("gym_ckpt_grpc.integrations.nemo_gym.environment", "EnvironmentMixin"),
    "policy_model": ("gym_ckpt_grpc.integrations.nemo_gym.policy", "PolicyMixin"),
}
"""Kind -> module and name of its mixin. A mixin may have a `mixin_for(cls)` that gives another for some classes."""


def checkpointed(cls: type, options: Options) -> type:
    """A subclass of a server class with the mixin of its kind in front, ready for `run_webserver()`.

    It has the class's own name: the framework makes the names of session cookies, and the keys that sign them, of it.
    Ray is not started for it where the class says nothing of Ray. A class that has a mixin already is given back with
    these options in place of its own.
    """
    mixin = mixin_of(cls, options.kind)
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {"checkpoint": ClassVar[Options]},
        "checkpoint": options,
        "checkpointed_class": classmethod(lambda _: cls),
    }
    if getattr(cls, "ray_enabled", False) is None:
        namespace["ray_enabled"] = False
        namespace["__annotations__"]["ray_enabled"] = ClassVar[Any]
    bases = (cls,) if issubclass(cls, mixin) else (mixin, cls)
    made: type = type(cls)(cls.__name__, bases, namespace)
    return made


def mixin_of(cls: type, kind: str) -> type:
    """The mixin for a server class of this kind. Raises UsageError for a kind without one."""
    if kind not in MIXINS:
        raise UsageError(f"{cls.__qualname__} is of kind {kind!r}; there are mixins for {', '.join(MIXINS)}")
    module, name = MIXINS[kind]
    mixin: type = getattr(importlib.import_module(module), name)
    choose = getattr(mixin, "mixin_for", None)
    return choose(cls) if choose is not None else mixin


def released_class(cls: type) -> type:
    """The class that `checkpointed` made a class of; any other class itself. What a class promises, it says itself."""
    made_of = vars(cls).get("checkpointed_class")
    return made_of.__get__(None, cls)() if isinstance(made_of, classmethod) else cls
