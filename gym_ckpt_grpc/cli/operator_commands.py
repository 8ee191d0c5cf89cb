"""The commands of an operator, added to `gym-ckpt`: a checkpoint step by step, what watches it, what looks it over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from gym_ckpt_grpc.cli.access import client_tls, fleet_of, token_source, with_tls
from gym_ckpt_grpc.cli.app import FleetOption, Json, TokenFileOption, app, ended_async
from gym_ckpt_grpc.cli.carrying import Access, refuse_busy
from gym_ckpt_grpc.cli.exits import Exit
from gym_ckpt_grpc.cli.session_file import SessionFile
from gym_ckpt_grpc.coordinator import Coordinator
from gym_ckpt_grpc.protocol.errors import UsageError
from gym_ckpt_grpc.protocol.ids import MAX_ATTEMPT, EpisodeId, rollout_id_problem
from gym_ckpt_grpc.protocol.lease import MAX_LEASE_TTL
from gym_ckpt_grpc.telemetry import exporting

__all__ = ["app"]

LEASE = 300.0
"""Seconds that participants stay closed between two commands: people type slower than trainers."""

Session = Annotated[
    Path, typer.Option("--session", help="The file that carries the open checkpoint from command to command.")
]
OptionalSession = Annotated[
    Path | None, typer.Option("--session", help="Inside this session; else under a new epoch, see --root.")
]
NewRoot = Annotated[str, typer.Option("--root", help="The checkpoint root: a directory or a file:// URI.")]
Lease = Annotated[
    float,
    typer.Option(
        "--lease", min=1.0, max=MAX_LEASE_TTL, help="Seconds that the fleet may stay closed between commands."
    ),
]
Controller = Annotated[str, typer.Option("--controller", help="Who this is: the controller's id.")]
Run = Annotated[str, typer.Option("--run", help="Id of the training run; the controller's by default.")]
TakeOver = Annotated[bool, typer.Option("--take-over", help="End what another controller has open.")]
Insecure = Annotated[bool, typer.Option("--allow-insecure", help="Send the token in plain text beyond this host.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for each server.")]
Limit = Annotated[float, typer.Option("--deadline", min=0.1, help="Seconds for the whole command.")]
Episodes = Annotated[
    typer.FileText, typer.Option("--episodes", help="Capture keys, one per line; - is standard input. May be empty.")
]
OptionalEpisodes = Annotated[
    typer.FileText | None, typer.Option("--episodes", help="Capture keys, one per line; - is standard input.")
]


def _run(
    token_file: Path | None,
    allow_insecure: bool,
    timeout: float,
    command: Callable[[Access], Coroutine[Any, Any, Exit]],
) -> None:
    async def run() -> Exit:
        with exporting("gym-ckpt"):
            return await command(
                Access(token=token_source(token_file), allow_insecure=allow_insecure, timeout=timeout, tls=client_tls())
            )

    ended_async(run)


@app.command()
@with_tls
def prepare(
    session: Session,
    fleet: FleetOption = None,
    root: NewRoot = "",
    ready_within: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for a safe cut.")] = 30.0,
    lease: Lease = LEASE,
    controller: Controller = "operator",
    run: Run = "",
    take_over: TakeOver = False,
    token_file: TokenFileOption = None,
    timeout: Timeout = 10.0,
    allow_insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Close the fleet at a safe cut. Exit 1 names what is not ready: prepare again, or resume."""
    from gym_ckpt_grpc.cli import operate

    async def command(access: Access) -> Exit:
        file = SessionFile(session)
        return await operate.prepare(
            file,
            access,
            fleet=None if file.exists else fleet_of(fleet),
            root=root,
            ready_within=ready_within,
            lease=lease,
            controller=controller,
            run_id=run,
            take_over=take_over,
            as_json=as_json,
        )

    _run(token_file, allow_insecure, timeout, command)


