"""What a worker's settings are: as given, from the environment, from what has started the process, or by default."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from jaxhetero._job.launchers import describe_launcher, read_worker
from jaxhetero._job.ports import reserve_port
from jaxhetero.config import Config, read_environment
from jaxhetero.errors import ConfigError

# What all processes of several have in common.
_MEETING = {"worker_count", "coordinator", "token"}
_HOW_TO_MEET = (
    "give initialize() a rank, worker_count, coordinator and token, or set JAXHETERO_RANK, JAXHETERO_WORKER_COUNT, "
    "JAXHETERO_COORDINATOR and JAXHETERO_TOKEN, or start the workers with `jaxhetero launch`, "
    "`jaxhetero slurm` or jaxhetero.cluster.ray"
)
_HOW_TO_BE_ALONE = "if this worker is meant to be alone, give alone=True or set JAXHETERO_ALONE=1"


def make_config(settings: dict[str, Any], held: contextlib.ExitStack) -> Config:
    """``held`` gets what must stay until the job has started."""
    given: dict[str, Any] = {**read_environment(), **settings}
    if not given.get("alone"):
        told = _from_launcher(given)
        if "rank" not in given and "worker_count" not in given:
            told |= _from_jax_distributed(told | given, held)
        given = told | given
        _refuse_accidents(given)
    return Config(**given)


def _from_launcher(given: dict[str, Any]) -> dict[str, Any]:
    """What the launcher that started this process tells, unless ``given`` speaks of other workers than the launcher."""
    told = read_worker()
    count = given.get("worker_count")
    if count is None or (count != 1 and told.get("worker_count", count) == count):
        return told
    return {name: value for name, value in told.items() if name == "restart_count"}


def _refuse_accidents(given: dict[str, Any]) -> None:
    """``ConfigError`` for a world of one that nobody has asked for, and for several workers of rank 0."""
    partly = [name for name in ("rank", "reducer_count", "colocated_count", "coordinator") if name in given]
    if given.get("worker_count") != 1 and not given.keys() >= _MEETING and (told := describe_launcher()):
        lack = "they have no job token" if "coordinator" in given else "no setting says how they meet"
        raise ConfigError(
            f"this process is one of several, because {told}; but {lack}: {_HOW_TO_MEET}; {_HOW_TO_BE_ALONE}"
        )
    if "worker_count" not in given and partly:
        raise ConfigError(f"{', '.join(partly)} given, but no worker_count: {_HOW_TO_MEET}; {_HOW_TO_BE_ALONE}")
    if given.get("worker_count", 1) != 1 and "rank" not in given:
        raise ConfigError(f"worker_count is {given['worker_count']}, but there is no rank: {_HOW_TO_MEET}")


def refuse_several_processes() -> None:
    """``ConfigError`` for an elastic job under ``jax.distributed``."""
    import jax

    from jaxhetero import _compat

    if jax.distributed.is_initialized() and _compat.distributed_place()[1] > 1:
        raise ConfigError(
            "elastic is set, and this process is one of several of jax.distributed, whose service ends all of them "
            "when one dies; let each worker be a JAX process by itself, without jax.distributed.initialize()"
        )


def _from_jax_distributed(given: dict[str, Any], held: contextlib.ExitStack) -> dict[str, Any]:
    """Rank and number of workers as ``jax.distributed`` has them, and a meeting point agreed on through it.

    Dedicated reducers do not run JAX: where there are any, coordinator and token must be given.
    """
    import jax

    if not jax.distributed.is_initialized():
        return {}
    from jaxhetero import _compat

    rank, worker_count = _compat.distributed_place()
    if worker_count == 1:
        return {}
    found: dict[str, Any] = {"rank": rank, "worker_count": worker_count}
    if given.get("reducer_count") or given.keys() >= {"coordinator", "token"}:
        return found
    key = "jaxhetero/coordinator"
    if rank == 0:
        coordinator = given.get("coordinator")
        if not coordinator:
            host = _compat.distributed_coordinator().rpartition(":")[0]
            port = held.enter_context(reserve_port(0, host.strip("[]"))).getsockname()[1]
            coordinator = f"{host}:{port}"
        _compat.distributed_publish(key, f"{coordinator} {given.get('token') or secrets.token_hex(32)}")
    timeout_ms = int(given.get("start_timeout_ms", Config.start_timeout_ms))
    found["coordinator"], found["token"] = _compat.distributed_read(key, timeout_ms).split()
    return found
