"""What the state hooks of released servers share: tables by session id, checked before anything is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gym_ckpt_grpc.control.ports import HookFailed, InvalidState
from gym_ckpt_grpc.integrations.nemo_gym.hooks.values import Classes, Reader, StateRefused, Writer, exactly, under
from gym_ckpt_grpc.participants import RestoredState, SessionRevisions
from gym_ckpt_grpc.protocol.ids import EpisodeId


class TableHooks:
    """Hooks of a server that keeps its sessions in dicts by session id, each an attribute of the server.

    tables: their names; a record has one field for each in which the session stands. classes: the dataclasses that may
    stand in them. required: whether a session stands in all of them. server: is changed in its dicts only.
    """

    tables: ClassVar[tuple[str, ...]]
    required: ClassVar[bool] = True
    seed_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of a seed's body that `seeded` must be told of."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def classes(self) -> Classes:
        """Found when it is needed: by then the server's module is imported."""
        return {}

    # ---- for subclasses

    def export(self, session_id: str) -> Any:
        """A session's state, or None if it has none. Raises StateRefused."""
        writer, state = Writer(self.classes()), {}
        for name in self.tables:
            table = self.table(name)
            if session_id in table:
                with under(name):
                    state[name] = writer.write(entry_of(table, session_id))
        return state or None

    def build(self, state: Any, episode: EpisodeId) -> Any:
        """What `install` takes, made aside. Raises StateRefused."""
        exactly(state, self.tables if self.required or type(state) is not dict else set(self.tables) & set(state))
        if not state:
            raise StateRefused("has no field")
        names = [name for name in self.tables if name in state]
        reader, built = Reader(self.classes()), {}
        for name in names:
            with under(name):
                built[name] = reader.read(state[name])
                self.check(name, built[name])
        return built

    def check(self, table: str, entry: Any) -> None:
        """Raise StateRefused for an entry that the server could not have made."""

    def install(self, session_id: str, built: Any) -> None:
        """Put it in; nothing can fail any more."""
        for name in self.tables:
            if name in built:
                self.table(name)[session_id] = built[name]
            else:
                self.table(name).pop(session_id, None)

    def free(self, session_id: str) -> None:
        """Drop all that the server keeps of a session; harmless if there is nothing."""
        for name in self.tables:
            self.table(name).pop(session_id, None)

    def table(self, name: str) -> dict[str, Any]:
        """One of the server's dicts."""
        found: dict[str, Any] = getattr(self.server, name)
        return found

    # ---- for the owner

    async def export_sessions(self, session_ids: Sequence[str]) -> Mapping[str, Any]:
        """States of the sessions that the server has. Raises HookFailed naming a session and a field."""
        states = {each: exported(self.export, each) for each in session_ids}
        return {each: state for each, state in states.items() if state is not None}

    async def restore_sessions(self, sessions: Sequence[RestoredState]) -> None:
        """Check and build all, then install all. Raises InvalidState naming a session and a field."""
        built = [built_aside(self.build, each) for each in sessions]
        for session, made in zip(sessions, built, strict=True):
            self.install(session.session_id, made)

    async def retire_session(self, session_id: str) -> None:
        """Free a session; repeats and unknown ids are harmless."""
        self.free(session_id)


class WatchedHooks(TableHooks):
    """Hooks that also give revisions, for a server whose every request takes the session's entry out of its dicts, and
    changes it, if at all, before it awaits anything: then each look at an entry counts as a change, and none is missed.

    The dicts are replaced by ones that count looks, so it is made once for a server, before that serves.
    """

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self._revisions = SessionRevisions()
        for name in self.tables:
            watched = WatchedTable(self, getattr(server, name))
            setattr(server, name, watched)

    def session_revisions(self) -> Mapping[str, int]:
        """A number for each session that differs whenever its state may."""
        return self._revisions.current()

    def looked_at(self, session_id: Any) -> None:
        """Somebody holds an entry of this session, and may change it."""
        if type(session_id) is str:
            if any(session_id in self.table(name) for name in self.tables):
                self._revisions.changed(session_id)
            else:
                self._revisions.ended(session_id)


class WatchedTable(dict[Any, Any]):
    """A dict that tells its hooks of each entry that is put in, taken out or handed out, but for `entry`."""

    def __init__(self, hooks: WatchedHooks, entries: Mapping[Any, Any]) -> None:
        super().__init__(entries)
        self._hooks = hooks

    def entry(self, key: Any) -> Any:
        return super().__getitem__(key)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self._hooks.looked_at(key)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._hooks.looked_at(key)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._hooks.looked_at(key)

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        found = super().pop(key, *default)
        self._hooks.looked_at(key)
        return found

    def popitem(self) -> tuple[Any, Any]:
        key, value = super().popitem()
        self._hooks.looked_at(key)
        return key, value

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def update(self, *others: Any, **entries: Any) -> None:
        for key, value in dict(*others, **entries).items():
            self[key] = value

    def __ior__(self, other: Any) -> WatchedTable:  # type: ignore[misc]
        self.update(other)
        return self

    def values(self) -> Any:
        self._all_looked_at()
        return super().values()

    def items(self) -> Any:
        self._all_looked_at()
        return super().items()

    def copy(self) -> dict[Any, Any]:
        return dict(self.items())

    def _all_looked_at(self) -> None:
        for key in self:
            self._hooks.looked_at(key)


def exported(export: Any, session_id: str) -> Any:
    """What `export` gives for a session; what it refuses is HookFailed naming the session."""
    try:
        return export(session_id)
    except StateRefused as refused:
        raise HookFailed(f"session {session_id}: {refused}") from refused


def built_aside(build: Any, session: RestoredState) -> Any:
    """What `build` makes of a restored state; what it refuses is InvalidState naming the session."""
    try:
        return build(session.state, session.episode)
    except StateRefused as refused:
        raise InvalidState(f"session {session.session_id}: {refused}", session.episode) from refused


def entry_of(table: Mapping[str, Any], session_id: str) -> Any:
    """A session's entry in a table, watched or not; the look is not counted."""
    return table.entry(session_id) if isinstance(table, WatchedTable) else table[session_id]
