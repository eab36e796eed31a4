"""jaxhetero.cluster.ray with the real Ray: three nodes, in namespaces of their own for network and processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from jaxhetero.errors import ConfigError
from models.common.checkpoint import Checkpoints
from tests.support import trainers
from tests.support.cluster import ROOT, program_path
from tests.support.launcher import wait_for
from tests.support.patience import PATIENCE

pytest.importorskip("ray", reason="needs the extra [ray]")
from jaxhetero.cluster.ray import JaxheteroConfig

MNIST = ROOT / "docs" / "how_to" / "ray_mnist.py"
# Of what never ends: with trainers of other tests beside it, Ray's start has taken four minutes.
TIMEOUT_S = 600 * PATIENCE

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)

# Every process ends with the first one, which ends with `unshare`; the latter also if pytest is killed, since the
# cluster ends with its standard input.
NAMESPACES = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]


@dataclass
class Nodes:
    """A running Ray cluster."""

    unshare: subprocess.Popen[str]
    address: str
    folder: Path
    """Ray's own files."""

    @property
    def init(self) -> psutil.Process:
        """The first process in the namespaces."""
        (child,) = psutil.Process(self.unshare.pid).children()
        return child

    def find(self, title: str) -> dict[int, psutil.Process]:
        """Processes of actors and tasks by the beginning of their titles, such as ``ray::Reducer``."""
        found = {}
        for process in self.init.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(title):
                    found[process.pid] = process
        return found

    def start(self, folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start a Python program that can reach the cluster, in ``folder``."""
        inside = ["nsenter", f"--target={self.init.pid}", "--net", "--pid", "--mount", f"--wdns={folder}"]
        command = [*inside, sys.executable, *arguments]
        environment = {**environ(), "RAY_ADDRESS": self.address}
        return subprocess.Popen(command, env=environment, stderr=subprocess.STDOUT, text=True, **options)

    def run(self, folder: Path, *arguments: str) -> tuple[int, str]:
        """The exit code and the output of such a program."""
        with self.start(folder, *arguments, stdout=subprocess.PIPE) as program:
            output, _ = program.communicate(timeout=TIMEOUT_S)
        return program.returncode, output


def environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAXHETERO_", "RAY_"))}
    ours = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray's workers are nice, and stand still while other tests want the processors. Of lines of two processes that
    # differ in numbers alone, its driver shows one, if they come within five seconds: those of reducers that are ready.
    return {**kept, **ours, "RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with start_nodes() as running:
        yield running


@contextlib.contextmanager
def start_nodes(*arguments: str) -> Iterator[Nodes]:
    """What ray_cluster.py starts with these arguments."""
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot make namespaces: needs root")
    # Not pytest's folder: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        program = f'ip link set lo up && "{sys.executable}" "{program_path("ray_cluster.py")}" {" ".join(arguments)}'
        unshare = subprocess.Popen(
            [*NAMESPACES, "sh", "-c", program],
            env={**environ(), "RAY_TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with unshare:
            try:
                assert unshare.stdout is not None
                yield Nodes(unshare, unshare.stdout.readline().strip(), Path(folder))
            finally:
                unshare.kill()


def is_known_to_ray(run: Path) -> bool:
    """Whether a retry of a run would start from a checkpoint. Ray's controller looks for new ones every few seconds."""
    record = run / "checkpoint_manager_snapshot.json"
    return record.exists() and '"checkpoint_2' in record.read_text()


def test_mnist_trains_to_the_same_bits_though_a_reducer_and_a_worker_are_killed(nodes: Nodes, tmp_path: Path) -> None:
    """A killed reducer comes back in the same attempt. After a killed worker the run goes on from its checkpoint."""
    arguments = ("--preset", "mnist", "--epochs", "10")
    log = tmp_path / "output.txt"
    saved = tmp_path / "ray-results" / "mnist"
    with log.open("w") as file, nodes.start(tmp_path, str(MNIST), *arguments, stdout=file) as driver:

        def waits_for(condition: Callable[[], object]) -> None:
            wait_for(lambda: condition() or driver.poll() is not None, TIMEOUT_S)
            assert driver.poll() is None, log.read_text()

        waits_for(lambda: is_known_to_ray(saved))
        first = nodes.find("ray::Reducer")
        assert len(first) == 2
        next(iter(first.values())).kill()
        waits_for(lambda: log.read_text().count("is ready for 2 workers") == 3)
        assert len(nodes.find("ray::Reducer").keys() & first.keys()) == 1
        next(iter(nodes.find("ray::RayTrainWorker").values())).kill()
        assert driver.wait(TIMEOUT_S) == 0, log.read_text()

    output = log.read_text()
    ready = re.findall(r"reducer (\d) is ready for 2 workers", output)
    assert sorted(ready) == sorted([*"01", *"01", ready[2]]), "each attempt has both, the first has one of them twice"
    end = re.search(r"test accuracy (\S+)% after step 400; the last attempt began after step (\d+)", output)
    assert end is not None, output
    assert int(end[2]) in range(40, 400, 40)

    wanted, _ = trainers.run(tmp_path / "here", "models.resnet", *arguments, workers=2)
    assert f"{wanted['evaluations'][-1]['test_accuracy']:.2%}" == f"{end[1]}%"
    shutil.copytree(max(saved.glob("checkpoint_2*")), tmp_path / "last" / "400")
    ours, theirs = (Checkpoints(tmp_path / name, {}).read_arrays(400) for name in ("last", "here/checkpoints"))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name, strict=True)


