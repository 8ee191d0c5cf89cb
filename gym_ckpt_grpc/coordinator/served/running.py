"""RunCheckpoint: the whole block in one call, with its events as they happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gym_ckpt_grpc.control import wire
from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.coordinator.coordinator import Coordinator
from gym_ckpt_grpc.coordinator.events import Event
from gym_ckpt_grpc.coordinator.fanout import until_done
from gym_ckpt_grpc.coordinator.served import operations
from gym_ckpt_grpc.coordinator.served import wire as served
from gym_ckpt_grpc.coordinator.served.sessions import Open, Sessions
from gym_ckpt_grpc.protocol.errors import ControlError, StaleCheckpoint
from gymckpt.v1 import coordinator_pb2 as pb


class RunStream:
    """One call. The checkpoint's steps are a task of the service; the stream only tells of it.

    A client that leaves ends the checkpoint (`leave`): aborted, or only resumed where it is published.
    """

    def __init__(self, coordinator: Coordinator, sessions: Sessions, opened: Open) -> None:
        self._coordinator = coordinator
        self._sessions = sessions
        self._opened = opened
        self._call = opened.call()
        self._call.__enter__()
        self._left = False

    async def messages(
        self, first: int, request: pb.RunCheckpointRequest, ready_within: float, budget: Budget
    ) -> AsyncIterator[pb.RunCheckpointResponse]:
        """Events of this checkpoint from number `first` on, the result last."""
        work = self._sessions.tasks.own(self._run(request, ready_within, budget), f"run {self._opened.id}")
        news: asyncio.Queue[Event] = asyncio.Queue()
        reader = self._sessions.tasks.own(self._follow(first, news), f"events of {self._opened.id}")
        try:
            told = first - 1
            while not work.done():
                item = asyncio.ensure_future(news.get())
                try:
                    await asyncio.wait({item, work}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    item.cancel()
                if item.done() and not item.cancelled():
                    told = item.result().number
                    yield self._event(item.result())
            for event in self._coordinator.events.since(told + 1):
                if self._mine(event):
                    yield self._event(event)
            yield pb.RunCheckpointResponse(result=work.result())
        finally:
            reader.cancel()

    async def _follow(self, first: int, news: asyncio.Queue[Event]) -> None:
        async for event in self._coordinator.events.follow(first):
            if self._mine(event):
                news.put_nowait(event)

    def _mine(self, event: Event) -> bool:
        return event.checkpoint_id in ("", self._opened.id)

    def _event(self, event: Event) -> pb.RunCheckpointResponse:
        return pb.RunCheckpointResponse(event=served.event_to(event, self._coordinator.epoch))

    async def _run(
        self, request: pb.RunCheckpointRequest, ready_within: float, budget: Budget
    ) -> pb.RunCheckpointResult:
        """The steps, then the end, which comes whatever the steps did."""
        opened, checkpoint = self._opened, self._opened.checkpoint
        scope = wire.episodes_from(request.in_flight)
        refused: ControlError | None = None
        result = pb.RunCheckpointResult()
        try:
            result.MergeFrom(
                await opened.once("Run", None, lambda: operations.run(checkpoint, scope, ready_within, request), budget)
            )
        except StaleCheckpoint as error:  # ended from elsewhere: by Resume, or with its client
            result.error.CopyFrom(served.error_of(error) or result.error)
        except ControlError as error:
            refused = error
        end = self._sessions.end(opened)
        await until_done([end])
        if refused:
            raise refused
        ended = end.result()
        result.checkpoint.CopyFrom(ended.summary)
        result.outcomes.extend(ended.reply.outcomes)
        result.resume_pending.extend(ended.reply.resume_pending)
        return result

    def leave(self) -> None:
        """The call is over. If its work is not, the client has gone away."""
        if not self._left:
            self._left = True
            self._call.__exit__(None, None, None)
            self._sessions.end(self._opened)
