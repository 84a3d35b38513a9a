"""config + plugins -> Plan: pure data, hashed, made without a framework."""

from minillm_core.plan.build import build_plan
from minillm_core.plan.estimate import Estimate
from minillm_core.plan.plan import Export, Plan, PlannedPlugin, stages_of
from minillm_core.plan.slots import geometry_of

__all__ = ["Estimate", "Export", "Plan", "PlannedPlugin", "build_plan", "geometry_of", "stages_of"]
