"""Inference workers of the random policy server: they outlive its processes, and what they answer is drawn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from gym_ckpt_grpc.control.budget import Budget
from gym_ckpt_grpc.control.generation import (
    BackendInfo,
    CallIdentity,
    Capability,
    CutAck,
    CutDisposition,
    CutEvidence,
    CutPresence,
    Sweep,
    SweepHeader,
)
from gym_ckpt_grpc.protocol.errors import OutOfTime, WorkerUnavailable
from tests.participants.policy_rig import digest_of

OK, FAIL, HANG, WILD, MISSING = "ok", "fail", "hang", "wild", "missing"
MODES = {
    "describe": (OK, OK, FAIL, HANG),
    "cut": (OK, WILD, WILD, WILD, FAIL, HANG),
    "check": (OK, OK, FAIL, HANG, MISSING),
    "release": (OK, OK, FAIL, HANG),
}
"""What each call of a worker may do."""
DELAYS = (0.0, 0.01, 0.2, 0.6, 1.5)
ALL = frozenset({Capability.CUT, Capability.CONTINUE, Capability.FINISHED})


class Worker:
    """One worker. Calls end at their budget, as the port promises, but for acknowledgements, which may come late.

    cuts: those that exist. told: cuts of which the policy server that runs now was told. own: finished calls, whose
    tokens it keeps. denied: cuts that it once said it did not have. shared: cuts that it gave two calls.
    on_release: told of each cut given up.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cuts: dict[str, CutEvidence] = {}
        self.told: set[str] = set()
        self.own: dict[str, CutEvidence] = {}
        self.denied: set[str] = set()
        self.shared: set[str] = set()
        self.on_release: Callable[[str], None] = lambda cut_id: None
        self.capabilities = ALL
        self._modes = dict.fromkeys(MODES, OK)
        self._changed = asyncio.Event()
        self._random = random.Random(0)
        self._life = 1
        self._passes = 0
        self._made = 0
        self._latest: dict[str, CutEvidence] = {}  # of each call

    # ---- the test's side

    def steer(self, choice: random.Random) -> None:
        """Change how one of its calls goes on from here; what hangs looks again."""
        self._random = random.Random(choice.random())
        what = choice.choice([*MODES, "cut", "cut", "restart", "capabilities"])
        if what == "restart":
            self._life += 1
        elif what == "capabilities":
            self.capabilities = choice.choice((ALL, ALL, ALL - {Capability.CUT}, ALL - {Capability.CONTINUE}))
        else:
            self._modes[what] = choice.choice(MODES[what])
        self._look_again()

    @property
    def hangs(self) -> bool:
        """Whether it does not answer questions about itself or its cuts."""
        return HANG in (self._modes["describe"], self._modes["check"])

    def calm(self) -> None:
        """All works from here on."""
        self._modes = dict.fromkeys(MODES, OK)
        self.capabilities = ALL
        self._look_again()

    def _look_again(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- GenerationBackend

    async def _step(self, method: str, budget: Budget) -> None:
        try:
            async with asyncio.timeout(max(0.0, budget.left())):
                while self._modes[method] == HANG:
                    await self._changed.wait()
        except TimeoutError:
            raise OutOfTime(f"{method} of {self.name} hangs on purpose") from None
        if self._modes[method] == FAIL:
            raise WorkerUnavailable(f"{method} of {self.name} fails on purpose")

    async def describe(self, budget: Budget) -> BackendInfo:
        await self._step("describe", budget)
        return BackendInfo(self.name, f"{self.name}-{self._life}", "m", 1, self.capabilities)

    async def cut(self, sweep: Sweep, budget: Budget) -> AsyncIterator[SweepHeader | Sequence[CutAck]]:
        await self._step("cut", budget)
        self._passes += 1
        yield SweepHeader(self.name, f"{self.name}-{self._life}", f"pass-{self._passes}")
        for call, _ in sweep.calls:
            wild, drawn = self._modes["cut"] == WILD, self._random
            if wild and drawn.random() < 0.3:
                await asyncio.sleep(drawn.choice(DELAYS))
            acks = self._acks(call, sweep) if wild else [self._cut(call)]
            self.told |= {ack.evidence.cut_id for ack in acks if ack.evidence is not None} & set(self.cuts)
            if acks:
                yield acks
            if wild and drawn.random() < 0.04:
                raise ConnectionError("the stream breaks on purpose")

    def _acks(self, call: CallIdentity, sweep: Sweep) -> list[CutAck]:
        """What a worker in disorder says about a call."""
        kind = self._random.choices(
            "cut again finished not_found uncuttable failed nothing bad wrong_call twice unasked shared".split(),
            weights=(30, 10, 8, 14, 5, 10, 6, 4, 3, 4, 3, 3),
        )[0]
        if kind in ("not_found", "uncuttable", "failed"):
            return [CutAck(call, CutDisposition[kind.upper()], "on purpose")]
        if kind == "nothing":
            return []
        earlier = self._latest.get(call.model_call_id)
        known = kind == "again" and earlier is not None and earlier.cut_id in self.cuts
        made = CutAck(call, CutDisposition.CUT, evidence=earlier) if known else self._cut(call)
        assert made.evidence is not None
        if kind == "finished":
            self.cuts.pop(made.evidence.cut_id)
            own = replace(made.evidence, cut_id=f"whole.{call.model_call_id}", finish_reason="length")
            own = self.own.setdefault(own.cut_id, own)  # the same each time: it names what the call itself staged
            return [CutAck(call, CutDisposition.FINISHED, evidence=own)]
        if kind == "bad":
            return [replace(made, evidence=replace(made.evidence, prefix_digest="none"))]
        if kind == "wrong_call":
            return [replace(made, call=replace(call, model_call_id="another"))]
        if kind == "unasked":
            return [replace(made, call=replace(call, ticket_id="999999"))]
        if kind == "twice":
            return [made, self._random.choice((made, self._cut(call)))]
        if kind == "shared":
            other = self._random.choice(sweep.calls)[0]
            self.shared.add(made.evidence.cut_id)
            return [made, replace(made, call=other)]
        return [made]

    def _cut(self, call: CallIdentity) -> CutAck:
        self._made += 1
        cut_id = f"{self.name}{self._made}.{call.model_call_id[:6]}"
        evidence = CutEvidence(cut_id, (f"cuts/{cut_id}",), 3, digest_of(cut_id), 64, 1)
        self.cuts[cut_id] = evidence
        self._latest[call.model_call_id] = evidence
        return CutAck(call, CutDisposition.CUT, evidence=evidence)

    async def check(self, cuts: Sequence[CutEvidence], budget: Budget) -> list[CutPresence]:
        await self._step("check", budget)
        return [self._presence(cut) for cut in cuts]

    def _presence(self, cut: CutEvidence) -> CutPresence:
        known = self.cuts.get(cut.cut_id) or self.own.get(cut.cut_id)
        if self._modes["check"] == MISSING or known is None:
            self.denied.add(cut.cut_id)
            return CutPresence.MISSING
        return CutPresence.PRESENT if known == cut else CutPresence.CHANGED

    async def release(self, cut_ids: Sequence[str], budget: Budget) -> None:
        await self._step("release", budget)
        for cut_id in cut_ids:
            if self.cuts.pop(cut_id, None) is not None:
                self.told.discard(cut_id)
                self.on_release(cut_id)
