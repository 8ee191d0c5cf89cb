"""`Embedding`: what makes the application of a server a participant, whatever its kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from starlette.middleware import Middleware

from gym_ckpt_grpc.auth import Authenticator, NamedRolesFile, Role, ServerTls, TokenFile
from gym_ckpt_grpc.control import ControlPlane, ParticipantServer, StateOwner
from gym_ckpt_grpc.integrations.asgi import CheckpointMiddleware, answer_refusal
from gym_ckpt_grpc.integrations.nemo_gym.names import BYPASS
from gym_ckpt_grpc.integrations.nemo_gym.options import Options
from gym_ckpt_grpc.integrations.nemo_gym.outer import IdentityMiddleware
from gym_ckpt_grpc.participants import Gate
from gym_ckpt_grpc.protocol.errors import ControlError, UsageError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.telemetry.ending import EXIT_LIMIT

T = TypeVar("T")

MCP_PATH = "/mcp"
"""The framework's MCP route. Only POST is gated there: a GET is a stream without end, and changes nothing."""
_KEPT = "_gymckpt"


class Embedding:
    """Makes a server a participant: its owner's control plane beside the application, the gate in front of it.

    Raises UsageError if the server asks for several worker processes: they would import the server's own module and
    serve it without a gate. server: for that check; the framework's server object.
    """

    def __init__(self, owner: StateOwner, options: Options, *, server: object = None) -> None:
        check_workers(server)
        self.owner = owner
        self.options = options
        if (kind := str(owner.kind)) != options.kind:
            raise UsageError(f"instance {options.instance} is of kind {options.kind}, and its mixin of kind {kind}")

    def install(
        self,
        app: Any,
        *,
        gate: Gate,
        position: Literal["inside", "outside"],
        drivers: Sequence[Middleware] = (),
        bodies: Sequence[str] = (),
        kept: Sequence[str] = (),
        honours_untagged: bool = False,
        bypass: Sequence[str] = (),
    ) -> None:
        """Install all of it in a FastAPI or Starlette application; a second time on one application changes nothing.

        position: the gate stands behind all middlewares of the application, inside its session, or in front of all.
        drivers: what stands innermost, behind an inner gate as well, in the order in which a request meets them.
        bodies, kept, honours_untagged: see IdentityMiddleware. bypass: further routes that are never held.
        """
        if getattr(app.state, _KEPT, None) is not None:
            return
        setattr(app.state, _KEPT, self)
        app.add_exception_handler(ControlError, answer_refusal)
        identity = Middleware(
            IdentityMiddleware, bodies=bodies, kept=kept, honours_untagged=honours_untagged, counted=gate.refused
        )
        gated = Middleware(
            CheckpointMiddleware, gate=gate, bypass=(*BYPASS, *bypass), keep_path=True, post_only=(MCP_PATH,)
        )
        outer, inner = ([identity], [gated]) if position == "inside" else ([identity, gated], [])
        _add_when_built(app, outer, [*inner, *drivers])
        self._serve_within(app)

    def _serve_within(self, app: Any) -> None:
        within = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            # The control server stands when the application is ready to be restored into.
            async with within(app) as state, self.served():
                yield state

        app.router.lifespan_context = lifespan

    @asynccontextmanager
    async def served(self) -> AsyncIterator[ParticipantServer]:
        """The control server, for as long as the block lasts."""
        options = self.options
        identity = ParticipantIdentity(self.owner.kind, options.service)
        plane = ControlPlane(self.owner, identity, roots=[options.root])
        server = ParticipantServer(
            plane,
            options.control,
            authenticator=_authenticator(options),
            allow_insecure=options.allow_insecure,
            tls=_tls(options),
            audit_log=options.audit_log,
        )
        try:
            async with server:
                yield server
        finally:
            # The framework shuts its providers down next, if these are its own: what has ended is handed over before.
            await asyncio.to_thread(plane.telemetry.flush, EXIT_LIMIT)


def _authenticator(options: Options) -> Authenticator | None:
    """Who is let in; None: everyone on this host."""
    tokens = {Role.CONTROLLER: TokenFile(options.token_file)} if options.token_file is not None else {}
    if options.roles_file is not None:
        return Authenticator(tokens, certificates=NamedRolesFile(options.roles_file))
    return Authenticator(tokens) if tokens else None


def _tls(options: Options) -> ServerTls | None:
    if options.tls_cert is None or options.tls_key is None:
        return None
    return ServerTls(options.tls_cert, options.tls_key, client_ca=options.client_ca)


def _add_when_built(app: Any, outer: Sequence[Middleware], inner: Sequence[Middleware]) -> None:
    """Add middlewares when the application builds its stack: outside and inside of those that it has now.

    Not at once, since the framework refuses to serve tools over MCP when it sees a middleware that is not its own, for
    it calls the tools directly. It may: the gate counts the MCP request as a whole.
    """
    outermost = app.user_middleware[0] if app.user_middleware else None
    build = app.build_middleware_stack

    def build_with_ours() -> Any:
        stack: list[Middleware] = app.user_middleware
        place = next((i for i, each in enumerate(stack) if each is outermost), len(stack))
        app.user_middleware = [*stack[:place], *outer, *stack[place:], *inner]
        try:
            return build()
        finally:
            app.user_middleware = stack

    app.build_middleware_stack = build_with_ours


def check_workers(server: object) -> None:
    """Raise UsageError if a server's configuration asks for several worker processes."""
    config = getattr(server, "config", None)
    workers = getattr(config, "num_workers", None)
    if isinstance(workers, int) and workers > 1:
        raise UsageError(
            f"{getattr(config, 'name', type(server).__name__)} has num_workers = {workers}: the framework's workers "
            "would serve it without a gate. Set it to 1, and start several instances instead"
        )


def options_of_server(server: object) -> Options:
    """The `checkpoint` of a server's class. Raises UsageError if it has none."""
    options = getattr(type(server), "checkpoint", None)
    if isinstance(options, Options):
        return options
    raise UsageError(f"{type(server).__name__} needs `checkpoint: ClassVar = Options(...)`")


def kept(server: object, make: Callable[[], T]) -> T:
    """What `make` gave for this server object the first time: a server has one owner, however often it is set up.

    The framework's servers are pydantic models; it lies beside their fields.
    """
    if found(server) is None:
        vars(server)[_KEPT] = make()
    made: T = found(server)
    return made


def found(server: object) -> Any:
    """What `kept` keeps for a server object; None before its first call."""
    return vars(server).get(_KEPT)
