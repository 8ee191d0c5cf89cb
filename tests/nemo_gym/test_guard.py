"""The guard of these tests refuses what would leave the host, here and in every process that a test starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737)."""


def _reach_out(kind: str) -> None:
    if kind == "connect":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outgoing:
            outgoing.connect((ELSEWHERE, 9))
    elif kind == "resolve":
        socket.getaddrinfo("example.invalid", 443)
    else:
        subprocess.run(["git", "--version"], check=True, capture_output=True)


@pytest.mark.parametrize("kind", ["connect", "resolve", "fetch"])
def test_refused_here(kind: str) -> None:
    with pytest.raises(RuntimeError, match=r"socket\.|subprocess"):
        _reach_out(kind)


def test_refused_in_a_child() -> None:
    program = f"import socket; socket.socket(type=socket.SOCK_DGRAM).connect(({ELSEWHERE!r}, 9))"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.returncode == 1
    assert "ReachedOut" in child.stderr


def test_this_host_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.getpeername() == server.getsockname()


def test_the_frameworks_own_parser_is_out_of_the_way() -> None:
    assert os.environ["NEMO_GYM_CONFIG_DICT"]
    assert sys.dont_write_bytecode
