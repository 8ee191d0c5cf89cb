"""Salvage: what is saved, what is lost, and that no rollout continues whose other half may be missing."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import orjson
import pytest

from gym_ckpt_grpc.cli.salvage import KindRepairs
from gym_ckpt_grpc.protocol.errors import InvalidArgument, StateNotFound
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity
from gym_ckpt_grpc.protocol.ids import EpisodeId
from gym_ckpt_grpc.storage import (
    CheckpointRoot,
    Codec,
    EpisodeLists,
    Payload,
    Record,
    decode,
    encode,
    read_episodes,
    read_part,
)
from gym_ckpt_grpc.storage.repairing import mend_part
from gym_ckpt_grpc.storage.salvaging import REASON, Salvaged, salvage
from gym_ckpt_grpc.storage.viewing import view_checkpoint
from tests.golden.scenes import FORMATS
from tests.storage.builders import faults
from tests.storage.damaged import (
    AGENT,
    COUNTER,
    ENVIRONMENT,
    LATE,
    MAIL,
    MEMBERS,
    POLICY,
    ROLLOUTS,
    TRAINER,
    copy_of_part,
    cut_short,
    flip,
    flip_payload,
    make_checkpoint,
    make_root,
    only,
    records_of,
    tree,
    unsynced,
)

__all__ = ["unsynced"]
pytestmark = pytest.mark.usefixtures("unsynced")

Content = tuple[str, Mapping[str, object], Mapping[str, bytes]]


def contents(records: list[Record] | tuple[Record, ...]) -> dict[EpisodeId, Content]:
    """What records say, by episode; each has one here."""
    found: dict[EpisodeId, Content] = {
        record.episode: (record.schema, dict(record.fields), {n: p.data for n, p in record.payloads.items()})
        for record in records
    }
    assert len(found) == len(records)
    return found


class Lab:
    """A root, what it was before any damage, and what was salvaged of it."""

    def __init__(self, directory: Path, **two: object) -> None:
        self.directory = directory
        self.source = directory / "root"
        self.root = make_root(self.source, **two)

    def salvage(self, checkpoint_id: str = "two", to: str = "new") -> Salvaged:
        """Salvage, see that the source was left alone, and that what was made is whole."""
        before = tree(self.source)
        found = salvage(
            CheckpointRoot(self.root.path),
            checkpoint_id,
            CheckpointRoot(str(self.directory / to)),
            repairs=KindRepairs(),
        )
        assert tree(self.source) == before
        report = self.directory / to / f"salvage-{checkpoint_id}.json"
        assert orjson.loads(report.read_bytes()) == found.described()
        if not found.refused:
            made = CheckpointRoot(str(self.directory / to))
            assert faults(made, checkpoint_id) == []
            [listed] = made.published()
            assert (listed.publication.number, listed.publication.checkpoint_id) == (found.number, checkpoint_id)
            assert made.find().location.checkpoint_id == checkpoint_id
        return found

    def records(
        self, who: ParticipantIdentity, checkpoint_id: str = "two", at: str = "new"
    ) -> dict[EpisodeId, Content]:
        """A part of the new root, every payload decoded."""
        root = CheckpointRoot(str(self.directory / at))
        part = read_part(root.files, root.location(checkpoint_id), who.place, checkpoint_id=checkpoint_id)
        assert not part.manifest.base_files, "it is written out in full"
        for record in part.records:
            for payload in record.payloads.values():
                decode(payload)
        return contents(part.records)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def expected(who: ParticipantIdentity, *lost: EpisodeId) -> dict[EpisodeId, Content]:
    found = contents(records_of(who, turn=1))
    return {episode: content for episode, content in found.items() if episode not in lost}


def lost_names(found: Salvaged) -> set[tuple[str, str]]:
    return {(each.participant, str(each.episode or "")) for each in found.lost}


def test_an_intact_checkpoint_is_copied_in_full(lab: Lab) -> None:
    """An incremental one becomes a full one; lists, trainer's state, documents and policy versions are kept."""
    found = lab.salvage()
    assert found.is_complete
    assert (found.continued, found.restarts) == (ROLLOUTS, {LATE: "straggler"})
    for who in MEMBERS:
        assert lab.records(who) == expected(who)
    made = CheckpointRoot(str(lab.directory / "new")).find()
    old = lab.root.find("two")
    assert made.manifest.trainer is not None
    assert decode(made.manifest.trainer.payload()) == TRAINER
    assert made.manifest.policy_versions == old.manifest.policy_versions
    assert made.manifest.created == old.manifest.created
    assert [m.participant for m in made.manifest.members] == [m.participant for m in old.manifest.members]
    assert [m.restarts for m in made.manifest.members] == [m.restarts for m in old.manifest.members]
    keys = [
        next(e for e in m.files if e.label)
        for f in (made, old)
        for m in f.manifest.members
        if m.participant.place == POLICY.place
    ]
    assert keys[0] == keys[1]


