"""Verify the example rows of every declared server, twice in order and once in reverse, and print what came out.

    python -m tests.nemo_gym.audit.verify_rows [SERVER...]

A process of its own: servers read files by relative paths, and one brings a module named `utils`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from gym_ckpt_grpc.integrations.nemo_gym.audited import TABLE
from gym_ckpt_grpc.integrations.nemo_gym.declared import Declaration, declaration_of
from tests.nemo_gym.audit.bodies import bodies_of
from tests.nemo_gym.audit.serving import VERDICTS, Answer, Served, class_of


async def differing(served: Served, bodies: list[dict[str, Any]]) -> tuple[list[Answer], list[int]]:
    """The first answer to each body, and the places of those that another of three verifications did not repeat."""
    first = [await served.ask(body, 2) for body in bodies]
    again = [await served.ask(body, 1) for body in reversed(bodies)][::-1]
    unequal = [
        place for place, (one, other) in enumerate(zip(first, again, strict=True)) if not one[0] == one[1] == other[0]
    ]
    return [answers[0] for answers in first], unequal


async def verified(declaration: Declaration) -> dict[str, Any]:
    """What one server answers: its rewards, a digest of all replies and judge calls, and which differed."""
    cls = class_of(declaration.module, declaration.server)
    directory = Path(sys.modules[declaration.module].__file__ or "").parent
    os.chdir(directory)
    answers: list[Answer] = []
    unequal: list[str] = []
    for verdict in VERDICTS[directory.name] if declaration.judge else ("",):
        found, places = await differing(Served(cls, directory, verdict), bodies_of(directory))
        answers += found
        unequal += [f"{verdict} {place}" for place in places]
    replies = [json.loads(body) if status == 200 else {} for status, body, _ in answers]
    text = repr([(status, body, asked) for status, body, asked in answers])
    return {
        "declared": declaration_of(cls) is declaration,
        "statuses": [status for status, _, _ in answers],
        "failed": [reply["_ng_failure_class"] for reply in replies if "_ng_failure_class" in reply],
        "rewards": [reply.get("reward") for reply in replies],
        "judge_calls": sum(len(asked) for _, _, asked in answers),
        "unequal": unequal,
        "digest": hashlib.sha256(text.encode()).hexdigest(),
    }


def main(names: list[str]) -> None:
    """Print one JSON object: server -> what came out."""
    chosen = [one for one in TABLE.servers.values() if not names or one.module.split(".")[1] in names]
    with contextlib.redirect_stdout(sys.stderr):  # some servers print
        results = {one.module.split(".")[1]: asyncio.run(verified(one)) for one in chosen}
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