def test_each_attempt_is_a_job_of_its_own(nodes: Nodes, tmp_path: Path) -> None:
    """With its restart count, and with a token that is in no log."""
    code, output = nodes.run(tmp_path, str(program_path("ray_attempts.py")), "2", "60000")
    assert code == 0, output
    told = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*-*.json")}
    assert told.keys() == {"0-0", "0-1", "1-0", "1-1"}, "by restart count and rank"
    assert {each["size"] for each in told.values()} == {2}
    assert {each["sum"] for each in told.values()} == {3.0}
    assert {each["timeout_ms"] for each in told.values()} == {"12345"}
    assert [each["roles"] for each in told.values()] == 4 * [["worker", "reducer"]]
    tokens = [told["0-0"]["token"], told["1-0"]["token"]]
    assert tokens == [told["0-1"]["token"], told["1-1"]["token"]]
    assert tokens[0] != tokens[1]
    logs = [path for path in nodes.folder.glob("ray/session_*/logs/**/*") if path.is_file()]
    shown = output + "".join(path.read_text(errors="replace") for path in logs)
    assert "is ready for 2 workers" in shown
    assert not any(token in shown for token in tokens)


def test_too_few_hosts_for_the_reducers(nodes: Nodes, tmp_path: Path) -> None:
    code, output = nodes.run(tmp_path, str(program_path("ray_attempts.py")), "4", "1000")
    assert code == 1, output
    assert "StartTimeout: reducers 2 to 3 have no place after 1 s: 4 bundles of reducer 1 are wanted" in output
    for host in ("CPU 2, free nothing", "reducer 1, free reducer 1"):
        assert f"127.0.0.1 has {host}" in output


def test_a_reducer_that_is_asked_to_end_comes_back_and_nothing_is_left_of_a_killed_driver(
    nodes: Nodes, tmp_path: Path
) -> None:
    arguments = (str(MNIST), "--preset", "mnist-smoke", "--epochs", "1000")
    with nodes.start(tmp_path, *arguments, stdout=subprocess.DEVNULL) as driver:
        wait_for(lambda: is_known_to_ray(tmp_path / "ray-results" / "mnist"), TIMEOUT_S)
        asked, stays = nodes.find("ray::Reducer.run").values()
        asked.terminate()
        wait_for(lambda: len(nodes.find("ray::Reducer.run").keys() - {asked.pid}) == 2, TIMEOUT_S)
        assert stays.is_running()
        (python,) = psutil.Process(driver.pid).children()
        python.kill()
    wait_for(lambda: not any(nodes.find(f"ray::{name}") for name in ("Reducer", "RayTrainWorker", "TrainC")), TIMEOUT_S)


