"""The protocol as a pure machine: ids, phases, fences, leases, errors, validation. No I/O and no clock."""

from gym_ckpt_grpc.protocol.errors import ERRORS as ERRORS
from gym_ckpt_grpc.protocol.errors import ControlError as ControlError
from gym_ckpt_grpc.protocol.errors import ErrorCode as ErrorCode
from gym_ckpt_grpc.protocol.errors import UsageError as UsageError
from gym_ckpt_grpc.protocol.identity import ParticipantIdentity as ParticipantIdentity
from gym_ckpt_grpc.protocol.identity import ParticipantKind as ParticipantKind
from gym_ckpt_grpc.protocol.ids import EpisodeId as EpisodeId
from gym_ckpt_grpc.protocol.ids import EpisodeScope as EpisodeScope
from gym_ckpt_grpc.protocol.phases import Phase as Phase
