"""Jobs on a Ray cluster: Ray Train starts the workers, and reducers run as actors beside them.

Needs Ray: ``pip install '.[ray]'`` in a clone. Imports neither jax nor numpy of its own.

What is used of Ray, tried with 2.60:
- public: ``ray.train.v2.jax``, ``ray.train.backend.Backend``, ``ray.util.placement_group``;
- private: ``ray._private.state.available_resources_per_node`` in ``placement.py``, for the text of an error. Nothing
  public tells what is free on each node;
- private: ``ray._private.state.state.get_draining_nodes`` in ``elastic.py``. Ray Train makes
  ``ray.train.get_preemption_info`` of it, which answers in its own workers alone.
"""

from jaxhetero.cluster.ray.config import JaxheteroConfig as JaxheteroConfig
from jaxhetero.cluster.ray.doctor import run_doctor as run_doctor
from jaxhetero.cluster.ray.elastic import run_elastic as run_elastic
