"""Which worker has which stages, of how many replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.schedules import Schedule


@dataclass(frozen=True)
class Places:
    """The workers of a job as replicas of a pipeline: ``count`` neighbours are one replica.

    Attributes:
      count: workers in a pipeline.
      rank: this worker.
      worker_count: all workers.
    """

    count: int
    rank: int
    worker_count: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.worker_count % self.count:
            raise ConfigError(
                f"pipeline: {self.worker_count} workers cannot be pipelines of {self.count}; start a multiple of "
                f"{self.count} workers, or choose stages of which {self.worker_count} is a multiple"
            )

    @property
    def place(self) -> int:
        """This worker's place in its pipeline."""
        return self.rank % self.count

    @property
    def replica(self) -> int:
        """The number of this worker's pipeline."""
        return self.rank // self.count

    @property
    def replica_count(self) -> int:
        """Pipelines in the job."""
        return self.worker_count // self.count

    def rank_at(self, place: int) -> int:
        """The rank at a place of this worker's pipeline."""
        return self.replica * self.count + place

    def ranks_at(self, places: Sequence[int]) -> tuple[int, ...]:
        """The ranks at these places in all pipelines, ascending."""
        return tuple(sorted(replica * self.count + place for replica in range(self.replica_count) for place in places))

    def own_stages(self, schedule: Schedule) -> range:
        """The numbers of this worker's stages."""
        return range(self.place, schedule.stage_count, self.count)
