"""An `entrypoint` for the framework's own `gym env start`: serves the instance that it names, as a participant.

In a server's block, relative to the server's directory as the framework wants it:

    entrypoint: ../../gym_ckpt_grpc/integrations/nemo_gym/entry.py

The server's own module is then `app.py`, or what its `class` in the block `gym_ckpt` says as `module:Class`.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Serve the instance of NEMO_GYM_CONFIG_PATH until the process is told to end. Returns the exit code."""
    try:
        from gym_ckpt_grpc.integrations.nemo_gym.launch import INSTANCE_VARIABLE, launch
        from gym_ckpt_grpc.protocol.errors import GymCkptError
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "gym_ckpt_grpc":
            raise
        print(f"gym_ckpt_grpc is not installed in {sys.prefix}: pip install 'gym-ckpt-grpc[asgi]'", file=sys.stderr)
        return 2
    instance = os.environ.get(INSTANCE_VARIABLE, "")
    if not instance:
        print(f"error: {INSTANCE_VARIABLE} names no instance: this is started by the framework", file=sys.stderr)
        return 2
    try:
        launch(instance)
    except GymCkptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # Python has put the directory of this file there; its modules would hide others of their names.
    sys.path[0] = os.getcwd()
    sys.exit(main())
