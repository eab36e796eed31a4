"""A worker on a spot instance, beside an HTTP server that stands in for the metadata of EC2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxhetero.cluster.spot import read_notice, run
from jaxhetero.cluster.wrapped import wrapped
from tests.support.cluster import ROOT

NOTICE = json.dumps({"action": "terminate", "time": "2026-01-01T00:02:00Z"})
# Says that it is there, and ends with 0 at SIGTERM, as a worker does that leaves. The signal is blocked, so that it can
# come before sigwait().
LEAVES = (
    "import pathlib, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); pathlib.Path(sys.argv[1]).touch(); "
)


class Metadata(ThreadingHTTPServer):
    """Version 2 of the service, which wants a token; a notice comes once a file is there."""

    def __init__(self, sign: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.sign = sign
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        is_right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "60"
        self.answer(200 if is_right else 400, "a token")

    def do_GET(self) -> None:
        assert isinstance(self.server, Metadata)
        if self.headers["X-aws-ec2-metadata-token"] != "a token":
            self.answer(401, "")
        elif self.path == "/latest/meta-data/spot/instance-action" and self.server.sign.exists():
            self.answer(200, NOTICE)
        else:
            self.answer(404, "")

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[Metadata]:
    with Metadata(tmp_path / "sign") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_notice_becomes_a_leave_and_asks_for_another_worker(
    metadata: Metadata, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert read_notice(metadata.url) == ""
    command = [sys.executable, "-c", LEAVES + "signal.sigwait([15])", str(metadata.sign)]
    assert run(command, metadata.url, poll_s=0.05) == 143
    assert f"AWS is about to take this instance away ({NOTICE}); SIGTERM to" in capfd.readouterr().err


def test_without_a_notice_the_exit_code_is_the_commands(metadata: Metadata, tmp_path: Path) -> None:
    assert run([sys.executable, "-c", "raise SystemExit(3)"], metadata.url, poll_s=0.05) == 3
    assert run(["sh", "-c", "kill -KILL $$"], metadata.url, poll_s=0.05) == 137
    assert run([sys.executable, "-c", LEAVES, str(metadata.sign)], metadata.url, poll_s=60) == 0


def test_no_proxy_is_asked(metadata: Metadata) -> None:
    program = "import sys; from jaxhetero.cluster.spot import read_notice; print(read_notice(sys.argv[1]))"
    env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    command = [sys.executable, "-c", program, metadata.url]
    assert subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True).stdout == b"\n"


def test_where_there_is_no_such_service_the_command_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["sleep", "0.3"], "http://127.0.0.1:9", poll_s=0.05) == 0
    errors = capfd.readouterr().err
    assert errors.count("cannot read the notices of spot instances from http://127.0.0.1:9: ") == 1


def test_it_is_a_program_which_passes_signals_on(metadata: Metadata, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "jaxhetero.cluster.spot"]
    assert subprocess.run(program, cwd=ROOT, capture_output=True, check=False).returncode == 2
    child = [sys.executable, "-c", LEAVES + "print('in', flush=True); signal.sigwait([15])", str(tmp_path / "other")]
    with subprocess.Popen([*program, *child], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.terminate()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_signal_that_comes_before_the_start_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def start_late(command: list[str]) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(command)

    monkeypatch.setattr(subprocess, "Popen", start_late)
    with wrapped(["sleep", "60"], signal.SIGTERM) as (child, received):
        try:
            assert child.wait(20) == -signal.SIGTERM
        finally:
            child.kill()
            child.wait()
    assert received == [signal.SIGTERM]
