"""`ResourcesMixin`: a resources server as a participant.

    class MyServer(ResourcesMixin, MyResourcesServer):
        checkpoint: ClassVar = Options(instance="mine", kind="resources", root=..., control=..., token_file=...)

or, for an unmodified class, `checkpointed(cls, options)`.
"""

from __future__ import annotations

import importlib
import logging
import secrets
from collections.abc import Callable
from typing import Any, ClassVar

from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient

from gym_ckpt_grpc.integrations.nemo_gym.classes import released_class
from gym_ckpt_grpc.integrations.nemo_gym.declared import declaration_of
from gym_ckpt_grpc.integrations.nemo_gym.hooks import hooks_for
from gym_ckpt_grpc.integrations.nemo_gym.inner import INNER_HEADER, SelfCalls
from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES, UNTAGGED_HEADER, NemoTokens
from gym_ckpt_grpc.integrations.nemo_gym.options import Options
from gym_ckpt_grpc.integrations.nemo_gym.outer import SEED_KEY
from gym_ckpt_grpc.integrations.nemo_gym.participant import Embedding, check_workers, found, kept, options_of_server
from gym_ckpt_grpc.participants import (
    GateRequest,
    Reply,
    ResourcesMode,
    ResourcesOwner,
    ResourcesSettings,
    VerifyMode,
    declared_mode,
    declared_verify,
)
from gym_ckpt_grpc.participants.names import header
from gym_ckpt_grpc.participants.verify_mode import REQUIRED_HOOKS
from gym_ckpt_grpc.protocol.errors import UsageError

SEED_PATHS = ("/seed_session", "/reset")
CLOSE_PATH = "/close_session"

log = logging.getLogger(__name__)


class ResourcesMixin:
    """Stands in front of a resources server class; everything is done in `setup_webserver`."""

    checkpoint: ClassVar[Options]

    @classmethod
    def mixin_for(cls, server: type) -> type:
        """The mixin for this server class: Gymnasium-style ones end their sessions elsewhere."""
        return GymnasiumMixin if _is_gymnasium(server) else ResourcesMixin

    def setup_webserver(self) -> Any:
        """The server's application, gated; its lifespan serves the control plane."""
        options = options_of_server(self)
        check_workers(self)
        if _is_gymnasium(type(self)) and not isinstance(self, GymnasiumMixin):
            raise UsageError(f"{type(self).__name__} is a Gymnasium-style server: it needs GymnasiumMixin")
        participant = kept(self, lambda: ResourcesParticipant(self, options))
        app = super().setup_webserver()  # type: ignore[misc]
        participant.install(app)
        return app


class GymnasiumMixin(ResourcesMixin):
    """The same for servers of `/reset` and `/step`, whose last step ends the session."""

    async def close_session(self, session_id: str | None) -> None:
        """End a session, here and in the owner."""
        await super().close_session(session_id)  # type: ignore[misc]
        participant = found(self)
        if session_id is not None and isinstance(participant, ResourcesParticipant):
            participant.session_ended(session_id)


class ResourcesParticipant:
    """The owner of one server's sessions and its embedding; both are made when the server is set up first."""

    owner: ResourcesOwner

    def __init__(self, server: Any, options: Options) -> None:
        self._server = server
        self._options = options
        self._inner = secrets.token_hex(16)
        self._cookie: str = server.get_session_middleware_key()  # the framework names the cookie as it names the key
        self._embedding: Embedding | None = None
        server.server_client = marked_client(server.server_client, options.instance, self._inner)

    def install(self, app: Any) -> None:
        """Make the application the participant's; the server has been set up whole."""
        embedding = self._embedding or self._embed()
        embedding.install(
            app,
            gate=SelfCalls(self.owner, self._inner),
            position="inside",
            bodies=(*SEED_PATHS, CLOSE_PATH),
            kept=self._role.seed_fields,
        )

    def session_ended(self, session_id: str) -> None:
        """The server has ended a session by itself."""
        if self._embedding is not None:
            self.owner.session_ended(session_id)

    def _embed(self) -> Embedding:
        server, self._role = self._server, role_of(self._server, self._options)
        over_mcp = getattr(server.config, "expose_tools_over_mcp", False)
        settings = ResourcesSettings(
            mode=self._role.mode,
            verify=self._role.verify,
            session_of=_session_of,
            session_after=self._seeded,
            tokens=NemoTokens(server.get_session_middleware_key()) if over_mcp else None,
            seed_path=SEED_PATHS if _is_gymnasium(type(server)) else SEED_PATHS[:1],
            close_path=CLOSE_PATH,
            ends_on_verify=self._role.ends_on_verify,
            brought=self._brought,
        )
        self.owner = ResourcesOwner(self._role.hooks, settings, names=NAMES)
        self._embedding = Embedding(self.owner, self._options, server=server)
        return self._embedding

    def _brought(self, request: GateRequest) -> bool:
        """Whether the session is one of an earlier reply; the framework gives a new one to whoever brings none."""
        cookies = header(request.headers, "cookie") or ""
        return any(pair.partition("=")[0].strip() == self._cookie for pair in cookies.split(";"))

    def _seeded(self, request: GateRequest, reply: Reply) -> str | None:
        """A seed was answered: the handler may have changed the session's id."""
        session_id = _session_of(request)
        if session_id is not None and self._role.seed_fields:
            self._role.hooks.seeded(session_id, request.scope["state"].get(SEED_KEY, {}))
        return session_id


