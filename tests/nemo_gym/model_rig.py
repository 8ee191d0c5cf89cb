"""A released model server in this process, with its control server and a pretended inference worker behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx  # type: ignore[import-not-found, unused-ignore]  # it comes with the framework
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from nemo_gym.token_id_capture.staging.capture import RolloutTokenCapture
from nemo_gym.token_id_capture.staging.records import CaptureAdmission, StagedCallRecord, StageResult
from omegaconf import OmegaConf
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

from gym_ckpt_grpc.coordinator import Coordinator, Fleet, Server
from gym_ckpt_grpc.integrations.nemo_gym.options import Options
from gym_ckpt_grpc.integrations.nemo_gym.policy import LEDGER, PolicyMixin

CONTROL_TOKEN = "manifest-secret"
ASK = {"role": "user", "content": "question"}


class FakeWorker:
    """An inference worker behind the server: stages what it is admitted to, and answers `answer <n>`.

    staged: by staging key, and outlives servers. admissions: of each call in order, None for one without. held: set it
    to a fresh Event, and calls wait for that before they answer; entered counts them.
    """

    def __init__(self) -> None:
        self.staged: dict[str, StagedCallRecord] = {}
        self.admissions: list[CaptureAdmission | None] = []
        self.held: asyncio.Event | None = None
        self.entered = asyncio.Semaphore(0)
        self._capture = RolloutTokenCapture(sink=self, weight_version_fn=lambda: 7)

    def stage(self, record: StagedCallRecord, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        key = f"{record.rollout_id}/{record.model_call_id}"
        self.staged[key] = record
        return StageResult(ok=True, staging_key=key)

    async def create_chat_completion(self, **body: Any) -> dict[str, Any]:
        admission = CaptureAdmission.model_validate(body["ng_capture"]) if "ng_capture" in body else None
        self.admissions.append(admission)
        number = len(self.admissions)
        self.entered.release()
        if self.held is not None:
            await self.held.wait()
        payload: dict[str, Any] = {
            "id": f"completion-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": f"answer {number}"},
                }
            ],
        }
        if admission is not None:
            prefix = [token for key in admission.staging_chain for token in self.staged[key].token_ids_delta]
            coordinates = self._capture.complete_call(
                self._capture.begin_call(admission, prefix_token_ids=prefix),
                prompt_token_ids=[*prefix, 10 * number],
                generated_token_ids=[100 + number],
                generated_logprobs=[-0.1],
            )
            payload["ng_commit_coords"] = coordinates.model_dump(mode="json")
        return payload


def capture_block(directory: Path) -> dict[str, Any]:
    """The framework's block for external staging, with our ledger."""
    return {
        "enabled": True,
        "external_staging": True,
        "rebuild_response": False,
        "lineage_store": LEDGER,
        "lineage_store_kwargs": {"directory": str(directory)},
    }


class ModelServer:
    """One life of the server: `http` calls its application, `fleet` its control server."""

    def __init__(self, app: Any, http: httpx.AsyncClient, fleet: Fleet) -> None:
        self.app = app
        self.http = http
        self.fleet = fleet

    async def chat(self, key: str, messages: list[dict[str, Any]], **headers: str) -> httpx.Response:
        """A captured call of an attempt."""
        path = f"/ng-rollout/{key}/training-token-capture/v1/chat/completions"
        return await self.http.post(path, json={"messages": messages}, headers=headers)

    async def talk(self, key: str, messages: list[dict[str, Any]]) -> None:
        """A captured call that succeeds; its answer and the next question are appended to `messages`."""
        response = await self.chat(key, messages)
        assert response.status_code == 200, response.text
        answer = response.json()["choices"][0]["message"]
        messages += [{"role": "assistant", "content": answer["content"]}, ASK]

    async def manifest(self, key: str) -> httpx.Response:
        """The framework's manifest route."""
        path = f"/training-token-capture/control/rollouts/{key}/manifest"
        return await self.http.get(path, headers={"authorization": f"Bearer {CONTROL_TOKEN}"})

    async def manifest_of(self, key: str, *, calls: int) -> dict[str, Any]:
        """The manifest, as soon as it lists so many calls."""
        async with asyncio.timeout(10):
            while True:
                manifest: dict[str, Any] = (await self.manifest(key)).json()
                if len(manifest["records"]) >= calls:
                    return manifest

    def coordinator(self, root: Path) -> Coordinator:
        return Coordinator(self.fleet, root=str(root))


def model_class(directory: Path, *, workers: int | None = None) -> type[Any]:
    """The released server as a participant whose control server is a socket in `directory`."""
    options = Options(
        instance="policy_model", kind="policy_model", root=str(directory / "root"), control=f"unix:{directory}/control"
    )
    return type(
        "VLLMModel", (PolicyMixin, VLLMModel), {"checkpoint": options, "__annotations__": {"checkpoint": ClassVar}}
    )


def made(directory: Path, worker: FakeWorker, block: Mapping[str, Any] | None, **changes: Any) -> Any:
    """The server object."""
    config = VLLMModelConfig(
        host="127.0.0.1",
        port=1,
        entrypoint="app.py",
        name="policy_model",
        base_url="http://127.0.0.1:1/v1",
        api_key="none",
        model="scripted",
        return_token_id_information=False,
        uses_reasoning_parser=False,
    ).model_copy(update=changes)
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"token_id_capture": dict(block)} if block is not None else {}),
    )
    server = model_class(directory)(config=config, server_client=client)
    server._clients = [worker]
    return server


@asynccontextmanager
async def living(directory: Path, worker: FakeWorker, block: Mapping[str, Any] | None) -> AsyncIterator[ModelServer]:
    """One life of the server."""
    (directory / "root").mkdir(exist_ok=True)
    app = made(directory, worker, block).setup_webserver()
    fleet = Fleet(
        [Server(kind="policy_model", service="policy_model", address=f"unix:{directory}/control")], require_kinds=[]
    )
    calls = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=calls, base_url="http://model") as http:
        yield ModelServer(app, http, fleet)
