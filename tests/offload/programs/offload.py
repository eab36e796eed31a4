"""Runs the train steps of ``lax_steps`` in every place of one kind: how far each ends from where jax.lax does.

With "lax" as kind, one process runs them as they are, on as many devices as there are workers' devices elsewhere, and
saves where they end.
"""

import functools
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lax_steps import AXIS, images, language, library, modules

import jaxhetero

KIND, REFERENCE, DEVICES, JAX_COORDINATOR = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
RANK, SIZE = int(os.environ.get("JAXHETERO_RANK", "0")), int(os.environ.get("JAXHETERO_WORKER_COUNT", "1"))
STEPS = 4
P = jax.P

Step = Callable[[Any, Any], Any]

# What to run, its first state, and the batch of a device.
EXAMPLES: dict[str, tuple[Step, Callable[[], Any], Callable[[int, int], Any]]] = {
    "images": (images.train_step, lambda: images.make_state(jnp.float32), images.make_batch),
    "half images": (images.train_step, lambda: images.make_state(jnp.float16), images.make_batch),
    "logits": (images.evaluate, lambda: images.make_state(jnp.float32), images.make_batch),
    "language": (language.untyped_train_step, language.make_state, language.make_batch),
    "typed language": (language.typed_train_step, language.make_state, language.make_batch),
    "modules": (modules.functional_step, lambda: nnx.split(modules.make_modules()), modules.make_batch),
}

# These run on any number of devices, the others on two: another number changes what is summed, not how a step is read.
ON_MANY = ("images", "typed language")

# --- Places: each takes a step, and gives a function of a state, and of the batches of devices along a first axis.


def in_pmap(step: Step) -> Any:
    return jax.pmap(step, axis_name=AXIS, in_axes=(None, 0), out_axes=None)


def in_jit(step: Step) -> Any:
    return jax.jit(lambda state, batch: step(state, first_of(batch)))


def in_shard_map(step: Step, *, check_vma: bool = True) -> Any:
    """On all devices that JAX knows of."""
    return jax.shard_map(
        lambda state, batch: step(state, first_of(batch)),
        mesh=jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(P(), P(AXIS)),
        out_specs=P(),
        check_vma=check_vma,
    )


def first_of(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], batch)


def in_a_library(step: Step, **options: Any) -> Any:
    """Of which nothing can be changed; only the call of what it has jitted is the user's."""
    jitted = jax.jit(in_shard_map(step, **options))

    def call(state: Any, batch: Any) -> Any:
        with jaxhetero.offload():
            return jitted(state, batch)

    return call


def in_a_mapping_library(step: Step) -> Any:
    """Of which nothing can be changed, and which calls jax.pmap itself."""
    trainer = library.Trainer(step)

    def call(state: Any, batch: Any) -> Any:
        with jaxhetero.offload():
            return trainer.fit(state, jax.tree.map(own_part, batch))

    return call


def own_part(leaf: Any) -> np.ndarray:
    """Of this process's devices, which is all that jax.pmap takes."""
    if isinstance(leaf, jax.Array):
        return np.concatenate([np.asarray(shard.data) for shard in leaf.addressable_shards])
    return np.asarray(leaf)


offload = jaxhetero.offload
by_name = functools.partial(jaxhetero.offload, axis_name=AXIS)
untyped = functools.partial(in_shard_map, check_vma=False)

# By the kind of job: the example and the place, and how the step comes there.
PLACES: dict[str, dict[tuple[str, str], Callable[[Step], Any]]] = {
    "lax": {
        ("images", "pmap"): in_pmap,
        ("half images", "pmap"): in_pmap,
        ("logits", "pmap"): in_pmap,
        ("language", "pmap"): in_pmap,
        ("typed language", "shard_map"): lambda step: jax.jit(in_shard_map(step)),
        ("modules", "pmap"): in_pmap,
    },
    # Each worker knows of its own devices only.
    "own": {
        ("images", "pmap"): lambda step: in_pmap(offload(step)),
        ("images", "library that maps"): in_a_mapping_library,
        ("half images", "pmap"): lambda step: in_pmap(by_name(step)),
        ("logits", "pmap"): lambda step: in_pmap(by_name(step)),
        ("language", "pmap"): lambda step: in_pmap(by_name(step)),
        ("typed language", "shard_map"): lambda step: jax.jit(in_shard_map(by_name(step))),
    },
    # The same, and there are two workers of one device each.
    "own pair": {
        ("images", "jit"): lambda step: in_jit(by_name(step)),
        ("half images", "around jit"): lambda step: by_name(in_jit(step)),
        ("logits", "jit"): lambda step: in_jit(offload(step)),
        ("language", "jit"): lambda step: in_jit(by_name(step)),
        ("modules", "pmap"): lambda step: in_pmap(by_name(step)),
        ("modules", "pmap, a bucket for each leaf"): lambda step: in_pmap(by_name(step, bucket_bytes=1)),
    },
    # One mesh of all workers.
    "global": {
        ("images", "in shard_map"): lambda step: jax.jit(untyped(offload(step))),
        ("images", "library that maps"): in_a_mapping_library,
        ("language", "block"): lambda step: in_a_library(step, check_vma=False),
        ("typed language", "around jit"): lambda step: offload(jax.jit(in_shard_map(step))),
    },
    # The same, and there are two workers.
    "global pair": {
        ("logits", "around jit"): lambda step: offload(jax.jit(untyped(step))),
        ("typed language", "in shard_map"): lambda step: jax.jit(in_shard_map(offload(step))),
        ("typed language", "around shard_map"): lambda step: jax.jit(offload(in_shard_map(step))),
        ("typed language", "block"): in_a_library,
    },
}


