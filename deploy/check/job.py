"""What no schema can see: counts that disagree, settings that do not exist, labels that nobody sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from jaxhetero.config import ENV_PREFIX, Config, CoordinatorConfig, ReducerConfig, parse_elastic
from jaxhetero.errors import ConfigError

_SETTINGS = {
    ENV_PREFIX + field.name.upper() for kind in (Config, CoordinatorConfig, ReducerConfig) for field in fields(kind)
}
_SETTINGS.add(ENV_PREFIX + "TOKEN_FILE")
# The labels and annotations of three domains, as far as a user may want to name them.
_DOMAINS = re.compile(r"\b(?:batch\.kubernetes\.io|(?:alpha\.)?jobset\.sigs\.k8s\.io|kueue\.x-k8s\.io)/[\w-]*")
_KEYS = {
    "alpha.jobset.sigs.k8s.io": {"exclusive-topology", "node-selector", "no-schedule"},
    "batch.kubernetes.io": {"job-completion-index", "job-name"},
    "jobset.sigs.k8s.io": {
        *("coordinator", "global-replicas", "group-name", "group-replicas", "job-global-index", "job-group-index"),
        *("job-index", "job-key", "jobset-name", "jobset-uid", "replicatedjob-name", "replicatedjob-replicas"),
        "restart-attempt",
    },
    "kueue.x-k8s.io": {
        *("max-exec-time-seconds", "podset-preferred-topology", "podset-required-topology"),
        *("podset-unconstrained-topology", "priority-class", "queue-name"),
    },
}
# The replicated job that a variable counts.
_COUNTS = {"JAXHETERO_WORKER_COUNT": "workers", "JAXHETERO_REDUCER_COUNT": "reducers"}


def name_problems(document: Any) -> Iterator[str]:
    """Labels and annotations of JobSet and Kueue, and JAXHETERO_* variables: an unknown one would do nothing."""
    for text in dict.fromkeys(_texts(document)):
        for key in _DOMAINS.findall(text):
            domain, _, name = key.partition("/")
            if name not in _KEYS[domain]:
                yield f"unknown label or annotation '{key}'"
        if text.startswith(ENV_PREFIX) and text not in _SETTINGS:
            yield f"jaxhetero has no setting '{text}'"


def job_problems(spec: Any) -> Iterator[str]:
    """Whether the numbers of workers and reducers, and the names of replicated jobs, are the same everywhere."""
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    for where, target in _targets(spec):
        if target not in jobs:
            yield f"{where} names the replicated job '{target}', which is not there"
    for name, job in jobs.items():
        if job.get("completionMode") != "Indexed":
            yield f"{name}: completionMode is not Indexed, so its pods have no numbers"
        if job.get("parallelism") != job.get("completions"):
            yield f"{name}: parallelism is {job.get('parallelism')}, but completions is {job.get('completions')}"
        for variable, value in _variables(job):
            counted = _COUNTS.get(variable)
            if counted in jobs and value != str(jobs[counted].get("parallelism")):
                yield f"{name}: {variable} is {value}, but there are {jobs[counted].get('parallelism')} {counted}"


def plain_job_problems(job: Any, documents: list[Any]) -> Iterator[str]:
    """Whether a Job that is in no JobSet finds its coordinator, and whether the workers of an elastic one come back."""
    spec, found = job["spec"], dict(_variables(job["spec"]))
    host, _, _ = (found.get("JAXHETERO_COORDINATOR") or "$").rpartition(":")
    if host and "$" not in host and host not in _names(documents, "Service"):
        yield f"JAXHETERO_COORDINATOR names the Service '{host}', which is not there"
    if "JAXHETERO_ELASTIC" not in found:
        return
    count = spec.get("completions")
    try:
        least, most = parse_elastic(found["JAXHETERO_ELASTIC"] or "")
        if not least <= (count or 0) <= most:
            yield f"JAXHETERO_ELASTIC is {least}:{most}, but there are {count} workers"
    except ConfigError as error:
        yield f"JAXHETERO_ELASTIC: {error}"
    if spec.get("completionMode") != "Indexed":
        yield "completionMode is not Indexed, so its pods have no numbers"
    if "backoffLimitPerIndex" not in spec:
        yield "there is no backoffLimitPerIndex, so a lost worker would end the others"
    if spec.get("parallelism") != count:
        yield f"parallelism is {spec.get('parallelism')}, but completions is {count}"
    reducers = [each["spec"].get("parallelism") for each in documents if _reduces(each)]
    for variable, wanted in {"JAXHETERO_WORKER_COUNT": count, "JAXHETERO_REDUCER_COUNT": sum(reducers)}.items():
        if found.get(variable) != str(wanted):
            yield f"{variable} is {found.get(variable)}, but there are {wanted}"


def _names(documents: list[Any], kind: str) -> list[str]:
    return [each["metadata"]["name"] for each in documents if each["kind"] == kind]


def _reduces(document: Any) -> bool:
    if document["kind"] != "Job":
        return False
    containers = document["spec"]["template"]["spec"]["containers"]
    return any(container.get("command") == ["jaxhetero", "reducer"] for container in containers)


def _targets(spec: Any) -> Iterator[tuple[str, str]]:
    if "coordinator" in spec:
        yield "coordinator", spec["coordinator"].get("replicatedJob")
    yield from (("successPolicy", each) for each in spec.get("successPolicy", {}).get("targetReplicatedJobs", []))


def _variables(job: Any) -> Iterator[tuple[str, str | None]]:
    for container in job.get("template", {}).get("spec", {}).get("containers", []):
        yield from ((variable["name"], variable.get("value")) for variable in container.get("env", []))


def _texts(node: Any) -> Iterator[str]:
    """Every key and every text in a document."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for each in node:
            yield from _texts(each)
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _texts(key)
            yield from _texts(value)
