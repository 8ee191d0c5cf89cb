"""The two weather servers: `resources_servers/example_mcp_weather` and `example_single_tool_call`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gym_ckpt_grpc.integrations.nemo_gym.hooks.sessions import TableHooks
from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import StateRefused, exactly, under
from gym_ckpt_grpc.protocol.ids import EpisodeId

SLACK: Final = 64
"""Sessions that may be remembered beyond twice those that are there."""


class McpWeatherHooks(TableHooks):
    """Of `ExampleMCPWeatherResourcesServer`: the calls seen, which its verify counts, and the city expected.

    A session that the server met in a tool call has no city: the field stays missing.
    """

    tables = ("session_id_to_state",)

    def check(self, table: str, entry: Any) -> None:
        exactly(entry, {"weather_calls", "expected_city"} if "expected_city" in entry else {"weather_calls"})
        if type(entry["weather_calls"]) is not list:
            raise StateRefused("is no list", ".weather_calls")
        for at, call in enumerate(entry["weather_calls"]):
            path = f".weather_calls[{at}]"
            with under(path):
                exactly(call, {"city", "weather"})
            for name, text in call.items():
                if type(text) is not str:
                    raise StateRefused(f"is {text!r:.40}, not a text", f"{path}.{name}")


class SimpleWeatherHooks(TableHooks):
    """Of `SimpleWeatherResourcesServer`: which episode and task a session was seeded for, if the seed was a typed one.

    The server knows a session by the `resources_session_id` of its seed, not by its cookie. It compares the episode
    with that of later requests, which come from the next attempt: so that is what is installed.
    """

    tables = ("_session_episodes",)
    seed_fields = ("resources_session_id",)

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self._ids: dict[str, str] = {}

    def seeded(self, session_id: str, fields: Mapping[str, Any]) -> None:
        """A session was seeded; these of `seed_fields` were in the body."""
        if len(self._ids) > 2 * len(self._episodes) + SLACK:  # the server closes sessions without a word to us
            self._ids = {each: of for each, of in self._ids.items() if of in self._episodes}
        resources_id = fields.get("resources_session_id")
        if isinstance(resources_id, str) and resources_id in self._episodes:  # an untyped seed may have anything there
            self._ids[session_id] = resources_id

    def export(self, session_id: str) -> Any:
        resources_id = self._ids.get(session_id)
        if resources_id is None or resources_id not in self._episodes:
            return {"resources_session_id": None, "episode_id": None, "task_id": None}
        episode, task = (part.model_dump(mode="json") for part in self._episodes[resources_id])
        return {"resources_session_id": resources_id, "episode_id": episode, "task_id": task}

    def build(self, state: Any, episode: EpisodeId) -> Any:
        exactly(state, {"resources_session_id", "episode_id", "task_id"})
        if all(value is None for value in state.values()):
            return None
        resources_id = state["resources_session_id"]
        if type(resources_id) is not str or not resources_id:
            raise StateRefused(f"is {resources_id!r:.40}, not a text", "resources_session_id")
        return resources_id, _bound(state, episode)

    def install(self, session_id: str, built: Any) -> None:
        if built is not None:
            self._ids[session_id], self._episodes[built[0]] = built

    def free(self, session_id: str) -> None:
        self._episodes.pop(self._ids.pop(session_id, ""), None)

    @property
    def _episodes(self) -> dict[str, Any]:
        return self.table("_session_episodes")


def _bound(state: Mapping[str, Any], episode: EpisodeId) -> Any:
    """The pair that the server compares: a tuple of its own types."""
    from nemo_gym.episode_types import EpisodeId as TheirEpisodeId
    from nemo_gym.episode_types import TaskId
    from pydantic import ValidationError

    made = []
    for name, cls in (("episode_id", TheirEpisodeId), ("task_id", TaskId)):
        try:
            made.append(cls.model_validate(state[name], strict=True))
        except ValidationError as error:
            raise StateRefused(f"cannot be read: {error.errors()[0]['msg']}", name) from error
    seeded_for, task = made
    if seeded_for.rollout_id == episode.rollout_id:
        seeded_for = TheirEpisodeId(rollout_id=episode.rollout_id, attempt=episode.attempt)
    return seeded_for, task
