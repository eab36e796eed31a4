"""`jaxhetero status` tells who is there, who is late and who does not answer, and tells it to nobody else."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxhetero.doctor.status import read_status
from jaxhetero.errors import AuthenticationError, InternalError
from tests.support.cluster import Cluster, free_port
from tests.support.launcher import JAXHETERO, Start, wait_for


@pytest.fixture
def job() -> Iterator[Cluster]:
    """Two workers, who sum all the time, and two reducers."""
    with Cluster(2, 2) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "until killed", "0")
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running")
        yield cluster


def status(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*JAXHETERO, "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def ask(job: Cluster) -> tuple[int, Any]:
    environ = os.environ | {"JAXHETERO_COORDINATOR": job.coordinator, "JAXHETERO_TOKEN": job.token}
    done = status("--json", env=environ)
    return done.returncode, json.loads(done.stdout)


def test_a_job_that_is_well(job: Cluster) -> None:
    code, told = ask(job)
    assert (code, told["problems"], told["view"]) == (0, [], 0)
    assert [process["name"] for process in told["processes"]] == ["rank 0", "rank 1", "reducer 0", "reducer 1"]
    for process in told["processes"]:
        assert process["answers"]
        assert process["round_count"] > 0
        assert process["rounds_per_s"] > 0
        assert process["sent_bytes_per_s"] > 0


@pytest.mark.parametrize(("who", "name"), [("worker 1", r"rank 1"), ("reducer 1", r"reducer \d")])
def test_a_process_that_is_stopped_is_named(job: Cluster, who: str, name: str) -> None:
    job.process(who).send_signal(signal.SIGSTOP)
    code, told = ask(job)
    assert code == 1
    assert len(told["problems"]) == 1
    assert re.match(rf"{name} \(.*\) does not answer; its last sign of life was", told["problems"][0])


def test_a_stopped_rank_0_takes_the_coordinator_with_it(job: Cluster) -> None:
    job.process("worker 0").send_signal(signal.SIGSTOP)
    # In the handshake, or to the question: a busy machine takes some time to stop all threads of a process.
    with pytest.raises(InternalError, match=r"no answer from the coordinator at .*, where rank 0 is: no answer"):
        read_status(job.coordinator, job.token)


def test_a_lost_reducer_is_missed(job: Cluster) -> None:
    job.process("reducer 1").send_signal(signal.SIGKILL)
    job.wait_for_error("worker 0", "going on with 1 reducers")
    code, told = ask(job)
    assert (code, told["problems"], told["view"]) == (1, ["1 of 2 reducers are lost"], 1)


def test_before_the_start_it_tells_who_is_missing() -> None:
    with Cluster(2, 2) as cluster:
        cluster.start_worker(0, "errors.py", "until killed", "0")

        def told() -> str:
            try:
                return read_status(cluster.coordinator, cluster.token, seconds=0).missing
            except InternalError:  # rank 0 does not listen yet
                return ""

        wait_for(lambda: told() == "rank 1, 2 of 2 reducers", 60)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = status(str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert f"Directory '{tmp_path}/nowhere' does not exist" in done.stderr


def test_a_jobs_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"coordinator"')
    done = status(str(tmp_path))
    assert done.returncode == 2
    told = r"jaxhetero: ConfigError: cannot read .*job\.json, which says where the job is: .*\n"
    assert re.fullmatch(told, done.stderr)


def test_strangers_are_told_nothing(job: Cluster) -> None:
    with pytest.raises(AuthenticationError, match=r"the coordinator at 127\.0\.0\.1:"):
        read_status(job.coordinator, "guess")
    assert ask(job)[0] == 0


def test_the_launchers_job_is_found_by_its_logs(start_launch: Start, tmp_path: Path) -> None:
    """The file with the token is its owner's alone, and goes with the job."""
    program = "import jaxhetero; jaxhetero.initialize(); print('running', flush=True); import time; time.sleep(600)"
    process = start_launch("--workers", "2", "--reducers", "1", "--", sys.executable, "-c", program)
    wait_for(lambda: sum("running" in path.read_text() for path in tmp_path.glob("logs/worker-*.log")) == 2, 60)
    path = tmp_path / "logs" / "job.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    done = status("logs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reducer 0" in done.stdout
    assert "view 0: no problem" in done.stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not path.exists()
    done = status(cwd=tmp_path)
    assert done.returncode == 2
    assert "no job: give LOG_DIR of a job of `jaxhetero launch` that runs" in done.stderr


def test_a_reducers_metrics_name_who_is_late() -> None:
    port = free_port()
    with Cluster(2, 1) as cluster:
        cluster.start_reducer(
            JAXHETERO_METRICS_PORT=str(port), JAXHETERO_HOST="127.0.0.1", JAXHETERO_TIMEOUT_MS="60000"
        )
        cluster.start_workers("errors.py", "until killed", "0", JAXHETERO_TIMEOUT_MS="60000")
        cluster.wait_for_output("worker 1", "running")
        cluster.process("worker 1").send_signal(signal.SIGSTOP)

        def late() -> list[str]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                return re.findall(r'^jaxhetero_late_seconds\{.*late_rank="(\d)".*\} [1-9]', page.read().decode(), re.M)

        wait_for(lambda: late() == ["1"], 60)


def test_where_no_job_is() -> None:
    environ = os.environ | {"JAXHETERO_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXHETERO_TOKEN": "t"}
    done = status(env=environ)
    assert done.returncode == 1
    assert done.stderr.startswith("jaxhetero: no answer from the coordinator at 127.0.0.1:")
    assert done.stderr.endswith("; the job is starting, or hangs, or is over\n")
    assert "Connection refused" in done.stderr
