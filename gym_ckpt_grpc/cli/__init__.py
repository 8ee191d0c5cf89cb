"""The command line: `gym-ckpt`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the script. Says what to install where the `cli` extra is missing."""
    try:
        from gym_ckpt_grpc.cli import operator_commands, root_commands, server_commands  # noqa: F401 - they register their commands
        from gym_ckpt_grpc.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("gym-ckpt needs the cli extra: pip install 'gym-ckpt-grpc[cli,minigym]'")
    app()
