"""The commands of `gym-ckpt`, and how they end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from gym_ckpt_grpc.cli.access import (
    FLEET_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    authenticator_of,
    client_tls,
    fleet_of,
    server_tls,
    token_source,
    with_tls,
)
from gym_ckpt_grpc.cli.exits import EXIT_HELP, Exit
from gym_ckpt_grpc.cli.output import errors, say
from gym_ckpt_grpc.coordinator import DiscoveryFailed, FleetError, FleetInvalid
from gym_ckpt_grpc.protocol.errors import (
    GymCkptError,
    InvalidArgument,
    PermissionDenied,
    StateNotFound,
    Unauthenticated,
    UsageError,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Consistent checkpoints of reinforcement-learning rollouts, over every server that holds them.",
    epilog=EXIT_HELP,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Root = Annotated[str, typer.Option("--root", help="The checkpoint root: a directory or a file:// URI.")]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", help=f"File with the bearer token; else {TOKEN_FILE_VARIABLE} or {TOKEN_VARIABLE}."),
]
FleetOption = Annotated[Path | None, typer.Option("--fleet", help=f"The fleet's YAML file; else {FLEET_VARIABLE}.")]
KeepLast = Annotated[int | None, typer.Option("--keep-last", min=1, help="Keep so many of the newest; default 2.")]
KeepEvery = Annotated[int | None, typer.Option("--keep-every", min=0, help="Keep each n-th of all publications.")]
KeepWithin = Annotated[
    str | None, typer.Option("--keep-within", help="Keep what was made so long before the newest: 90s, 15m, 6h, 2d.")
]

_USAGE = (UsageError, FleetInvalid, InvalidArgument, StateNotFound)
_UNREACHABLE = (DiscoveryFailed, Unauthenticated, PermissionDenied)


def ended(command: Callable[[], Exit]) -> None:
    """Run a command and exit with its code; an error of ours is one line on standard error, never a traceback."""
    try:
        code = command()
    except KeyboardInterrupt:
        errors.print("interrupted")
        code = Exit.INTERRUPTED
    except GymCkptError as error:
        # Escaped: the name of a participant, in brackets, would be taken for a style.
        say(errors, "red", "error:", error)
        code = _code(error)
    raise typer.Exit(int(code))


def _code(error: GymCkptError) -> Exit:
    if isinstance(error, _UNREACHABLE) or (isinstance(error, FleetError) and isinstance(error.cause, _UNREACHABLE)):
        return Exit.UNREACHABLE
    return Exit.USAGE if isinstance(error, _USAGE) else Exit.FAILED


def ended_async(command: Callable[[], Coroutine[Any, Any, Exit]]) -> None:
    """The same for a coroutine; SIGTERM and SIGHUP end it as Ctrl-C does, so that servers it started end too."""

    def run() -> Exit:
        # A shell starts background jobs with SIGINT ignored; whoever sends it all the same means it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
        return asyncio.run(command())

    ended(run)


@app.command()
def demo(
    as_json: Json = False,
    rollouts: Annotated[int, typer.Option(min=4, help="Rollouts to run, half blackjack and half counter.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of tasks, cards and tokens.")] = 7,
    keep: Annotated[Path | None, typer.Option(help="Keep plan, logs and checkpoints in this directory.")] = None,
    leave_out: Annotated[
        str, typer.Option(help="Negative control: restore every kind but this one, and see what that costs.")
    ] = "",
    cuts: Annotated[
        bool,
        typer.Option("--cuts/--no-cuts", help="Cut generations that are running and continue them, or do without."),
    ] = True,
) -> None:
    """Checkpoint rollouts in flight, kill every server, restore, finish, and compare with a run never killed."""
    from gym_ckpt_grpc.cli.demo import demo as run

    ended_async(lambda: run(rollouts=rollouts, seed=seed, keep=keep, leave_out=leave_out, cuts=cuts, as_json=as_json))


@app.command()
def up(
    directory: Annotated[Path | None, typer.Option(help="Where it lives; a temporary directory by default.")] = None,
    rollouts: Annotated[int, typer.Option(min=0, help="Rollouts to keep running in it.")] = 0,
    mtls: Annotated[bool, typer.Option("--mtls", help="Certificates in place of tokens on the control plane.")] = False,
    audit: Annotated[bool, typer.Option("--audit", help="Keep an audit log.")] = False,
    as_json: Json = False,
) -> None:
    """Start a small Gym of real servers and keep it up until Ctrl-C, to try the other commands and grpcurl on."""
    from gym_ckpt_grpc.cli.up import up as run

    ended_async(lambda: run(directory=directory, rollouts=rollouts, mtls=mtls, audit=audit, as_json=as_json))


@app.command()
@with_tls
def status(
    fleet: FleetOption = None,
    token_file: TokenFileOption = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for each server.")] = 10.0,
    allow_insecure: Annotated[bool, typer.Option(help="Send the token in plain text beyond this host.")] = False,
    as_json: Json = False,
) -> None:
    """Show where every participant stands. Changes nothing."""
    from gym_ckpt_grpc.cli.status import status as run

    async def command() -> Exit:
        return await run(
            fleet_of(fleet),
            token_source(token_file),
            timeout=timeout,
            allow_insecure=allow_insecure,
            tls=client_tls(),
            as_json=as_json,
        )

    ended_async(command)


@app.command()
@with_tls
def conform(
    address: Annotated[str, typer.Argument(help="Where the participant is served: host:port or unix:path.")],
    token_file: TokenFileOption = None,
    observer_token_file: Annotated[Path | None, typer.Option(help="An observer's token, to check roles.")] = None,
    root: Annotated[str | None, typer.Option(help="A root it may write to; without: no Commit, no Restore.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Check only this id or name; repeatable.")] = None,
    expendable: Annotated[
        list[str] | None, typer.Option(help="A live episode that may be retired and restored; repeatable.")
    ] = None,
    ready_within: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for a safe cut.")] = 5.0,
    allow_insecure: Annotated[bool, typer.Option(help="Send the token in plain text beyond this host.")] = False,
    as_json: Json = False,
) -> None:
    """Check what a participant keeps of the control plane's behaviours. Closes admission often: not in a run."""
    from gym_ckpt_grpc.cli.conform import conform as run

    async def command() -> Exit:
        return await run(
            address,
            token=token_source(token_file),
            observer_token=token_source(observer_token_file) if observer_token_file else None,
            root=root,
            expendable=expendable or [],
            only=only or [],
            ready_within=ready_within,
            allow_insecure=allow_insecure,
            tls=client_tls(),
            as_json=as_json,
        )

    ended_async(command)


