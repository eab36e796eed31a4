"""Prints what the kernel has been told of the memory that a large total lies in: the flags of proc(5), smaps."""

import json
import re
from pathlib import Path

import jax.numpy as jnp

import jaxhetero

BYTES = 64 << 20


def mapping_flags(address: int) -> list[str]:
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:#x}")


def main() -> None:
    jaxhetero.initialize()
    total = jaxhetero.psum(jnp.ones(BYTES, jnp.uint8)).block_until_ready()
    print(json.dumps(mapping_flags(total.unsafe_buffer_pointer() + BYTES // 2)))
    jaxhetero.shutdown()


main()
