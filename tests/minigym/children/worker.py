"""An inference worker as a process: `worker.py PORT LOG LIFE TICK [STAGED CONTROL_ADDRESS]`."""

import sys
from pathlib import Path

import uvicorn

from gym_ckpt_grpc.minigym.inference_worker import InferenceWorker, WorkerConfig

port, log, life, tick, *capture = sys.argv[1:]
staged, control_address = (Path(capture[0]), capture[1]) if capture else (None, "")
config = WorkerConfig(
    log=Path(log), life=int(life), tick=float(tick), staged=staged, control_address=control_address, controls=True
)
uvicorn.run(InferenceWorker(config).app, host="127.0.0.1", port=int(port), log_level="warning")