# --- Running them.


def batches(make_batch: Callable[[int, int], Any], step: int) -> Any:
    """Of all devices of this process, or, in a global mesh, of all workers."""
    rows = [make_batch(RANK * DEVICES + device, step) for device in range(DEVICES)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    if KIND != "global":
        return stacked
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    along = functools.partial(jax.make_array_from_process_local_data, jax.sharding.NamedSharding(mesh, P(AXIS)))
    return jax.tree.map(along, stacked)


def train(example: str, place: Callable[[Step], Any]) -> tuple[list[np.ndarray], str]:
    """The last state and the metrics of each step; and the compiled program, where the place shows it."""
    step, make_state, make_batch = EXAMPLES[example]
    # States go through the host, so that the program is compiled for one place of them.
    state, metrics, text = jax.tree.map(np.asarray, make_state()), [], ""
    call = place(step)
    if hasattr(call, "lower"):
        call = call.lower(state, batches(make_batch, 0)).compile()
        text = call.as_text()
    for number in range(STEPS):
        results = jax.tree.map(np.asarray, call(state, batches(make_batch, number)))
        if example == "logits":
            metrics.append(results)
        else:
            state = results[0]
            metrics.append(results[1])
    return jax.tree.leaves((state, metrics)), text


# A step that changes NNX modules in place, as NNX means it.
IN_NNX: dict[str, Callable[[], Any]] = {
    "modules, around nnx.jit": lambda: offload(nnx.jit(modules.train_step)),
    "modules, in nnx.jit": lambda: nnx.jit(by_name(modules.train_step)),
}


def train_in_place(step: Any) -> list[np.ndarray]:
    model, optimizer = modules.make_modules()
    losses = [step(model, optimizer, first_of(batches(modules.make_batch, number))) for number in range(STEPS)]
    return [np.asarray(leaf) for leaf in jax.tree.leaves((nnx.split((model, optimizer)), losses))]


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """0.0 if they are equal to the bit; else the largest difference, as a part of the largest number of its leaf."""
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if not np.array_equal(one, other):
            largest = max(largest, float(np.max(np.abs(one - other)) / np.max(np.abs(other))))
    return largest


def places_of(kind: str, device_count: int) -> dict[tuple[str, str], Callable[[Step], Any]]:
    return {key: place for key, place in PLACES[kind].items() if device_count <= 2 or key[0] in ON_MANY}


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if KIND == "lax":
        ends = {example: train(example, place)[0] for (example, _), place in places_of("lax", DEVICES).items()}
        REFERENCE.write_bytes(pickle.dumps(ends))
        return
    if KIND == "global":
        jax.distributed.initialize(JAX_COORDINATOR, SIZE, RANK)
    jaxhetero.initialize()
    places = places_of(KIND, SIZE * DEVICES) | (PLACES[f"{KIND} pair"] if (SIZE, DEVICES) == (2, 1) else {})
    expected = pickle.loads(REFERENCE.read_bytes())
    differences, calls, foreign = {}, {}, {}
    for (example, name), place in places.items():
        key = f"{example}, {name}"
        found, text = train(example, place)
        differences[key] = difference(found, expected[example])
        if text:
            calls[key] = len(re.findall(r'custom_call_target="jaxhetero_all_reduce"', text))
            foreign[key] = re.findall(r" (all-\w+|reduce-scatter|collective-\w+)[\w-]*\(", text)
    for key, make in IN_NNX.items() if ("modules", "pmap") in places else ():
        differences[key] = difference(train_in_place(make()), expected["modules"])
    jaxhetero.shutdown()
    print(json.dumps({"differences": differences, "calls": calls, "foreign": foreign}))


main()