@pytest.mark.behaviour("C184")
def test_a_damaged_record_costs_its_rollout_and_nothing_else(lab: Lab) -> None:
    """Its rollout starts over with the reason, although other participants still have its state."""
    hurt = ROLLOUTS[3]
    file = flip_payload(lab.root, "two", AGENT.place, hurt)
    found = lab.salvage()
    assert lost_names(found) == {(str(AGENT), str(hurt))}
    assert file.name in found.lost[0].why
    assert found.continued == tuple(episode for episode in ROLLOUTS if episode != hurt)
    assert found.restarts is not None
    assert found.restarts[hurt].startswith(REASON)
    assert str(AGENT) in found.restarts[hurt]
    assert found.restarts[LATE] == "straggler"
    assert lab.records(AGENT) == expected(AGENT, hurt)
    assert lab.records(COUNTER) == expected(COUNTER), "what is intact of it is saved all the same"


@pytest.mark.behaviour("C184")
def test_every_intact_record_is_saved_whichever_are_damaged(lab: Lab) -> None:
    """In one chunk or another: of each pair of records one is damaged."""
    hurt = ROLLOUTS[::2]
    for episode in hurt:
        flip_payload(lab.root, "two", ENVIRONMENT.place, episode, payload=0)
    found = lab.salvage()
    assert lab.records(ENVIRONMENT) == expected(ENVIRONMENT, *hurt)
    assert found.continued == ROLLOUTS[1::2]


def test_the_base_of_an_incremental_one_is_gone(lab: Lab) -> None:
    """What was pointed at is lost, what was written is saved."""
    shutil.rmtree(lab.source / copy_of_part(AGENT, "one"))
    found = lab.salvage()
    still = ROLLOUTS[::2]
    assert {episode for name, episode in lost_names(found) if name == str(AGENT)} >= {str(each) for each in still}
    assert found.continued == tuple(e for e in ROLLOUTS if str(e) not in {name for _, name in lost_names(found)})
    assert not set(still) & set(found.continued)
    assert "one" in found.lost[0].why
    assert lab.records(MAIL) == expected(MAIL)


def test_a_record_whose_writer_garbled_it_is_lost_too(tmp_path: Path) -> None:
    """Its digests are right and nobody can decode it: a restore would refuse the whole checkpoint for it."""

    def records(who: ParticipantIdentity) -> list[Record]:
        found = records_of(who, turn=1)
        if who is COUNTER:
            found[1].payloads["state"] = Payload(Codec.MSGPACK, b"\xc1 no MessagePack")  # type: ignore[index]
        return found

    lab = Lab(tmp_path, records=records)
    found = lab.salvage()
    assert lost_names(found) == {(str(COUNTER), str(ROLLOUTS[3]))}
    assert found.continued == tuple(episode for episode in ROLLOUTS if episode != ROLLOUTS[3])


