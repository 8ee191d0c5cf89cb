"""The servers of NeMo Gym as participants: mixins for its four kinds, and what a launcher needs to apply them.

Importing this package imports nothing of the framework; the mixins (`resources`, `agent`, `environment`, `policy`) do.
"""

from gym_ckpt_grpc.integrations.nemo_gym.classes import checkpointed as checkpointed
from gym_ckpt_grpc.integrations.nemo_gym.names import BYPASS as BYPASS
from gym_ckpt_grpc.integrations.nemo_gym.names import NAMES as NAMES
from gym_ckpt_grpc.integrations.nemo_gym.names import NemoTokens as NemoTokens
from gym_ckpt_grpc.integrations.nemo_gym.names import episode_of_body as episode_of_body
from gym_ckpt_grpc.integrations.nemo_gym.options import Options as Options
from gym_ckpt_grpc.integrations.nemo_gym.options import options_of as options_of
