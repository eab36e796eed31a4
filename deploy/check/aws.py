"""AWS: templates of CloudFormation by cfn-lint, clusters by ParallelCluster's schema and its dry run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deploy.check.report import Report
from deploy.check.tools import find_tool

_DRY_RUN = Path(__file__).with_name("dry_run.py")


def check_template(path: Path) -> Report:
    """Check a template of CloudFormation."""
    lint = find_tool("cfn-lint")
    if not lint:
        return Report(unchecked=["all of it: cfn-lint is not installed (pip install '.[deploy]')"])
    run = subprocess.run([lint, "--format", "json", "--", path], capture_output=True, text=True, check=False)
    try:
        found = json.loads(run.stdout)
    except ValueError:
        return Report([f"cfn-lint: {(run.stderr or run.stdout).strip()}"])
    return Report([f"{'.'.join(map(str, each['Location']['Path']))}: {each['Message']}" for each in found])


def check_clusters(paths: Sequence[Path], python: Path | None) -> list[Report]:
    """Check configurations of ParallelCluster, in the Python that has aws-parallelcluster and moto."""
    if not python:
        reason = "all of it; a Python with aws-parallelcluster and moto[server] by --pcluster-python or PCLUSTER_PYTHON"
        return [Report(unchecked=[reason]) for _ in paths]
    run = subprocess.run([python, _DRY_RUN, *paths], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"the dry run of ParallelCluster failed:\n{run.stderr[-2000:]}")
    return [Report(problems) for problems in json.loads(run.stdout)]
