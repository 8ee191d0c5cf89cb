"""The office as a resources server: tools that change its tables, by label."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gym_ckpt_grpc.minigym.office import PEOPLE, Label, Office
from gym_ckpt_grpc.minigym.resources_server import ResourcesServer, UnknownSession, built_aside, choice_tool
from gym_ckpt_grpc.participants import ResourcesMode, RestoredState, SessionRevisions, VerifyMode

DAYS = [1, 2, 3, 4, 5]


TOOLS: tuple[dict[str, Any], ...] = (
    choice_tool("send_email", "Send an urgent mail.", "to", PEOPLE[:3]),
    choice_tool("delete_email", "Delete a mail.", "which", ["oldest", "newest"]),
    choice_tool("add_event", "Put a meeting on a day.", "day", DAYS),
    choice_tool("log_visit", "Record a visit of the web site.", "pages", [0, 1, 2]),
    choice_tool("move_task", "Move a task to another state.", "to", ["doing", "done"]),
    choice_tool("update_customer", "Change the status of the next lead.", "status", ["lead", "won", "lost"]),
)
"""The tools as offered to the model."""


class OfficeServer(ResourcesServer):
    """An office per session. Setup: `seed` of what stands in it, and the `goal` in points, at which the reward is 1."""

    checkpoint_mode = ResourcesMode.EXPORTED
    checkpoint_verify = VerifyMode.WAIT
    name = "office"
    tools = TOOLS

    def __init__(self) -> None:
        self._offices: dict[str, Office] = {}
        self._revisions = SessionRevisions()

    def open(self, session_id: str, setup: Mapping[str, Any]) -> None:
        _goal(setup)
        self._offices[session_id] = Office.furnished(setup["seed"])
        self._revisions.changed(session_id)

    def call(self, session_id: str, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        known = next((each["function"] for each in TOOLS if each["function"]["name"] == tool), None)
        if known is None or set(arguments) != set(known["parameters"]["required"]):
            raise ValueError(f"no tool {tool!r} with arguments {sorted(arguments)}")
        [(parameter, value)] = arguments.items()
        choices = known["parameters"]["properties"][parameter]["enum"]
        if not any(type(value) is type(each) and value == each for each in choices):
            raise ValueError(f"{parameter} is {value!r}, not one of {choices}")
        office = self._office(session_id)
        self._revisions.changed(session_id)
        label = _TOOLS[tool](office, value)
        return {"label": label, "points": office.points()}

    def judge(self, session_id: str, setup: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        office = self._office(session_id)
        return min(1.0, office.points() / _goal(setup)), office.export()

    def close(self, session_id: str) -> None:
        self._offices.pop(session_id, None)
        self._revisions.ended(session_id)

    def session_revisions(self) -> Mapping[str, int]:
        """A number per session that differs whenever its tables may: they are encoded ahead of a checkpoint."""
        return self._revisions.current()

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        return {each: self._offices[each].export() for each in session_ids if each in self._offices}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        """Rebuild all tables of all sessions in a thread; only then are they here."""
        built = await asyncio.to_thread(built_aside, sessions, Office.from_state)
        self._offices.update(built)
        for session_id in built:
            self._revisions.changed(session_id)

    def _office(self, session_id: str) -> Office:
        try:
            return self._offices[session_id]
        except KeyError:
            raise UnknownSession(f"no office of session {session_id}") from None


def _goal(setup: Mapping[str, Any]) -> int:
    goal = setup["goal"]
    if type(goal) is not int or goal < 1:
        raise ValueError(f"goal is {goal!r}, not an integer >= 1")
    return goal


# ---- the tools: each gives the label of the row it changed, or None if there was none to change


def _send_email(office: Office, to: str) -> Label | None:
    return office["email"].append({"to": to, "subject": f"mail {len(office['email'])}", "urgent": True})


def _delete_email(office: Office, which: str) -> Label | None:
    mails = office["email"]
    if not mails.index:
        return None
    label = mails.index[0 if which == "oldest" else -1]
    mails.remove(label)
    return label


def _add_event(office: Office, day: int) -> Label | None:
    before = office["calendar"].find("day", lambda value: value == day)
    return office["calendar"].append({"title": "meeting", "day": day, "hours": 0.5 if before is None else None})


def _log_visit(office: Office, pages: int) -> Label | None:
    # A visit without pages has no rate: that is NaN, not null.
    rate = 1 / pages if pages else math.nan
    return office["analytics"].append({"visitor": None, "pages": pages, "engagement": rate})


def _move_task(office: Office, to: str) -> Label | None:
    label = office["projects"].find("state", lambda value: value == ("open" if to == "doing" else "doing"))
    if label is not None:
        office["projects"].put(label, {**office["projects"].row(label), "state": to})
    return label


def _update_customer(office: Office, status: str) -> Label | None:
    label = office["customers"].find("status", lambda value: value == "lead")
    if label is not None:
        office["customers"].put(label, {**office["customers"].row(label), "status": status})
    return label


_TOOLS: Mapping[str, Callable[[Office, Any], Label | None]] = {
    "send_email": _send_email,
    "delete_email": _delete_email,
    "add_event": _add_event,
    "log_visit": _log_visit,
    "move_task": _move_task,
    "update_customer": _update_customer,
}
