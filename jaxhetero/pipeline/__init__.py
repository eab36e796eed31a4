"""Model parallelism: a loss is traced, cut into stages, and run as a pipeline over several workers."""

from jaxhetero.pipeline.gathering import gather
from jaxhetero.pipeline.gradient import Pipeline, value_and_grad
from jaxhetero.pipeline.report import Report, StageReport
from jaxhetero.pipeline.simulation import Network, Simulation

__all__ = ["Network", "Pipeline", "Report", "Simulation", "StageReport", "gather", "value_and_grad"]