@app.command()
@with_tls
def commit(
    session: Session,
    episodes: Episodes,
    reopen: Annotated[
        bool, typer.Option("--reopen", help="Open the fleet once the records are frozen, before they are written.")
    ] = False,
    incremental: Annotated[
        bool, typer.Option("--incremental", help="Do not write again what the newest checkpoint has unchanged.")
    ] = False,
    deadline: Limit = 120.0,
    token_file: TokenFileOption = None,
    timeout: Timeout = 10.0,
    allow_insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Write the episodes in flight, so that every record is durable. They are restored only once published."""
    from gym_ckpt_grpc.cli import operate

    async def command(access: Access) -> Exit:
        chosen = operate.read_episodes(Path(episodes.name), episodes.read())
        return await operate.commit(
            SessionFile(session),
            access,
            chosen,
            reopen=reopen,
            incremental=incremental,
            deadline=deadline,
            as_json=as_json,
        )

    _run(token_file, allow_insecure, timeout, command)


@app.command()
@with_tls
def publish(
    session: Session,
    deadline: Limit = 120.0,
    token_file: TokenFileOption = None,
    timeout: Timeout = 10.0,
    allow_insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Make the committed checkpoint the newest one. Given again, it gives the same number."""
    from gym_ckpt_grpc.cli import operate

    async def command(access: Access) -> Exit:
        return await operate.publish(SessionFile(session), access, deadline=deadline, as_json=as_json)

    _run(token_file, allow_insecure, timeout, command)


@app.command()
@with_tls
def resume(
    session: Session,
    abort: Annotated[bool, typer.Option("--abort", help="Free what was restored instead of opening it.")] = False,
    deadline: Limit = 60.0,
    token_file: TokenFileOption = None,
    timeout: Timeout = 10.0,
    allow_insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Open the fleet and end the session. Aborts a checkpoint that is not published, and says which it was."""
    from gym_ckpt_grpc.cli import operate

    async def command(access: Access) -> Exit:
        return await operate.resume(SessionFile(session), access, deadline=deadline, abort=abort, as_json=as_json)

    _run(token_file, allow_insecure, timeout, command)


@app.command()
@with_tls
def restore(
    session: Session,
    root: Annotated[str, typer.Option("--root", help="The checkpoint root: a directory or a file:// URI.")],
    checkpoint: Annotated[str, typer.Argument(help="A published checkpoint's id, or 'latest'.")] = "latest",
    fleet: FleetOption = None,
    lease: Lease = LEASE,
    controller: Controller = "operator",
    run: Run = "",
    deadline: Limit = 120.0,
    take_over: TakeOver = False,
    token_file: TokenFileOption = None,
    timeout: Timeout = 10.0,
    allow_insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Install a published checkpoint. The fleet stays closed until resume; send the attempts that this prints."""
    from gym_ckpt_grpc.cli import operate

    async def command(access: Access) -> Exit:
        return await operate.restore(
            SessionFile(session),
            access,
            fleet=fleet_of(fleet),
            root=root,
            checkpoint=checkpoint,
            lease=lease,
            controller=controller,
            run_id=run,
            deadline=deadline,
            take_over=take_over,
            as_json=as_json,
        )

    _run(token_file, allow_insecure, timeout, command)


async def _begun(
    session: Path | None, access: Access, fleet: Path | None, root: str, controller: str, take_over: bool
) -> SessionFile | Coordinator:
    """The session, or a coordinator with an epoch of its own."""
    if session is not None:
        return SessionFile(session)
    if not root:
        raise UsageError("without --session an epoch is claimed, which needs --root")
    servers = fleet_of(fleet)
    if not take_over:
        await refuse_busy(servers, access)
    return access.begin(servers, root, controller=controller, run_id="", lease=LEASE)


@app.command()
@with_tls
def retire(
    episode: Annotated[list[str] | None, typer.Argument(help="Episodes, as capture keys.")] = None,
    episodes: OptionalEpisodes = None,
    session: OptionalSession = None,
    fleet: FleetOption = None,
    root: NewRoot = "",
    controller: Controller = "operator",
    take_over: TakeOver = False,
    deadline: Limit = 60.0,
    token_file: TokenFileOption = None,
    timeout: Timeout = 10.0,
    allow_insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Refuse these attempts and earlier ones everywhere, and free them. Without --session: under a new epoch."""
    from gym_ckpt_grpc.cli import operate

    async def command(access: Access) -> Exit:
        chosen = operate.read_episodes(Path("EPISODE"), "\n".join(episode or []))
        if episodes is not None:
            chosen += operate.read_episodes(Path(episodes.name), episodes.read())
        if not chosen and episodes is None:
            raise UsageError("name episodes, or a file of them with --episodes")
        begun = await _begun(session, access, fleet, root, controller, take_over)
        return await operate.retire(begun, access, chosen, deadline=deadline, as_json=as_json)

    _run(token_file, allow_insecure, timeout, command)


@app.command()
@with_tls
def forget(
    rollout: Annotated[list[str], typer.Argument(help="ROLLOUT or ROLLOUT:THROUGH; without: every attempt.")],
    session: OptionalSession = None,
    fleet: FleetOption = None,
    root: NewRoot = "",
    controller: Controller = "operator",
    take_over: TakeOver = False,
    deadline: Limit = 60.0,
    token_file: TokenFileOption = None,
    timeout: Timeout = 10.0,
    allow_insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """End the refusal of rollouts that are finished, up to an attempt. Without --session: under a new epoch."""
    from gym_ckpt_grpc.cli import operate

    async def command(access: Access) -> Exit:
        rollouts = _rollouts(rollout)
        begun = await _begun(session, access, fleet, root, controller, take_over)
        return await operate.forget(begun, access, rollouts, deadline=deadline, as_json=as_json)

    _run(token_file, allow_insecure, timeout, command)


def _rollouts(words: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        rollout, _, through = word.partition(":")
        if problem := rollout_id_problem(rollout):
            raise UsageError(f"rollout {rollout!r} {problem}")
        try:
            attempt = EpisodeId(rollout, int(through)).attempt if through else MAX_ATTEMPT
        except ValueError:
            raise UsageError(f"{word!r}: after the colon comes an attempt, 0 to {MAX_ATTEMPT}") from None
        found[rollout] = max(attempt, found.get(rollout, 0))
    return found


@app.command()
@with_tls
def watch(
    fleet: FleetOption = None,
    token_file: TokenFileOption = None,
    allow_insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per change and line.")] = False,
) -> None:
    """Show every change of every participant until Ctrl-C, through servers that go away. Changes nothing."""
    from gym_ckpt_grpc.cli.watch import watch as run

    async def command(access: Access) -> Exit:
        return await run(
            fleet_of(fleet),
            access.token,
            allow_insecure=allow_insecure,
            tls=access.tls,
            as_json=as_json,
            live=sys.stdout.isatty(),
        )

    _run(token_file, allow_insecure, 10.0, command)


@app.command()
@with_tls
def doctor(
    fleet: FleetOption = None,
    root: NewRoot = "",
    token_file: TokenFileOption = None,
    timeout: Timeout = 5.0,
    allow_insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Look a deployment over and name what to do. Exit 3: a server is not reached or refuses; 1: another fault."""
    from gym_ckpt_grpc.cli.doctor import doctor as run

    async def command(access: Access) -> Exit:
        return await run(fleet_of(fleet), access, root=root, as_json=as_json)

    _run(token_file, allow_insecure, timeout, command)
