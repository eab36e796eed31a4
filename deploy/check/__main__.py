"""The command line of the check."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from deploy.check.aws import check_clusters, check_template
from deploy.check.kubernetes import check_kubernetes
from deploy.check.report import Report

DEPLOY = Path(__file__).parents[1]
_EXISTING = click.Path(exists=True, path_type=Path)


def default_files() -> list[Path]:
    """All configurations of this folder."""
    folders = [kustomization.parent for kustomization in DEPLOY.glob("kubernetes/*/kustomization.yaml")]
    return sorted(folders) + sorted(DEPLOY.glob("aws/*.yaml"))


def check(files: Sequence[Path], jobset_crd: Path | None, pcluster_python: Path | None) -> dict[Path, Report]:
    """What is wrong in each file or folder."""
    clusters = [path for path in files if path.is_file() and "\nScheduling:" in path.read_text()]
    reports = dict(zip(clusters, check_clusters(clusters, pcluster_python) if clusters else [], strict=True))
    for path in files:
        if path.is_file() and "AWSTemplateFormatVersion" in path.read_text():
            reports[path] = check_template(path)
        elif path not in reports:
            reports[path] = check_kubernetes(path, jobset_crd)
    return {path: reports[path] for path in files}


@click.command()
@click.argument("files", nargs=-1, type=_EXISTING)
@click.option("--jobset-crd", type=_EXISTING, envvar="JOBSET_CRD", help="JobSet's CRD. [default: $JOBSET_CRD]")
@click.option(
    "--pcluster-python",
    type=_EXISTING,
    envvar="PCLUSTER_PYTHON",
    help="A Python with aws-parallelcluster and moto[server]. [default: $PCLUSTER_PYTHON]",
)
def main(files: tuple[Path, ...], jobset_crd: Path | None, pcluster_python: Path | None) -> None:
    """Check configurations; all that are in deploy/ if no FILES are named.

    A file may be a folder with a kustomization, manifests of Kubernetes, a configuration of AWS ParallelCluster, or a
    template of CloudFormation. Exits with 1 if anything is wrong.
    """
    reports = check(files or default_files(), jobset_crd, pcluster_python)
    for path, report in reports.items():
        shown = path.resolve()
        name = shown.relative_to(DEPLOY.parent) if shown.is_relative_to(DEPLOY.parent) else path
        click.echo(f"{name}: {'wrong' if report.problems else 'not checked' if _nothing(report) else 'ok'}")
        for problem in report.problems:
            click.echo(f"  {problem}")
        for part in report.unchecked:
            click.echo(f"  not checked: {part}")
    sys.exit(any(report.problems for report in reports.values()))


def _nothing(report: Report) -> bool:
    return any(part.startswith("all of it") for part in report.unchecked)


if __name__ == "__main__":
    main()
