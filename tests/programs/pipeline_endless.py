"""Steps of a pipeline, with the same batch: ``[COUNT] [STAGES]``. Without a count, until somebody ends it."""

import itertools
import json
import sys

import jax
import numpy as np
from pipeline_zoo import MICROBATCHES, language_model

import jaxhetero

count = int(sys.argv[1]) if len(sys.argv) > 1 else None
stages = int(sys.argv[2]) if len(sys.argv) > 2 else 3
jaxhetero.initialize()
model = language_model(tied=True)
grad_fn = jaxhetero.pipeline.value_and_grad(
    model.loss, stages=stages, microbatches=MICROBATCHES, schedule="interleaved"
)
grad_fn.cut(model.params, *model.arguments)
params = grad_fn.own(model.params)
first = None
same = True
for number in itertools.count() if count is None else range(count):
    results = jax.tree.map(np.asarray, grad_fn(params, *model.arguments))
    first = results if first is None else first
    same &= all(map(np.array_equal, jax.tree.leaves(results), jax.tree.leaves(first)))
    print(f"step {number}", flush=True)
print(json.dumps({"same_bits": same}), flush=True)
jaxhetero.shutdown()
