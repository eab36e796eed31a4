"""Sums of what looks like gradients, and of random bits; prints their bits, and what the codes saved."""

import functools
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero


def main() -> None:
    jaxhetero.initialize()
    random = np.random.default_rng(jaxhetero.rank())
    normal = (random.standard_normal(400_001) * 1e-3).astype(np.float32)
    tree = {"float32": normal, "bfloat16": jnp.asarray(normal, jnp.bfloat16)}
    tree["computed in bfloat16"] = np.asarray(tree["bfloat16"].astype(np.float32))
    digests, parts = {}, {}
    for name, array in tree.items():
        before = jaxhetero.metrics()
        total = jax.block_until_ready(jax.jit(jaxhetero.psum)(array))
        after = jaxhetero.metrics()
        digests[name] = hashlib.sha256(np.asarray(total).tobytes()).hexdigest()
        parts[name] = (after.sent_bytes - before.sent_bytes) / (after.bucket_bytes - before.bucket_bytes)
    saved = jaxhetero.metrics().saved_bytes
    noise = random.integers(0, 2**31, 400_001, dtype=np.int32)
    for array in (noise, noise.view(np.float32)):
        total = jax.block_until_ready(jax.jit(functools.partial(jaxhetero.psum, name="noise"))(array))
        digests[f"random {array.dtype}"] = hashlib.sha256(np.asarray(total).tobytes()).hexdigest()
    saved_of_noise = jaxhetero.metrics().saved_bytes - saved
    jaxhetero.shutdown()
    print(json.dumps({"digests": digests, "parts": parts, "saved": saved, "saved_of_noise": saved_of_noise}))


if __name__ == "__main__":
    main()
