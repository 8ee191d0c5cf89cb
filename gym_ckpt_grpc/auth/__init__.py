"""Who may call what: tokens and certificates, roles with default deny, TLS from files, and the audit log."""

from gym_ckpt_grpc.auth.authenticator import Authenticator as Authenticator
from gym_ckpt_grpc.auth.authenticator import Caller as Caller
from gym_ckpt_grpc.auth.authenticator import Denied as Denied
from gym_ckpt_grpc.auth.callers import CertificateRoles as CertificateRoles
from gym_ckpt_grpc.auth.callers import NamedRoles as NamedRoles
from gym_ckpt_grpc.auth.callers import NamedRolesFile as NamedRolesFile
from gym_ckpt_grpc.auth.interceptors import token_interceptors as token_interceptors
from gym_ckpt_grpc.auth.roles import ROLES as ROLES
from gym_ckpt_grpc.auth.roles import Role as Role
from gym_ckpt_grpc.auth.roles import is_reading as is_reading
from gym_ckpt_grpc.auth.tls import ClientTls as ClientTls
from gym_ckpt_grpc.auth.tls import ServerTls as ServerTls
from gym_ckpt_grpc.auth.tokens import TokenFile as TokenFile
from gym_ckpt_grpc.auth.tokens import TokenSource as TokenSource
from gym_ckpt_grpc.auth.tokens import TokenValue as TokenValue
