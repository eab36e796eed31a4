"""Model parallelism: a loss is traced, cut into stages, and run as a pipeline over several workers."""

from jaxhetero.pipeline.gathering import gather, part
from jaxhetero.pipeline.gradient import Pipeline, value_and_grad
from jaxhetero.pipeline.report import Report, StageReport
from jaxhetero.pipeline.rows import Rows
from jaxhetero.pipeline.simulation import Interconnect, Simulation

__all__ = [
    "Interconnect",
    "Pipeline",
    "Report",
    "Rows",
    "Simulation",
    "StageReport",
    "gather",
    "part",
    "value_and_grad",
]
