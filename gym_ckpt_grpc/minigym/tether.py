"""Run a command that dies with its parent: `tether.py PARENT_PID COMMAND [ARGUMENT ...]`.

Run as a script, by path: it asks the kernel for SIGKILL at the parent's death and then becomes the command,
which inherits that wish. So nothing has to run between fork and exec, and any command can be tethered. The
kernel means the parent *thread*: whoever starts the command does it from a thread that lives on. Elsewhere
than on Linux it only becomes the command.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_ORPHANED, _NOT_RUN = 70, 127
"""Exit codes: the parent was gone before the kernel had been asked; the command cannot be run."""


def main(arguments: list[str]) -> int:
    """Become the command; returns an exit code if it cannot, or if there is no parent left."""
    parent, *command = arguments
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        return _ORPHANED
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
