"""Heterogeneous all-reduce for JAX: workers push gradient shards to CPU reducers and get the totals back.

The program of a worker, which ``jaxhetero launch`` starts once for each::

    import jaxhetero

    jaxhetero.initialize()                      # finds its settings in the environment of ``jaxhetero launch``
    params = jaxhetero.broadcast(params)        # every worker starts from rank 0's parameters
    ...
    grads = jaxhetero.pmean(grads)              # inside the jitted train step
    ...
    jaxhetero.shutdown()

Examples:
  The examples in docstrings follow these lines, in a world of one worker, where a sum is the worker's own value:

  >>> import jax
  >>> import jax.numpy as jnp
  >>> import jaxhetero
  >>> jaxhetero.initialize(rank=0, worker_count=1)
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

# In a checkout this directory comes before the installed package, which alone has the compiled `_native`.
__path__ = pkgutil.extend_path(__path__, __name__)

if TYPE_CHECKING:
    from jaxhetero import elastic as elastic
    from jaxhetero import optimizers as optimizers
    from jaxhetero import pipeline as pipeline
    from jaxhetero._collectives.api import all_gather as all_gather
    from jaxhetero._collectives.api import barrier as barrier
    from jaxhetero._collectives.api import broadcast as broadcast
    from jaxhetero._collectives.api import pmax as pmax
    from jaxhetero._collectives.api import pmean as pmean
    from jaxhetero._collectives.api import pmin as pmin
    from jaxhetero._collectives.api import psum as psum
    from jaxhetero._collectives.api import psum_scatter as psum_scatter
    from jaxhetero._collectives.api import replicated as replicated
    from jaxhetero._collectives.best_time import best_time_s as best_time_s
    from jaxhetero._collectives.buckets import make_buckets as make_buckets
    from jaxhetero._collectives.exchanges import all_to_all as all_to_all
    from jaxhetero._collectives.exchanges import ppermute as ppermute
    from jaxhetero._collectives.exchanges import pshuffle as pshuffle
    from jaxhetero._collectives.exchanges import pswapaxes as pswapaxes
    from jaxhetero._collectives.participants import Who as Who
    from jaxhetero._collectives.pending import Pending as Pending
    from jaxhetero._collectives.pending import psum_done as psum_done
    from jaxhetero._collectives.pending import psum_start as psum_start
    from jaxhetero._job.counts import Metrics as Metrics
    from jaxhetero._job.counts import RoundTimes as RoundTimes
    from jaxhetero._job.counts import metrics as metrics
    from jaxhetero._job.counts import timeline as timeline
    from jaxhetero._job.counts import write_timeline as write_timeline
    from jaxhetero._job.world import check as check
    from jaxhetero._job.world import initialize as initialize
    from jaxhetero._job.world import rank as rank
    from jaxhetero._job.world import restart_count as restart_count
    from jaxhetero._job.world import shutdown as shutdown
    from jaxhetero._job.world import size as size
    from jaxhetero._offload.api import offload as offload
    from jaxhetero.optimizers import all_reduce_gradients as all_reduce_gradients

# Imported when first used, so that starting a reducer or the launcher never imports jax.
_HOMES = {
    "Who": "_collectives.participants",
    "make_buckets": "_collectives.buckets",
    "all_gather": "_collectives.api",
    "barrier": "_collectives.api",
    "broadcast": "_collectives.api",
    "pmax": "_collectives.api",
    "pmean": "_collectives.api",
    "pmin": "_collectives.api",
    "psum": "_collectives.api",
    "psum_scatter": "_collectives.api",
    "replicated": "_collectives.api",
    "all_to_all": "_collectives.exchanges",
    "ppermute": "_collectives.exchanges",
    "pshuffle": "_collectives.exchanges",
    "pswapaxes": "_collectives.exchanges",
    "Pending": "_collectives.pending",
    "psum_done": "_collectives.pending",
    "psum_start": "_collectives.pending",
    "offload": "_offload.api",
    "all_reduce_gradients": "optimizers",
    "best_time_s": "_collectives.best_time",
    "Metrics": "_job.counts",
    "RoundTimes": "_job.counts",
    "check": "_job.world",
    "initialize": "_job.world",
    "metrics": "_job.counts",
    "rank": "_job.world",
    "restart_count": "_job.world",
    "shutdown": "_job.world",
    "size": "_job.world",
    "timeline": "_job.counts",
    "write_timeline": "_job.counts",
}

_MODULES = ("elastic", "optimizers", "pipeline")

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from jaxhetero._native import version

        return version
    if name in _MODULES:
        return importlib.import_module(f"jaxhetero.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxhetero' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxhetero.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]
