"""The command that starts a server, added to `gym-ckpt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_ckpt_grpc.cli.app import app, ended
from gym_ckpt_grpc.cli.exits import Exit

__all__ = ["app"]


@app.command("nemo-gym")
def nemo_gym(
    instance: Annotated[str, typer.Argument(help="The server's name in NeMo Gym's configuration.")],
    config: Annotated[
        Path | None, typer.Option("--config", help="The configuration, JSON or YAML; else NEMO_GYM_CONFIG_DICT.")
    ] = None,
    server_class: Annotated[
        str | None, typer.Option("--class", help="The class to serve, or module:Class; else as the module says.")
    ] = None,
    control: Annotated[
        str | None, typer.Option("--control", help="Where to serve the control plane: host:port or unix:path.")
    ] = None,
    root: Annotated[str | None, typer.Option("--root", help="The checkpoint root: a directory or a URI.")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the controller's bearer token.")
    ] = None,
    service: Annotated[
        str | None, typer.Option("--service", help="Its name in the fleet; else the instance's.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="Of a resources server: stateless, exported or restart_only.")
    ] = None,
    verify: Annotated[
        str | None, typer.Option("--verify", help="Of a resources server: replay or wait at a checkpoint.")
    ] = None,
    hooks: Annotated[str | None, typer.Option("--hooks", help="Its state: module:Class, made with the server.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="A model instance whose calls are an agent's; repeatable.")
    ] = None,
) -> None:
    """Serve one of NeMo Gym's own servers, unchanged, as a participant of checkpoints.

    Each option stands in place of what the block `gym_ckpt` of the configuration says. A server that neither of them
    names, or that holds nothing of a rollout, is served as it is.
    """
    from gym_ckpt_grpc.integrations.nemo_gym.launch import launch

    def command() -> Exit:
        launch(
            instance,
            config_file=config,
            server_class=server_class,
            root=root,
            token_file=token_file,
            control=control,
            service=service,
            mode=mode,
            verify=verify,
            hooks=hooks,
            policy=policy or None,
        )
        return Exit.OK

    ended(command)
