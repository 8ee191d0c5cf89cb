"""Where a task or a thread is now, as text. Reads no source files: it runs on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

DEPTH = 32
"""Frames of one stack, the innermost ones."""


def task_stack(task: asyncio.Task[Any]) -> str:
    """The frames of a task that waits, down to what it waits for, which `Task.get_stack` does not give."""
    frames: list[FrameType] = []
    with contextlib.suppress(Exception):  # an awaitable of somebody else's making may be anything
        for frame in _frames(task.get_coro()):
            frames.append(frame)
    return _text(frames)


def thread_stack(ident: int) -> str:
    """The frames of a thread; empty once it has ended."""
    frames: list[FrameType] = []
    frame = sys._current_frames().get(ident)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _text(frames[::-1])


def _text(frames: list[FrameType]) -> str:
    return "\n".join(f"  {f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_qualname}" for f in frames[-DEPTH:])


def _frames(awaited: Any) -> Iterator[FrameType]:
    while awaited is not None:
        if type(awaited).__name__ == "async_generator_asend":  # it tells nothing of its generator by itself
            awaited = next(filter(inspect.isasyncgen, gc.get_referents(awaited)), None)
        for frame, inner in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
            if hasattr(awaited, frame):
                if (found := getattr(awaited, frame)) is not None:
                    yield found
                awaited = getattr(awaited, inner)
                break
        else:
            return
