"""Jobs whose workers come and go between two steps: ``initialize(elastic="MIN:MAX")``.

A worker may be lost at any time, and the others go on. To come or to leave in order, a worker needs a gate: a place
between two steps that all workers pass, and where one that comes gets the state of the others.
"""

from jaxhetero.elastic.gate import Team, gate, leave, skip_unless

__all__ = ["Team", "gate", "leave", "skip_unless"]
