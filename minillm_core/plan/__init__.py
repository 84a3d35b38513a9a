"""config + plugins -> Plan: pure data, hashed, made without a framework."""

from minillm_core.plan.build import build_plan
from minillm_core.plan.plan import Plan, stages_of

__all__ = ["Plan", "build_plan", "stages_of"]
