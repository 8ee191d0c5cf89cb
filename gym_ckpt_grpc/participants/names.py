"""Names on the data plane: headers and the path prefix, all configurable and checked at construction.

Source: participants section 2.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from gym_ckpt_grpc.protocol.errors import InvalidArgument, UsageError, Violation
from gym_ckpt_grpc.protocol.ids import EpisodeId

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+\Z")


@dataclass(frozen=True, slots=True)
class DataPlaneNames:
    """Header names and the rollout prefix that the servers of one deployment agree on.

    Header names are compared in any case. Raises UsageError naming the option for a name that is no legal header,
    one that stands twice, or a prefix that does not begin with a slash or ends in one.
    """

    verify_header: str = "x-gymckpt-verify"
    restart_header: str = "x-gymckpt-restart"
    activation_header: str = "x-gymckpt-activation"
    waiting_header: str = "x-gymckpt-waiting"
    gate_header: str = "x-gymckpt-gate"
    owner_header: str = "x-gymckpt-owner"
    session_header: str = "x-gymckpt-session"
    rollout_prefix: str = "/rollout"

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "rollout_prefix":
                if not _PREFIX.match(value):
                    raise UsageError(f"rollout_prefix is {value!r}: it must be a path such as /rollout")
                continue
            if not _TOKEN.match(value):
                raise UsageError(f"{option.name} is {value!r}, which is no header name")
            if other := seen.get(value.lower()):
                raise UsageError(f"{option.name} is {value!r}, and so is {other}")
            seen[value.lower()] = option.name

    def is_replay(self, headers: Mapping[str, str]) -> bool:
        """Whether a seed reply allows `/verify` to run twice: exactly `replay`; anything else is wait."""
        return header(headers, self.verify_header) == "replay"

    def is_restart(self, headers: Mapping[str, str]) -> bool:
        """Whether a seed reply says that its session cannot be captured: exactly `1`."""
        return header(headers, self.restart_header) == "1"

    def is_waiting(self, headers: Mapping[str, str]) -> bool:
        """Whether the caller of a policy call is parked for the whole call: exactly `1`."""
        return header(headers, self.waiting_header) == "1"

    def path_of(self, episode: EpisodeId, path: str) -> str:
        """The path of a call for an episode: `<prefix>/<capture key><path>`."""
        return f"{self.rollout_prefix}/{episode.capture_key}{path}"

    def split(self, path: str) -> tuple[EpisodeId | None, str]:
        """Split a request's path into its episode and the path behind the prefix.

        A path without the prefix has no episode. Raises InvalidArgument if the capture key is malformed.
        """
        start = f"{self.rollout_prefix}/"
        if path != self.rollout_prefix and not path.startswith(start):
            return None, path
        key, slash, rest = path[len(start) :].partition("/")
        try:
            return EpisodeId.from_capture_key(key), slash + rest or "/"
        except ValueError as error:
            problem = Violation("path", f"{error}")
            raise InvalidArgument(f"the path has no capture key: {error}", violations=[problem]) from None


def header(headers: Mapping[str, str], name: str) -> str | None:
    """The value of a header, whatever the case of its name; None if it is absent."""
    name = name.lower()
    found = headers.get(name)
    if found is not None:
        return found
    return next((value for key, value in headers.items() if key.lower() == name), None)
