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
    from jaxhetero import optimizers as optimizers
    from jaxhetero import pipeline as pipeline
    from jaxhetero.buckets import make_buckets as make_buckets
    from jaxhetero.collectives import all_gather as all_gather
    from jaxhetero.collectives import barrier as barrier
    from jaxhetero.collectives import broadcast as broadcast
    from jaxhetero.collectives import pmax as pmax
    from jaxhetero.collectives import pmean as pmean
    from jaxhetero.collectives import pmin as pmin
    from jaxhetero.collectives import psum as psum
    from jaxhetero.collectives import psum_scatter as psum_scatter
    from jaxhetero.collectives import replicated as replicated
    from jaxhetero.exchanges import all_to_all as all_to_all
    from jaxhetero.exchanges import ppermute as ppermute
    from jaxhetero.exchanges import pshuffle as pshuffle
    from jaxhetero.exchanges import pswapaxes as pswapaxes
    from jaxhetero.offloading import offload as offload
    from jaxhetero.optimizers import all_reduce_gradients as all_reduce_gradients
    from jaxhetero.plan import best_time_s as best_time_s
    from jaxhetero.world import Metrics as Metrics
    from jaxhetero.world import RoundTimes as RoundTimes
    from jaxhetero.world import check as check
    from jaxhetero.world import initialize as initialize
    from jaxhetero.world import metrics as metrics
    from jaxhetero.world import rank as rank
    from jaxhetero.world import restart_count as restart_count
    from jaxhetero.world import shutdown as shutdown
    from jaxhetero.world import size as size
    from jaxhetero.world import timeline as timeline
    from jaxhetero.world import write_timeline as write_timeline

# Imported when first used, so that starting a reducer or the launcher never imports jax.
_HOMES = {
    "make_buckets": "buckets",
    "all_gather": "collectives",
    "barrier": "collectives",
    "broadcast": "collectives",
    "pmax": "collectives",
    "pmean": "collectives",
    "pmin": "collectives",
    "psum": "collectives",
    "psum_scatter": "collectives",
    "replicated": "collectives",
    "all_to_all": "exchanges",
    "ppermute": "exchanges",
    "pshuffle": "exchanges",
    "pswapaxes": "exchanges",
    "offload": "offloading",
    "all_reduce_gradients": "optimizers",
    "best_time_s": "plan",
    "Metrics": "world",
    "RoundTimes": "world",
    "check": "world",
    "initialize": "world",
    "metrics": "world",
    "rank": "world",
    "restart_count": "world",
    "shutdown": "world",
    "size": "world",
    "timeline": "world",
    "write_timeline": "world",
}

_MODULES = ("optimizers", "pipeline")

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