def test_a_record_that_reads_and_cannot_be_written_is_lost_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer's: readers take more in fields than writers of this project put there."""
    odd = ROLLOUTS[1]

    def chosen(who: ParticipantIdentity) -> list[Record]:
        found = records_of(who, turn=1)
        if who is not COUNTER:
            return found
        return [msgspec.structs.replace(r, fields={"x": {"a": 1}}) if r.episode == odd else r for r in found]

    lab = Lab(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("gym_ckpt_grpc.storage.records._field_problem", lambda name, value: None)
        make_checkpoint(lab.root, "three", records=chosen)
    found = lab.salvage("three")
    assert lost_names(found) == {(str(COUNTER), str(odd))}
    assert not found.refused
    assert odd not in found.continued


@pytest.mark.parametrize("damage", ["index", "cut short", "header", "footer", "gone"])
def test_a_records_file_without_its_index_stops_every_rollout(lab: Lab, damage: str) -> None:
    """Nobody knows any more which rollouts had state there, so none may continue; the other parts are saved."""
    file = only(lab.source, f"{copy_of_part(COUNTER, 'two')}/records-*.gck")
    size = file.stat().st_size
    ways: dict[str, Callable[[], object]] = {
        "index": lambda: flip(file, size - 100),
        "cut short": lambda: cut_short(file),
        "header": lambda: flip(file, 3),
        "footer": lambda: flip(file, size - 3),
        "gone": file.unlink,
    }
    ways[damage]()
    found = lab.salvage()
    assert lost_names(found) == {(str(COUNTER), "")}
    assert "all 3 records" in found.lost[0].why
    assert file.name in found.lost[0].why
    assert found.continued == ()
    assert found.restarts is not None
    assert all(str(COUNTER) in found.restarts[episode] for episode in ROLLOUTS)
    assert lab.records(COUNTER) == {}
    assert lab.records(AGENT) == expected(AGENT)


def test_a_records_file_without_records_costs_nothing(tmp_path: Path) -> None:
    lab = Lab(tmp_path, records=lambda who: [] if who is COUNTER else records_of(who, turn=1))
    only(lab.source, f"{copy_of_part(COUNTER, 'two')}/records-*.gck").unlink()
    found = lab.salvage()
    assert (found.lost, found.continued) == ((), ROLLOUTS)


# ---- manifests and documents


@pytest.mark.parametrize("who", [COUNTER, POLICY], ids=str)
def test_a_parts_manifest_is_made_anew_if_its_digest_proves_it(lab: Lab, who: ParticipantIdentity) -> None:
    """Without facts of its own, or with those that its documents give."""
    flip(only(lab.source, f"{copy_of_part(who, 'two')}/manifest.json"))
    found = lab.salvage()
    assert found.is_complete
    assert found.continued == ROLLOUTS
    made, root = CheckpointRoot(str(lab.directory / "new")), CheckpointRoot(lab.root.path)
    again = read_part(made.files, made.location("two"), who.place, checkpoint_id="two").manifest
    before = read_part(root.files, root.location("one"), who.place, checkpoint_id="one").manifest
    assert set(again.extra) == set(before.extra)


def test_a_manifest_with_facts_that_nobody_knows_refuses_the_whole_and_saves_the_parts(tmp_path: Path) -> None:
    lab = Lab(tmp_path, extra={"fact": 1})
    (lab.source / copy_of_part(COUNTER, "two") / "manifest.json").unlink()
    found = lab.salvage()
    assert str(COUNTER) in found.refused
    assert "cannot be proven" in found.refused
    assert lab.records(COUNTER) == expected(COUNTER)
    assert not list(CheckpointRoot(str(tmp_path / "new")).published())
    with pytest.raises(StateNotFound):
        CheckpointRoot(str(tmp_path / "new")).find("two")


def test_a_damaged_document_is_made_anew_from_its_records(lab: Lab) -> None:
    """The index of staging keys: the same bytes by the digest in its name."""
    document = only(lab.source, f"{copy_of_part(POLICY, 'two')}/staging_keys-*.json")
    before = document.read_bytes()
    flip(document)
    found = lab.salvage()
    assert found.is_complete
    assert (lab.directory / "new" / document.relative_to(lab.source)).read_bytes() == before


@pytest.mark.parametrize(
    "rows",
    [5, [5], [{"staging_key": 5}, {"staging_key": "k"}], [{"staging_key": "k", "capture_key": []}],
     [{"staging_key": "\ud800"}]],
)  # fmt: skip
def test_records_that_cannot_give_a_document_lose_it_and_nothing_else(lab: Lab, rows: object) -> None:
    """They verify and decode, and are not what their kind writes: that is no reason to save nothing."""
    flip(only(lab.source / copy_of_part(POLICY, "two"), "staging_keys-*.json"))
    view = view_checkpoint(lab.root, "two")
    [part] = [part for part in view.parts if part.place == POLICY.place]
    odd = Record(ROLLOUTS[-1], "gymckpt.policy_model", payloads={"rows": encode(rows), "cuts": encode([])})
    mended = mend_part(view, part, KindRepairs(), [*records_of(POLICY, turn=1)[:-1], odd])  # type: ignore[arg-type]
    assert "staging_keys" in mended.unsafe
    assert [each.participant for each in mended.lost] == [str(POLICY)]


def test_a_directory_whose_name_is_no_text_is_told_and_the_rest_saved(lab: Lab) -> None:
    strange = lab.source / "checkpoints/two/participants/agent/agent" / os.fsdecode(b"\xff\xfe")
    strange.mkdir()
    (strange / "manifest.json").touch()
    os.remove(lab.source / "checkpoints/two/checkpoint.json")
    found = lab.salvage()
    assert any("\\udcff" in each.why for each in found.lost)


def test_a_document_that_cannot_be_proven_refuses_the_whole(lab: Lab) -> None:
    """With a record lost as well, the keys that it named are not known, and tokens could be cleared that are needed."""
    only(lab.source, f"{copy_of_part(POLICY, 'two')}/staging_keys-*.json").unlink()
    flip_payload(lab.root, "two", POLICY.place, ROLLOUTS[1], payload=0)
    found = lab.salvage()
    assert "staging_keys" in found.refused
    assert str(POLICY) in found.refused
    assert lab.records(POLICY) == expected(POLICY, ROLLOUTS[1])


# ---- the aggregate manifest and the lists


def test_without_the_aggregate_manifest_intent_and_lists_say_what_belongs_together(lab: Lab) -> None:
    flip(lab.source / "checkpoints/two/checkpoint.json")
    flip_payload(lab.root, "two", AGENT.place, ROLLOUTS[3])
    found = lab.salvage()
    assert found.continued == tuple(episode for episode in ROLLOUTS if episode != ROLLOUTS[3])
    assert any("trainer" in note for note in found.notes), "what is not there any more is said"
    made = CheckpointRoot(str(lab.directory / "new")).find()
    assert made.manifest.run_id == "run"
    assert made.manifest.trainer is None


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (["checkpoint.json", "intent.json"], "who belongs to it"),
        (["checkpoint.json", "episodes-*.json"], "what continued is not known"),
        (["checkpoint.json", f"participants/{COUNTER.kind}/counter/0/manifest.json"], str(COUNTER)),
    ],
    ids=["no members", "no lists", "no manifest"],
)
def test_what_is_not_certain_is_refused_by_name_and_the_parts_are_saved(lab: Lab, lose: list[str], why: str) -> None:
    for pattern in lose:
        only(lab.source / "checkpoints/two", pattern).unlink()
    found = lab.salvage()
    assert why in found.refused
    assert found.continued == ()
    assert found.number == 0
    for who in MEMBERS:
        assert lab.records(who) == expected(who)


