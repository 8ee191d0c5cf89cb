"""The requests that minigym's model understands: OpenAI chat completions, as the policy model server gets them.

A field it does not know is refused: ignored, it would make two different requests equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gym_ckpt_grpc.minigym.generation import MAX_SEED, PLAIN, Sampling, offered_calls, seed_of_rollout

DEFAULT_LIMIT = 256
"""Most tokens of a reply whose request gives no limit."""
MOST_CHOICES = 8

_Text = Annotated[str, Field(min_length=1)]


class ChatRequest(BaseModel):
    """One chat completion request.

    seed: None takes the rollout's. max_tokens: most tokens to make, >= 1. temperature, top_p: as in `Sampling`. n:
    choices, each with the next seed; capture knows the first of them. request_id: part of the reply's id, so that
    the same request can give the same bytes. Only text is generated: another response_format is refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: list[dict[str, Any]]
    tools: list[Any] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    model: str = "minigym"
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    max_tokens: int = Field(default=DEFAULT_LIMIT, ge=1)
    temperature: float = Field(default=PLAIN.temperature, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=PLAIN.top_p, gt=0, le=1, allow_inf_nan=False)
    stop: list[_Text] = Field(default=[], max_length=4)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=128)

    def with_defaults(self, rollout_id: str) -> dict[str, Any]:
        """The effective request as JSON-able fields: with every default, and without what was not asked for."""
        effective = self.model_dump(exclude_none=True)
        effective.setdefault("seed", seed_of_rollout(rollout_id))
        return effective

    @property
    def sampling(self) -> Sampling:
        """How its tokens are chosen."""
        return Sampling(self.temperature, self.top_p)

    def callable_tools(self) -> list[Any]:
        """The tools that its reply may call. Raises ValueError for one that this model cannot call."""
        offered_calls(self.tools)
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, Mapping):
            named = self.tool_choice.get("function", {}).get("name")
            tools = [tool for tool in self.tools if _name_of(tool) == named]
            if not tools:
                raise ValueError(f"tool_choice names {named!r}, which is not among the tools")
            return tools
        return self.tools


def _name_of(tool: Any) -> Any:
    return tool if isinstance(tool, str) else tool.get("function", tool)["name"]
