"""Workplace Assistant, `resources_servers/workplace_assistant`: six tables per session."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, Final

from gym_ckpt_grpc.integrations.nemo_gym.hooks.sessions import WatchedHooks, built_aside, entry_of, exported
from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import StateRefused, exactly, under
from gym_ckpt_grpc.participants import RestoredState
from gym_ckpt_grpc.protocol.ids import EpisodeId

TOOLKITS: Final = ("email", "calendar", "analytics", "project_management", "customer_relationship_manager")
"""What the server's seed asks for. The directory of addresses comes with them, and no tool changes it."""
TABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "email": ("_emails",),
    "calendar": ("_calendar_events",),
    "analytics": ("_analytics_data", "_plots_data"),
    "project_management": ("_project_tasks",),
    "customer_relationship_manager": ("_crm_data",),
}
"""The tables of each container; they are all that it has. Tools that only read change some of them as well."""
DIRECTORY: Final = "company_directory"

Tables = dict[str, dict[str, Any]]


class WorkplaceHooks(WatchedHooks):
    """Of `WorkbenchResourcesServer`. A session's functions are bound to its containers, so these are made anew.

    Tables are encoded and built in a thread: a few milliseconds for each session.
    """

    tables = ("session_id_to_tool_env",)

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self._template: dict[str, Any] | None = None

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        # Tables as of one moment of the loop: a tool changes nothing of what is taken here.
        environments = self.table("session_id_to_tool_env")
        taken = {each: exported(self._snapshot, each) for each in session_ids if each in environments}
        return await asyncio.to_thread(
            lambda: {each: exported(lambda which: _written(taken[which]), each) for each in taken}
        )

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        built = await asyncio.to_thread(lambda: [built_aside(self.build, each) for each in sessions])
        for session, made in zip(sessions, built, strict=True):
            self.install(session.session_id, {"session_id_to_tool_env": made})

    def _snapshot(self, session_id: str) -> Tables:
        environment = entry_of(self.table("session_id_to_tool_env"), session_id)
        containers = environment["containers"]
        exactly(containers, {*TABLES, DIRECTORY})
        taken: Tables = {}
        deep = not _copies_on_write()
        for name, tables in TABLES.items():
            with under(name):
                exactly(vars(containers[name]), tables)
            taken[name] = {each: getattr(containers[name], each).copy(deep=deep) for each in tables}
        return taken

    def build(self, state: Any, episode: EpisodeId) -> Any:
        tables = _read(state)
        for name, container in self._fresh()["containers"].items():
            for each in TABLES.get(name, ()):
                wanted = list(getattr(container, each).columns)
                if list(tables[name][each].columns) != wanted:
                    raise StateRefused(f"has not the columns {', '.join(wanted)}", f"{name}.{each}")
        return self._environment(tables)

    def _environment(self, tables: Tables) -> dict[str, Any]:
        """A session's environment: containers of its own around these tables, and the tools bound to them."""
        template = self._fresh()
        containers = {name: copy.copy(container) for name, container in template["containers"].items()}
        for name, parts in tables.items():
            vars(containers[name]).update(parts)
        directory = containers[DIRECTORY]
        directory._emails = directory._emails.copy(deep=False)
        ours = {id(container): containers[name] for name, container in template["containers"].items()}
        functions = {
            name: MethodType(bound.__func__, ours[id(bound.__self__)]) for name, bound in template["functions"].items()
        }
        return {**template, "containers": containers, "functions": functions, "schemas": list(template["schemas"])}

    def _fresh(self) -> dict[str, Any]:
        """One environment as the server makes it, never handed out: reading its files takes longer than a restore."""
        if self._template is None:
            from resources_servers.workplace_assistant.utils import get_tools

            self._template = get_tools(list(TOOLKITS))
        return self._template


def _copies_on_write() -> bool:
    """Whether a shallow copy of a table stays as it is when the table changes: always, from pandas 3 on.

    No release of the framework says which pandas it wants.
    """
    import pandas

    return int(pandas.__version__.partition(".")[0]) >= 3 or pandas.options.mode.copy_on_write is True


def _written(tables: Tables) -> dict[str, Any]:
    from gym_ckpt_grpc.integrations.nemo_gym.hooks.tables import TableWriter

    writer, state = TableWriter(), {}
    for name, parts in tables.items():
        for each, table in parts.items():
            with under(f"{name}.{each}"):
                state[f"{name}.{each}"] = writer.write_table(table)
    return {"tables": state}


def _read(state: Any) -> Tables:
    from gym_ckpt_grpc.integrations.nemo_gym.hooks.tables import TableReader

    exactly(state, {"tables"})
    exactly(state["tables"], {f"{name}.{each}" for name, parts in TABLES.items() for each in parts})
    reader = TableReader()
    tables: Tables = {name: {} for name in TABLES}
    for name, parts in TABLES.items():
        for each in parts:
            with under(f"{name}.{each}"):
                tables[name][each] = reader.read_table(state["tables"][f"{name}.{each}"])
    return tables
