"""Accumulation and loss scaling between workers; prints rounds, scales, digests, and what differs from one process."""

import hashlib
import json
from typing import Any

import jax
import numpy as np
import optax

import jaxhetero
from jaxhetero import optimizers

Params = dict[str, Any]
CALLS = 7
EVERY = 3
# Unlike Adam and LAMB it tells a sum from a mean.
SGD = optax.sgd(0.1, momentum=0.9)


def initial_params() -> Params:
    generator = np.random.default_rng(0)
    return {"kernel": generator.normal(size=(5, 3)).astype(np.float32), "bias": np.zeros(3, np.float32)}


def gradients(rank: int, call: int) -> Params:
    generator = np.random.default_rng([rank, call])
    return {name: generator.normal(size=x.shape).astype(np.float32) for name, x in initial_params().items()}


def digest(tree: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()


def mean_over_everything(calls: range) -> Params:
    """What one process would have computed from all workers' gradients of these calls."""
    trees = [gradients(rank, call) for call in calls for rank in range(jaxhetero.size())]
    return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *trees)


def accumulate() -> tuple[Params, list[int]]:
    """The parameters after all calls, and the rounds that each call took."""
    inner = optax.chain(jaxhetero.all_reduce_gradients(), SGD)
    optimizer = optimizers.accumulate_gradients(inner, every=EVERY)
    update = jax.jit(optimizer.update)
    params, rounds = initial_params(), []
    state = optimizer.init(params)
    for call in range(CALLS):
        before = jaxhetero.metrics().round_count
        updates, state = jax.block_until_ready(update(gradients(jaxhetero.rank(), call), state, params))
        params = optax.apply_updates(params, updates)
        rounds.append(jaxhetero.metrics().round_count - before)
    return params, rounds


def accumulate_in_one_process() -> Params:
    update = jax.jit(SGD.update)
    params = initial_params()
    state = SGD.init(params)
    for start in range(0, CALLS - EVERY + 1, EVERY):
        updates, state = update(mean_over_everything(range(start, start + EVERY)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def scale() -> tuple[Params, list[float], int]:
    """The parameters, the scale after each call, and how many calls made no step."""
    optimizer = optax.chain(
        jaxhetero.all_reduce_gradients(), optimizers.dynamic_loss_scale(optax.sgd(0.1), 8.0, growth_interval=2)
    )
    update = jax.jit(optimizer.update)
    params, scales = initial_params(), []
    state = optimizer.init(params)
    for call in range(6):
        mine = gradients(jaxhetero.rank(), call)
        if jaxhetero.rank() == 1 and call in (1, 4):
            mine["bias"][2] = np.inf if call == 1 else np.nan
        updates, state = update(mine, state, params)
        params = optax.apply_updates(params, updates)
        scales.append(float(state[1].loss_scale))
    return params, scales, int(state[1].skipped_count)


def differs(got: Params, expected: Params) -> list[str]:
    return [name for name in expected if not np.allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)]


def main() -> None:
    jaxhetero.initialize()
    total, _ = jaxhetero.all_reduce_gradients(mean=False).update(gradients(jaxhetero.rank(), 0), optax.EmptyState())
    failed = differs(total, jax.tree.map(lambda leaf: jaxhetero.size() * leaf, mean_over_everything(range(1))))
    accumulated, rounds = accumulate()
    failed += differs(accumulated, accumulate_in_one_process())
    scaled, scales, skipped = scale()
    jaxhetero.shutdown()
    failed += [name for name, leaf in scaled.items() if not np.all(np.isfinite(leaf))]
    digests = [digest(accumulated), digest(scaled)]
    print(json.dumps({"failed": failed, "rounds": rounds, "scales": scales, "skipped": skipped, "digests": digests}))


main()
