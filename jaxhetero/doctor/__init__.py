"""`jaxhetero doctor`: finds out what would trouble a long job, before it runs."""

from jaxhetero.doctor.examine import Visit as Visit
from jaxhetero.doctor.examine import run_doctor as run_doctor