def _session_of(request: GateRequest) -> str | None:
    session_id = (request.scope.get("session") or {}).get(SESSION_ID_KEY)
    return session_id if isinstance(session_id, str) else None


def _is_gymnasium(server: type) -> bool:
    return any(f"{each.__module__}:{each.__qualname__}" == _GYMNASIUM for each in server.__mro__)


_GYMNASIUM = "resources_servers.gymnasium.base:GymnasiumServer"


# ---- what the server promises -------------------------------------------------------------------------------


class Role:
    """How a server takes part: what its options say, else its class, else what is known of the released class."""

    def __init__(self, mode: ResourcesMode, verify: VerifyMode, hooks: Any, options: Options) -> None:
        self.mode = mode
        self.verify = verify
        self.hooks = hooks
        self.seed_fields: tuple[str, ...] = tuple(getattr(hooks, "seed_fields", ()))
        said = options.ends_on_verify
        self.ends_on_verify: bool = getattr(hooks, "ends_on_verify", True) if said is None else said


def role_of(server: Any, options: Options) -> Role:
    """Decide it, once per server object. Warns of a server about which nobody said anything: it is restart_only.

    Raises UsageError for hooks that cannot be imported, or that contradict the mode.
    """
    cls = released_class(type(server))
    mode = ResourcesMode(options.mode) if options.mode else None
    verify = VerifyMode(options.verify) if options.verify else None
    if mode is None and hasattr(cls, "checkpoint_mode"):
        mode = declared_mode(cls)
    if verify is None and hasattr(cls, "checkpoint_verify"):
        verify = declared_verify(cls)
    hooks = _hooks(server, options, mode)
    declared = declaration_of(cls) if hooks is None and mode in (None, ResourcesMode.STATELESS) else None
    if mode is None and hooks is not None:
        mode = ResourcesMode.EXPORTED
    if mode is None and declared is not None:
        mode = ResourcesMode.STATELESS
    if verify is None and declared is not None:
        verify = VerifyMode.REPLAY
    if mode is None:
        log.warning(
            "%s (%s) is restart_only: neither its options nor what is known of its class say how to capture a session",
            options.instance,
            cls.__qualname__,
        )
    return Role(mode or ResourcesMode.RESTART_ONLY, verify or VerifyMode.WAIT, hooks, options)


def _hooks(server: Any, options: Options, mode: ResourcesMode | None) -> Any:
    """The state hooks of a server that is exported, or may be; None if there are none."""
    may_be = mode in (None, ResourcesMode.EXPORTED)
    if options.hooks:
        if not may_be:
            raise UsageError(f"{options.instance} is {mode}, and has hooks, which only an exported server has")
        return _class_of(options.hooks)(server)
    # Its author wrote them; the owner looks whether one is missing. A parent's may not know all that it keeps.
    written = vars(released_class(type(server))) if mode is None else dir(server)
    if may_be and any(name in written for name in REQUIRED_HOOKS):
        return server
    return hooks_for(server) if may_be else None


def _class_of(place: str) -> Callable[[Any], Any]:
    module, _, name = place.partition(":")
    try:
        made: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"hooks {place} cannot be imported: {error}") from error
    return made


# ---- calls of the server itself -----------------------------------------------------------------------------


def marked_client(client: Any, instance: str, inner: str) -> Any:
    """The client of a server, which marks its calls to model servers as nobody's, and those to the server itself.

    A judge call made inside a verify that is counted must not wait at the closed gate of a policy model server, which
    would wait for each other. Anything that is no ServerClient is given back as it is.
    """
    if not issubclass(type(client), ServerClient):
        return client

    class MarkedClient(type(client)):  # type: ignore[misc]
        async def request(self, server_name: str, url_path: str, method: str, **options: Any) -> Any:
            added = {}
            if server_name == instance:
                added[INNER_HEADER] = inner
            elif "responses_api_models" in (self.global_config_dict.get(server_name) or {}):
                added[UNTAGGED_HEADER] = "1"
            if added:
                options["headers"] = {**(options.get("headers") or {}), **added}
            return await super().request(server_name=server_name, url_path=url_path, method=method, **options)

    return MarkedClient(**dict(client))
