"""The framework's client, and its module function, as the steps of the handler that runs (steps.py).

Both stand above the framework's retry loop, which sends a call again for ever whatever exception it meets: so a refusal
reaches the handler.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from nemo_gym.server_utils import ServerClient
from pydantic import BaseModel

from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES
from gym_ckpt_grpc.integrations.nemo_gym.peers import Peers as Peers
from gym_ckpt_grpc.integrations.nemo_gym.steps import CURRENT, Call


class StepClient(ServerClient):  # type: ignore[misc]
    """Hands the calls of a handler that has steps to these; any other call goes out as it always does."""

    @classmethod
    def of(cls, client: Any) -> Any:
        """The same client, with steps. One that is no ServerClient, such as a test's, is given back as it is."""
        if not isinstance(client, ServerClient) or isinstance(client, StepClient):
            return client
        return cls(head_server_config=client.head_server_config, global_config_dict=client.global_config_dict)

    async def request(self, server_name: str, url_path: str, method: str, **kwargs: Any) -> Any:
        steps = CURRENT.get()
        if steps is None:
            return await super().request(server_name=server_name, url_path=url_path, method=method, **kwargs)
        make = super().request

        async def send(method: str, path: str, options: Mapping[str, Any]) -> Any:
            return await make(server_name=server_name, url_path=path, method=method, **options)

        if isinstance(body := kwargs.get("json"), BaseModel):
            kwargs["json"] = body.model_dump(exclude_unset=True)
        _, path = NAMES.split(url_path)
        return await steps.call(Call(server_name, method, path, kwargs, send))


def intercept(module: str, name: str) -> None:
    """Let the framework's `request` function, as a module imported it under a name, be a step of its handlers.

    The second time it changes nothing.
    """
    where = importlib.import_module(module)
    original = getattr(where, name)
    if getattr(original, "is_step", False):
        return

    async def request(method: str, url: str, **kwargs: Any) -> Any:
        steps = CURRENT.get()
        if steps is None:
            return await original(method=method, url=url, **kwargs)
        place = urlsplit(url)
        base = f"{place.scheme}://{place.netloc}"
        path = url[len(base) :] or "/"

        async def send(method: str, path: str, options: Mapping[str, Any]) -> Any:
            return await original(method=method, url=f"{base}{path}", **options)

        server = steps.peers.at(url)
        if server is not None:
            _, path = NAMES.split(path)
        return await steps.call(Call(server or base, method, path, kwargs, send))

    request.is_step = True  # type: ignore[attr-defined]
    setattr(where, name, request)