def test_doctor_examines_every_node(nodes: Nodes, tmp_path: Path) -> None:
    code, output = nodes.run(tmp_path, "-m", "jaxhetero.cluster.ray", "doctor", "--measure-ms", "50")
    assert re.findall(r"^ *(\d): .* \(127\.0\.0\.1\)", output, re.MULTILINE) == ["0", "1", "2"]
    assert code == ("nothing to mend" not in output)


def test_an_elastic_job_replaces_a_killed_worker_and_those_whose_host_is_to_go(tmp_path: Path) -> None:
    """All come back while the others go on; the latter leave first, at Ray's notice, and move."""
    log = tmp_path / "output.txt"

    def told() -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in tmp_path.glob("*-*.json")]

    with (
        start_nodes("2") as nodes,
        log.open("w") as file,
        nodes.start(tmp_path, str(program_path("ray_elastic.py")), "1", stdout=file) as driver,
    ):

        def waits_for(condition: Callable[[], object]) -> None:
            wait_for(lambda: condition() or driver.poll() is not None, TIMEOUT_S)
            assert driver.poll() is None, log.read_text()

        waits_for(lambda: len(told()) == 3)
        first = told()
        assert [each["step"] for each in first] == [0, 0, 0]
        next(iter(nodes.find("ray::ElasticWorker").values())).kill()
        waits_for(lambda: len(told()) == 4)
        (back,) = (each for each in told() if each not in first)
        assert (back["step"] > 0, back["ranks"]) == (True, [0, 1, 2])
        loss_count = log.read_text().count("was lost: ")
        assert loss_count

        now = [each for each in first if each["rank"] != back["rank"]] + [back]
        here = re.findall(r"driver on (\w+)", log.read_text())[0]
        lost = next(each["node"] for each in now if each["node"] != here)
        drain = ("drain-node", "--address", nodes.address, "--node-id", lost)
        why = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
        code, output = nodes.run(tmp_path, "-m", "ray.scripts.scripts", *drain, *why)
        assert code == 0, output
        ranks = {each["rank"] for each in now if each["node"] == lost}
        waits_for(lambda: len(told()) == 4 + len(ranks))
        moved = [each for each in told() if each not in [*first, back]]
        assert {each["rank"] for each in moved} == ranks
        assert all(each["node"] != lost and each["step"] > back["step"] for each in moved)
        assert log.read_text().count("was lost: ") == loss_count, "somebody has not left in order"
        (tmp_path / "end").touch()
        assert driver.wait(TIMEOUT_S) == 0, log.read_text()
    found = json.loads(re.findall(r"found (.*)", log.read_text())[0])
    (step, total) = found["0"]
    assert (step > back["step"], total) == (True, step * (step - 1) / 2)
    assert found == {str(rank): [step, total] for rank in range(3)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reducers": -1}, "reducers is -1; it must be at least 0"),
        ({"max_reducer_restarts": -2}, "max_reducer_restarts is -2"),
        ({"placement_strategy": "WIDE"}, "placement_strategy is 'WIDE'; it must be one of PACK, SPREAD,"),
        ({"resources_per_reducer": {}}, "must name at least one resource"),
        ({"resources_per_reducer": {"CPU": 0}}, "more than 0 of each"),
        ({"settings": {"rank": 1}}, "settings has rank, which the run decides"),
        (
            {"settings": {"elastic": "2:4"}},
            "settings has elastic, but Ray Train ends all workers when one of them fails",
        ),
        ({"settings": {"reducer_count": 1}}, "settings has reducer_count; give reducers instead"),
        ({"settings": {"time_out": 1}}, "settings has 'time_out', which is no setting; there are checksum, "),
        ({"settings": {"timeout_ms": 0}}, "timeout_ms is 0; it must be at least 1"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        JaxheteroConfig(**fields)
