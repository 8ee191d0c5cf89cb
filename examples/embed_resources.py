"""A resources server that takes part in checkpoints: embed_resources.py PORT CONTROL_ADDRESS ROOT TOKEN_FILE"""

import asyncio
import sys

import uvicorn
from fastapi import FastAPI, Request, Response

from gym_ckpt_grpc.auth import Authenticator, Role, TokenFile
from gym_ckpt_grpc.control import ControlPlane, ParticipantServer
from gym_ckpt_grpc.integrations import CheckpointMiddleware, answer_refusal
from gym_ckpt_grpc.participants import ResourcesMode, ResourcesOwner, ResourcesSettings
from gym_ckpt_grpc.protocol import ControlError, ParticipantIdentity

app = FastAPI()
counts: dict[str, int] = {}  # the state of this server: a number per session


@app.post("/seed_session")
async def seed(request: Request, response: Response) -> dict[str, str]:
    session = (await request.json())["session"]
    counts[session] = 0
    response.set_cookie("session", session)
    return {"session": session}


@app.post("/increment")
async def increment(request: Request) -> dict[str, int]:
    counts[request.cookies["session"]] += 1
    return {"count": counts[request.cookies["session"]]}


@app.post("/verify")
async def verify(request: Request) -> dict[str, int]:
    return {"reward": counts.pop(request.cookies["session"])}


class Hooks:  # all that a checkpoint needs to know of that state
    async def export_sessions(self, session_ids):
        return {session: counts[session] for session in session_ids if session in counts}

    async def restore_sessions(self, sessions):
        counts.update({session.session_id: session.state for session in sessions})

    async def retire_session(self, session_id):
        counts.pop(session_id, None)


async def main(port: str, control_address: str, root: str, token_file: str) -> None:
    owner = ResourcesOwner(Hooks(), ResourcesSettings(mode=ResourcesMode.EXPORTED))
    app.add_exception_handler(ControlError, answer_refusal)
    plane = ControlPlane(owner, ParticipantIdentity(owner.kind, "counter"), roots=[root])
    tokens = Authenticator({Role.CONTROLLER: TokenFile(token_file)})
    async with ParticipantServer(plane, control_address, authenticator=tokens):
        served = CheckpointMiddleware(app, owner.gate())
        await uvicorn.Server(uvicorn.Config(served, port=int(port), lifespan="off", log_level="warning")).serve()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
