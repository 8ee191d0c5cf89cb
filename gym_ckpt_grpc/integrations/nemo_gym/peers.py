"""What the other servers of a deployment are to one server: told from the framework's configuration."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES
from gym_ckpt_grpc.integrations.nemo_gym.options import BLOCK, KINDS
from gym_ckpt_grpc.protocol.ids import EpisodeId

RESPONSES = "/v1/responses"
GENERATIONS = (RESPONSES, "/v1/chat/completions", "/v1/messages")
"""Ends of the paths of a model server that generate."""


class Peers:
    """The servers that one server calls, by the names of their instances.

    config: the framework's whole configuration. own: the instance of the server that calls. policy: names of the model
    instances whose calls are policy calls.
    """

    def __init__(self, config: Mapping[str, Any], own: str, policy: Collection[str] = frozenset()) -> None:
        self._config = config
        self.own = own
        self.policy = frozenset(policy)
        self._kinds: dict[str, str] = {}

    def kind(self, server: str) -> str:
        """The kind of a server, a value of KINDS; empty for one that the configuration does not know."""
        if server not in self._kinds:
            block = self._config.get(server)
            kind = next((KINDS[each] for each in block if each in KINDS), "") if isinstance(block, Mapping) else ""
            self._kinds[server] = kind
        return self._kinds[server]

    def generates(self, server: str, path: str) -> bool:
        """Whether a call is one of the policy's generations. path: without the rollout prefix."""
        return server in self.policy and path.partition("?")[0].endswith(GENERATIONS)

    def path_for(self, episode: EpisodeId, server: str, path: str) -> str:
        """The path under which a server learns whose call it is; unchanged where it would not be understood."""
        kind = self.kind(server)
        whole = path.partition("?")[0]
        understood = (
            kind == "resources"
            or (kind == "policy_model" and server in self.policy and whole.endswith(GENERATIONS))
            or (kind == "agent" and whole.endswith(RESPONSES))
        )
        return NAMES.path_of(episode, path) if understood else path

    def service(self, server: str) -> str:
        """The name of a server's participant in its fleet."""
        block = self._config.get(BLOCK)
        instances = block.get("instances") if isinstance(block, Mapping) else None
        own = instances.get(server) if isinstance(instances, Mapping) else None
        return str((own.get("service") if isinstance(own, Mapping) else None) or server)

    # ---- addresses

    def base_url(self, server: str) -> str | None:
        """Where a server is now, such as `http://127.0.0.1:8000`; None if the configuration does not say."""
        return self._bases.get(server)

    def at(self, url: str) -> str | None:
        """The instance that a URL leads to, by its host and port; None for an address outside the deployment."""
        place = urlsplit(url)
        return self._by_base.get(f"{place.scheme}://{place.netloc}")

    def portable(self, said: bytes) -> bytes:
        """JSON with the names of the instances in place of their addresses, which another life may have changed."""
        if b"http://" not in said:
            return said
        return self._any_base.sub(lambda found: self._by_base[found[0].decode()].encode(), said)

    @cached_property
    def _bases(self) -> Mapping[str, str]:
        bases = {name: _base(self._config[name]) for name in self._config if self.kind(name)}
        return {name: base for name, base in bases.items() if base is not None}

    @cached_property
    def _by_base(self) -> Mapping[str, str]:
        return {base: name for name, base in self._bases.items()}

    @cached_property
    def _any_base(self) -> re.Pattern[bytes]:
        bases = b"|".join(re.escape(each.encode()) for each in self._by_base)
        return re.compile(rb"(?:%b)(?![0-9])" % bases if bases else rb"(?!)")


def _base(block: Any) -> str | None:
    for _ in range(2):  # type of the server, implementation
        block = next(iter(block.values()), None) if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or "host" not in block or "port" not in block:
        return None
    return f"http://{block['host']}:{block['port']}"
