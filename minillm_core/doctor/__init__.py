"""What this machine can run, what is missing, and the command that installs it."""

from minillm_core.doctor.diagnosis import diagnose
from minillm_core.doctor.finding import STATES, Finding, can_run

__all__ = ["STATES", "Finding", "can_run", "diagnose"]
