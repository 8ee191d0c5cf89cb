"""Where the project meets other people's frameworks."""

from gym_ckpt_grpc.integrations.asgi import CheckpointMiddleware as CheckpointMiddleware
from gym_ckpt_grpc.integrations.asgi import Refusal as Refusal
from gym_ckpt_grpc.integrations.asgi import answer_refusal as answer_refusal
from gym_ckpt_grpc.integrations.asgi import episode_of as episode_of
