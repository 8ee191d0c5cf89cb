"""The vocabulary of minigym's language model: STOP, action tokens, words in the order of a sentence, prompt bytes."""

from __future__ import annotations

from typing import NamedTuple


class IdRange(NamedTuple):
    """The ids first, first + 1, ... of `size` tokens."""

    first: int
    size: int


STOP = 0
"""Id of the last token of a reply; it has no text."""

ACTION_IDS = IdRange(1, 60)
"""The action tokens. Their number is a multiple of 2 to 6, so that a choice among few is even."""


def _words(text: str) -> list[str]:
    return text.split()


_LISTS = {
    "opener": _words("The A This That Each Some My Your Our Every Another One Any Its Their No"),
    "adjective": _words(
        "amber bold brisk calm clear cold cosy crisp curious dark deep dry eager early faint fair fast fine "
        "fresh gentle glad golden grand green happy heavy high honest idle keen kind large late light little "
        "long loud lucky mild modest narrow neat new odd old open pale plain proud quick quiet rare rough "
        "round sharp short silent simple slow small smooth soft steady still strong sunny tall"
    ),
    "noun": _words(
        "anchor apple autumn barn basket bell bird boat book branch bridge brook candle card castle cloud "
        "coast corner dealer door field fire forest fox garden gate glass hand harbour hill horse house "
        "island kettle key lake lamp lantern leaf market meadow mill mirror moon morning mountain number "
        "orchard path pond rain ridge river road sail season shadow shore snow song star stone storm"
    ),
    "verb": _words(
        "asks bends calls carries counts crosses draws drifts falls finds follows gathers grows guards hides "
        "holds keeps leads leaves lifts meets moves names opens passes plays reaches rests returns rises "
        "shows turns"
    ),
    "joint": _words(
        "above across after along before behind beneath beside beyond by inside near over past toward under"
    ),
    "article": _words("the a"),
}
_ENDS = [".", ";", "!"]
_ORDER = ("opener", "adjective", "noun", "verb", "joint", "article", "adjective", "noun", "end")


def _build() -> tuple[tuple[str, ...], tuple[IdRange, ...]]:
    texts = ["", *(f" [act {number}]" for number in range(ACTION_IDS.size))]
    ranges: dict[str, IdRange] = {}
    for name, words in _LISTS.items():
        ranges[name] = IdRange(len(texts), len(words))
        texts.extend(f" {word}" for word in words)
    ranges["end"] = IdRange(len(texts), len(_ENDS))
    texts.extend(_ENDS)
    return tuple(texts), tuple(ranges[name] for name in _ORDER)


VOCABULARY, SENTENCE = _build()
"""Token texts by id, and the ids that each place of a sentence draws from.

The text of a reply is the plain concatenation of its tokens' texts, so that the texts of parts join too.
"""

BYTE_IDS = IdRange(len(VOCABULARY), 256)
"""Ids behind the words, one for each byte of a prompt; a reply has none of them."""

END_OF_MESSAGE = BYTE_IDS.first + BYTE_IDS.size
ROLE_IDS = {role: END_OF_MESSAGE + 1 + n for n, role in enumerate(("system", "developer", "user", "assistant", "tool"))}
"""Id of the head of a message, by its role."""
