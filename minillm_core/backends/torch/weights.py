"""A model's arrays on the device: masters in float32, copies in the compute dtype, joined leaves.

In float32 a master *is* the parameter. Otherwise the parameters are compute copies, filled once a
step after the update, outside the micro-batch graph; the weights of leaves that read the same
input may be row blocks of one buffer, which is multiplied once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minillm_core.backends.torch import foreach
from minillm_core.backends.torch.module import TorchFramework
from minillm_core.nn.decoder import decoder
from minillm_core.nn.initial import initial_values, witness_inits
from minillm_core.nn.module import declared, materialising, named_modules
from minillm_core.nn.param import Param
from minillm_core.plan import Plan

__all__ = ["Leaf", "Weights", "materialise"]


@dataclass(frozen=True)
class Leaf:
    """A tensor that gradients arrive for, and the parameters that its rows are."""

    tensor: nn.Parameter
    parts: tuple[tuple[str, int, int], ...]  # name, first row, rows

    def split(self, like: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, rows) of a tensor shaped as the leaf."""
        if len(self.parts) == 1:
            yield self.parts[0][0], like
        else:
            for name, start, rows in self.parts:
                yield name, like.narrow(0, start, rows)


class Weights:
    """Masters by name, and the leaves that gradients arrive for.

    Args:
        model: materialised, filled, in float32.
        dtype: of the compute copies.
        join: multiply leaves that read the same input as one.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, join: bool) -> None:
        self.masters: dict[str, Tensor] = {}
        for name, module, attribute, _ in declared(model, Param):
            parameter = getattr(module, attribute)
            self.masters[name] = parameter.data
            if dtype != torch.float32:
                parameter.data = parameter.data.to(dtype)
        joints = {parts[0][0]: parts for parts in _join(model)} if join else {}
        inside = {name for parts in joints.values() for name, _, _ in parts}
        self.leaves: list[Leaf] = []
        self.copies: dict[str, Tensor] = {}
        for name, module, attribute, _ in declared(model, Param):
            parameter = getattr(module, attribute)
            self.copies[name] = parameter.data
            if name in joints:
                self.leaves.append(Leaf(module.joint, joints[name]))
            elif name not in inside:
                self.leaves.append(Leaf(parameter, ((name, 0, parameter.shape[0]),)))
        self.apart = [
            name for name, master in self.masters.items() if master is not self.copies[name]
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Fill the compute copies from the masters."""
        if self.apart:
            foreach.copy_(
                [self.copies[name] for name in self.apart],
                [self.masters[name] for name in self.apart],
            )


def _join(model: Any) -> Iterator[tuple[tuple[str, int, int], ...]]:
    """Lay the weights of leaves that may be multiplied as one into one buffer: (name, row, rows)."""
    for path, module in named_modules(model):
        for names in module.joined:
            leaves = [getattr(module, name) for name in names]
            if any(leaf.product is not None for leaf in leaves):
                continue  # a plugin replaces one of the products
            buffer = torch.cat([leaf.weight.detach() for leaf in leaves])
            start, parts = 0, []
            for name, leaf in zip(names, leaves, strict=True):
                rows = buffer.narrow(0, start, leaf.out_features)
                leaf.weight = nn.Parameter(rows, requires_grad=False)
                parts.append((f"{path}.{name}.weight", start, leaf.out_features))
                start += leaf.out_features
            leaves[0].joint = nn.Parameter(buffer)
            yield tuple(parts)


def materialise(
    plan: Plan,
    framework: TorchFramework,
    seed: int,
    device: torch.device,
    positions: int,
    *,
    checkpointing: bool = False,
) -> Any:
    """The plan's model with its seeded initial values, float32, on ``device``."""
    spec = replace(plan.spec, geometry=replace(plan.spec.geometry, positions=positions))
    with materialising(framework), torch.device(device):
        model = decoder(spec, checkpointing=checkpointing)
    with torch.no_grad():
        for module, attribute, value in initial_values(model, plan.inits, seed):
            getattr(module, attribute).copy_(torch.from_numpy(np.array(value, order="C")))
    witness_inits(model, plan.inits, seed, lambda t: t.detach().cpu().numpy(), framework.witness)
    return model
