"""Jobs whose workers come and go between two steps: ``initialize(elastic="MIN:MAX")``.

A worker may be lost at any time, and the others go on. To come or to leave in order, a worker needs a gate: a place
between two steps that all workers pass, and where one that comes gets the state of the others.
"""

from jaxhetero._job.world import capacity, is_elastic
from jaxhetero.elastic.gate import Team, gate, leave, leaving, skip_unless, team

__all__ = ["Team", "capacity", "gate", "is_elastic", "leave", "leaving", "skip_unless", "team"]
