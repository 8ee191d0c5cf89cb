"""`PolicyMixin`: a model server of the framework whose calls are a policy's generations.

    class PolicyServer(PolicyMixin, SimpleModelServer):
        checkpoint: ClassVar = Options(instance="policy_model", kind="policy_model", ...)

The gate stands in front of all of the server's own middlewares, so a reply is held after everything that the server
does with it. Calls without a rollout, and those marked as a judge's, are admitted and counted as untagged.

With external staging of training tokens, `token_id_capture.lineage_store` names a NemoLedger (ledger.py): its rows
are then part of each checkpoint. No call is cut in its middle: the framework's workers have no such request.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from nemo_gym.token_id_capture.config import token_id_capture_config

from gym_ckpt_grpc.integrations.nemo_gym.ledger import CALL_NAMED, NemoLedger, ledger_at
from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES
from gym_ckpt_grpc.integrations.nemo_gym.participant import Embedding, check_workers, kept, options_of_server
from gym_ckpt_grpc.participants import DataPlaneNames, Gate, GateRequest, PolicyModelOwner, Visit
from gym_ckpt_grpc.protocol.errors import ControlError, UsageError

LEDGER = f"{NemoLedger.__module__}:{NemoLedger.__name__}"
"""What `token_id_capture.lineage_store` says for rows that checkpoints keep."""

log = logging.getLogger(__name__)


class PolicyMixin:
    """In front of a model server's class; see the module. The class needs `checkpoint: ClassVar = Options(...)`.

    `setup_webserver` raises UsageError for several worker processes, or a NemoLedger without external staging.
    """

    def setup_webserver(self) -> Any:
        """The server's application as a participant."""
        check_workers(self)
        options = options_of_server(self)
        app = super().setup_webserver()  # type: ignore[misc]
        owner = kept(self, lambda: PolicyModelOwner(ledger=_ledger_of(self), names=NAMES))
        _close_at_end(app, owner)
        embedding = Embedding(owner, options, server=self)
        embedding.install(app, gate=_NamedCalls(owner), position="outside", honours_untagged=True)
        return app


def _ledger_of(server: Any) -> NemoLedger | None:
    """The ledger that the framework has made for this server's calls, if it is ours."""
    settings = token_id_capture_config(server.server_client.global_config_dict).token_id_capture
    if not settings.enabled:
        return None
    if settings.lineage_store != LEDGER:
        log.warning(
            "no checkpoint will have the token capture of %s: rollouts that a restore continues have no parents for "
            "their calls, and are not trained on. token_id_capture.lineage_store is not %s",
            server.config.name,
            LEDGER,
        )
        return None
    if not settings.external_staging:
        raise UsageError(f"token_id_capture.lineage_store is {LEDGER}, which needs token_id_capture.external_staging")
    ledger = ledger_at(settings.lineage_store_kwargs["directory"])
    if ledger is None:
        raise UsageError(f"{server.config.name} has made no ledger: {type(server).__name__} has no token capture")
    return ledger


def _close_at_end(app: Any, owner: PolicyModelOwner) -> None:
    """End the owner's background work when the application ends: behind the control server, which is put in front."""
    within = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with within(app) as state:
            try:
                yield state
            finally:
                await owner.close()

    app.router.lifespan_context = lifespan


class _NamedCalls:
    """The gate of a policy model. The framework makes the id of a model call behind it: the ledger tells it the ticket,
    so that the row of a reply which a checkpoint holds back is left out of that checkpoint."""

    def __init__(self, owner: PolicyModelOwner) -> None:
        self._owner = owner
        self._gate: Gate = owner.gate()

    @property
    def names(self) -> DataPlaneNames:
        return self._gate.names

    async def enter(self, request: GateRequest) -> Visit:
        visit = await self._gate.enter(request)
        CALL_NAMED.set(partial(self._owner.call_named, visit))  # each request has a context of its own
        return visit

    def reply_headers(self) -> Mapping[str, str]:
        return self._gate.reply_headers()

    def refused(self, error: ControlError) -> None:
        self._gate.refused(error)
