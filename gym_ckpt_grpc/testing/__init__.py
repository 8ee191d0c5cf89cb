"""What a server author needs in a test: serve(), fakes, a network to break, and the conformance kit.

    async with serve(FakeOwner(), roots=[tmp_path]) as served:
        await served.client.prepare("c1")

    report = await run_conformance(address, token=token, root=root)
    assert report.ok, report.of(Verdict.BROKEN)

Needs no test framework.
"""

from gym_ckpt_grpc.testing.client import ParticipantClient as ParticipantClient
from gym_ckpt_grpc.testing.client import typed as typed
from gym_ckpt_grpc.testing.client import unreplayed as unreplayed
from gym_ckpt_grpc.testing.clock import FakeClock as FakeClock
from gym_ckpt_grpc.testing.conformance import CHECKS as CHECKS
from gym_ckpt_grpc.testing.conformance import Check as Check
from gym_ckpt_grpc.testing.conformance import Report as Report
from gym_ckpt_grpc.testing.conformance import Result as Result
from gym_ckpt_grpc.testing.conformance import Unreachable as Unreachable
from gym_ckpt_grpc.testing.conformance import Verdict as Verdict
from gym_ckpt_grpc.testing.conformance import run_conformance as run_conformance
from gym_ckpt_grpc.testing.gates import Gate as Gate
from gym_ckpt_grpc.testing.network import Cable as Cable
from gym_ckpt_grpc.testing.network import Network as Network
from gym_ckpt_grpc.testing.owner import FakeOwner as FakeOwner
from gym_ckpt_grpc.testing.revisions import RevisedHooks as RevisedHooks
from gym_ckpt_grpc.testing.revisions import RevisionAudit as RevisionAudit
from gym_ckpt_grpc.testing.serving import QUICK as QUICK
from gym_ckpt_grpc.testing.serving import Served as Served
from gym_ckpt_grpc.testing.serving import serve as serve
