"""An inference worker as a process: `worker.py PORT LOG LIFE TICK`."""

import sys
from pathlib import Path

import uvicorn

from gym_ckpt_grpc.minigym.inference_worker import InferenceWorker, WorkerConfig

port, log, life, tick = sys.argv[1:]
worker = InferenceWorker(WorkerConfig(log=Path(log), life=int(life), tick=float(tick)))
uvicorn.run(worker.app, host="127.0.0.1", port=int(port), log_level="warning")
