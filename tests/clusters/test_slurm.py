"""Jobs of `jaxhetero slurm` on a real Slurm, of which every node is a network namespace."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.slurm_lab import SlurmLab, missing_tools, slurm_lab
from models.common.checkpoint import Checkpoints
from tests.support import trainers
from tests.support.cluster import ROOT, program_path
from tests.support.cluster import run as run_program
from tests.support.launcher import JAXHETERO
from tests.support.patience import PATIENCE

# Slurm itself takes up to a minute to end what was on a lost node, and more where the machine is busy.
PATIENCE_S = 240 * PATIENCE
pytestmark = pytest.mark.timeout(2 * PATIENCE_S)
TRAIN = (sys.executable, "-m", "models.resnet", "--preset", "mnist", "--epochs", "3", "--evaluate-every", "1")
STEPS = 120

needs_slurm = pytest.mark.skipif(bool(missing_tools()), reason=f"there is no {', '.join(missing_tools())} here")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """Three nodes for workers, of which a job takes two, and two for reducers."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm_lab(folder, gpu_count=3, cpu_count=2) as running:
        yield running


def script(*arguments: str) -> str:
    """The script that `jaxhetero slurm` writes."""
    done = subprocess.run([*JAXHETERO, "slurm", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Run:
    """A job in the lab, and what it has written so far."""

    def __init__(self, lab: SlurmLab, folder: Path, *arguments: str) -> None:
        self.lab = lab
        self.log = folder / "job.log"
        path = folder / "job.sh"
        path.write_text(script("--output", str(self.log), *arguments))
        self.number = lab.submit(path, folder)

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, words: str | Callable[[], object]) -> None:
        """Wait until words are in the output, or something is true; the job must not have ended before."""
        condition = words if callable(words) else lambda: re.search(words, self.output())
        deadline = time.monotonic() + PATIENCE_S
        while True:
            state = self.lab.state(self.number)  # before the look: the job may end between the two
            if condition():
                return
            assert state in ("PENDING", "RUNNING"), f"{state}: {self.output()}"
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def check_end(self) -> None:
        assert self.lab.wait_for_end(self.number, PATIENCE_S) == "COMPLETED", self.output()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the same two workers make of it on one machine."""
    folder = tmp_path_factory.mktemp("runs") / "one-machine"
    trainers.run(folder, *TRAIN[2:], workers=2, reducers=1)
    return folder


def check_same_bits(folder: Path, wanted: Path) -> None:
    result, theirs = trainers.result_of(folder), trainers.result_of(wanted)
    assert result["is_complete"]
    assert result["evaluations"][-1] == theirs["evaluations"][-1]
    ours, others = (Checkpoints(path / "checkpoints", {}).read_arrays(STEPS) for path in (folder, wanted))
    assert ours.keys() == others.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name, strict=True)


COUNTS = ("--workers", "2", "--workers-partition", "gpu", "--reducers", "2", "--reducers-partition", "cpu")


@needs_slurm
def test_reducers_and_their_nodes_may_die(lab: SlurmLab, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Run(lab, tmp_path, *COUNTS, "--timeout-ms", "5000", "--", *TRAIN, "--output", str(folder))
    run.wait_for("epoch 1/3")
    (_, child) = sorted(lab.find("cpu1", "jaxhetero reducer"))[-2:]
    os.kill(child, signal.SIGKILL)
    run.wait_for("was killed by SIGKILL; starting it anew, 1 of at most 10 times")
    run.wait_for("going on with 2 reducers")
    lab.kill_node("cpu2")
    run.check_end()
    assert re.search(r"reducer 1 \(host cpu2, .*\) was lost: no sign of life", run.output())
    assert re.search(r"^reducer 0: .*INFO done: .*round_count=", run.output(), re.MULTILINE)
    check_same_bits(folder, undisturbed)
    assert not list(tmp_path.glob(".jaxhetero-*")), "the token is still there"


@needs_slurm
def test_without_reducer_nodes_workers_reduce(lab: SlurmLab, tmp_path: Path) -> None:
    """A plain job, with more than one worker a node."""
    program = (sys.executable, str(program_path("first_sum.py")))
    run = Run(lab, tmp_path, "--workers", "4", "--workers-nodes", "2", "--workers-partition", "gpu", "--", *program)
    run.check_end()
    assert sorted(re.findall(r"rank (\d) of 4: \[ 6. 10. 14. 18. 22.\]", run.output())) == ["0", "1", "2", "3"]


@needs_slurm
def test_jax_distributed_needs_no_token(lab: SlurmLab, tmp_path: Path) -> None:
    program = ("env", "--unset=JAXHETERO_TOKEN_FILE", sys.executable, str(program_path("distributed_sum.py")))
    run = Run(lab, tmp_path, "--workers", "2", "--workers-partition", "gpu", "--", *program)
    run.check_end()
    assert run.output().count("of 2: 2.0") == 2, run.output()


@needs_slurm
@pytest.mark.parametrize("reducers", ["0", "2"])
def test_the_doctor_sees_every_node(lab: SlurmLab, tmp_path: Path, reducers: str) -> None:
    counts = ("--workers", "2", "--workers-partition", "gpu", "--reducers", reducers, "--reducers-partition", "cpu")
    run = Run(lab, tmp_path, *counts, "--doctor")
    # Failed, if it found hosts or pairs slower than others: they share the processors of this machine.
    assert lab.wait_for_end(run.number, PATIENCE_S) in ("COMPLETED", "FAILED"), run.output()
    seen = re.findall(r"^0: +\d+: (\w+) ", run.output(), re.MULTILINE)
    assert len(seen) == len(set(seen)), run.output()
    assert set(seen) >= {"gpu1", "gpu2", *(["cpu1", "cpu2"] if reducers == "2" else [])}, run.output()


@needs_slurm
def test_the_secret_is_in_a_file_of_its_owners_alone(lab: SlurmLab, tmp_path: Path) -> None:
    """Not in the environment, not in what Slurm tells of the job, and gone at its end."""
    look = """
        token=$(cat "$JAXHETERO_TOKEN_FILE")
        echo "mode $(stat --format=%a "$JAXHETERO_TOKEN_FILE"), length ${#token}"
        echo "environment: $(env | grep --count "$token")"
        echo "Slurm: $(scontrol show job "$SLURM_JOB_ID" | grep --count "$token")"
    """
    run = Run(lab, tmp_path, "--workers", "1", "--workers-partition", "gpu", "--", "bash", "-c", look)
    run.check_end()
    lines = sorted(line.partition(": ")[2] for line in run.output().splitlines())
    assert lines == ["Slurm: 0", "environment: 0", "mode 600, length 64"]
    assert not list(tmp_path.glob(".jaxhetero-*"))


def test_the_command_reaches_the_workers_as_it_was_given() -> None:
    text = script("--workers", "2", "--reducers", "1", "--", "python", "train.py", "--name", "two words; $x")
    assert "python train.py --name 'two words; $x'\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@needs_slurm
def test_a_job_is_submitted(lab: SlurmLab, tmp_path: Path) -> None:
    options = ("--workers", "1", "--workers-partition", "gpu", "--output", str(tmp_path / "job.log"), "--submit")
    told = lab.command(*JAXHETERO, "slurm", *options, "--", "echo", "it ran").stdout
    job = int(re.fullmatch(r"Submitted batch job (\d+)\n", told)[1])  # type: ignore[index]
    assert lab.wait_for_end(job, PATIENCE_S) == "COMPLETED"
    assert "0: it ran" in (tmp_path / "job.log").read_text()


def test_where_there_is_no_slurm_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = subprocess.run(
        [*JAXHETERO, "slurm", "--workers", "1", "--submit", "--", "true"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no sbatch here" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workers", "3", "--workers-nodes", "2", "--", "true"), "3 processes cannot be shared equally by 2 nodes"),
        (("--workers", "3", "--time", "1\n#SBATCH --uid=0", "--", "true"), "has a line break in it"),
        (("--workers", "3", "--elastic", "2", "--", "true"), "elastic is '2'; it must be MIN:MAX"),
        (("--workers", "3", "--elastic", "4:8", "--", "true"), "worker_count is 3; with elastic 4:8 it must be in"),
        (
            ("--workers", "4", "--workers-nodes", "2", "--elastic", "2:4", "--", "true"),
            "4 workers on 2 nodes: with --elastic each worker has a node of its own",
        ),
        (("--workers", "3"), "give either a command for the workers or --doctor"),
        (("--workers", "3", "--doctor", "--", "true"), "give either a command for the workers or --doctor"),
    ],
)
def test_a_wrong_request_is_named(arguments: tuple[str, ...], words: str) -> None:
    done = subprocess.run([*JAXHETERO, "slurm", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


@needs_slurm
def test_slurm_ends_no_job_whose_reducer_node_it_has_given_up(lab: SlurmLab, tmp_path: Path) -> None:
    done = tmp_path / "done"
    run = Run(lab, tmp_path, *COUNTS, "--", "bash", "-c", f"echo begun; until [ -e {done} ]; do sleep 0.2; done")
    run.wait_for("begun")
    lab.kill_node("cpu2")
    lab.wait_until_down("cpu2")
    assert set(lab.states(run.number)) == {"RUNNING"}
    done.touch()
    run.check_end()


@needs_slurm
@pytest.mark.parametrize("lost", ["process", "node"])
def test_a_lost_worker_queues_the_job_again(lab: SlurmLab, undisturbed: Path, tmp_path: Path, lost: str) -> None:
    """It goes on from its checkpoint; without the lost node, on another one."""
    folder = tmp_path / "run"
    # On a busy machine a worker of the undisturbed job has stood still for five seconds.
    options = ("--requeue", "1", "--timeout-ms", "15000")
    run = Run(lab, tmp_path, *COUNTS, *options, "--", *TRAIN, "--output", str(folder))
    run.wait_for((folder / "checkpoints" / "40").is_dir)
    if lost == "node":
        lab.kill_node("gpu2")
    else:
        for worker in lab.find("gpu2", "models.resnet"):
            os.kill(worker, signal.SIGKILL)
    run.wait_for("the job is queued again")
    lab.start_again(run.number)
    run.check_end()
    assert trainers.result_of(folder)["first_step"] in (40, 80)
    check_same_bits(folder, undisturbed)


ELASTIC = ("--workers-partition", "gpu", "--elastic", "2:4", "--lost-after-ms", "5000")
STEPS_OF_ELASTIC = 600


def slow_training(steps: int = STEPS_OF_ELASTIC) -> tuple[str, ...]:
    """A program with the parts of all trainers."""
    return "--", sys.executable, str(program_path("elastic_training.py")), str(steps), "0.05"


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """What one worker makes of that program: a digest of the weights, and the losses."""
    (found,) = run_program("elastic_training.py", str(STEPS_OF_ELASTIC), "0", workers=1, reducers=0)
    return list(found[:2])


def check_end_of_elastic(run: Run, alone: list[Any]) -> None:
    """Trained to the end, and each microbatch counts once."""
    run.check_end()
    results = [json.loads(line[line.index('["') :]) for line in run.output().splitlines() if '["' in line]
    assert results, run.output()
    assert alone[0] in [digest for digest, _, _ in results]
    assert all(losses == alone[1] and others == 0 for _, losses, others in results)


@needs_slurm
def test_an_elastic_job_runs_on_without_a_node(lab: SlurmLab, alone: list[Any], tmp_path: Path) -> None:
    """A killed worker comes back on its node; one whose node is gone does not, and the job is not started again."""
    run = Run(lab, tmp_path, "--workers", "3", *ELASTIC, *slow_training())
    run.wait_for("rank 1 is in at step 0")
    for worker in lab.find("gpu2", "elastic_training"):
        os.kill(worker, signal.SIGKILL)
    run.wait_for("warning: worker . .* exited with code 137; the others go on, and it is started again in 0.5 s")
    run.wait_for(r"is in at step [1-9]")
    lab.kill_node("gpu3")
    lab.wait_until_down("gpu3")
    assert lab.state(run.number) == "RUNNING"
    check_end_of_elastic(run, alone)
    assert "Node failure on gpu3; the others go on, and it is started again when a host is free" in run.output()
    assert run.output().count("3 workers, elastic 2:4") == 1, "the job was started again"
    assert not list(tmp_path.glob(".jaxhetero-*")), "the token is still there"


@needs_slurm
def test_a_worker_of_an_elastic_job_moves_to_a_spare_node(lab: SlurmLab, alone: list[Any], tmp_path: Path) -> None:
    """The other one waits for it at its gate, since it may not go on alone."""
    counts = ("--workers", "2", "--workers-nodes", "3", "--reducers", "1", "--reducers-partition", "cpu")
    run = Run(lab, tmp_path, *counts, *ELASTIC, *slow_training())
    run.wait_for("rank 1 is in at step 0")
    (lost,) = (node for node in ("gpu2", "gpu3") if lab.find(node, "elastic_training"))
    lab.kill_node(lost)
    run.wait_for(r"is in at step [1-9]")
    check_end_of_elastic(run, alone)
    assert re.search(rf"worker . .* has failed: srun: error: Node failure on {lost}; the others go on", run.output())


def test_the_steps_of_an_elastic_job_want_their_settings() -> None:
    command = [sys.executable, "-m", "jaxhetero.cluster.steps"]
    found = {**os.environ, "JAXHETERO_COORDINATOR": "here:1", "JAXHETERO_TOKEN": "any"}
    for arguments, words in (([], "no command"), (["true"], "this job is not elastic: set JAXHETERO_ELASTIC")):
        done = subprocess.run([*command, *arguments], env=found, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr


@needs_slurm
def test_a_warning_of_slurm_makes_the_workers_of_an_elastic_job_leave(lab: SlurmLab, tmp_path: Path) -> None:
    """As the one that comes before the time limit does."""
    run = Run(lab, tmp_path, "--workers", "2", *ELASTIC, *slow_training(steps=100_000))
    assert "\n#SBATCH --signal=TERM@60\n" in (tmp_path / "job.sh").read_text()
    for rank in range(2):
        run.wait_for(f"rank {rank} is in at step 0")
    lab.command("scancel", "--signal=TERM", str(run.number))
    run.check_end()
    assert re.search("rank . .*(wants to leave|leaves)", run.output())
    assert "was lost" not in run.output()
