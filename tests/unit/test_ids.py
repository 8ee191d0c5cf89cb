"""Ids, capture keys and scopes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_ckpt_grpc.protocol.ids import (
    MAX_ATTEMPT,
    EpisodeId,
    EpisodeScope,
    RestoreScope,
    checkpoint_id_problem,
    episode_ids,
    rollout_id_problem,
)

HEAD = "abcxyzABCXYZ0189"
ids = st.builds(str.__add__, st.sampled_from(HEAD), st.text(alphabet=HEAD + "._-" * 6 + "a" * 8, max_size=40))
rollouts = ids.filter(lambda text: rollout_id_problem(text) is None)
attempts = st.integers(0, MAX_ATTEMPT)


@pytest.mark.behaviour("C1")
@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ("a", True),
        ("0", True),
        ("Z9._-", True),
        ("a" * 128, True),
        ("", False),
        ("a" * 129, False),
        (".a", False),
        ("-a", False),
        ("_a", False),
        ("a/b", False),
        ("a b", False),
        ("a\n", False),
        ("a\x00", False),
        ("\u00e9", False),
        ("\u0661", False),
    ],
)
def test_legal_checkpoint_ids(text: str, legal: bool) -> None:
    """1 to 128 of the safe characters, the first one alphanumeric; no trailing newline slips through."""
    assert (checkpoint_id_problem(text) is None) is legal


@pytest.mark.behaviour("C1", "C2")
@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ("a" * 256, True),
        ("a" * 257, False),
        ("r-a0", True),
        ("r-a01", True),
        ("r-a00", True),
        ("r-a", True),
        ("r-a1x", True),
        ("r-a1", False),
        ("r-a10", False),
        ("r-a1-a2", False),
        ("r\n", False),
    ],
)
def test_legal_rollout_ids(text: str, legal: bool) -> None:
    """1 to 256 characters, and never the form in which a capture key names an attempt."""
    assert (rollout_id_problem(text) is None) is legal


@pytest.mark.behaviour("C3")
@given(rollouts, attempts)
def test_capture_keys_convert_both_ways(rollout: str, attempt: int) -> None:
    """Every key decodes to exactly the pair it was built from."""
    episode = EpisodeId(rollout, attempt)
    assert EpisodeId.from_capture_key(episode.capture_key) == episode


@pytest.mark.behaviour("C3")
@given(ids)
def test_keys_that_decode_were_built_so(key: str) -> None:
    """Two keys never decode to one episode: what decodes encodes to the same text again."""
    try:
        episode = EpisodeId.from_capture_key(key)
    except ValueError:
        return
    assert episode.capture_key == key


@pytest.mark.behaviour("C4")
@given(st.integers(0, 10**9), st.integers(0, 10**6), attempts)
def test_keys_of_task_and_rollout_indexes(task: int, rollout: int, attempt: int) -> None:
    """Ids made of a task index and a rollout index decode to that id and attempt."""
    name = f"t{task}-r{rollout}"
    assert EpisodeId.from_capture_key(EpisodeId(name, attempt).capture_key) == EpisodeId(name, attempt)


@pytest.mark.parametrize(("rollout", "attempt"), [("", 0), ("r-a1", 0), ("r", -1), ("r", MAX_ATTEMPT + 1)])
def test_illegal_episodes_do_not_exist(rollout: str, attempt: int) -> None:
    """An EpisodeId in hand is always a legal one."""
    with pytest.raises(ValueError):
        EpisodeId(rollout, attempt)


@pytest.mark.behaviour("C31", "C33")
def test_scopes_are_compared_as_sets() -> None:
    """Order does not matter; `all` is not an empty list."""
    a, b = EpisodeId("a"), EpisodeId("b", 3)
    assert EpisodeScope.of([a, b]) == EpisodeScope.of([b, a])
    assert hash(EpisodeScope.of([a, b])) == hash(EpisodeScope.of([b, a]))
    assert EpisodeScope.all() != EpisodeScope.of([])
    assert EpisodeScope.of([a]) != EpisodeScope.of([EpisodeId("a", 1)])
    assert a in EpisodeScope.all()
    assert a not in EpisodeScope.of([b])
    assert EpisodeScope.of([a]) != "a"


def test_restore_plans() -> None:
    """The next attempt, or the higher one that is named; each fault of a plan is refused."""
    a, b = EpisodeId("a", 2), EpisodeId("b")
    assert RestoreScope.plan([a, b]).targets == {a: EpisodeId("a", 3), b: EpisodeId("b", 1)}
    assert RestoreScope.plan([a, b], [7, 1]).targets == {a: EpisodeId("a", 7), b: EpisodeId("b", 1)}
    for episodes, install_as in (
        ([a, b], [7]),
        ([a, b], [2, 1]),
        ([a, EpisodeId("a", 4)], []),
    ):
        with pytest.raises(ValueError):
            RestoreScope.plan(episodes, install_as)


@pytest.mark.parametrize(
    "rollout_id",
    [
        *("a", "a-b", "a-a", "a-a1b", "a-a0", "x" * 256, "0.-_"),
        *("a-a1", "", "x" * 257, "../x", "-x", "a\n", "\na", "a\nb", "a\n-b", "a\r", "ä", "a\u2028b", "\ud800"),
    ],
)
@pytest.mark.parametrize("attempt", [0, 1, 2**32 - 2, 2**32 - 1, -1])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_many_ids_at_once_are_checked_as_each_is(rollout_id: str, attempt: int, before: int) -> None:
    rollout_ids = [*["first", "second"][:before], rollout_id, "last"]
    attempts = [*[0, 7][:before], attempt, 1]
    try:
        wanted = [EpisodeId(*pair) for pair in zip(rollout_ids, attempts, strict=True)]
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            episode_ids(rollout_ids, attempts)
        return
    found = episode_ids(rollout_ids, attempts)
    assert found == wanted
    assert [*map(hash, found)] == [*map(hash, wanted)]
    assert repr(found) == repr(wanted)


def test_columns_of_ids_must_have_one_length() -> None:
    with pytest.raises(ValueError, match="2 rollout ids and 1 attempts"):
        episode_ids(["a", "b"], [0])
