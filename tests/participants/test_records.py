"""Records of every kind: what is refused when one is built, when one is read, and how older ones are brought up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gym_ckpt_grpc.control.ports import HookFailed, InvalidState, RecordBatch
from gym_ckpt_grpc.participants import records
from gym_ckpt_grpc.participants.policy_records import PolicyModelRecord
from gym_ckpt_grpc.participants.records import AgentRecord, EnvironmentRecord, ResourcesRecord
from gym_ckpt_grpc.protocol.errors import ExportFailed, StateCorrupt
from gym_ckpt_grpc.storage import Record, encode
from tests.participants.fakes import R1, R, S
from tests.participants.kinds import KINDS
from tests.participants.served_kinds import WITH_RECORDS, export_these, restored, served, started

BUILT: dict[str, Callable[[Any], Record]] = {
    "environment": lambda state: EnvironmentRecord(R, "digest", {}, state).to_record(),
    "agent": lambda state: AgentRecord(R, "key", state).to_record(),
    "resources": lambda state: ResourcesRecord(R, "key", state).to_record(),
    "policy_model": lambda state: PolicyModelRecord(R, [state]).to_record(),
}
READ: dict[str, Callable[[Record], Any]] = {
    "environment": lambda record: EnvironmentRecord.from_record(record).boundary,
    "agent": lambda record: AgentRecord.from_record(record).session,
    "resources": lambda record: ResourcesRecord.from_record(record).state,
    "policy_model": lambda record: PolicyModelRecord.from_record(record).rows[0],
}


@pytest.fixture(params=list(BUILT))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# ---- P18


@pytest.mark.behaviour("P18")
@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": [{"b": {1: "x"}}]}, r"a\W*0\W*b"),
        ({"a": {"b": {"x"}}}, r"a\W*b"),
        ({"a": [0, object()]}, r"a\W*1"),
        ({"a": (1, 2)}, "a"),
        ({"a": {None: 1}}, "a"),
    ],
)
def test_what_is_no_json_is_refused_when_the_record_is_built_naming_its_path(kind: str, state: Any, path: str) -> None:
    with pytest.raises(HookFailed, match=path) as caught:
        BUILT[kind](state)
    assert caught.value.episode == R


@pytest.mark.behaviour("P18")
def test_long_integers_and_the_order_of_keys_survive(kind: str) -> None:
    state: dict[str, Any] = {"z": 2**64, "a": -(2**200), "m": {"y": 2**63, "b": [10**400, -1]}, "": None}
    back = READ[kind](BUILT[kind](state))
    assert (back, list(back), list(back["m"])) == (state, list(state), list(state["m"]))


@pytest.mark.behaviour("P18")
async def test_they_survive_a_checkpoint_on_disk(tmp_path: Path) -> None:
    """From live state, over a file, into live state."""
    state: dict[str, Any] = {"z": 2**64, "a": -(2**200), "m": {"y": 1, "b": 2}}
    async with served("agent", tmp_path) as first:
        await started(first, R)
        first.rig.rig.states["key-r"] = state  # type: ignore[attr-defined]
        await first.commit("source", R)
    async with served("agent", tmp_path) as second:
        await restored(second, R)
        back = second.rig.rig.states["key-r"]  # type: ignore[attr-defined]
        assert (back, list(back), list(back["m"])) == (state, list(state), list(state["m"]))


# ---- P17


def with_more(record: Record) -> list[Record]:
    """The record with a field and with a payload that nobody knows."""
    return [
        replace(record, fields={**record.fields, "more": 1}),
        replace(record, payloads={**record.payloads, "more": encode(1)}),
    ]


@pytest.mark.behaviour("P17")
def test_unknown_parts_and_newer_versions_are_refused_naming_the_episode(kind: str) -> None:
    record = BUILT[kind]({"x": 1})
    for bad in (*with_more(record), replace(record, schema_version=records.VERSION + 1)):
        with pytest.raises(InvalidState, match=r"unknown parts: .*more|schema version 2") as caught:
            READ[kind](bad)
        assert caught.value.episode == R


@pytest.mark.behaviour("P17")
@pytest.mark.parametrize("name", WITH_RECORDS)
async def test_over_the_wire_they_are_state_corrupt_and_install_nothing(tmp_path: Path, name: str) -> None:
    [good] = await KINDS[name]().records(R)
    bad = [*with_more(good), replace(good, schema_version=2), replace(good, schema="gymckpt.other")]
    for number, record in enumerate(bad):
        root = tmp_path / str(number)
        root.mkdir()
        async with served(name, root) as kind:
            export_these(kind.owner, [record])
            await kind.commit("source", R)
        async with served(name, root) as kind:
            with pytest.raises(StateCorrupt) as caught:
                await kind.p.client.restore("restore", [R], source="source")
            assert (caught.value.episodes, await kind.pending()) == ((R,), set())


@pytest.mark.behaviour("P17")
@pytest.mark.parametrize("name", WITH_RECORDS)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
async def test_one_of_each_older_version_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: int
) -> None:
    """To version 4 in steps: 1 to 2 renames the fields, 2 to 3 is none of this kind, 3 to 4 renames them again."""
    [good] = await KINDS[name]().records(R)
    prefix = {1: "oldest_", 2: "old_", 3: "old_", 4: ""}[version]
    old = replace(good, schema_version=version, fields={f"{prefix}{key}": value for key, value in good.fields.items()})
    async with served(name, tmp_path) as kind:
        export_these(kind.owner, [old])
        await kind.commit("source", R)
    seen: list[int] = []

    def renamed(record: Record) -> Record:
        seen.append(record.schema_version)
        before, after = {1: ("oldest_", "old_"), 3: ("old_", "")}[record.schema_version]
        return replace(record, fields={after + key.removeprefix(before): each for key, each in record.fields.items()})

    monkeypatch.setattr(records, "VERSION", 4)
    for step in (1, 3):
        monkeypatch.setitem(records.MIGRATIONS, (good.schema, step), renamed)
    async with served(name, tmp_path) as kind:
        await restored(kind, R)
        assert await kind.pending() == {R1}
        assert dict.fromkeys(seen) == dict.fromkeys(each for each in (1, 3) if each >= version)


@pytest.mark.behaviour("P17")
@pytest.mark.parametrize("version", [1, 2, 3])
def test_each_kind_reads_its_older_versions(monkeypatch: pytest.MonkeyPatch, kind: str, version: int) -> None:
    """Also payloads that had other names once."""
    new = BUILT[kind]({"x": 1})
    old = new
    if version < 3:
        old = replace(new, payloads={f"v{version}_{name}": each for name, each in new.payloads.items()})
    old = replace(old, schema_version=version)

    def renamed(record: Record) -> Record:
        after = {1: "v2_", 2: ""}[record.schema_version]
        return replace(record, payloads={after + name[3:]: each for name, each in record.payloads.items()})

    monkeypatch.setattr(records, "VERSION", 3)
    for step in (1, 2):
        monkeypatch.setitem(records.MIGRATIONS, (new.schema, step), renamed)
    assert READ[kind](old) == {"x": 1}


# ---- P13


@pytest.mark.behaviour("P13")
@pytest.mark.parametrize("name", list(KINDS))
async def test_an_exception_in_the_export_is_export_failed_and_a_retry_can_succeed(tmp_path: Path, name: str) -> None:
    """Named after the episode whose hook failed, if the owner knows it; the checkpoint stays open."""
    async with served(name, tmp_path) as kind:
        await started(kind, R)
        real, failures = kind.owner.export, iter([HookFailed("the state is odd", R), RuntimeError("broken")])

        async def export(scope: Any) -> AsyncIterator[RecordBatch]:
            if failure := next(failures, None):
                raise failure
            async for batch in real(scope):
                yield batch

        kind.owner.export = export
        await kind.p.client.prepare("c")
        with pytest.raises(ExportFailed, match="the state is odd") as caught:
            await kind.p.client.commit("c", [R])
        assert caught.value.episodes == (R,)
        with pytest.raises(ExportFailed):
            await kind.p.client.commit("c", [R])
        assert (await kind.p.client.status()).active_checkpoint_id == "c"
        await kind.p.client.commit("c", [R])
        await kind.p.client.resume("c")


@pytest.mark.behaviour("P13")
@pytest.mark.parametrize("name", ["agent", "resources"])
async def test_a_state_that_cannot_be_kept_names_its_episode(tmp_path: Path, name: str) -> None:
    """An author's hook that gives no JSON, among others; mended, the same checkpoint commits."""
    async with served(name, tmp_path) as kind:
        await started(kind, R, S)
        rig = kind.rig.rig  # type: ignore[attr-defined]
        table = rig.states if name == "agent" else rig.counters
        kept = table["key-s"]
        table["key-s"] = {"x": {1, 2}}
        await kind.p.client.prepare("c")
        with pytest.raises(ExportFailed, match=r"\bx\b") as caught:
            await kind.p.client.commit("c", [R, S])
        assert caught.value.episodes == (S,)
        table["key-s"] = kept
        assert (await kind.p.client.commit("c", [R, S])).record_count == 2