@app.command("serve-coordinator")
@with_tls
def serve_coordinator(
    root: Root,
    address: Annotated[str, typer.Option(help="Where to serve: host:port or unix:path.")] = "127.0.0.1:7100",
    fleet: FleetOption = None,
    token_file: TokenFileOption = None,
    observer_token_file: Annotated[Path | None, typer.Option(help="A token that may only read.")] = None,
    controller: Annotated[str, typer.Option(help="Who this is: the controller's id.")] = "coordinator",
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for a fleet that is not complete yet.")] = 60.0,
    session_ttl: Annotated[float, typer.Option(min=1.0, help="Seconds that a client may be silent.")] = 30.0,
    incremental: Annotated[
        bool, typer.Option("--incremental", help="Do not write again what the newest checkpoint has unchanged.")
    ] = False,
    max_chain: Annotated[int, typer.Option(min=1, help="Checkpoints after which one is written in full again.")] = 8,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_within: KeepWithin = None,
    allow_insecure: Annotated[bool, typer.Option(help="Tokens and data in plain text beyond this host.")] = False,
    server_cert: Annotated[Path | None, typer.Option(help="Certificate of this server: serve with TLS.")] = None,
    server_key: Annotated[Path | None, typer.Option(help="Its key file.")] = None,
    client_ca: Annotated[Path | None, typer.Option(help="CA file of clients, who must show a certificate.")] = None,
    roles_file: Annotated[Path | None, typer.Option(help="YAML: role -> names in clients' certificates.")] = None,
    audit_log: Annotated[Path | None, typer.Option(help="Append a JSON line per mutating call to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Serve CoordinatorService over a fleet until Ctrl-C, for trainers in any language.

    With a --keep option, what none of them keeps is removed after each publication.
    """
    from gym_ckpt_grpc.cli.gc import policy_of
    from gym_ckpt_grpc.cli.serve import serve_coordinator as run

    async def command() -> Exit:
        token = token_source(token_file)
        return await run(
            fleet_of(fleet),
            root,
            address,
            token=token,
            authenticator=authenticator_of(
                token, token_source(observer_token_file) if observer_token_file else None, roles_file
            ),
            client_tls=client_tls(),
            server_tls=server_tls(server_cert, server_key, client_ca),
            audit_log=audit_log,
            controller=controller,
            wait=wait,
            session_ttl=session_ttl,
            incremental=incremental,
            max_chain=max_chain,
            retention=policy_of(keep_last, keep_every, keep_within),
            allow_insecure=allow_insecure,
            as_json=as_json,
        )

    ended_async(command)
