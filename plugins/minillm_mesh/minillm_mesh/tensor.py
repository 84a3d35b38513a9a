"""Tensor parallelism on torch: N ranks compute the same tokens, each with some heads and hidden units.

A process holds whole parameters, as in a single-process run, and computes with a second model of 1 / N of the
geometry (tensor_spec.py), whose parameters are views of slices of the first one's, without storage.
So plans, updates, State and checkpoints need no change.

The output of a leaf with a part of its input (``o``, ``down``) is all-reduced over the neighbours. Each then
computes the loss of 1 / N of the positions, L_r, and the objective of the step is the sum of L_r over all
processes. The gradient of a sum is the sum of gradients: the backward pass has all-reduces at the same
places, and a process computes a partial gradient of each parameter, sliced or not. Data parallelism sums
these over all processes anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minillm_core import Buffer, Param
from minillm_core.inspection import (
    GATHERED,
    LABELS,
    declared,
    decoder,
    materialising,
    named_modules,
)
from minillm_mesh.collectives import all_reduce_autograd
from minillm_mesh.tensor_spec import Cut, cuts, divided, summed
from minillm_mesh.tensor_validation import validate


class Share:
    """The share of a model that a rank computes in tensor parallelism.

    Args:
        rank: of this process among its neighbours.
        size: N.
        group: the neighbours' process group.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    def of(self, trainer: Any) -> Any:
        """Build this process's model on the whole one's parameters, State and constants, and validate it.

        Raises:
            PlanError: a node does not compute heads independently, or does not call its leaves.
        """
        part, sums = self._part(trainer.model, trainer.plan.spec)
        trainer.model.add_module("part", part)  # without parameters; train() and eval() reach it
        validate(trainer, part, sums, self.rank, self.size, self.group)
        return part

    def _part(self, whole: Any, spec: Any) -> tuple[Any, set[str]]:
        """Build the model of this rank's heads; return it and the paths of leaves that are all-reduced."""
        framework = whole.framework
        spec = divided(replace(spec, geometry=whole.geometry), self.size)
        with materialising(framework), torch.device("meta"):
            part = decoder(spec, checkpointing=whole.checkpointing)
        known, sums = dict(named_modules(whole)), summed(whole, part)
        found, kinds = dict(cuts(whole, part)), dict[str, str]()
        for path, module in named_modules(part):
            body: dict[str, Any] = {}
            kinds |= {f"{path}.{name}": how for name, how in module.statistics.items()}
            for _, holder, attribute, one in declared(module):
                if holder is not module:
                    continue
                full = f"{path}.{attribute}" if path else attribute
                source = known[path].__dict__["_declared"][attribute]
                if isinstance(one, Buffer) and one.shape != source.shape:
                    with framework.placing():
                        value = torch.empty(one.shape)
                    setattr(module, attribute, value)
                    framework.fill(module, attribute, one.fn())
                    continue
                body[attribute] = self._slice(attribute, found.get(full))
                (module._parameters if isinstance(one, Param) else module._buffers).pop(attribute)
            if path in sums:
                body["forward"] = self._adding(type(module))
            if not path:
                body |= self._own_positions(type(module), kinds)
            module.__dict__["_whole"] = (known[path],)  # in a tuple, so that it is not a submodule
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), body)
        return part, sums

    def _slice(self, attribute: str, cut: Cut | None) -> property:
        """Return a property that reads the whole model's array, or this rank's slice of it."""
        if cut is None:
            return property(lambda module: getattr(module._whole[0], attribute))
        axis, parts, place = cut.axis, cut.parts, cut.place(self.rank, self.size)

        def sliced(module: Any) -> Tensor:
            whole = getattr(module._whole[0], attribute)
            size = whole.shape[axis] // parts
            return whole.narrow(axis, place * size, size)

        return property(sliced)

    def _adding(self, kind: Any) -> Any:
        """Return a leaf's ``forward`` whose output is all-reduced over the neighbours."""
        group = self.group

        def forward(module: Any, x: Tensor, scope: Any = None) -> Tensor:
            return all_reduce_autograd(kind.forward(module, x, scope), group)

        return forward

    def _own_positions(self, kind: Any, kinds: Mapping[str, str]) -> dict[str, Any]:
        """Return methods of the model that compute the loss at 1 / N of the positions.

        Terms are means over the same rows in each process, weighted by its share of their labels; statistics
        that are sums (``kinds``) count once.
        """
        rank, size = self.rank, self.size

        def own(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            count, device = batch["ids"].numel(), batch["ids"].device
            at = torch.arange(
                count * rank // size, count * (rank + 1) // size, dtype=torch.int32, device=device
            )
            labels = {LABELS: batch[LABELS] / size} if LABELS in batch else {}
            return {**batch, **labels, GATHERED: at}

        def forward(module: Any, batch: dict[str, Tensor], values: dict[str, Any]) -> Any:
            loss = kind.forward(module, own(batch), values)
            sums = {n: v / size for n, v in loss.statistics.items() if kinds[n] == "sum"}
            loss.statistics.update(sums)  # torch 2.11 does not compile a _replace here
            return loss

        def evaluate(module: Any, batch: dict[str, Tensor], values: dict[str, Any]) -> Any:
            return kind.evaluate(module, own(batch), values)

        return {"forward": forward, "evaluate": evaluate}


__all__ = ["Share"]
