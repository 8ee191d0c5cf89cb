"""Who may call what: bearer tokens, roles with default deny, both halves of the interceptor."""

from gym_ckpt_grpc.auth.interceptors import AuthServerInterceptor as AuthServerInterceptor
from gym_ckpt_grpc.auth.interceptors import token_interceptors as token_interceptors
from gym_ckpt_grpc.auth.roles import ROLES as ROLES
from gym_ckpt_grpc.auth.roles import Role as Role
from gym_ckpt_grpc.auth.tokens import Authenticator as Authenticator
from gym_ckpt_grpc.auth.tokens import TokenFile as TokenFile
from gym_ckpt_grpc.auth.tokens import TokenSource as TokenSource
from gym_ckpt_grpc.auth.tokens import TokenValue as TokenValue
