"""Everything: the store, the commit through gRPC, memory, the pause, and what telemetry costs.

python -m benchmarks [--json FILE] [--gate] [--smoke] [--rounds N] [--checkpoints N] [--sizes MB,MB]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import options, pause, storage, telemetry_cost


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything; the exit code."""
    parser = options.parser("Measure the store, the pause and telemetry.")
    storage.add_options(parser)
    pause.add_options(parser)
    given = parser.parse_args(arguments)
    return options.run(
        given,
        lambda directory, rng, tell: [
            *storage.measure(given, directory, rng, tell),
            *pause.measure(given, directory, rng, tell),
            *telemetry_cost.measure(given, directory, rng, tell),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
