"""The calls of an inference worker: what each is asked, how far it is, and what it leaves in log and token store."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from gym_ckpt_grpc.capture import (
    AsyncTokenStore,
    CaptureAdmission,
    Coordinates,
    Fetched,
    StagedCall,
    admission_from_json,
    fetch,
)
from gym_ckpt_grpc.minigym.chat_request import ChatRequest
from gym_ckpt_grpc.minigym.engine import Advance
from gym_ckpt_grpc.minigym.generation import (
    MAX_SEED,
    Generation,
    Token,
    assistant_message,
    request_digest,
    seed_of_rollout,
)
from gym_ckpt_grpc.minigym.inference_log import PROGRESS_EVERY, InferenceLog, ids_digest
from gym_ckpt_grpc.minigym.token_context import following_ids, prompt_ids
from gym_ckpt_grpc.minigym.worker_controls import CallName, WorkerControls
from gym_ckpt_grpc.protocol import ControlError

_log = logging.getLogger(__name__)

State = Literal["running", "end", "cancelled"]


class WorkerRequest(ChatRequest):
    """What the policy model server sends: the effective request, for whom, and its capture admission.

    rollout_id, attempt: empty and 0 for a call of no episode. capture: a `CaptureAdmission` as JSON.
    """

    rollout_id: str = ""
    attempt: int = Field(default=0, ge=0)
    capture: dict[str, Any] | None = None


class WorkerCall:
    """One call. Its choices are generated side by side; capture and cuts know the first of them.

    staged: of the first choice, None without capture. reused: tokens of that which came from a cut.
    """

    def __init__(
        self, asked: WorkerRequest, generations: list[Generation], *, staged: StagedCall | None, log: InferenceLog
    ) -> None:
        self.asked = asked
        self.generations = generations
        self.staged = staged
        self.tools = asked.callable_tools()
        admission = staged.admission if staged else None
        self.id = admission.call_id if admission else uuid.uuid4().hex
        self.response_id = f"chatcmpl-{asked.request_id or self.id}"
        self.reused = staged.reused if staged else 0
        continuation = admission.continuation if admission else None
        self.continued_from = continuation.source_call_id if continuation else ""
        turn = sum(message.get("role") == "assistant" for message in asked.messages)
        self.name = CallName(asked.rollout_id, asked.attempt, turn)
        self.state: State = "running"
        self.held = False
        self.coordinates: Coordinates | None = None
        self.moved = asyncio.Event()
        """Set after each token and at the end; a stream that has read all clears it."""
        self._log = log
        self._common = {
            "call_id": self.id,
            "rollout_id": asked.rollout_id,
            "attempt": asked.attempt,
            "turn": turn,
        }

    @property
    def made(self) -> int:
        """Tokens that this call has generated, of all its choices."""
        return sum(len(generation.ids) for generation in self.generations) - self.reused

    def advances(self, choice: int, weights: Callable[[], int], controls: WorkerControls) -> Advance:
        """What the engine calls once a tick for one choice."""
        generation = self.generations[choice]

        def advance() -> bool | None:
            was_held, self.held = self.held, controls.holds(self.name, len(generation.ids))
            if self.held:
                if not was_held:
                    controls.stopped()
                return None
            version = weights()
            token = generation.advance(version)
            if choice == 0 and self.staged:
                self.staged.add(token.id, token.logprob, version)
            if self.made % PROGRESS_EVERY == 0:
                self._log.write("tokens", **self._common, tokens=self.made)
            self.moved.set()
            return generation.finish_reason is not None

        return advance

    def begin(self) -> None:
        """Log that the call has begun."""
        self._log.write(
            "start",
            **self._common,
            messages=len(self.asked.messages),
            context_digest=self.generations[0].digest.hex(),
            continued_from=self.continued_from,
            reused=self.reused,
        )

    async def stage(self) -> None:
        """Make the finished reply durable, if the call is captured."""
        if self.staged:
            first = self.generations[0]
            reason = "length" if first.finish_reason == "length" else "stop"
            self.coordinates = await self.staged.complete(reason, stop_reason=first.stop_reason)

    def finish(self, state: State) -> None:
        """Log how the call ended, once."""
        if self.state != "running":
            return
        self.state, self.held = state, False
        made = {"tokens": self.made, "ids_digest": ids_digest(self.generations[0].ids)}
        if state == "end":
            self._log.write("end", **self._common, **made, finish_reason=self.generations[0].finish_reason)
        else:
            self._log.write("cancelled", **self._common, **made)
        self.moved.set()

    def message(self, choice: int) -> dict[str, Any]:
        """A finished choice as an OpenAI assistant message."""
        generation = self.generations[choice]
        return assistant_message(generation.digest, generation.ids, self.tools)


def seed_of(asked: WorkerRequest) -> int:
    """The seed of the first choice."""
    return seed_of_rollout(asked.rollout_id) if asked.seed is None else asked.seed


async def make_call(
    asked: WorkerRequest, *, tokens: AsyncTokenStore | None, weight_version: int, log: InferenceLog
) -> WorkerCall:
    """Fetch what the call goes on from and make it, without beginning. Raises ValueError or ControlError.

    A cut that cannot be continued here and now costs a regeneration, never an error.
    """
    asked.callable_tools()
    if asked.capture is None or tokens is None:
        generations = [_generation(asked, choice, ()) for choice in range(asked.n)]
        return WorkerCall(asked, generations, staged=None, log=log)
    admission = admission_from_json(asked.capture)
    if admission.continuation is not None:
        try:
            return await _captured(asked, admission, tokens=tokens, weight_version=weight_version, log=log)
        except (ControlError, ValueError) as error:
            _log.warning("call %s is generated from its first token: %s", admission.call_id, error)
    return await _captured(asked, admission.fresh(), tokens=tokens, weight_version=weight_version, log=log)


async def _captured(
    asked: WorkerRequest,
    admission: CaptureAdmission,
    *,
    tokens: AsyncTokenStore,
    weight_version: int,
    log: InferenceLog,
) -> WorkerCall:
    fetched = await fetch(admission, tokens)
    prompt = _prompt(asked, admission, fetched)
    staged = StagedCall.begin(
        admission, tokens, prompt, fetched=fetched, weight_version=weight_version, output_limit=asked.max_tokens
    )
    pairs = zip(staged.generated_ids, staged.generated_logprobs, strict=True)
    reused = tuple(Token(*pair) for pair in pairs)
    first = _generation(asked, 0, reused, staged.weight_version if reused else None)
    others = [_generation(asked, choice, ()) for choice in range(1, asked.n)]
    return WorkerCall(asked, [first, *others], staged=staged, log=log)


def _prompt(asked: WorkerRequest, admission: CaptureAdmission, fetched: Fetched) -> tuple[int, ...]:
    if fetched.snapshot is not None:
        return (*fetched.prefix, *fetched.snapshot.ids)
    encoded = following_ids(asked.messages) if admission.mode == "token_in" else prompt_ids(asked.messages)
    return (*fetched.prefix, *encoded)


def _generation(
    asked: WorkerRequest, choice: int, reused: tuple[Token, ...], weight_version: int | None = None
) -> Generation:
    seed = (seed_of(asked) + choice) & MAX_SEED
    return Generation(
        request_digest(asked.messages, asked.tools, model=asked.model, seed=seed),
        seed,
        limit=asked.max_tokens,
        sampling=asked.sampling,
        stop=asked.stop,
        prefix=reused,
        weight_version=weight_version,
    )
