"""A model's arrays: masters in float32 by name, and the compute copies that modules hold.

MLX rebinds arrays, so nothing is written in place: a step takes masters and returns new ones, and
casts them on its way. Leaves that read the same input may share one copy, which is multiplied once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from minillm_core.backends.mlx.module import MLXFramework
from minillm_core.nn.decoder import decoder
from minillm_core.nn.initial import initial_values, witness_inits
from minillm_core.nn.module import declared, materialising, named_modules
from minillm_core.nn.param import Param
from minillm_core.plan import Plan

__all__ = ["Leaf", "Weights", "materialise"]


@dataclass(frozen=True)
class Leaf:
    """An attribute that gradients arrive for, and the parameters that its rows are."""

    module: Any
    attribute: str
    names: tuple[str, ...]
    rows: tuple[int, ...]


class Weights:
    """Where each parameter's master lives, and how compute copies are made of masters.

    Args:
        model: materialised and filled, float32.
        dtype: of the compute copies.
        join: multiply leaves that read the same input as one.
    """

    def __init__(self, model: Any, dtype: mx.Dtype, *, join: bool) -> None:
        self.dtype = dtype
        self.masters: dict[str, mx.array] = {
            name: module[attribute] for name, module, attribute, _ in declared(model, Param)
        }
        joints = {leaf.names[0]: leaf for leaf in _joints(model)} if join else {}
        inside = {name for leaf in joints.values() for name in leaf.names}
        self.leaves: dict[str, Leaf] = {}
        for name, module, attribute, param in declared(model, Param):
            if name in joints:
                self.leaves[name] = joints[name]
            elif name not in inside:
                self.leaves[name] = Leaf(module, attribute, (name,), (param.shape[0],))

    def copies(self, masters: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Leaf -> compute copy; in float32 an unjoined one is the master itself."""
        made = {}
        for key, leaf in self.leaves.items():
            parts = [masters[name] for name in leaf.names]
            whole = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
            made[key] = whole.astype(self.dtype)
        return made

    def place(self, copies: Mapping[str, mx.array]) -> None:
        """Let the model's modules hold these."""
        for key, leaf in self.leaves.items():
            leaf.module[leaf.attribute] = copies[key]

    def split(self, gradients: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Leaf -> gradient as parameter -> gradient."""
        named: dict[str, mx.array] = {}
        for key, leaf in self.leaves.items():
            if len(leaf.names) == 1:
                named[key] = gradients[key]
                continue
            ends = [sum(leaf.rows[: i + 1]) for i in range(len(leaf.rows) - 1)]
            named.update(zip(leaf.names, mx.split(gradients[key], ends, axis=0), strict=True))
        return named


def _joints(model: Any) -> Iterator[Leaf]:
    for path, module in named_modules(model):
        for names in module.joined:
            leaves = [getattr(module, name) for name in names]
            if any(leaf.product is not None for leaf in leaves):
                continue  # a plugin replaces one of the products
            leaves[0].joint = mx.concatenate([leaf.weight for leaf in leaves], axis=0)
            for leaf in leaves:
                leaf.freeze(keys=["weight"], recurse=False)
            yield Leaf(
                leaves[0],
                "joint",
                tuple(f"{path}.{name}.weight" for name in names),
                tuple(leaf.out_features for leaf in leaves),
            )


def materialise(
    plan: Plan, framework: MLXFramework, seed: int, positions: int, *, checkpointing: bool = False
) -> Any:
    """The plan's model with its seeded initial values, float32."""
    spec = replace(plan.spec, geometry=replace(plan.spec.geometry, positions=positions))
    with materialising(framework):
        model = decoder(spec, checkpointing=checkpointing)
    for module, attribute, value in initial_values(model, plan.inits, seed):
        module[attribute] = mx.array(value)
    mx.eval(model.parameters())
    witness_inits(model, plan.inits, seed, np.array, framework.witness)
    return model
