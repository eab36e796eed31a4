"""`jaxhetero launch` as a user meets it: real processes, their ends, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxhetero._job.ports import reserve_port
from jaxhetero.errors import AddressInUse
from tests.support.cluster import free_port
from tests.support.launcher import FAMILY, JAXHETERO, TIMEOUT_S, Run, Start, is_running, read_pids, wait_for

# What the processes are told


def test_every_worker_learns_its_place(launch: Run) -> None:
    code = "import json; from jaxhetero.config import read_environment; print(json.dumps(read_environment()))"
    outer = {name: value for name, value in os.environ.items() if not name.startswith("JAXHETERO_")}
    outer |= {"JAXHETERO_TOKEN_FILE": "/nowhere", "JAXHETERO_RANK": "77", "JAXHETERO_WINDOW_CHUNKS": "3"}

    def settings(*arguments: str) -> list[dict[str, Any]]:
        done = launch("--workers", "2", *arguments, "--", sys.executable, "-c", code, env=outer)
        assert done.returncode == 0, done.stderr
        return [json.loads(line.partition("] ")[2]) for line in sorted(done.stdout.splitlines())]

    one, two = settings(), settings("--start-timeout-ms", "1234", "--timeout-ms", "567")
    assert [worker.pop("rank") for worker in one] == [0, 1]
    assert one[0] == one[1]
    assert len(one[0]["token"]) >= 32
    assert one[0]["token"] != two[0]["token"]
    assert one[0]["coordinator"].startswith("127.0.0.1:")
    assert one[0] | {"token": "", "coordinator": ""} == {
        "worker_count": 2, "reducer_count": 0, "host": "127.0.0.1", "window_chunks": 3, "token": "", "coordinator": "",
        "restart_count": 0, "metrics_port": 0,
    }  # fmt: skip
    assert (two[1]["start_timeout_ms"], two[1]["timeout_ms"]) == (1234, 567)


def test_metrics_ports_are_counted_from_the_first(launch: Run) -> None:
    code = "import os; print(os.environ['JAXHETERO_METRICS_PORT'])"
    done = launch("--workers", "2", "--metrics-port", "9400", "--", sys.executable, "-c", code)
    assert sorted(done.stdout.splitlines()) == ["[worker 0] 9400", "[worker 1] 9401"], done.stderr
    assert "metrics at 127.0.0.1:9400 to 9401" in done.stderr
    done = launch("--workers", "2", "--metrics-port", "65535", "--", "true")
    assert done.returncode == 2
    assert "metrics_port is 65535; this job's ports from there must be in 1..65535" in done.stderr


def test_the_commands_own_options_are_its_own(launch: Run) -> None:
    assert launch("--workers", "1", "echo", "--workers", "--", "x").stdout == "[worker 0] --workers -- x\n"


def test_the_coordinators_port_is_held_for_rank_0_alone() -> None:
    holders = [reserve_port(0) for _ in range(50)]
    with contextlib.ExitStack() as stack:
        for holder in holders:
            stack.enter_context(holder)
        assert len({holder.getsockname() for holder in holders}) == 50
        address = holders[0].getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        with socket.create_server(address) as listener, socket.create_connection(address):
            listener.accept()[0].close()
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(AddressInUse, match="in use"):
        reserve_port(listener.getsockname()[1])


def test_the_ports_of_these_tests_are_held() -> None:
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", free_port()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0", "--", "true"], ["--workers", "0 is not in the range x>=1"]),
        (["--workers", "x", "--", "true"], ["--workers", "'x'"]),
        (["--reducers", "1", "--", "true"], ["--workers"]),
        (["--workers", "2", "--reducers", "-1", "--", "true"], ["--reducers", "-1"]),
        (["--workers", "2"], ["COMMAND"]),
        (["--workers", "2", "--"], ["COMMAND"]),
        (["--workers", "2", "--", "no-such-command"], ["no-such-command", "not found"]),
        (["--workers", "2", "--", "./script"], ["cannot start worker 0", "./script", "Exec format error"]),
        (["--workers", "2", "--coordinator-port", "65536", "--", "true"], ["--coordinator-port", "65536"]),
        (["--workers", "2", "--log-dir", "script/x", "--", "true"], ["logs", "script/x", "Not a directory"]),
        (["--workers", "2", "--what", "--", "true"], ["--what"]),
    ],
)
def test_bad_input_is_one_line_and_code_2(launch: Run, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    (tmp_path / "script").write_bytes(b"\x00")
    (tmp_path / "script").chmod(0o755)
    done = launch(*arguments)
    complaint = [line for line in done.stderr.splitlines() if "coordinator 127.0.0.1" not in line]
    assert (done.returncode, done.stdout, len(complaint)) == (2, "", 1)
    assert complaint[0].startswith("jaxhetero")
    assert all(word in complaint[0] for word in words), complaint[0]


def test_a_bad_setting_in_the_environment_is_found_before_anything_starts(launch: Run) -> None:
    done = launch("--workers", "2", "--", "true", env=os.environ | {"JAXHETERO_CHUNK_BYTES": "7"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jaxhetero: ConfigError: chunk_bytes is 7;")


def test_a_port_in_use_is_named(launch: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = launch("--workers", "2", "--coordinator-port", str(port), "--", "true")
    assert done.returncode == 1
    assert f"AddressInUse: cannot use 127.0.0.1:{port}" in done.stderr


def test_the_version_is_that_of_the_native_module() -> None:
    done = subprocess.run([*JAXHETERO, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"jaxhetero \d+\.\d+\.\d+\S*\n", done.stdout)


# How a job ends


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("exit 3", 3, "exited with code 3"),
        ("kill -KILL $$", 137, "was killed by SIGKILL"),
        ("kill -SEGV $$", 139, "was killed by SIGSEGV"),
    ],
)
def test_a_failure_stops_the_rest_and_is_named(launch: Run, script: str, code: int, words: str) -> None:
    started = time.monotonic()
    done = launch("--workers", "3", "--", "sh", "-c", f"seq 30; [ $JAXHETERO_RANK = 2 ] || exec sleep 600; {script}")
    assert time.monotonic() - started < 10
    assert done.returncode == code
    report = re.search(
        rf"worker 2 \(pid \d+\) {words}; last lines of its log logs/worker-2.log:\n(( +\d+\n)+)", done.stderr
    )
    assert report, done.stderr
    assert report[1].split() == [str(number) for number in range(11, 31)]
    assert f"{words}; stopping 2 other processes" in done.stderr
    assert done.stderr.endswith("logs of all processes in logs\n")


@pytest.mark.parametrize(
    ("scripts", "culprit", "code"),
    [
        # The first of two failures a moment apart: worker 0 sees worker 1's end as it would on a connection.
        (["cat connection; sleep 0.05; exit 4", "exec 3> connection; sleep 0.2; exit 3"], 1, 3),
        # A kill explains more than an exit, even if that is seen first.
        (["exit 4", "sleep 0.05; kill -KILL $$"], 1, 137),
        # Who only tells of another's end is not the cause, though the cause takes longer to end.
        (["echo jaxhetero.WorkerLost: rank 1 >&2; exit 1", "sleep 0.8; exit 7"], 1, 7),
        (["echo jaxhetero.WorkerLost: rank 1 >&2; exit 1", "exec sleep 600"], 0, 1),
        # The cause hears of its own end from the others, and of more.
        (["echo WorkerLost: rank 1; exit 1", "echo WorkerLost: rank 1; sleep 0.1; exit 7"], 1, 7),
        (["echo WorkerLost: rank 1; exit 1", "echo ReducerLost: reducer 0; sleep 0.1; exit 7"], 1, 7),
    ],
)
def test_the_cause_is_named_not_its_consequence(
    launch: Run, tmp_path: Path, scripts: list[str], culprit: int, code: int
) -> None:
    os.mkfifo(tmp_path / "connection")
    arms = " ".join(f"{rank}) {script};;" for rank, script in enumerate(scripts))
    done = launch(
        "--workers", "2", "--stop-timeout-ms", "4000", "--", "sh", "-c", f"case $JAXHETERO_RANK in {arms} esac"
    )
    assert done.returncode == code
    assert re.search(rf"worker {culprit} \(pid \d+\) .*; last lines", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("script", "failover", "code", "words"),
    [
        ("exit 0", "1", 0, "killed by SIGKILL; the workers may go on without it"),
        ("exit 3", "1", 3, r"worker 0 \(pid \d+\) exited with code 3; last lines"),
        (
            "echo ReducerLost: no reducer is left; exit 1",
            "1",
            137,
            r"reducer 0 \(pid \d+\) was killed by SIGKILL; last",
        ),
        ("exit 0", "0", 137, "killed by SIGKILL; stopping 1 other process"),
    ],
)
def test_workers_may_go_on_without_a_reducer(
    start_launch: Start, tmp_path: Path, script: str, failover: str, code: int, words: str
) -> None:
    arguments = (
        "--workers",
        "1",
        "--reducers",
        "1",
        "--",
        "sh",
        "-c",
        f"until [ -e go ]; do sleep 0.05; done; {script}",
    )
    process = start_launch(*arguments, env=os.environ | {"JAXHETERO_FAILOVER": failover})
    launcher = psutil.Process(process.pid)
    wait_for(lambda: any("reducer" in child.cmdline() for child in launcher.children()))
    next(child for child in launcher.children() if "reducer" in child.cmdline()).kill()
    assert process.stderr is not None
    told = next(line for line in iter(process.stderr.readline, "") if "SIGKILL" in line)
    (tmp_path / "go").touch()
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code
    assert re.search(words, told + err), err


_TRAIN = """
import jax, jax.numpy as jnp, jaxhetero, sys
jaxhetero.initialize()
step = jax.jit(jaxhetero.psum)
for number in range(int(sys.argv[1])):
    if number == 10 and jaxhetero.rank() == 1:
        print("under way")
        if sys.argv[2] == "raise":
            raise ValueError("a bug of the user")
    step(jnp.ones(1000)).block_until_ready()
