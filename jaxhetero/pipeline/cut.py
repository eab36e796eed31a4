"""A loss that has been cut: its stages, and where they are."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from jaxhetero.pipeline.arguments import Signature, TracedLoss
from jaxhetero.pipeline.decision import Decision
from jaxhetero.pipeline.operations import Operations
from jaxhetero.pipeline.places import Places
from jaxhetero.pipeline.programs import Programs, make_programs
from jaxhetero.pipeline.report import Report, StageReport, balance
from jaxhetero.pipeline.rows import Holding
from jaxhetero.pipeline.stages import Stage


class Cut:
    """A loss that has been cut."""

    def __init__(
        self,
        traced: TracedLoss,
        signature: Signature,
        operations: Operations,
        decision: Decision,
        places: Places,
        stages: list[Stage],
    ) -> None:
        self.traced = traced
        self.signature = signature
        self.operations = operations
        self.decision = decision
        self.places = places
        self.stages = stages

    @property
    def own_stages(self) -> list[Stage]:
        """Those of this worker, ascending."""
        return [self.stages[number] for number in self.places.own_stages(self.decision.schedule)]

    @cached_property
    def holding(self) -> Holding:
        """What this worker holds of the parameters."""
        return self._holding_at(self.places.place)

    def _holding_at(self, place: int) -> Holding:
        """What the worker at a place holds of the parameters. The first one has those that no stage uses."""
        place_of = self.decision.schedule.place_of
        held = {number for stage in self.stages if place_of(stage.number) == place for number in stage.params}
        if place == 0:
            held.update(set(self.traced.roles.params).difference(*(stage.params for stage in self.stages)))
        return Holding(self.traced.graph.inputs, self.traced.spans, held)

    def sharers(self) -> dict[int, int]:
        """For each parameter, how many places of the pipeline have it."""
        place_of = self.decision.schedule.place_of
        return {
            number: len({place_of(stage.number) for stage in self.stages if number in stage.params} or {0})
            for number in self.traced.roles.params
        }

    def programs(self, stage: Stage) -> Programs:
        """Trace the programs of a stage."""
        holding = self._holding_at(self.decision.schedule.place_of(stage.number))
        return make_programs(stage, self.traced.graph, holding, parted=self.decision.schedule.is_parted)

    def report(self) -> Report:
        """What each stage computes, receives and holds. Traces the programs of all stages."""
        schedule = self.decision.schedule
        reports = tuple(self._report_of(stage, held) for stage, held in zip(self.stages, schedule.held(), strict=True))
        shares = [stage.cost for stage in reports]
        operation_count = len(self.operations.equations)
        return Report(schedule, reports, balance(shares), operation_count, self.decision.simulation)

    def _report_of(self, stage: Stage, microbatches: int) -> StageReport:
        begin, end = self.decision.partition.edges[stage.number : stage.number + 2]
        costs = self.operations.costs
        largest = begin + int(np.argmax(costs[begin:end]))
        programs = self.programs(stage)
        fixed = programs.params_bytes + programs.sums_bytes + programs.prepared_bytes
        return StageReport(
            cost=float(costs[begin:end].sum() / costs.sum()),
            parameter_count=sum(value.aval.size for value in programs.params),
            parameter_bytes=programs.params_bytes,
            sum_bytes=programs.sums_bytes,
            prepared_bytes=programs.prepared_bytes,
            received_bytes=sum(value.bytes for value in stage.received),
            fixed_bytes=fixed,
            kept_bytes=programs.kept_bytes,
            kept_for_weights_bytes=programs.kept_for_weights_bytes,
            microbatches=microbatches,
            largest=self.operations.equations[largest].describe(),
            largest_cost=float(costs[largest] / costs.sum()),
        )
