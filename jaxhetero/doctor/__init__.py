"""``jaxhetero doctor``: finds problems of hosts and network before a long job runs."""

from jaxhetero.doctor.examine import Visit as Visit
from jaxhetero.doctor.examine import run_doctor as run_doctor
