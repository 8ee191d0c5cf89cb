"""The coordinator as a service, for trainers in any language."""

from gym_ckpt_grpc.coordinator.served.server import CoordinatorServer as CoordinatorServer
