"""Where commands find the fleet and the token. A token comes from a file or the environment, never from argv."""

from __future__ import annotations

import os
from pathlib import Path

from gym_ckpt_grpc.auth import TokenFile, TokenSource, TokenValue
from gym_ckpt_grpc.coordinator import Fleet
from gym_ckpt_grpc.protocol.errors import UsageError

TOKEN_VARIABLE = "GYM_CKPT_TOKEN"
TOKEN_FILE_VARIABLE = "GYM_CKPT_TOKEN_FILE"
FLEET_VARIABLE = "GYM_CKPT_FLEET"


def token_source(token_file: Path | None) -> TokenSource | None:
    """The given file, else the one that GYM_CKPT_TOKEN_FILE names, else GYM_CKPT_TOKEN, else none."""
    path = token_file or (Path(named) if (named := os.environ.get(TOKEN_FILE_VARIABLE)) else None)
    if path is not None:
        try:
            return TokenFile(path)
        except ValueError as error:
            raise UsageError(str(error)) from error
    value = os.environ.get(TOKEN_VARIABLE, "").strip()
    return TokenValue(value) if value else None


def fleet_of(fleet_file: Path | None) -> Fleet:
    """The fleet of a file, else of the one that GYM_CKPT_FLEET names."""
    path = fleet_file or (Path(named) if (named := os.environ.get(FLEET_VARIABLE)) else None)
    if path is None:
        raise UsageError(f"name the fleet's file with --fleet or {FLEET_VARIABLE}")
    return Fleet.from_yaml(path)
