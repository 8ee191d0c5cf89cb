"""The supervisor: nothing starts unnoticed, nothing dies unnamed, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gym_ckpt_grpc.minigym.ports import free_ports
from gym_ckpt_grpc.minigym.processes import ProcessSpec
from gym_ckpt_grpc.minigym.supervisor import Supervisor, Unhealthy

_CHILDREN = Path(__file__).with_name("children")
_STAND_IN = str(_CHILDREN / "stand_in.py")
_TETHER = str(Path(sys.modules[ProcessSpec.__module__].__file__ or "").with_name("tether.py"))


def _spec(name: str, *words: str, port: int = 0, tethered: bool = True) -> ProcessSpec:
    port = port or free_ports(1)[0]
    return ProcessSpec(name, [sys.executable, _STAND_IN, str(port), *words], port, tethered=tethered)


def _ends(pid: int, seconds: float = 10) -> bool:
    """Wait for the end of any process, and say whether it came."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(pidfd)


def _reaped(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_all_roles_start_side_by_side_in_groups_of_their_own(tmp_path: Path) -> None:
    async with Supervisor(tmp_path / "logs") as supervisor:
        await supervisor.start([_spec("a"), _spec("b"), _spec("c", tethered=False)])
        pids = supervisor.pids
        assert set(pids) == {"a", "b", "c"}
        assert all(os.getpgid(pid) == os.getsid(pid) == pid for pid in pids.values())
    assert all(_reaped(pid) for pid in pids.values())
    assert supervisor.pids == {}
    assert (tmp_path / "logs" / "a.log").read_text() == "up with []\ngoodbye\n"


@pytest.mark.parametrize(("word", "ending"), [("fail", "exit code 3"), ("die", "SIGKILL")])
async def test_a_server_that_exits_is_named_at_once_with_the_end_of_its_log(
    tmp_path: Path, word: str, ending: str
) -> None:
    """Long before the deadline; its healthy siblings go with it."""
    child = tmp_path / "sibling-child"
    async with Supervisor(tmp_path) as supervisor:
        with pytest.raises(Unhealthy) as caught:
            await supervisor.start([_spec("good", f"child={child}"), _spec("bad", word)], within=1000)
        assert set(caught.value.problems) == {"bad"}
        assert f"exited with {ending}; end of bad.log:\nup with" in caught.value.problems["bad"]
        assert ("no such card" in str(caught.value)) == (word == "fail")
        assert supervisor.pids == {}
    if child.exists():
        assert _ends(int(child.read_text()))


@pytest.mark.parametrize(("word", "answer"), [("mute", "Cannot connect"), ("busy", "HTTP 503")])
async def test_a_server_not_healthy_in_time_is_named_with_its_last_answer(
    tmp_path: Path, word: str, answer: str
) -> None:
    async with Supervisor(tmp_path) as supervisor:
        await supervisor.start([_spec("good")])
        with pytest.raises(Unhealthy, match=f"running, but not healthy .*{answer}") as caught:
            await supervisor.start([_spec("slow", word)], within=1)
        assert set(caught.value.problems) == {"slow"}
        assert set(supervisor.pids) == {"good"}  # started by another call: untouched


async def test_the_health_of_a_foreign_server_on_the_port_does_not_count(tmp_path: Path) -> None:
    first = _spec("first")
    async with Supervisor(tmp_path) as supervisor:
        await supervisor.start([first])
        owner = supervisor.pids["first"]
        with pytest.raises(Unhealthy, match=f"is served by process {owner}"):
            await supervisor.start([_spec("second", "mute", port=first.port)], within=1)


async def test_a_crash_leaves_no_process_of_any_group_and_the_ports_can_be_used_again(tmp_path: Path) -> None:
    """Children of servers die too, and who ignores SIGTERM; the second life appends to the same logs."""
    child = tmp_path / "child.pid"
    specs = [_spec("a", f"child={child}"), _spec("b", "deaf")]
    async with Supervisor(tmp_path) as supervisor:
        await supervisor.start(specs)
        pids = supervisor.pids
        await supervisor.crash()
        assert all(_reaped(pid) for pid in pids.values())
        assert _ends(int(child.read_text()), seconds=0)
        assert supervisor.pids == {}
        await supervisor.start(specs)
        assert not set(supervisor.pids.values()) & set(pids.values())
        await supervisor.crash()
    assert (tmp_path / "b.log").read_text() == "up with ['deaf']\n" * 2


async def test_an_error_shows_nothing_that_an_earlier_life_wrote(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor:
        await supervisor.start([_spec("a", "first")])
        await supervisor.crash()
        with pytest.raises(Unhealthy) as caught:
            await supervisor.start([_spec("a", "fail")])
    assert "up with ['fail']" in str(caught.value)
    assert "first" not in str(caught.value)


async def test_stop_asks_first_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    child = tmp_path / "child.pid"
    async with Supervisor(tmp_path) as supervisor:
        await supervisor.start([_spec("polite"), _spec("deaf", "deaf", f"child={child}")])
        pids = supervisor.pids
        await supervisor.stop(grace=0.2)
    assert all(_reaped(pid) for pid in pids.values())
    assert _ends(int(child.read_text()), seconds=0)
    assert "goodbye" in (tmp_path / "polite.log").read_text()
    assert "goodbye" not in (tmp_path / "deaf.log").read_text()


async def test_kill_ends_one_process_and_leaves_the_others(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor:
        await supervisor.start([_spec("a"), _spec("b")])
        victim = supervisor.pids["a"]
        await supervisor.kill("a")
        assert _reaped(victim)
        assert set(supervisor.pids) == {"b"}
        with pytest.raises(KeyError):
            await supervisor.kill("a")


async def test_first_exit_says_who_died_and_how(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor:
        with pytest.raises(RuntimeError, match="no process"):
            await supervisor.first_exit()
        await supervisor.start([_spec("a"), _spec("b")])
        watch = asyncio.create_task(supervisor.first_exit())
        os.kill(supervisor.pids["b"], signal.SIGKILL)
        assert (await watch).startswith("b: exited with SIGKILL; end of b.log:\nup with []")


async def test_an_exception_or_a_cancellation_leaves_nothing(tmp_path: Path) -> None:
    pids: list[int] = []
    up = asyncio.Event()

    async def block(error: Exception | None) -> None:
        async with Supervisor(tmp_path) as supervisor:
            await supervisor.start([_spec("a", "deaf")])
            pids.extend(supervisor.pids.values())
            up.set()
            if error:
                raise error
            await asyncio.Event().wait()

    with pytest.raises(LookupError):
        await block(LookupError())
    up.clear()
    task = asyncio.create_task(block(None))
    await up.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(pids) == 2
    assert all(_reaped(pid) for pid in pids)


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor:
        starting = asyncio.create_task(supervisor.start([_spec("a", "mute"), _spec("b", "mute")], within=1000))
        await asyncio.sleep(0)  # one turn of the loop: a start tracks its processes before it waits
        pids = supervisor.pids
        assert set(pids) == {"a", "b"}
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert supervisor.pids == {}
        assert all(_reaped(pid) for pid in pids.values())


async def test_names_are_unique(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as supervisor:
        with pytest.raises(ValueError, match="a: running already, or named twice"):
            await supervisor.start([_spec("a"), _spec("a")])
        await supervisor.start([_spec("a")])
        with pytest.raises(ValueError, match="a: running"):
            await supervisor.start([_spec("b"), _spec("a")])
        assert set(supervisor.pids) == {"a"}


@pytest.mark.parametrize("tethered", [True, False])
async def test_a_program_that_does_not_exist_is_an_error_and_leaves_nothing(tmp_path: Path, tethered: bool) -> None:
    port = free_ports(1)[0]
    spec = ProcessSpec("b", [str(tmp_path / "missing")], port, tethered=tethered)
    async with Supervisor(tmp_path) as supervisor:
        with pytest.raises((Unhealthy, FileNotFoundError), match="missing"):
            await supervisor.start([_spec("a"), spec])
        assert supervisor.pids == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_children_do_not_outlive_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    """SIGKILL and SIGTERM run no code of the parent: the kernel ends the children. Ctrl-C stops them."""
    command = [sys.executable, str(_CHILDREN / "parent.py"), str(tmp_path), _STAND_IN]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as parent:
        assert parent.stdout is not None
        try:
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2
            parent.send_signal(number)
            assert all(_ends(pid) for pid in pids)
            assert parent.wait(10) != 0
        finally:
            parent.kill()


def test_a_tether_whose_parent_is_gone_runs_nothing(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    result = subprocess.run([sys.executable, "-I", "-S", _TETHER, "1", "touch", str(touched)], check=False)
    assert result.returncode == 70
    assert not touched.exists()


def test_free_ports_are_distinct_and_free_and_not_of_the_ephemeral_range() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in ports:
        assert port < first or first < 11_000
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
