"""The ops: contracts, a float64 reference, and the choice of a kernel. Imports no framework."""

from __future__ import annotations

from minillm_core.config.kernels import parse_policy
from minillm_core.ops.contract import CONTRACTS, Contract, Operations, Rotary
from minillm_core.ops.form import Cap, LossForm, SigmoidCap, TanhCap
from minillm_core.ops.select import (
    Candidate,
    Choice,
    Policy,
    Request,
    choose,
    choose_all,
    load,
)

__all__ = [
    "CONTRACTS",
    "Candidate",
    "Cap",
    "Choice",
    "Contract",
    "LossForm",
    "Operations",
    "Policy",
    "Request",
    "Rotary",
    "SigmoidCap",
    "TanhCap",
    "choose",
    "choose_all",
    "load",
    "parse_policy",
]
