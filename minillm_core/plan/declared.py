"""What the plugins said, slot by slot, before it is resolved."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minillm_core.config.schema import Config
from minillm_core.nn.geometry import Geometry
from minillm_core.ops.select import Candidate
from minillm_core.plugins.builders import (
    AttentionSlots,
    DataSlots,
    LossSlots,
    ModelSlots,
    OptimizerSlots,
)
from minillm_core.plugins.builders.base import ValueTable

__all__ = ["Declared"]


@dataclass
class Declared:
    """The slots of one planning; those of the optimizer exist once the model is resolved."""

    attention: tuple[AttentionSlots, ...]  # a layer each
    model: ModelSlots
    loss: LossSlots = field(default_factory=LossSlots)
    data: DataSlots = field(default_factory=DataSlots)
    values: ValueTable = field(default_factory=ValueTable)
    optimizer: OptimizerSlots | None = None
    kernels: dict[str, tuple[str, Candidate]] = field(default_factory=dict)  # op=name -> who, what
    layered: set[str] = field(default_factory=set)  # plugins that can be told their layers
    heard: set[str] = field(default_factory=set)  # hooks that every plugin has answered

    @classmethod
    def of(cls, config: Config, geometry: Geometry) -> Declared:
        """Empty slots for a model of this geometry."""
        base, layered = config.model.rope_base, set[str]()
        layers = (replace(geometry, layer=i) for i in range(geometry.layers))
        attention = tuple(AttentionSlots(layer, base, layered) for layer in layers)
        return cls(attention, ModelSlots(geometry, layered), layered=layered)
