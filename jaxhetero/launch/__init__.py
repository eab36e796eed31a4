"""``jaxhetero launch``: one job's workers and reducers on this machine."""

from jaxhetero.launch.job import Job as Job
from jaxhetero.launch.job import launch as launch
