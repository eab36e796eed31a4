"""The command `jaxhetero reducer`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import free_port
from tests.support.launcher import JAXHETERO, TIMEOUT_S, is_running, wait_for


@contextlib.contextmanager
def _reducer(port: int, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    environ = {"JAXHETERO_TOKEN": "secret", "JAXHETERO_COORDINATOR": f"127.0.0.1:{free_port()}"} | environ
    command = [*JAXHETERO, "reducer", "--host", "127.0.0.1", "--port", str(port), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environ) as process:
        try:
            yield process
        finally:
            process.kill()


def _await_listener(port: int) -> None:
    def listens() -> bool:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    wait_for(listens)


def test_a_reducer_is_small() -> None:
    port = free_port()
    with _reducer(port) as process:
        _await_listener(port)
        status = Path(f"/proc/{process.pid}/status").read_text()
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10 < 60e6


def test_a_reducer_imports_neither_jax_nor_numpy() -> None:
    code = (
        "import sys; from jaxhetero.cli import main; code = main(); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'jax', 'jaxlib', 'numpy'}), code)"
    )
    environ = os.environ | {"JAXHETERO_TOKEN": "secret"}
    command = [
        sys.executable,
        "-c",
        code,
        "reducer",
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--host",
        "127.0.0.1",
    ]
    done = subprocess.run(
        [*command, "--start-timeout-ms", "100"], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert "StartTimeout" in done.stderr
    assert done.stdout == "1\n"


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        ([], {"JAXHETERO_COORDINATOR": ""}, ["no coordinator", "--coordinator"]),
        (["--coordinator", "nowhere"], {}, ["'nowhere'", "host:port"]),
        ([], {"JAXHETERO_TOKEN": ""}, ["no job token", "--token-file"]),
        (["--token-file", "/nowhere"], {}, ["/nowhere", "No such file"]),
        (["--timeout-ms", "0"], {}, ["--timeout-ms", "0"]),
        ([], {"JAXHETERO_TIMEOUT_MS": "soon"}, ["JAXHETERO_TIMEOUT_MS", "'soon'"]),
        (["--token", "secret"], {}, ["--token"]),
        (["--port", "65536"], {}, ["--port", "65536"]),
    ],
)
def test_a_reducers_bad_setting_is_one_line_and_code_2(
    arguments: list[str], environ: dict[str, str], words: list[str]
) -> None:
    with _reducer(0, *arguments, **environ) as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_reducer_stops_at_once_on_a_signal(number: signal.Signals) -> None:
    port = free_port()
    with _reducer(port) as process:
        _await_listener(port)
        started = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - started < 10
    assert process.returncode == 128 + number
    assert f"got {number.name}" in err
    assert "Traceback" not in err
    assert "done: met nobody" in err


def test_a_reducer_that_meets_nobody_says_so() -> None:
    with _reducer(0, "--start-timeout-ms", "300") as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("jaxhetero: StartTimeout: ")


def test_a_reducers_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with _reducer(port) as process:
            _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert re.search(rf"jaxhetero: AddressInUse: .*127\.0\.0\.1:{port}", err), err


# --- --restart


def _child_of(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    wait_for(lambda: children.read_text().split())
    return int(children.read_text().split()[0])


def test_a_reducer_that_crashes_is_started_anew() -> None:
    port = free_port()
    with _reducer(port, "--restart", "2") as process:
        victims = []
        for _ in range(3):
            _await_listener(port)
            victims.append(_child_of(process.pid))
            os.kill(victims[-1], signal.SIGKILL)
            wait_for(lambda: not Path(f"/proc/{victims[-1]}").exists())
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGKILL
        assert process.stderr is not None
        text = process.stderr.read()
    assert len(set(victims)) == 3
    assert re.findall(r"was killed by SIGKILL; starting it anew, (\d) of at most 2 times", text) == ["1", "2"]


def test_a_signal_ends_a_reducer_that_would_be_started_anew() -> None:
    port = free_port()
    with _reducer(port, "--restart", "2") as process:
        _await_listener(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM


def test_a_reducer_ends_with_what_would_start_it_anew() -> None:
    port = free_port()
    with _reducer(port, "--restart", "2") as process:
        _await_listener(port)
        child = _child_of(process.pid)
        process.kill()
        wait_for(lambda: not is_running(child))


def test_a_failed_job_is_no_reason_to_start_a_reducer_anew() -> None:
    with _reducer(0, "--restart", "2", "--start-timeout-ms", "200") as process:
        assert process.wait(TIMEOUT_S) == 1
        assert process.stderr is not None
        text = process.stderr.read()
    assert "StartTimeout: the coordinator at 127.0.0.1:" in text
    assert "anew" not in text
    assert "Traceback" not in text


# --- A name that comes later


def _in_a_world_of_names(hosts: Path, *command: str) -> list[str]:
    """The command, where this file says which names there are, and nobody else is asked."""
    (hosts.parent / "nsswitch.conf").write_text("hosts: files\n")
    mount = 'mount --bind "$0" /etc/hosts && mount --bind "$1" /etc/nsswitch.conf && shift && exec "$@"'
    return ["unshare", "--mount", "bash", "-c", mount, str(hosts), str(hosts.parent / "nsswitch.conf"), *command]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change /etc/hosts for one process")
def test_a_reducer_waits_for_the_coordinators_name(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    coordinator = f"rank-0:{free_port()}"
    command = _in_a_world_of_names(hosts, *JAXHETERO, "reducer", "--coordinator", coordinator)
    environ = os.environ | {"JAXHETERO_TOKEN": "secret"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stderr is not None
            assert f"still looking for the name of the coordinator {coordinator}" in process.stderr.readline()
            with hosts.open("a") as file:
                file.write("127.0.0.1 rank-0\n")
            while "still trying to reach the coordinator at 127.0.0.1:" not in (line := process.stderr.readline()):
                assert "still looking for the name" in line
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change /etc/hosts for one process")
def test_a_name_that_never_comes_is_told_and_a_signal_ends_the_wait(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    command = _in_a_world_of_names(hosts, *JAXHETERO, "reducer", "--coordinator", "rank-0:4000")
    environ = os.environ | {"JAXHETERO_TOKEN": "secret"}
    done = subprocess.run([*command, "--start-timeout-ms", "300"], capture_output=True, text=True, env=environ)
    assert done.returncode == 1
    assert "StartTimeout: the name of the coordinator rank-0:4000 was not found in 0.3 s (Name or " in done.stderr
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stderr is not None
            assert "still looking" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
