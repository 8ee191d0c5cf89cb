"""Servers that a caller may call, and a reply as it is recorded."""

from __future__ import annotations

from typing import Any

from gym_ckpt_grpc.integrations.nemo_gym.peers import Peers

CONFIG = {
    "world": {"resources_servers": {"x": {"host": "127.0.0.1", "port": 1}}},
    "judge": {"responses_api_models": {"x": {"host": "127.0.0.1", "port": 2}}},
    "policy": {"responses_api_models": {"x": {"host": "127.0.0.1", "port": 3}}},
    "helper": {"responses_api_agents": {"x": {"host": "127.0.0.1", "port": 4}}},
    "gym_ckpt": {"instances": {"policy": {"control": "", "service": "the-policy"}}},
    "port": 5,
}
PEERS = Peers(CONFIG, "self", {"policy"})


def record(body: str, **more: Any) -> dict[str, Any]:
    return {"status": 200, "type": "application/json", "cookies": [], "body": body, **more}
