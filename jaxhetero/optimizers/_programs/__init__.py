"""Optimizers as data: optax transformations, traced and lowered to programs that a reducer can run without JAX.

``lower`` is the way in; ``update.Update`` is what it gives, and tells how its parts belong together.

- ``graph.py``: the traced step as a graph of calls.
- ``homes.py``: where each value is computed.
- ``lowering.py``, with ``rules.py`` and ``assembly.py``: from calls to operations on slots.
- ``program.py``: a program, and how it is sent.
"""

from jaxhetero.optimizers._programs.lowering import lower as lower
