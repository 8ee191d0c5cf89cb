"""Exit codes of `gym-ckpt`, and how errors become them."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Documented in `gym-ckpt --help` and the README; a script may rely on them."""

    OK = 0
    """Everything is as it should be."""
    FAILED = 1
    """The command ran, and its answer is no: rollouts were lost, a checkpoint is damaged, a server is wrong."""
    USAGE = 2
    """The command line or a file it names is wrong; nothing was done."""
    UNREACHABLE = 3
    """A server could not be reached, or refused the credentials."""
    INTERRUPTED = 130
    """Ctrl-C."""


EXIT_HELP = (
    "Exit codes: 0 all is well; 1 the answer is no (rollouts lost, checkpoint damaged); 2 usage; "
    "3 a server could not be reached or refused the credentials; 130 interrupted."
)
