"""Where the project meets other people's frameworks."""

from gym_ckpt_grpc.integrations.asgi import CheckpointMiddleware as CheckpointMiddleware
from gym_ckpt_grpc.integrations.asgi import Refusal as Refusal
from gym_ckpt_grpc.integrations.asgi import RolloutPrefix as RolloutPrefix
from gym_ckpt_grpc.integrations.asgi import answer_refusal as answer_refusal
from gym_ckpt_grpc.integrations.asgi import episode_of as episode_of
from gym_ckpt_grpc.integrations.asgi import visit_of as visit_of
from gym_ckpt_grpc.integrations.body_identity import BodyIdentity as BodyIdentity
from gym_ckpt_grpc.integrations.body_identity import rollout_in_body as rollout_in_body
from gym_ckpt_grpc.integrations.ledger_client import HttpReply as HttpReply
from gym_ckpt_grpc.integrations.ledger_client import LedgerClient as LedgerClient
from gym_ckpt_grpc.integrations.ledger_client import Transport as Transport
from gym_ckpt_grpc.integrations.ledger_routes import LedgerRoutes as LedgerRoutes
