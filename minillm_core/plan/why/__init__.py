"""Who owns what of a plan, and why; what was refused there. For ``minillm plugins why``."""

from minillm_core.plan.why.answer import Answer, Folded, Held, Refused, folded
from minillm_core.plan.why.asked import Pattern, nearest_names
from minillm_core.plan.why.slots import slot_answers

__all__ = [
    "Answer",
    "Folded",
    "Held",
    "Pattern",
    "Refused",
    "folded",
    "nearest_names",
    "slot_answers",
]
