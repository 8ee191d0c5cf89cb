"""The flat public face of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gym_ckpt_grpc


def test_every_public_name_is_there_and_is_that_of_its_room() -> None:
    """Each name of `__all__` is imported at first use."""
    from gym_ckpt_grpc.coordinator import Coordinator

    assert gym_ckpt_grpc.Coordinator is Coordinator
    for name in gym_ckpt_grpc.__all__:
        assert getattr(gym_ckpt_grpc, name).__module__.startswith("gym_ckpt_grpc.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="no attribute 'Cordinator'"):
        gym_ckpt_grpc.Cordinator  # noqa: B018


@pytest.mark.parametrize("room", ["protocol", "storage"])
def test_the_lower_rooms_import_without_grpc(room: str) -> None:
    """The machine and the files can be used where no control plane is installed."""
    code = f"import sys, gym_ckpt_grpc.{room}; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