def test_a_participant_that_the_intent_names_and_that_has_no_part_stops_the_whole(lab: Lab) -> None:
    """With checkpoint.json gone nothing else says that it took part."""
    (lab.source / "checkpoints/two/checkpoint.json").unlink()
    shutil.rmtree(lab.source / copy_of_part(COUNTER, "two"))
    found = lab.salvage()
    assert str(COUNTER) in found.refused


def test_lost_lists_are_proven_by_the_counts(tmp_path: Path) -> None:
    """As many rollouts have records as continue: they are the same."""
    lab = Lab(tmp_path, lists=EpisodeLists(ROLLOUTS))
    flip_payload(lab.root, "two", AGENT.place, ROLLOUTS[3])
    only(lab.source, "checkpoints/two/episodes-*.json").unlink()
    found = lab.salvage()
    assert set(found.continued) == set(ROLLOUTS) - {ROLLOUTS[3]}


@pytest.mark.parametrize(
    ("lists", "why"),
    [(EpisodeLists(ROLLOUTS, {LATE: "straggler"}), "1 rollouts"), (EpisodeLists(ROLLOUTS[1:]), "which is not known")],
    ids=["restarts", "a rollout with records that does not continue"],
)
def test_lost_lists_that_the_counts_do_not_prove_refuse_the_whole(
    tmp_path: Path, lists: EpisodeLists, why: str
) -> None:
    lab = Lab(tmp_path, lists=lists)
    only(lab.source, "checkpoints/two/episodes-*.json").unlink()
    assert why in lab.salvage().refused


