"""What a user gives to Ray Train's ``JaxTrainer``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ray.train.v2.jax import JaxConfig

from jaxhetero.cluster.ray.backend import JaxheteroBackend
from jaxhetero.config import Config
from jaxhetero.errors import ConfigError

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_DECIDED_BY_THE_RUN = {
    "rank",
    "worker_count",
    "alone",
    "coordinator",
    "token",
    "host",
    "restart_count",
    "timeline_file",
}
_FIELDS_OF_THEIR_OWN = {"reducer_count": "reducers", "colocated_count": "colocated"}


# Not frozen, because JaxConfig is not.
@dataclass(kw_only=True)
class JaxheteroConfig(JaxConfig):  # type: ignore[misc]
    """A ``jax_config`` for ``ray.train.v2.jax.JaxTrainer``: reducers beside the workers, and their settings.

    The reducers are actors in a placement group of their own. They start with the workers and end with them: after
    success, when Ray retries a run, and when the driver is gone. Every worker finds its settings in its environment, so
    ``jaxhetero.initialize()`` needs no argument. The fields of ``JaxConfig`` mean what they mean there.

    Raises:
      ConfigError: a field is out of its range, or ``settings`` has a name that is no setting or that the run decides.

    Example:
      >>> from jaxhetero.cluster.ray import JaxheteroConfig
      >>> config = JaxheteroConfig(reducers=2, settings={"timeout_ms": 10_000})
      >>> config.resources_per_reducer
      {'CPU': 1}
      >>> JaxheteroConfig(settings={"rank": 3})
      Traceback (most recent call last):
          ...
      jaxhetero.errors.ConfigError: settings has rank, which the run decides; leave it out
    """

    reducers: int = 1
    """How many reducers to start. With 0, every worker runs a co-located one."""
    colocated: int = -1
    """In how many workers a reducer runs as well; see ``Config.colocated_count``."""
    resources_per_reducer: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    """What Ray sets aside for each reducer. A resource that only some hosts have puts the reducers there."""
    placement_strategy: str = "SPREAD"
    """PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, as for a placement group of Ray's."""
    max_reducer_restarts: int = -1
    """How often Ray starts one reducer anew in one attempt at the run. There is no limit with -1."""
    settings: Mapping[str, str | int] = field(default_factory=dict)
    """Other fields of ``jaxhetero.config.Config`` for all workers and reducers. They win over ``JAXHETERO_`` variables
    that a host has. Ray also waits for room for the reducers no longer than ``start_timeout_ms``. ``metrics_port`` is
    the port of rank 0; the other workers and then the reducers have those after it."""

    def __post_init__(self) -> None:
        for name, least in {"reducers": 0, "colocated": -1, "max_reducer_restarts": -1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.placement_strategy not in _STRATEGIES:
            raise ConfigError(
                f"placement_strategy is {self.placement_strategy!r}; it must be one of {', '.join(_STRATEGIES)}"
            )
        if not self.resources_per_reducer or any(amount <= 0 for amount in self.resources_per_reducer.values()):
            raise ConfigError(
                f"resources_per_reducer is {self.resources_per_reducer}; it must name at least one resource, and give "
                "more than 0 of each"
            )
        self._check_settings()

    def _check_settings(self) -> None:
        for name in self.settings:
            if name in _DECIDED_BY_THE_RUN:
                raise ConfigError(f"settings has {name}, which the run decides; leave it out")
            if name == "elastic":
                raise ConfigError(
                    "settings has elastic, but Ray Train ends all workers when one of them fails; use "
                    "jaxhetero.cluster.ray.run_elastic in place of a trainer"
                )
            if name in _FIELDS_OF_THEIR_OWN:
                raise ConfigError(f"settings has {name}; give {_FIELDS_OF_THEIR_OWN[name]} instead")
            if name not in Config.__dataclass_fields__:
                known = sorted(
                    {each.name for each in fields(Config)} - _DECIDED_BY_THE_RUN - _FIELDS_OF_THEIR_OWN.keys()
                )
                raise ConfigError(f"settings has {name!r}, which is no setting; there are {', '.join(known)}")
        # The driver's host need not have the interface.
        checked: dict[str, Any] = {name: value for name, value in self.settings.items() if name != "interface"}
        Config(**checked)

    @property
    def start_timeout_s(self) -> float:
        """How long to wait for room for the reducers."""
        return int(self.settings.get("start_timeout_ms", Config.start_timeout_ms)) / 1000

    def job_settings(
        self, *, worker_count: int, coordinator: str, token: str, restart_count: int
    ) -> dict[str, str | int]:
        """The settings that all processes of one attempt share, by the names of ``Config``."""
        return {
            **self.settings,
            "worker_count": worker_count,
            "reducer_count": self.reducers,
            "colocated_count": self.colocated,
            "coordinator": coordinator,
            "token": token,
            "restart_count": restart_count,
        }

    def own_settings(self, index: int) -> dict[str, str | int]:
        """The settings of one process alone. ``index`` counts all workers, by rank, and then all reducers."""
        first_port = int(self.settings.get("metrics_port", 0))
        return {"metrics_port": first_port + index} if first_port else {}

    @property
    def backend_cls(self) -> type[JaxheteroBackend]:
        """What Ray Train's controller calls when workers start and end."""
        return JaxheteroBackend

    def to_dict(self) -> dict[str, Any]:
        """The fields, for Ray's state tracking. The token is no field."""
        return asdict(self)
