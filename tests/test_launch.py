"""`jaxhetero launch` as a user meets it: real processes, their output, their ends, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxhetero._display import LineSplitter, last_lines
from jaxhetero.errors import AddressInUse
from jaxhetero.launch import reserve_port

_JAXHETERO = [sys.executable, "-m", "jaxhetero"]
_LAUNCH = [*_JAXHETERO, "launch", "--log-dir", "logs"]
_TIMEOUT_S = 60

# Any: text, or bytes with text=False.
Run = Callable[..., "subprocess.CompletedProcess[Any]"]
Start = Callable[..., "subprocess.Popen[Any]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launcher in a folder of its own; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
            defaults: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            command = [*_LAUNCH, *arguments]
            process = stack.enter_context(subprocess.Popen(command, cwd=tmp_path, **defaults | options))
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def run(start: Start) -> Run:
    """Run a launcher to its end."""

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=_TIMEOUT_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return run


def _wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in b"ZX"


def _read_pids(folder: Path, count: int) -> list[int]:
    """The process ids that ``count`` children wrote into files, once all are there."""
    _wait_for(lambda: sum(path.stat().st_size > 0 for path in folder.glob("*.pid")) == count)
    return [int(path.read_text()) for path in folder.glob("*.pid")]


# A worker with a child of its own: both pids go into files.
_FAMILY = "sleep 600 & echo $! > child-$JAXHETERO_RANK.pid; echo $$ > self-$JAXHETERO_RANK.pid; "


# Output


def test_output_is_prefixed_and_saved(run: Run, tmp_path: Path) -> None:
    done = run("--workers", "2", "--", "sh", "-c", "echo out $JAXHETERO_RANK; echo err >&2; printf 'no end'")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[worker {rank}] {text}" for rank in (0, 1) for text in
                                                ("no end", f"out {rank}")]  # fmt: skip
    assert done.stdout.endswith("\n")
    first, *others = done.stderr.splitlines()
    assert re.fullmatch(r"jaxhetero launch: 2 workers, 0 reducers, coordinator 127\.0\.0\.1:\d+, logs in logs", first)
    assert sorted(others) == ["[worker 0] err", "[worker 1] err"]
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"worker-{rank}.log").read_text()
        assert sorted(log.replace("no end", "no end\n").split("\n")) == sorted([f"out {rank}", "err", "no end", ""])


def test_prefixes_are_aligned_and_plain_when_not_on_a_terminal(run: Run) -> None:
    done = run("--workers", "11", "--", "echo", "x")
    assert sorted(done.stdout.splitlines()) == sorted(f"{f'[worker {rank}]':11} x" for rank in range(11))


def test_the_default_log_folder_is_fresh_every_time(tmp_path: Path) -> None:
    for _ in range(2):
        command = [*_JAXHETERO, "launch", "--workers", "1", "--", "echo", "x"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=_TIMEOUT_S)
    folders = list((tmp_path / "jaxhetero-logs").iterdir())
    assert len(folders) == 2
    assert all((folder / "worker-0.log").read_text() == "x\n" for folder in folders)


def test_long_lines_stay_whole(run: Run, tmp_path: Path) -> None:
    code = "import os, sys; r = os.environ['JAXHETERO_RANK']; [print(r * (1 << 20)) for _ in range(4)]"
    done = run("--workers", "3", "--", sys.executable, "-c", code)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[worker {r}] {str(r) * (1 << 20)}" for r in range(3) for _ in "1234"
    )
    assert (tmp_path / "logs" / "worker-1.log").stat().st_size == 4 * ((1 << 20) + 1)


def test_a_line_without_end_does_not_fill_memory() -> None:
    splitter = LineSplitter()
    pieces = [piece for _ in range(40) for piece in splitter.feed(b"x" * (1 << 20))]
    assert len(pieces) >= 4
    assert sum(map(len, [*pieces, *splitter.close()])) == 40 << 20


def test_bytes_that_are_no_text_pass_unchanged(run: Run, tmp_path: Path) -> None:
    code = "import random, sys; sys.stdout.buffer.write(random.Random(7).randbytes(200_000))"
    done = run("--workers", "1", "--", sys.executable, "-c", code, text=False)
    assert done.returncode == 0
    assert (tmp_path / "logs" / "worker-0.log").read_bytes() == random.Random(7).randbytes(200_000)
    assert b"[worker 0] " in done.stdout


def test_output_appears_while_the_job_runs(start: Start) -> None:
    process = start("--workers", "1", "--", sys.executable, "-c", "import time; print('now'); time.sleep(600)")
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 20)[0]
    assert process.stdout.readline() == "[worker 0] now\n"


def test_the_job_outlives_whoever_reads_its_output(run: Run, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as closed:  # noqa: PTH123 (a descriptor, not a path)
        done = run("--workers", "1", "--", "sh", "-c", "seq 100000; echo end >&2", stdout=closed)
    assert done.returncode == 0
    assert "[worker 0] end" in done.stderr
    assert (tmp_path / "logs" / "worker-0.log").read_text().endswith("100000\nend\n")


@pytest.mark.parametrize(
    ("pieces", "lines", "update"),
    [
        ([b"a\nb\n"], [b"a", b"b"], None),
        ([b"a", b"b\n", b"c"], [b"ab"], None),
        ([b"\n\n"], [b"", b""], None),
        ([b"a\r\nb\r\n"], [b"a", b"b"], None),
        ([b"a\r", b"\n"], [b"a"], None),
        ([b"\r 1%", b"\r 2%"], [], b" 2%"),
        ([b"1%\r", b"2%\r"], [], b"2%"),
        ([b"\r 1", b"0%"], [], b" 10%"),
        ([b"\r 1%", b"\r100%\n"], [b"100%"], None),
        ([b"\r 1%\nnext"], [b" 1%"], None),
        ([b"a\x1b[A\x1b[2Kb \x1b[31mred\x1b[0m\n"], [b"ab \x1b[31mred\x1b[0m"], None),
    ],
)
def test_cutting_output_into_lines(pieces: list[bytes], lines: list[bytes], update: bytes | None) -> None:
    splitter = LineSplitter()
    assert [line for piece in pieces for line in splitter.feed(piece)] == lines
    assert splitter.update() == update


def test_the_last_lines_of_a_log() -> None:
    assert last_lines(b"".join(b"%d\n" % number for number in range(9)) + b"\r 1%\r 2%", 3) == ["7", "8", " 2%"]
    assert last_lines(b"\xff\n", 3) == ["\N{REPLACEMENT CHARACTER}"]
    assert last_lines(b"", 3) == []


_BAR = r"for i in $(seq 1 50); do printf '\r%3d%%' $i >&2; sleep 0.01; done; printf '\n' >&2; echo done"


def test_a_progress_bar_in_a_file_is_one_line_now_and_then(run: Run, tmp_path: Path) -> None:
    done = run("--workers", "2", "--", "sh", "-c", _BAR)
    for rank in (0, 1):
        shown = [line for line in done.stderr.splitlines() if line.startswith(f"[worker {rank}]")]
        assert shown[-1] == f"[worker {rank}]  50%"
        assert len(shown) <= 2
        assert (tmp_path / "logs" / f"worker-{rank}.log").read_bytes().count(b"\r") == 50


def _run_on_terminal(start: Start, *arguments: str) -> bytes:
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:  # noqa: PTH123
        process = start(*arguments, stdout=theirs, stderr=theirs)
        os.close(theirs)
        shown = b""
        # On Linux, reading a terminal that nobody writes to any more is an I/O error.
        with contextlib.suppress(OSError):
            while data := terminal.read(65536):
                shown += data
    assert process.wait(_TIMEOUT_S) == 0
    return shown


def test_the_first_workers_progress_bar_stays_in_place_on_a_terminal(start: Start) -> None:
    shown = _run_on_terminal(start, "--workers", "2", "--", "sh", "-c", _BAR)
    assert shown.count(b"\r\x1b[K[worker 0]  ") > 10
    assert b"\r\x1b[K[worker 1]" not in shown
    assert re.search(rb"\x1b\[\d+m\[worker 0\]\x1b\[0m  50%\r\n", shown)
    assert re.search(rb"\x1b\[\d+m\[worker 1\]\x1b\[0m  50%\r\n", shown)


def test_a_rich_progress_bar_is_drawn_on_a_terminal(start: Start) -> None:
    code = "import time; from rich.progress import track; [time.sleep(0.02) for _ in track(range(50), 'training')]"
    shown = _run_on_terminal(start, "--workers", "2", "--", sys.executable, "-c", code)
    assert len(re.findall(rb"\r\x1b\[K\[worker 0\] training [^\r]*%", shown)) > 3
    assert b"\x1b[?25l" not in shown, "a hidden cursor would stay hidden when a worker is killed"
    assert re.search(rb"\[worker 0\]\x1b\[0m training [^\r]*100%[^\r]*\r\n", shown)


# What the processes are told


def test_every_worker_learns_its_place(run: Run) -> None:
    code = "import json; from jaxhetero.config import read_environment; print(json.dumps(read_environment()))"
    outer = os.environ | {"JAXHETERO_TOKEN_FILE": "/nowhere", "JAXHETERO_RANK": "77", "JAXHETERO_WINDOW_CHUNKS": "3"}

    def settings(*arguments: str) -> list[dict[str, Any]]:
        done = run("--workers", "2", *arguments, "--", sys.executable, "-c", code, env=outer)
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
    }  # fmt: skip
    assert (two[1]["start_timeout_ms"], two[1]["timeout_ms"]) == (1234, 567)


def test_the_commands_own_options_are_its_own(run: Run) -> None:
    assert run("--workers", "1", "echo", "--workers", "--", "x").stdout == "[worker 0] --workers -- x\n"


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
def test_bad_input_is_one_line_and_code_2(run: Run, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    (tmp_path / "script").write_bytes(b"\x00")
    (tmp_path / "script").chmod(0o755)
    done = run(*arguments)
    complaint = [line for line in done.stderr.splitlines() if "coordinator 127.0.0.1" not in line]
    assert (done.returncode, done.stdout, len(complaint)) == (2, "", 1)
    assert complaint[0].startswith("jaxhetero")
    assert all(word in complaint[0] for word in words), complaint[0]


def test_a_bad_setting_in_the_environment_is_found_before_anything_starts(run: Run) -> None:
    done = run("--workers", "2", "--", "true", env=os.environ | {"JAXHETERO_CHUNK_BYTES": "7"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jaxhetero: ConfigError: chunk_bytes is 7;")


def test_a_port_in_use_is_named(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = run("--workers", "2", "--coordinator-port", str(port), "--", "true")
    assert done.returncode == 1
    assert f"AddressInUse: cannot use 127.0.0.1:{port}" in done.stderr


def test_the_version_is_that_of_the_native_module() -> None:
    done = subprocess.run([*_JAXHETERO, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S)
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
def test_a_failure_stops_the_rest_and_is_named(run: Run, script: str, code: int, words: str) -> None:
    started = time.monotonic()
    done = run("--workers", "3", "--", "sh", "-c", f"seq 30; [ $JAXHETERO_RANK = 2 ] || exec sleep 600; {script}")
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
    run: Run, tmp_path: Path, scripts: list[str], culprit: int, code: int
) -> None:
    os.mkfifo(tmp_path / "connection")
    arms = " ".join(f"{rank}) {script};;" for rank, script in enumerate(scripts))
    done = run("--workers", "2", "--", "sh", "-c", f"case $JAXHETERO_RANK in {arms} esac")
    assert done.returncode == code
    assert re.search(rf"worker {culprit} \(pid \d+\) .*; last lines", done.stderr), done.stderr


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


def test_a_worker_that_raises_in_the_middle_of_a_job_is_named(run: Run) -> None:
    done = run("--workers", "3", "--reducers", "1", "--", sys.executable, "-c", _TRAIN, "20", "raise")
    assert done.returncode == 1
    report = re.search(r"worker 1 \(pid \d+\) exited with code 1; last lines.*", done.stderr, re.DOTALL)
    assert report, done.stderr
    assert "    ValueError: a bug of the user\n" in report[0]


def test_a_process_that_does_not_stop_is_killed(run: Run) -> None:
    script = "[ $JAXHETERO_RANK = 0 ] || { sleep 0.5; exit 5; }; trap '' TERM; while :; do sleep 0.1; done"
    done = run("--workers", "2", "--stop-timeout-ms", "300", "--", "sh", "-c", script)
    assert done.returncode == 5
    assert "worker 0 did not end within 0.3 s; killing" in done.stderr


def test_a_paused_process_is_stopped_as_well(run: Run) -> None:
    done = run("--workers", "2", "--", "sh", "-c", "[ $JAXHETERO_RANK = 0 ] || { sleep 0.3; exit 5; }; kill -STOP $$")
    assert done.returncode == 5
    assert "did not end" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    script = _FAMILY + f"trap 'echo got it; exit 0' {number.name[3:]}; while :; do sleep 0.05; done"
    process = start("--workers", "2", "--", "sh", "-c", script)
    pids = _read_pids(tmp_path, 4)
    # The trap is set just after the last file is written.
    time.sleep(0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 128 + number
    assert sorted(out.splitlines()) == ["[worker 0] got it", "[worker 1] got it"]
    assert f"got {number.name} and passed it on" in err
    assert "killing" not in err
    assert not any(map(_is_running, pids))


def test_reducers_serve_until_interrupted_workers_have_left(start: Start) -> None:
    process = start("--workers", "2", "--reducers", "2", "--", sys.executable, "-c", _TRAIN, "1000000", "go on")
    assert process.stdout is not None
    assert "under way" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 130
    assert "ReducerLost" not in err
    assert "did not end" not in err


def test_a_second_interrupt_kills(start: Start, tmp_path: Path) -> None:
    process = start("--workers", "2", "--", "sh", "-c", "trap '' INT; " + _FAMILY + "while :; do sleep 0.05; done")
    pids = _read_pids(tmp_path, 4)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(3) == 130
    assert not any(map(_is_running, pids))


def test_a_signal_that_was_ignored_at_the_start_stays_so(start: Start, tmp_path: Path) -> None:
    # Inherited rather than set in the child, which would take a fork of this process and its threads.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("--workers", "1", "--", "sh", "-c", _FAMILY + "sleep 0.7")
    finally:
        signal.signal(signal.SIGHUP, before)
    _read_pids(tmp_path, 2)
    process.send_signal(signal.SIGHUP)
    assert process.wait(_TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("end", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)], ids=["success", "failure", "killed"]
)
def test_what_workers_started_ends_with_them(run: Run, tmp_path: Path, end: str, code: int) -> None:
    started = time.monotonic()
    done = run("--workers", "2", "--", "sh", "-c", _FAMILY + end)
    assert time.monotonic() - started < 10
    assert done.returncode == code
    assert not any(map(_is_running, _read_pids(tmp_path, 4)))


@pytest.mark.parametrize("round_", range(3))
def test_nothing_outlives_a_launcher_that_is_killed(start: Start, tmp_path: Path, round_: int) -> None:
    process = start("--workers", "2", "--", "sh", "-c", "trap '' TERM HUP; " + _FAMILY + "wait")
    pids = _read_pids(tmp_path, 4)
    assert all(map(_is_running, pids))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 3, "two workers and the guard"
    process.kill()
    _wait_for(lambda: not any(map(_is_running, [*pids, *map(int, children)])), seconds=5)


def test_nothing_outlives_a_launcher_killed_while_it_starts(start: Start) -> None:
    marker = f"600.{os.getpid()}"

    def running() -> bool:
        commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
        with contextlib.suppress(OSError):
            return any(command == b"sleep\0" + marker.encode() + b"\0" for command in commands)
        return True

    for delay_ms in range(0, 24, 3):
        process = start("--workers", "4", "--", "sleep", marker)
        # Said just before the first worker starts.
        assert process.stderr is not None
        assert "4 workers" in process.stderr.readline()
        time.sleep(delay_ms / 1000)
        process.kill()
        process.wait()
    _wait_for(lambda: not running(), seconds=5)


# Reducers


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def _reducer(port: int, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    environ = {"JAXHETERO_TOKEN": "secret", "JAXHETERO_COORDINATOR": f"127.0.0.1:{_free_port()}"} | environ
    command = [*_JAXHETERO, "reducer", "--host", "127.0.0.1", "--port", str(port), *arguments]
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

    _wait_for(listens)


def test_a_reducer_starts_fast_and_small() -> None:
    seconds: list[float] = []
    peak_bytes: list[int] = []
    # The best of several: a machine that is busy with other things says nothing about the reducer.
    while len(seconds) < 20 and min(seconds, default=1) >= 0.5:
        port = _free_port()
        started = time.monotonic()
        with _reducer(port) as process:
            _await_listener(port)
            seconds.append(time.monotonic() - started)
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak_bytes.append(int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10)
    assert min(seconds) < 0.5, seconds
    assert max(peak_bytes) < 60e6, peak_bytes


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
        f"127.0.0.1:{_free_port()}",
        "--host",
        "127.0.0.1",
    ]
    done = subprocess.run(
        [*command, "--start-timeout-ms", "100"], env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S
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
        _, err = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_reducer_stops_at_once_on_a_signal(number: signal.Signals) -> None:
    port = _free_port()
    with _reducer(port) as process:
        _await_listener(port)
        started = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=_TIMEOUT_S)
    assert time.monotonic() - started < 1
    assert process.returncode == 128 + number
    assert f"got {number.name}" in err
    assert "Traceback" not in err
    assert re.search(r"done: .*\w+_bytes=\d+", err)


def test_a_reducer_that_meets_nobody_says_so() -> None:
    with _reducer(0, "--start-timeout-ms", "300") as process:
        _, err = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("jaxhetero: StartTimeout: ")


def test_a_reducers_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with _reducer(port) as process:
            _, err = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 1
    assert re.search(rf"jaxhetero: AddressInUse: .*127\.0\.0\.1:{port}", err), err


def test_a_job_whose_reducers_never_meet_a_worker_names_one(run: Run) -> None:
    done = run("--workers", "2", "--reducers", "2", "--start-timeout-ms", "500", "--", "sleep", "600")
    assert done.returncode == 1
    assert re.search(r"reducer \d \(pid \d+\) exited with code 1; last lines", done.stderr), done.stderr
    assert "StartTimeout" in done.stderr


def test_reducers_that_stay_are_stopped_after_the_workers_end(run: Run) -> None:
    started = time.monotonic()
    done = run("--workers", "2", "--reducers", "2", "--", "true")
    assert done.returncode == 0
    assert 4 < time.monotonic() - started < 15
    assert "every worker is done but reducer 0, reducer 1 did not end within 5 s; stopping" in done.stderr
