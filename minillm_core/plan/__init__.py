"""config + plugins -> Plan: pure data, hashed, made without a framework."""

from minillm_core.plan.build import build_plan, geometry_of
from minillm_core.plan.estimate import Estimate
from minillm_core.plan.plan import Export, Plan, PlannedPlugin

__all__ = ["Estimate", "Export", "Plan", "PlannedPlugin", "build_plan", "geometry_of"]