def test_one_that_was_never_published_says_so(lab: Lab) -> None:
    make_checkpoint(lab.root, "three", published=False)
    found = lab.salvage("three")
    assert found.continued == ROLLOUTS
    assert any("never published" in note for note in found.notes)


# ---- the target


@pytest.mark.parametrize("to", ["root", "root/new", ".", "full", "file"])
def test_a_target_must_be_new_and_apart_from_the_source(lab: Lab, to: str) -> None:
    """Nothing is written otherwise."""
    (lab.directory / "full").mkdir()
    (lab.directory / "full" / "something").touch()
    (lab.directory / "file").touch()
    before = tree(lab.directory)
    target = (lab.directory / to).resolve()
    with pytest.raises(InvalidArgument, match="target"):
        salvage(lab.root, "two", CheckpointRoot(str(target)))
    assert tree(lab.directory) == before


def test_there_is_no_such_checkpoint(lab: Lab) -> None:
    with pytest.raises(StateNotFound):
        salvage(lab.root, "three", CheckpointRoot(str(lab.directory / "new")))
    assert not (lab.directory / "new").exists()


# ---- whatever the damage


def random_damage(source: Path, rng: random.Random) -> list[str]:
    """Hurt one to four files of the second checkpoint, or of its base."""
    files = [path for path in sorted((source / "checkpoints").rglob("*")) if path.is_file()]
    hurt: list[str] = []
    for path in rng.sample(files, rng.randint(1, 4)):
        size = path.stat().st_size
        ways: list[Callable[[], object]] = [
            lambda p=path, s=size: flip(p, rng.randrange(s), 1 << rng.randrange(8)),  # type: ignore[misc]
            lambda p=path, s=size: flip(p, rng.randrange(s), 1 << rng.randrange(8)),  # type: ignore[misc]
            lambda p=path, s=size: cut_short(p, left=rng.randrange(s)),  # type: ignore[misc]
            path.unlink,
        ]
        rng.choice(ways)()
        hurt.append(str(path.relative_to(source)))
    return hurt


@pytest.mark.behaviour("C184")
@pytest.mark.parametrize("seed", range(40))
def test_no_rollout_ever_continues_without_all_of_its_state(tmp_path: Path, seed: int) -> None:
    """Whatever is damaged: what continues has, at every participant, exactly the records that it had."""
    lab = Lab(tmp_path, lists=EpisodeLists(ROLLOUTS[1:], {LATE: "straggler", ROLLOUTS[0]: "left_out"}))
    hurt = random_damage(lab.source, random.Random(seed))
    print(f"seed {seed}: {hurt}")
    found = lab.salvage()
    for who in MEMBERS:
        saved, had = lab.records(who), expected(who)
        assert all(saved[episode] == had[episode] for episode in saved)
        if not found.refused:
            missing = had.keys() - saved.keys()
            assert not missing & set(found.continued), f"{who} lost {missing}"
    assert set(found.continued) <= set(ROLLOUTS[1:])
    if not found.refused:
        assert found.restarts is not None
        assert {*found.continued, *found.restarts} == {*ROLLOUTS, LATE}, "no rollout is forgotten"


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("kind", ["agent", "policy_model"])
def test_a_checkpoint_of_every_format_has_its_manifests_proven(tmp_path: Path, format: Path, kind: str) -> None:
    source = tmp_path / "root"
    shutil.copytree(format / "native" / "root", source)
    root = CheckpointRoot(str(source))
    checkpoint_id = root.find().manifest.checkpoint_id
    only(source, f"checkpoints/{checkpoint_id}/participants/{kind}/*/0/manifest.json").unlink()
    found = salvage(root, checkpoint_id, CheckpointRoot(str(tmp_path / "new")), repairs=KindRepairs())
    assert found.is_complete
    old, made = root.find(), CheckpointRoot(str(tmp_path / "new")).find()
    lists = [read_episodes(root.files, each.location, each.manifest) for each in (old, made)]
    assert lists[0] == lists[1]
