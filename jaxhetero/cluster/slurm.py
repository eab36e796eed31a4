"""``jaxhetero slurm``: the batch script of a job, as text."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from jaxhetero.config import ENV_PREFIX, Config
from jaxhetero.errors import ConfigError


@dataclass(frozen=True)
class Component:
    """The nodes of one kind of process, and what Slurm is asked for them.

    Example:
      >>> from jaxhetero.cluster.slurm import Component
      >>> Component(task_count=8, node_count=2, partition="gpu", options=("--gres=gpu:4",)).requests()
      ['--nodes=2', '--ntasks=8', '--ntasks-per-node=4', '--partition=gpu', '--gres=gpu:4']
    """

    task_count: int
    node_count: int = 0
    """0: a node for each task."""
    partition: str = ""
    """Empty: Slurm's default."""
    cpu_count: int = 0
    """How many CPUs each task gets. 0: Slurm's default."""
    options: tuple[str, ...] = ()
    """More options of sbatch."""
    is_elastic: bool = False
    """Whether each task has a node of its own, and a step. Nodes beyond their number are there for tasks that have lost
    theirs."""

    def __post_init__(self) -> None:
        if self.is_elastic and 0 < self.node_count < self.task_count:
            raise ConfigError(
                f"{self.task_count} workers on {self.node_count} nodes: with --elastic each worker has a node of its "
                "own, where it may use all devices; give fewer workers, or more nodes"
            )
        if self.node_count and self.task_count % self.node_count and not self.is_elastic:
            raise ConfigError(f"{self.task_count} processes cannot be shared equally by {self.node_count} nodes")

    def requests(self) -> list[str]:
        """The options of sbatch."""
        nodes = self.node_count or self.task_count
        tasks = nodes if self.is_elastic else self.task_count
        found = [f"--nodes={nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={tasks // nodes}"]
        if self.partition:
            found.append(f"--partition={self.partition}")
        return [*found, *self.step_options(), *self.options]

    def step_options(self) -> list[str]:
        """The options that srun does not take over from sbatch."""
        return [f"--cpus-per-task={self.cpu_count}"] if self.cpu_count else []


@dataclass(frozen=True)
class SlurmJob:
    """A job for Slurm.

    With dedicated reducers it is a heterogeneous job of two components, workers and reducers. Without, a reducer runs
    inside each worker.

    Raises:
      ConfigError: processes cannot be shared equally by the nodes, or an option has a line break in it.
    """

    command: tuple[str, ...]
    """What each worker runs. Empty for an examination of the nodes."""
    workers: Component
    reducers: Component | None = None
    name: str = "jaxhetero"
    time_limit: str = ""
    """As sbatch takes it: ``12:00:00``. Empty: the partition's."""
    output: str = ""
    """The file of the job's output, as sbatch takes it. Empty: Slurm's default."""
    max_restarts: int = 0
    """How often the job is queued again after a failure of the workers or of their nodes."""
    reducer_restarts: int = 10
    """How often a reducer that has crashed is started anew, on its node."""
    settings: dict[str, str | int] = field(default_factory=dict)
    """Fields of ``Config`` for all processes."""
    doctor: bool = False
    """Whether the job only runs ``jaxhetero doctor``, on all its nodes."""
    elastic: str = ""
    """``"MIN:MAX"``: the job goes on without workers that are lost, each of which has a step and a node of its own."""

    def __post_init__(self) -> None:
        if self.doctor == bool(self.command):
            raise ConfigError("give either a command for the workers or --doctor")
        if self.elastic:
            self._check_elastic()
        texts = [self.name, self.time_limit, self.output, *self.workers.options]
        texts += self.reducers.options if self.reducers else ()
        if broken := [text for text in texts if "\n" in text]:
            raise ConfigError(f"an option of Slurm has a line break in it: {broken[0]!r}")

    def script(self) -> str:
        """The text of the batch script."""
        if self.doctor:
            body = [_EXAMINE.format(group="--het-group=0,1 " if self.reducers else "")]
        else:
            run = self._keep_workers() if self.elastic else self._run_workers()
            body = [*([self._start_reducers()] if self.reducers else []), run, self._end()]
        return "\n".join([self._requests(), _PREPARE + self._export_settings(), *body])

    def _requests(self) -> str:
        # With --no-kill the job outlives a node: reducers may be lost, and a lost worker ends the others by itself.
        common = ["--no-kill", "--requeue" if self.max_restarts else "--no-requeue"]
        own = [f"--job-name={self.name}", "--open-mode=append"]
        own += [
            f"--{option}={value}" for option, value in (("time", self.time_limit), ("output", self.output)) if value
        ]
        # Before the time limit the workers' steps get SIGTERM, on which they leave. The reducers' step gets none.
        warning = [_WARNING] if self.elastic else []
        lines = [*own, *self.workers.requests(), *common, *warning]
        if self.reducers:
            lines += ["hetjob", *self.reducers.requests(), *common]
        return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines)

    def _settings(self) -> dict[str, str | int]:
        """Fields of ``Config`` for all processes. How many there are follows from Slurm's variables, mostly."""
        if not self.elastic:
            return self.settings
        reducers = self.reducers.task_count if self.reducers else 0
        counts = {"worker_count": self.workers.task_count, "reducer_count": reducers}
        return {**self.settings, "elastic": self.elastic, **counts}

    def _export_settings(self) -> str:
        settings = self._settings()
        return "".join(f"export {ENV_PREFIX}{name.upper()}={shlex.quote(str(settings[name]))}\n" for name in settings)

    def _start_reducers(self) -> str:
        assert self.reducers is not None
        options = " ".join(["--het-group=1", "--no-kill", "--label", *self.reducers.step_options()])
        return _START_REDUCERS.format(options=options, restarts=self.reducer_restarts)

    def _run_workers(self) -> str:
        group = ["--het-group=0"] if self.reducers else []
        options = [*group, "--no-kill", "--kill-on-bad-exit=1", "--label", *self.workers.step_options()]
        return f"srun {' '.join(options)} {shlex.join(self.command)}\ncode=$?\n"

    def _keep_workers(self) -> str:
        group = ["--het-group=0"] if self.reducers else []
        options = [*group, "--nodes=1", "--ntasks=1", "--no-kill", _PATIENCE, *self.workers.step_options()]
        return _KEEP_WORKERS.format(options=" ".join(options), command=shlex.join(self.command))

    def _check_elastic(self) -> None:
        if not self.workers.is_elastic:
            raise ConfigError("an elastic job wants Component(..., is_elastic=True) for its workers")
        settings: dict[str, Any] = {"coordinator": "first:1", "token": "any", **self._settings()}
        Config(**settings)

    def _end(self) -> str:
        return (_END_REDUCERS if self.reducers else "") + _END.format(max_restarts=self.max_restarts)


