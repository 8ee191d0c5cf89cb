"""Which groups of spans are made. Metrics have no switch: they are recorded wherever a meter provider exports."""

from __future__ import annotations

import logging
import os

from gym_ckpt_grpc.telemetry.catalogue import Group

VARIABLE = "GYM_CKPT_SPAN_GROUPS"
PRESETS: dict[str, frozenset[Group]] = {
    "none": frozenset(),
    "default": frozenset(),  # coarse on purpose: nothing of a checkpoint
    "all": frozenset(Group),
}
log = logging.getLogger(__name__)


class Switches:
    """The groups that are on. checkpoint: whether the spans of checkpoints are made; all that a call site looks at."""

    def __init__(self, text: str | None = None) -> None:
        self.checkpoint = False
        self.set(os.environ.get(VARIABLE, "") if text is None else text)

    def set(self, text: str) -> None:
        """Take a comma list of groups and presets, such as `default,checkpoint`. Unknown words warn and are left out:
        a typing mistake must not stop a server."""
        groups: set[Group] = set()
        for word in filter(None, (word.strip().lower() for word in text.split(","))):
            if word in PRESETS:
                groups |= PRESETS[word]
            elif word in set(Group):
                groups.add(Group(word))
            else:
                known = ", ".join([*PRESETS, *Group])
                log.warning("%s: unknown span group %r is left out (known: %s)", VARIABLE, word[:40], known)
        self.checkpoint = Group.CHECKPOINT in groups
