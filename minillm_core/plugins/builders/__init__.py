"""The builders that planning hooks receive: one per hook, bound to the plugin whose hook is called.

Slots are attributes, so that an editor completes them and a typo fails.
"""

from minillm_core.plugins.builders.attention import AttentionBuilder, AttentionSlots
from minillm_core.plugins.builders.data import DataBuilder, DataSlots
from minillm_core.plugins.builders.kernels import KernelBuilder
from minillm_core.plugins.builders.loss import LossBuilder, LossSlots
from minillm_core.plugins.builders.model import ModelBuilder, ModelSlots
from minillm_core.plugins.builders.optimizer import OptimizerBuilder, OptimizerSlots, ParamInfo

__all__ = [
    "AttentionBuilder",
    "AttentionSlots",
    "DataBuilder",
    "DataSlots",
    "KernelBuilder",
    "LossBuilder",
    "LossSlots",
    "ModelBuilder",
    "ModelSlots",
    "OptimizerBuilder",
    "OptimizerSlots",
    "ParamInfo",
]