"""


def test_a_worker_that_raises_in_the_middle_of_a_job_is_named(launch: Run) -> None:
    done = launch("--workers", "3", "--reducers", "1", "--", sys.executable, "-c", _TRAIN, "20", "raise")
    assert done.returncode == 1
    report = re.search(r"worker 1 \(pid \d+\) exited with code 1; last lines.*", done.stderr, re.DOTALL)
    assert report, done.stderr
    assert "    ValueError: a bug of the user\n" in report[0]


def test_a_process_that_does_not_stop_is_killed(launch: Run) -> None:
    script = "[ $JAXHETERO_RANK = 0 ] || { sleep 0.5; exit 5; }; trap '' TERM; while :; do sleep 0.1; done"
    done = launch("--workers", "2", "--stop-timeout-ms", "300", "--", "sh", "-c", script)
    assert done.returncode == 5
    assert "worker 0 did not end within 0.3 s; killing" in done.stderr


def test_a_paused_process_is_stopped_as_well(launch: Run) -> None:
    done = launch(
        "--workers", "2", "--", "sh", "-c", "[ $JAXHETERO_RANK = 0 ] || { sleep 0.3; exit 5; }; kill -STOP $$"
    )
    assert done.returncode == 5
    assert "did not end" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(start_launch: Start, tmp_path: Path, number: signal.Signals) -> None:
    script = FAMILY + f"trap 'echo got it; exit 0' {number.name[3:]}; while :; do sleep 0.05; done"
    process = start_launch("--workers", "2", "--", "sh", "-c", script)
    pids = read_pids(tmp_path, 4)
    # The trap is set just after the last file is written.
    time.sleep(0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + number
    assert sorted(out.splitlines()) == ["[worker 0] got it", "[worker 1] got it"]
    assert f"got {number.name} and passed it on" in err
    assert "killing" not in err
    assert not any(map(is_running, pids))


def test_reducers_serve_until_interrupted_workers_have_left(start_launch: Start) -> None:
    process = start_launch("--workers", "2", "--reducers", "2", "--", sys.executable, "-c", _TRAIN, "1000000", "go on")
    assert process.stdout is not None
    assert "under way" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "ReducerLost" not in err
    assert "did not end" not in err


def test_a_second_interrupt_kills(start_launch: Start, tmp_path: Path) -> None:
    process = start_launch(
        "--workers", "2", "--", "sh", "-c", "trap '' INT; " + FAMILY + "while :; do sleep 0.05; done"
    )
    pids = read_pids(tmp_path, 4)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(3) == 130
    assert not any(map(is_running, pids))


def test_a_signal_that_was_ignored_at_the_start_stays_so(start_launch: Start, tmp_path: Path) -> None:
    # Inherited rather than set in the child, which would take a fork of this process and its threads.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start_launch("--workers", "1", "--", "sh", "-c", FAMILY + "sleep 0.7")
    finally:
        signal.signal(signal.SIGHUP, before)
    read_pids(tmp_path, 2)
    process.send_signal(signal.SIGHUP)
    assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("end", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)], ids=["success", "failure", "killed"]
)
def test_what_workers_started_ends_with_them(launch: Run, tmp_path: Path, end: str, code: int) -> None:
    started = time.monotonic()
    done = launch("--workers", "2", "--", "sh", "-c", FAMILY + end)
    assert time.monotonic() - started < 10
    assert done.returncode == code
    assert not any(map(is_running, read_pids(tmp_path, 4)))


@pytest.mark.parametrize("round_", range(3))
def test_nothing_outlives_a_launcher_that_is_killed(start_launch: Start, tmp_path: Path, round_: int) -> None:
    process = start_launch("--workers", "2", "--", "sh", "-c", "trap '' TERM HUP; " + FAMILY + "wait")
    pids = read_pids(tmp_path, 4)
    assert all(map(is_running, pids))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 3, "two workers and the guard"
    process.kill()
    wait_for(lambda: not any(map(is_running, [*pids, *map(int, children)])))


def test_nothing_outlives_a_launcher_killed_while_it_starts(start_launch: Start) -> None:
    marker = f"600.{os.getpid()}"

    def running() -> bool:
        commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
        with contextlib.suppress(OSError):
            return any(command == b"sleep\0" + marker.encode() + b"\0" for command in commands)
        return True

    for delay_ms in range(0, 24, 3):
        process = start_launch("--workers", "4", "--", "sleep", marker)
        # Said just before the first worker starts.
        assert process.stderr is not None
        assert "4 workers" in process.stderr.readline()
        time.sleep(delay_ms / 1000)
        process.kill()
        process.wait()
    wait_for(lambda: not running())


def test_a_job_whose_reducers_never_meet_a_worker_names_one(launch: Run) -> None:
    done = launch("--workers", "2", "--reducers", "2", "--start-timeout-ms", "500", "--", "sleep", "600")
    assert done.returncode == 1
    assert re.search(r"reducer \d \(pid \d+\) exited with code 1; last lines", done.stderr), done.stderr
    assert "StartTimeout" in done.stderr


def test_reducers_that_stay_are_stopped_after_the_workers_end(launch: Run) -> None:
    started = time.monotonic()
    done = launch("--workers", "2", "--reducers", "2", "--", "true")
    assert done.returncode == 0
    assert time.monotonic() - started > 4
    assert "every worker is done but reducer 0, reducer 1 did not end within 5 s; stopping" in done.stderr
