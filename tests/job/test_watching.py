"""What others see of a job that runs: its metrics in a real Prometheus, the alerts, the queries of the dashboard."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxhetero.config import Config
from jaxhetero.errors import AddressInUse, ConfigError
from jaxhetero.watching.exporter import Exporter
from tests.support.cluster import ROOT, Cluster, free_port, program_path
from tests.support.launcher import Start, wait_for

PROMETHEUS = ROOT / "deploy" / "prometheus"
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="Debian's package `prometheus` is not installed",
)


def free_ports(count: int) -> int:
    """The first of so many ports in a row, clear of those that the system hands out."""
    while True:
        first = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def samples(port: int) -> dict[str, float]:
    """The metrics of a process: ``name{labels}`` and value."""
    text = get(f"http://127.0.0.1:{port}/metrics")
    assert text.endswith("# EOF\n")
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


class Prometheus:
    """A real one, asked by its API."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **parameters: str) -> Any:
        answer = json.loads(get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[float]:
        return [float(series["value"][1]) for series in self.ask("query", query=query)["result"]]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return "Ready" in get(f"{self.url}/-/ready")
        return False

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}


@contextlib.contextmanager
def prometheus(folder: Path, first_target: int) -> Iterator[Prometheus]:
    """Runs with the example of ``deploy/prometheus``, every second and for other ports."""
    config = (PROMETHEUS / "prometheus.yml").read_text()
    config = re.sub(r"_interval: 5s", "_interval: 1s", config)
    config = re.sub(r"127\.0\.0\.1:94(\d\d)", lambda found: f"127.0.0.1:{first_target + int(found[1])}", config)
    (folder / "prometheus.yml").write_text(config.replace("alerts.yaml", str(PROMETHEUS / "alerts.yaml")))
    port = free_port()
    command = ["setpriv", "--pdeathsig", "KILL", "prometheus", "--config.file=prometheus.yml"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.path=data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            server = Prometheus(port)
            wait_for(server.is_ready)
            yield server
        finally:
            process.kill()
            process.wait()


def dashboard_queries() -> list[str]:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    return [query.replace("$job", ".*").replace("$__rate_interval", "10s") for query in queries]


@needs_prometheus
def test_prometheus_sees_a_reducer_die_and_another_join(start_launch: Start, tmp_path: Path) -> None:
    first, phase = free_ports(4), tmp_path / "phase"
    phase.write_text("run")
    job = start_launch(
        *("--workers", "2", "--reducers", "2", "--metrics-port", str(first)),
        *("--", sys.executable, str(program_path("abuse.py")), str(phase), "0.1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with prometheus(tmp_path, first) as server, contextlib.ExitStack() as stack:
        wait_for(lambda: server.values("up") == [1, 1, 1, 1], 60)
        wait_for(lambda: server.values("jaxhetero_live_reducers") == [2, 2], 60)
        wait_for(lambda: min(server.values("rate(jaxhetero_rounds_total[10s])"), default=0) > 0, 60)
        assert server.firing() == set()
        for query in dashboard_queries():
            nothing_yet = re.search("ALERTS|late_seconds", query)
            wait_for(lambda query=query, fine=nothing_yet: server.ask("query", query=query)["result"] or fine, 60)

        reducer = process_at(job.pid, first + 3)
        environment = reducer.environ()
        reducer.kill()
        wait_for(lambda: server.firing() == {"JaxheteroReducerLost"}, 60)
        assert server.values("jaxhetero_live_reducers") == [1, 1]

        reducer_command = [sys.executable, "-m", "jaxhetero", "reducer", "--number", "1"]
        with (tmp_path / "reducer.log").open("w") as log:
            successor = stack.enter_context(subprocess.Popen(reducer_command, env=environment, stderr=log))
            stack.callback(successor.kill)
        wait_for(lambda: server.firing() == set(), 60)
        assert server.values("jaxhetero_live_reducers") == [2, 2]
        assert server.values("count(count by (job) (jaxhetero_rounds_total))") == [1], "one job, one label"

        phase.write_text("end")
        assert job.wait(60) == 0
        assert successor.wait(60) == 0


def process_at(launcher: int, port: int) -> psutil.Process:
    """The child of a launcher that listens on a port."""
    for child in psutil.Process(launcher).children():
        if port in {connection.laddr.port for connection in child.net_connections("tcp")}:
            return child
    raise AssertionError(f"nobody listens on {port}")


@needs_prometheus
@pytest.mark.parametrize(
    "command",
    [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml"), ("check", "config", "prometheus.yml")],
    ids=" ".join,
)
def test_promtool_accepts(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_worker_shows_itself_and_the_reducer_inside(tmp_path: Path) -> None:
    port, phase = free_port(), tmp_path / "phase"
    phase.write_text("run")
    with Cluster(2, 0) as cluster:
        cluster.start_worker(0, "abuse.py", str(phase), JAXHETERO_METRICS_PORT=str(port))
        cluster.start_worker(1, "abuse.py", str(phase))
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running")
        shown = samples(port)
        address = [
            each.laddr.ip
            for each in psutil.Process(cluster.process("worker 0").pid).net_connections("tcp")
            if each.laddr.port == port and each.status == psutil.CONN_LISTEN
        ]
        assert address == ["127.0.0.1"], "where the coordinator is, and nowhere else"
        assert cluster.token not in get(f"http://127.0.0.1:{port}/metrics")
        phase.write_text("end")
        cluster.wait_workers()
    (job,) = {label for name in shown for label in re.findall(r'job="([0-9a-f]{16})"', name)}

    def value(name: str, role: str) -> float:
        return shown[f'jaxhetero_{name}{{job="{job}",rank="0",role="{role}"}}']

    assert value("rounds_total", "worker") > 0
    assert value("joined_workers", "reducer") == 2
    assert value("live_reducers", "worker") == value("expected_reducers", "worker") == 2
    assert value("sent_bytes_total", "worker") > value("bucket_bytes_total", "worker") > 0
    assert value("round_seconds_count", "worker") > 0
    assert value("cpu_seconds_total", "worker") > 0


def exporter_config(**settings: Any) -> Config:
    defaults: dict[str, Any] = {
        "worker_count": 2,
        "reducer_count": 1,
        "coordinator": "127.0.0.1:7700",
        "token": "secret",
    }
    return Config(**defaults | settings)


def test_a_port_that_is_taken() -> None:
    """Both kinds of processes say so at once, and do not join the job."""
    with socket.socket() as other, Cluster(2, 1) as cluster:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        cluster.start_worker(0, "first_sum.py", JAXHETERO_METRICS_PORT=str(port))
        cluster.start_reducer(JAXHETERO_METRICS_PORT=str(port))
        told = rf"AddressInUse: cannot listen on 127\.0\.0\.1:{port} for metrics: Address already in use; give another"
        assert re.search(told, cluster.wait("worker 0").exception_line)
        reducer = cluster.wait("reducer 0")
        assert reducer.code == 1
        assert re.fullmatch(rf"jaxhetero: {told}.*\n", reducer.errors)


def test_an_address_of_another_host() -> None:
    with pytest.raises(AddressInUse, match=r"cannot listen on 192\.0\.2\.1:9400 for metrics: Cannot assign"):
        Exporter(exporter_config(metrics_port=9400, host="192.0.2.1"))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"metrics_port is 9400, which needs .* pip install prometheus-client"):
        Exporter(exporter_config(metrics_port=9400))


@pytest.fixture
def exported() -> Iterator[int]:
    """The port of an exporter in this process."""
    port = free_port()
    with Exporter(exporter_config(metrics_port=port)):
        yield port


def test_before_the_job_has_met_there_are_no_samples(exported: int) -> None:
    assert samples(exported) == {}


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 4\r\n\r\nabcd", b"501"),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n", b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
    ],
)
def test_another_request_is_refused(exported: int, request_: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", exported), 10) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(request_)
        answer = stranger.recv(100)
    assert status in answer.split()[:2], answer


def test_connections_that_say_nothing_keep_nobody_out(exported: int) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", exported), 60)) for _ in range(50)]
        assert samples(exported) == {}
        for connection in silent:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "it is closed at its deadline, or for a newer one"


def test_nothing_is_left_after_the_end() -> None:
    port = free_port()
    exporter = Exporter(exporter_config(metrics_port=port))
    with socket.create_connection(("127.0.0.1", port), 10) as silent:
        exporter.stop()
        assert not exporter.is_alive()
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 10)
