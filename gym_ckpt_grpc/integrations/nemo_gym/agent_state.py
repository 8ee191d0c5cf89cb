"""The sessions of an agent of the framework: exported, restored, freed. Legacy runs keep nothing but their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.base_responses_api_agent import AgentSeedSessionRequest
from nemo_gym.rollout_observability import AgentObservationBundle
from pydantic import ValidationError

from gym_ckpt_grpc.control import InvalidState
from gym_ckpt_grpc.integrations.nemo_gym.peers import Peers
from gym_ckpt_grpc.participants import RestoredSession
from gym_ckpt_grpc.participants.agent_sessions import RUN_PREFIX
from gym_ckpt_grpc.protocol.ids import EpisodeId

_FIELDS = {"request", "servers", "resources_cookies", "observations", "activations"}


class AgentState:
    """The hooks of an agent's owner. running: keys of the sessions in an activation; the driver keeps it.

    A session is exported as of the start of the activation that runs: after a restore that one runs again, with its
    calls replayed.
    """

    def __init__(self, server: Any, peers: Peers) -> None:
        self._server = server
        self._peers = peers
        self.running: set[str] = set()

    def holds(self, key: str) -> bool:
        """Whether there is a session of this id, open or being closed."""
        record = self._server._session_records.get(key)
        return record is not None and record.state is not None

    def episode_of(self, key: str) -> EpisodeId | None:
        """The episode of a session, None if there is none of this id."""
        record = self._server._session_records.get(key)
        found = record.episode_id if record is not None else None
        return EpisodeId(found.rollout_id, found.attempt) if found is not None else None

    async def export_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """An empty object for a run; of a session its seed, its cookies and what was observed."""
        return {key: {} if key.startswith(RUN_PREFIX) else self._exported(key) for key in keys if self._known(key)}

    def _known(self, key: str) -> bool:
        return key.startswith(RUN_PREFIX) or self.holds(key)

    def _exported(self, key: str) -> dict[str, Any]:
        state = self._server._session_records[key].state
        request = state.request.model_dump(mode="json", exclude_unset=True)
        servers = {each["name"]: self._peers.at(each["base_url"]) for each in _direct(request)}
        observed = state.observations
        return {
            "request": request,
            "servers": {name: server for name, server in servers.items() if server is not None},
            "resources_cookies": dict(state.resources_cookies),
            "observations": None if observed is None else observed.model_dump(mode="json"),
            "activations": state.activations - (key in self.running),
        }

    async def restore_sessions(self, sessions: Sequence[RestoredSession]) -> None:
        """Check all, then install all, each as its next attempt, with the addresses that its servers have now."""
        built = [(each, await self._built(each)) for each in sessions if not _is_empty_run(each)]
        for session, state in built:
            record = type(self)._record_type()(state=state, episode_id=state.request.episode_id)
            self._server._closed_session_records.pop(session.key, None)
            self._server._session_records[session.key] = record

    async def _built(self, session: RestoredSession) -> Any:
        kept = session.state
        if not isinstance(kept, dict) or set(kept) != _FIELDS:
            raise InvalidState(f"session {session.key} has another state than this agent exports", session.episode)
        try:
            request = AgentSeedSessionRequest.model_validate(self._renewed(kept, session))
            state = await self._server._seed_agent_session_state(request)
            state.resources_cookies = {str(name): str(value) for name, value in kept["resources_cookies"].items()}
            observed = kept["observations"]
            state.observations = None if observed is None else AgentObservationBundle.model_validate(observed)
            state.activations = int(kept["activations"])
        except (ValidationError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise InvalidState(f"session {session.key} is unusable: {_told(error)}", session.episode) from None
        return state

    def _renewed(self, kept: Mapping[str, Any], session: RestoredSession) -> dict[str, Any]:
        """The seed as the next attempt would have sent it here."""
        request = dict(kept["request"])
        if request.get("agent_session_id") != session.key:
            raise InvalidState(f"session {session.key} was seeded under another id", session.episode)
        request["episode_id"] = {"rollout_id": session.episode.rollout_id, "attempt": session.episode.attempt}
        for access in _direct(request):
            base = self._peers.base_url(kept["servers"].get(access["name"], ""))
            if base is not None:
                access["base_url"] = base + "/" + access["base_url"].split("/", 3)[3]
        return request

    async def retire_session(self, key: str) -> None:
        """Forget a session; harmless for one that is not there."""
        if not key.startswith(RUN_PREFIX):
            self._server._session_records.pop(key, None)
            self._server._closed_session_records.pop(key, None)

    @staticmethod
    def _record_type() -> Any:
        from nemo_gym.base_responses_api_agent import _AgentSessionRecord

        return _AgentSessionRecord


def _direct(request: Mapping[str, Any]) -> list[Any]:
    """The tools of a seed that the agent calls over HTTP by itself."""
    return [each for each in request.get("tool_accesses", ()) if "base_url" in each]


def _told(error: Exception) -> str:
    """What is wrong, without the values: cookies and tokens are among them."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)


def _is_empty_run(session: RestoredSession) -> bool:
    if not session.key.startswith(RUN_PREFIX):
        return False
    if session.state != {}:
        raise InvalidState(f"{session.key} has a state: runs of this agent keep none", session.episode)
    return True