def make_job(
    command: tuple[str, ...], *, workers: int, reducers: int, colocated_count: int | None = None,
    start_timeout_ms: int | None = None, timeout_ms: int | None = None, lost_after_ms: int | None = None,
    elastic: str = "", **options: Any,
) -> SlurmJob:  # fmt: skip
    """The job that the options of ``jaxhetero slurm`` ask for.

    Args:
      command: what each worker runs.
      workers: how many workers.
      reducers: how many dedicated reducers.
      colocated_count, start_timeout_ms, timeout_ms, lost_after_ms, elastic: fields of ``Config``.
      options: fields of ``SlurmJob``, and ``workers_`` or ``reducers_`` with ``nodes``, ``partition``, ``cpus`` and
        ``option``.

    Raises:
      ConfigError: see ``SlurmJob``.
    """

    def take_component(kind: str, count: int) -> Component:
        nodes, partition, cpus, more = (options.pop(f"{kind}_{of}") for of in ("nodes", "partition", "cpus", "option"))
        return Component(count, nodes or 0, partition, cpus or 0, more, bool(elastic) and kind == "workers")

    parts = [take_component("workers", workers), take_component("reducers", reducers)]
    given = {"colocated_count": colocated_count, "start_timeout_ms": start_timeout_ms, "timeout_ms": timeout_ms}
    given["lost_after_ms"] = lost_after_ms
    settings: dict[str, str | int] = {name: value for name, value in given.items() if value is not None}
    return SlurmJob(command, parts[0], parts[1] if reducers else None, settings=settings, elastic=elastic, **options)


# The secret is in a file, and only the file's name in the environment, where `scontrol` and every child would show it.
_PREPARE = """\
export PYTHONUNBUFFERED=1
# The job's secret: in a file that nobody else can read, in the folder that all nodes share.
export JAXHETERO_TOKEN_FILE="$PWD/.jaxhetero-$SLURM_JOB_ID.token"
trap 'rm -f "$JAXHETERO_TOKEN_FILE"' EXIT
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >"$JAXHETERO_TOKEN_FILE") || exit
"""

_EXAMINE = """\
srun {group}--label jaxhetero doctor
"""

_START_REDUCERS = """\
# In a step of their own: the end of a reducer does not end the workers. Their lines begin with "reducer 0:".
srun {options} jaxhetero reducer --restart {restarts} > >(sed -u 's/^ */reducer /') 2>&1 &
reducers=$!
"""

# Slurm counts in steps of a minute.
_WARNING = "--signal=TERM@60"
# Where no node is free, the next attempt comes after a pause. A step that waits would start when the job is over.
_PATIENCE = "--immediate=30"

_KEEP_WORKERS = """\
# The coordinator runs here. Each worker is a step with a node of its own, and starts again when it is lost.
python3 -m jaxhetero.cluster.steps srun {options} {command}
code=$?
"""

_END_REDUCERS = """\
# They end when the workers have left. For one on a dead node, srun would wait long.
for _ in {1..10}; do
  kill -0 "$reducers" 2>/dev/null || break
  sleep 1
done
kill "$reducers" 2>/dev/null
"""

# Exit codes 2, 126 and 127 stand for a wrong command line, which would fail again.
_END = """\
if ((code != 0 && code != 2 && code != 126 && code != 127 && ${{SLURM_RESTART_COUNT:-0}} < {max_restarts})); then
  echo "the workers ended with code $code; the job is queued again"
  scontrol requeue "$SLURM_JOB_ID" && sleep infinity # Slurm ends this script
fi
exit "$code"
"""
