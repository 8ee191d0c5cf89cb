"""A process that does all that has to do with secrets, as loud as it gets: run by test_redaction.

Prints what a program might print: reprs, errors, and at last `done`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import grpc

from gym_ckpt_grpc.auth import Authenticator, Role, TokenFile, TokenValue
from gym_ckpt_grpc.capture import GrpcGenerationBackend
from gym_ckpt_grpc.cli.carrying import Access
from gym_ckpt_grpc.control import ControlPlane, ParticipantServer, open_channel
from gym_ckpt_grpc.coordinator import Coordinator, Fleet
from gym_ckpt_grpc.coordinator.member import Credentials
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity, ParticipantKind
from gym_ckpt_grpc.testing import FakeOwner
from gymckpt.v1 import participant_pb2 as pb
from gymckpt.v1 import participant_pb2_grpc


class Failing(FakeOwner):
    """Fails with an exception that the product does not know."""

    def report(self, context: Any) -> Any:
        raise RuntimeError("an owner's own failure")


async def main(directory: Path) -> None:
    """Everything once."""
    files = {role: directory / f"{role}.token" for role in Role}
    sources = {role: TokenFile(file) for role, file in files.items()}
    authenticator = Authenticator(dict(sources))
    wrong = TokenValue((directory / "wrong").read_text())
    for token in (sources[Role.CONTROLLER], sources[Role.OBSERVER], wrong, None):
        owner = FakeOwner()
        identity = ParticipantIdentity(ParticipantKind.RESOURCES, "loud")
        plane = ControlPlane(owner, identity, roots=[str(directory)])
        server = ParticipantServer(plane, authenticator=authenticator, audit_log=directory / "audit")
        async with server, open_channel(server.address, token=token) as channel:
            stub: Any = participant_pb2_grpc.ParticipantServiceStub(channel)
            calls = [
                stub.GetStatus(pb.GetStatusRequest(), timeout=5),
                stub.Prepare(pb.PrepareRequest(), timeout=5),
                stub.Prepare(pb.PrepareRequest(), timeout=0.000001),
            ]
            for call in calls:
                try:
                    await call
                except grpc.aio.AioRpcError as failure:
                    traceback.print_exception(failure)
                    print(repr(failure), str(failure), failure.debug_error_string(), failure.trailing_metadata())
                print(repr(call))
            fleet = Fleet.from_mapping(
                {"servers": [{"kind": "resources", "service": "other", "address": server.address}], "require_kinds": []}
            )
            coordinator = Coordinator(fleet, root=str(directory), token=token, discovery_timeout=2)
            try:
                async with coordinator:
                    pass
            except Exception as error:
                traceback.print_exception(error)
            credentials = Credentials(token=token)
            access = Access(token=token, allow_insecure=False, timeout=1.0)
            backend = GrpcGenerationBackend("b", server.address, token=token)
            print(coordinator, vars(coordinator), credentials, dataclasses.asdict(access))
            print(vars(backend), server, vars(server._host), authenticator, vars(authenticator), channel)
    (directory / "controller.token").write_text((directory / "wrong").read_text() + " two words")
    for source in sources.values():
        source.refresh()
        print(source, repr(source), str(source), f"{source!s:>100}")
    for bad in ("empty words", "\u00fcmlaut", ""):
        try:
            TokenValue((directory / "wrong").read_text() + bad if bad else "")
        except ValueError as error:
            traceback.print_exception(error)
    print("done")


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    logging.getLogger().setLevel(1)
    asyncio.run(main(Path(sys.argv[1])), debug=True)
