"""What `jaxhetero launch` shows of its processes' output, and what it keeps."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from jaxhetero.launch.terminal import LineSplitter, last_lines
from tests.support.launcher import JAXHETERO, TIMEOUT_S, Run, Start


def test_output_is_prefixed_and_saved(launch: Run, tmp_path: Path) -> None:
    done = launch("--workers", "2", "--", "sh", "-c", "echo out $JAXHETERO_RANK; echo err >&2; printf 'no end'")
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


def test_prefixes_are_aligned_and_plain_when_not_on_a_terminal(launch: Run) -> None:
    done = launch("--workers", "11", "--", "echo", "x")
    assert sorted(done.stdout.splitlines()) == sorted(f"{f'[worker {rank}]':11} x" for rank in range(11))


def test_the_default_log_folder_is_fresh_every_time(tmp_path: Path) -> None:
    for _ in range(2):
        command = [*JAXHETERO, "launch", "--workers", "1", "--", "echo", "x"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=TIMEOUT_S)
    folders = list((tmp_path / "jaxhetero-logs").iterdir())
    assert len(folders) == 2
    assert all((folder / "worker-0.log").read_text() == "x\n" for folder in folders)


def test_long_lines_stay_whole(launch: Run, tmp_path: Path) -> None:
    code = "import os, sys; r = os.environ['JAXHETERO_RANK']; [print(r * (1 << 20)) for _ in range(4)]"
    done = launch("--workers", "3", "--", sys.executable, "-c", code)
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


def test_bytes_that_are_no_text_pass_unchanged(launch: Run, tmp_path: Path) -> None:
    code = "import random, sys; sys.stdout.buffer.write(random.Random(7).randbytes(200_000))"
    done = launch("--workers", "1", "--", sys.executable, "-c", code, text=False)
    assert done.returncode == 0
    assert (tmp_path / "logs" / "worker-0.log").read_bytes() == random.Random(7).randbytes(200_000)
    assert b"[worker 0] " in done.stdout


def test_output_appears_while_the_job_runs(start_launch: Start) -> None:
    process = start_launch("--workers", "1", "--", sys.executable, "-c", "import time; print('now'); time.sleep(600)")
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 20)[0]
    assert process.stdout.readline() == "[worker 0] now\n"


def test_the_job_outlives_whoever_reads_its_output(launch: Run, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as closed:  # noqa: PTH123 (a descriptor, not a path)
        done = launch("--workers", "1", "--", "sh", "-c", "seq 100000; echo end >&2", stdout=closed)
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


def test_a_progress_bar_in_a_file_is_one_line_now_and_then(launch: Run, tmp_path: Path) -> None:
    done = launch("--workers", "2", "--", "sh", "-c", _BAR)
    for rank in (0, 1):
        shown = [line for line in done.stderr.splitlines() if line.startswith(f"[worker {rank}]")]
        assert shown[-1] == f"[worker {rank}]  50%"
        assert len(shown) <= 2
        assert (tmp_path / "logs" / f"worker-{rank}.log").read_bytes().count(b"\r") == 50


def _run_on_terminal(start_launch: Start, *arguments: str) -> bytes:
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:  # noqa: PTH123
        process = start_launch(*arguments, stdout=theirs, stderr=theirs)
        os.close(theirs)
        shown = b""
        # On Linux, reading a terminal that nobody writes to any more is an I/O error.
        with contextlib.suppress(OSError):
            while data := terminal.read(65536):
                shown += data
    assert process.wait(TIMEOUT_S) == 0
    return shown


def test_the_first_workers_progress_bar_stays_in_place_on_a_terminal(start_launch: Start) -> None:
    shown = _run_on_terminal(start_launch, "--workers", "2", "--", "sh", "-c", _BAR)
    assert shown.count(b"\r\x1b[K[worker 0]  ") > 10
    assert b"\r\x1b[K[worker 1]" not in shown
    assert re.search(rb"\x1b\[\d+m\[worker 0\]\x1b\[0m  50%\r\n", shown)
    assert re.search(rb"\x1b\[\d+m\[worker 1\]\x1b\[0m  50%\r\n", shown)


def test_a_rich_progress_bar_is_drawn_on_a_terminal(start_launch: Start) -> None:
    code = "import time; from rich.progress import track; [time.sleep(0.02) for _ in track(range(50), 'training')]"
    shown = _run_on_terminal(start_launch, "--workers", "2", "--", sys.executable, "-c", code)
    assert len(re.findall(rb"\r\x1b\[K\[worker 0\] training [^\r]*%", shown)) > 3
    assert b"\x1b[?25l" not in shown, "a hidden cursor would stay hidden when a worker is killed"
    assert re.search(rb"\[worker 0\]\x1b\[0m training [^\r]*100%[^\r]*\r\n", shown)
