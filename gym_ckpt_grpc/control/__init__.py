"""The control plane of one participant, its servicer, and the one way to make a channel."""

from gym_ckpt_grpc.control import wire as wire
from gym_ckpt_grpc.control.budget import Budget as Budget
from gym_ckpt_grpc.control.budget import Clock as Clock
from gym_ckpt_grpc.control.channel import open_channel as open_channel
from gym_ckpt_grpc.control.control_plane import ControlPlane as ControlPlane
from gym_ckpt_grpc.control.error_details import error_from as error_from
from gym_ckpt_grpc.control.ports import Closing as Closing
from gym_ckpt_grpc.control.ports import EpisodeListKind as EpisodeListKind
from gym_ckpt_grpc.control.ports import HookFailed as HookFailed
from gym_ckpt_grpc.control.ports import InvalidState as InvalidState
from gym_ckpt_grpc.control.ports import MarkView as MarkView
from gym_ckpt_grpc.control.ports import Opening as Opening
from gym_ckpt_grpc.control.ports import OpeningCause as OpeningCause
from gym_ckpt_grpc.control.ports import OwnerDefaults as OwnerDefaults
from gym_ckpt_grpc.control.ports import OwnerPort as OwnerPort
from gym_ckpt_grpc.control.ports import RecordBatch as RecordBatch
from gym_ckpt_grpc.control.ports import StateOwner as StateOwner
from gym_ckpt_grpc.control.server import ParticipantServer as ParticipantServer
from gym_ckpt_grpc.control.settings import ControlSettings as ControlSettings
