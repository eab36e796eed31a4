"""Trainings with few exchanges; prints what each gives, beside what the same arithmetic gives in one process.

Arguments: perhaps a file: with differences on their way, rank 0 says so and waits until the file is there.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero import optimizers
from jaxhetero.errors import ConfigError

STEPS, EVERY, FRAGMENTS = 24, 6, 3
Params = list[jax.Array]
INNER = optax.adam(1e-2)


def initial_params() -> Params:
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(0, 0.3, shape), jnp.float32) for shape in ((40, 60), (60, 50), (50, 20))]


def batch(rank: int, step: int) -> tuple[jax.Array, jax.Array]:
    generator = np.random.default_rng([rank, step])
    inputs = generator.normal(size=(16, 40)).astype(np.float32)
    return jnp.asarray(inputs), jnp.asarray(np.sin(inputs[:, :20]))


@jax.jit
def train_step(params: Params, opt_state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
    def loss_fn(params: Params) -> jax.Array:
        outputs = jnp.tanh(jnp.tanh(inputs @ params[0]) @ params[1]) @ params[2]
        return jnp.mean((outputs - targets) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = INNER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(local: optimizers.LocalSteps, steps: int = STEPS, pause: Path | None = None) -> Params:
    """Settles in the middle, as for a checkpoint, and at the end."""
    params = initial_params()
    opt_state, state = INNER.init(params), local.init(params)
    for step in range(steps):
        params, opt_state, _ = train_step(params, opt_state, *batch(jaxhetero.rank(), step))
        params, state = local.exchange(params, state, step)
        if step == EVERY and pause is not None:
            if jaxhetero.rank() == 0:
                assert any(fragment.pending is not None for fragment in state.fragments)
                print("pending", flush=True)
            while not pause.exists():
                time.sleep(0.01)
        if step == steps // 2:
            params, state = local.settle(params, state)
    return local.settle(params, state)[0]


def expected(overlap: int, mixing: float) -> Params:
    """The same of both workers in this process."""
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    common = initial_params()
    all_params = [initial_params() for _ in range(2)]
    opt_states = [INNER.init(params) for params in all_params]
    outer_states = [outer.init([leaf]) for leaf in common]
    means: list[Any] = [None] * len(common)

    def start(leaf: int) -> None:
        differences = [common[leaf] - params[leaf] for params in all_params]
        means[leaf] = (differences[0] + differences[1]) / 2

    def finish(leaf: int, mixing: float) -> None:
        if means[leaf] is None:
            return
        updates, outer_states[leaf] = outer.update([means[leaf]], outer_states[leaf], [common[leaf]])
        (common[leaf],) = optax.apply_updates([common[leaf]], updates)
        means[leaf] = None
        for params in all_params:
            params[leaf] = mixing * params[leaf] + (1 - mixing) * common[leaf]

    def settle() -> None:
        for leaf in range(len(common)):
            finish(leaf, mixing)
            start(leaf)
        for leaf in range(len(common)):
            finish(leaf, 0.0)

    for step in range(STEPS):
        for rank, params in enumerate(all_params):
            new, opt_states[rank], _ = train_step(params, opt_states[rank], *batch(rank, step))
            params[:] = new
        for leaf in range(len(common)):
            behind = (step + 1 - (leaf + 1) * EVERY // FRAGMENTS) % EVERY
            if behind == 0:
                start(leaf)
            if behind == overlap:
                finish(leaf, mixing)
        if step == STEPS // 2:
            settle()
    settle()
    return common


def distance(found: Params, wanted: Params) -> float:
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(found, wanted, strict=True))


def sent_bytes(run: Any) -> int:
    before = jaxhetero.metrics().sent_bytes
    jax.block_until_ready(run())
    return jaxhetero.metrics().sent_bytes - before


def bytes_compared() -> float:
    """What is sent in a period of 60 steps, as a share of sums in each step."""
    local = optimizers.local_steps(every=60, fragments=FRAGMENTS, overlap=2, wire_dtype="bfloat16")
    params = initial_params()

    def exchange() -> Params:
        state = local.init(params)
        whole = params
        for step in range(62):
            whole, state = local.exchange(whole, state, step)
        return whole

    return sent_bytes(exchange) / (60 * sent_bytes(lambda: jaxhetero.psum(params)))


def error_of(run: Any) -> str:
    try:
        run()
    except ConfigError as error:
        return str(error)
    return "nothing"


def mistakes() -> dict[str, str]:
    local = optimizers.local_steps(every=4, fragments=1, overlap=2)
    params = initial_params()
    state = local.init(params)
    started = local.exchange(params, state, 3)
    found = {
        "overlap": error_of(lambda: optimizers.local_steps(every=4, fragments=1, overlap=4)),
        "fragments": error_of(lambda: optimizers.local_steps(every=4)),
        "traced": error_of(lambda: jax.jit(local.exchange)(params, state, 3)),
        "other model": error_of(lambda: local.exchange(params[:2], state, 3)),
        "twice": error_of(lambda: local.exchange(*started, 3)),
    }
    local.settle(*started)
    return found


def main() -> None:
    jaxhetero.initialize()
    pause = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    found: dict[str, Any] = {}
    options = {"every": EVERY, "fragments": FRAGMENTS}
    for overlap, mixing in ((0, 0.0), (2, 0.5)):
        trained = train(optimizers.local_steps(overlap=overlap, **options), pause=pause if overlap else None)
        found[f"overlap {overlap}"] = distance(trained, expected(overlap, mixing))
    found["digest"] = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in trained)).hexdigest()
    outer = optimizers.on_reducers(optax.sgd(0.7, momentum=0.9, nesterov=True))
    found["on reducers"] = distance(train(optimizers.local_steps(outer, overlap=2, **options)), expected(2, 0.5))
    found["moved"] = distance(trained, initial_params())
    found["bytes"] = bytes_compared()
    found["mistakes"] = mistakes()
    found["views"] = jaxhetero.metrics().view_count
    jaxhetero.shutdown()
    print(json.dumps(found))


main()
