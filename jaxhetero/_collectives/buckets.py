"""Buckets: which leaves of a pytree a collective sends together, and in which order."""

from __future__ import annotations

from typing import Any

import jax

from jaxhetero._collectives.wire_dtypes import bucket_dtype, wire_bytes

DEFAULT_BUCKET_BYTES = 8 * 2**20
"""Bytes of a bucket where ``bucket_bytes`` is not given. Smaller buckets leave earlier in the backward pass, but cost
more custom calls. Measured; see ``notebook/train_steps.md``."""


def make_buckets(tree: Any, bucket_bytes: int = DEFAULT_BUCKET_BYTES, wire_dtype: Any = None) -> list[list[int]]:
    """The buckets in which a collective sends a pytree, without sending it.

    A collective makes one custom call, and so one all-reduce, for each bucket. A bucket has leaves of one dtype, and at
    most ``bucket_bytes`` bytes; a larger leaf has a bucket for itself. Leaves are taken from the last to the first,
    because the backward pass computes the gradients of the last layers first.

    Args:
      tree: a pytree of arrays or ``jax.ShapeDtypeStruct``, such as parameters. Cast bools to int32 first, as ``psum``
        does.
      bucket_bytes, wire_dtype: as in ``jaxhetero.psum``. Bytes are counted as they are sent, in ``wire_dtype``.

    Returns:
      For each bucket the indices of its leaves in ``jax.tree.leaves(tree)``. Buckets are in the order of their first
      leaves, which is the order in which the backward pass can fill them.

    Does not block, and needs no ``jaxhetero.initialize()``.

    Example:
      Three leaves of 4 MiB, 1 MiB and 1 KiB are too large for one bucket of 4 MiB:

      >>> params = {
      ...     "a_embedding": jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
      ...     "b_dense": jax.ShapeDtypeStruct((512, 512), jnp.float32),
      ...     "c_bias": jax.ShapeDtypeStruct((256,), jnp.float32),
      ... }
      >>> jaxhetero.make_buckets(params, bucket_bytes=4 * 2**20)
      [[2, 1], [0]]

      In bfloat16 on the wire one bucket has room for all of them. Their names, in the order of sending:

      >>> (bucket,) = jaxhetero.make_buckets(params, bucket_bytes=4 * 2**20, wire_dtype=jnp.bfloat16)
      >>> paths = [path for path, _ in jax.tree.leaves_with_path(params)]
      >>> [jax.tree_util.keystr(paths[index]) for index in bucket]
      ["['c_bias']", "['b_dense']", "['a_embedding']"]
    """
    leaves = jax.tree.leaves(tree)
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for index in reversed(range(len(leaves))):
        leaf = leaves[index]
        dtype = bucket_dtype(leaf.dtype, wire_dtype)
        leaf_bytes = wire_bytes([leaf], wire_dtype)
        bucket, filled_bytes = open_buckets.get(dtype, ([], 0))
        if not bucket or filled_bytes + leaf_bytes > bucket_bytes:
            bucket, filled_bytes = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[dtype] = (bucket, filled_bytes + leaf_bytes)
    return buckets
