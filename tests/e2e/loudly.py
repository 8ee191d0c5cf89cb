"""A module as `python -m` runs it, with everything logged: `python -m tests.e2e.loudly MODULE ARGUMENTS...`."""

from __future__ import annotations

import logging
import runpy
import sys


def main() -> None:
    """Log at DEBUG, whatever the module asks for later."""
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
