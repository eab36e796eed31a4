"""The custom calls of some programs, as they are lowered: prints what each is given."""

import json
import re

import jax
import jax.numpy as jnp

import jaxhetero

jaxhetero.initialize()
tree = {"weights": jnp.ones((3, 2)), "biases": jnp.ones(4, jnp.bfloat16), "count": jnp.int32(1)}
programs = {
    "psum": lambda x: jaxhetero.psum(x),
    "psum, bfloat16": lambda x: jaxhetero.psum(x, wire_dtype=jnp.bfloat16),
    "psum, group": lambda x: jaxhetero.psum(x, workers=(0, 1)),
    "pmean": lambda x: jaxhetero.pmean(x),
    "broadcast": lambda x: jaxhetero.broadcast(x, root=1),
    "all_gather": lambda x: jaxhetero.all_gather(x),
    "psum_scatter": lambda x: jaxhetero.psum_scatter(x["biases"], tiled=True),
}


def attributes(call: str) -> dict[str, str]:
    """Of the handler, and the types of operands and results."""
    config = re.search(r"mhlo.backend_config = \{(.*?)\}, operand_layouts", call)
    assert config, call
    found = dict(re.findall(r"(\w+) = (\".*?\"|dense<.*?> : tensor<.*?>|-?\d+ : i64)", config[1]))
    return {**found, "types": call.rpartition(" : ")[2]}


found = {}
for name, program in programs.items():
    text = jax.jit(program).lower(tree).as_text()
    found[name] = [attributes(call) for call in re.findall(r"stablehlo\.custom_call @jaxhetero.*", text)]
jaxhetero.shutdown()
print(json.dumps(found))
