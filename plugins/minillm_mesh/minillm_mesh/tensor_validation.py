"""Validation of tensor parallelism before training: nodes on some heads must match the whole model on one row.

Nodes do not declare that they treat heads independently. So each process runs one short row through the whole
model and through the model of its heads, with constant parameters perturbed (a gate that starts closed hides
later nodes). The output of each node must be the whole model's or a slice of it; else it is refused by name.

A module may compute the products of its linear layers by a kernel of its own in training alone. So the row passes
through the process's model a second time, as in training: every leaf with an all-reduce must be called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minillm_core import PlanError, PluginCodeError
from minillm_core.inspection import named_modules
from minillm_mesh.tensor_spec import OWN_PRODUCTS

COLUMNS_TRIED = 64
"""Maximum length of the row."""

APART: Mapping[torch.dtype, float] = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.03,
}
"""Tolerance between two arrays, relative to the norm of one: rounding accumulated over layers."""

MOVED = 0.05
"""Standard deviation of the perturbation of constant parameters."""

DIFFERS = "gives a different result for a subset of the heads than for all of them"


def validate(
    trainer: Any, part: Any, sums: Collection[str], rank: int, size: int, group: Any
) -> None:
    """Check that every node computes the same on some heads as on all, and calls the leaves that are summed.

    Collective: every neighbour must call it, and all raise the same error. Synchronises.

    Args:
        trainer: with the whole, initialised model.
        part: the model of this process's heads.
        sums: the paths of the leaves whose outputs are all-reduced.
        rank: of this process among its neighbours.
        size: N.
        group: the neighbours' process group.

    Raises:
        PlanError: the first node that differs, or does not call such a leaf; names the plugin and the reason.
    """
    whole, seen = trainer.model, trainer.framework.evidence.copy()
    with trainer.inferring(), _moved(whole):
        batch, given = trainer.to_device(_row(trainer.plan)), trainer.final_values()
        every, _ = _recorded(whole, batch, given)
        own, failed = _recorded(part, batch, given)
        trained, broken = _as_in_training(part, batch, given)
    trainer.framework.evidence.clear()
    trainer.framework.evidence.update(seen)  # this is not evidence of training
    order = [path for path in every if not path.endswith(".product")]  # before it is added up
    wrong = [
        place
        for place, path in enumerate(order)
        if path in own and not _alike(every[path], own[path], rank, size)
    ]
    first = torch.tensor([min(wrong, default=len(order))], device=trainer.device)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    if (at := int(first)) < len(order):
        inside = {path for path in sums if path.startswith(f"{order[at]}.")}
        why = OWN_PRODUCTS if inside - own.keys() else DIFFERS
        raise _refused(whole, order[at], why)
    if (failure := failed or broken) is not None:
        path, error = failure
        raise _refused(
            whole, path, f"cannot be computed for a subset of the heads ({_line(error)})"
        )
    if uncalled := [path for path in order if path in sums and path not in trained]:
        raise _refused(whole, uncalled[0], OWN_PRODUCTS)


def _row(plan: Any) -> dict[str, np.ndarray]:
    """Build one row of random tokens in two documents, with ones in every further field."""
    columns = min(COLUMNS_TRIED, plan.config.train.seq_len)
    at, shape = np.arange(columns, dtype=np.int32)[None], (1, columns)
    ids = np.random.default_rng(0).integers(0, plan.spec.geometry.vocab, shape, np.int32)
    further = {
        one.name: np.ones((*shape, *one.shape), one.dtype) for _, _, one in plan.batch_fields
    }
    documents = (at >= columns // 2).astype(np.int32)
    return {**further, "ids": ids, "labels": ids, "documents": documents, "positions": at}


@contextmanager
def _moved(model: Any) -> Iterator[None]:
    """Perturb constant parameters, equally in every process."""
    held: list[tuple[Tensor, Tensor]] = []
    drawn = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if (parameter == parameter.flatten()[0]).all():
            held.append((parameter, parameter.clone()))
            noise = torch.randn(parameter.shape, generator=drawn) * MOVED
            parameter.add_(noise.to(parameter))
    try:
        yield
    finally:
        for parameter, value in held:
            parameter.copy_(value)


def _recorded(
    model: Any, batch: dict[str, Tensor], given: dict[str, Any]
) -> tuple[dict[str, list[Tensor]], tuple[str, Exception] | None]:
    """Record each module's outputs, by path in call order, and the call that failed."""
    found, begun, hooks = dict[str, list[Tensor]](), list[str](), list[Any]()
    for path, module in named_modules(model):
        if path:
            hooks.append(module.register_forward_pre_hook(_begins(begun, path)))
            hooks.append(module.register_forward_hook(_gives(found, begun, path)))
    try:
        model.hidden(batch, given)
    except (RuntimeError, ValueError, IndexError, PluginCodeError) as error:
        return found, (begun[-1] if begun else "", error)
    finally:
        for hook in hooks:
            hook.remove()
    return found, None


def _as_in_training(
    part: Any, batch: dict[str, Tensor], given: dict[str, Any]
) -> tuple[dict[str, list[Tensor]], tuple[str, Exception] | None]:
    """Record the same in training mode and with gradients, which are not computed."""
    part.train()
    try:
        with torch.enable_grad():
            return _recorded(part, batch, given)
    finally:
        part.eval()


def _begins(begun: list[str], path: str) -> Callable[..., None]:
    def hook(_module: Any, _given: Any) -> None:
        begun.append(path)

    return hook


def _gives(found: dict[str, list[Tensor]], begun: list[str], path: str) -> Callable[..., None]:
    def hook(_module: Any, _given: Any, result: Any) -> None:
        begun.pop()
        parts = result if isinstance(result, tuple) else (result,)
        found[path] = [one for one in parts if isinstance(one, Tensor)]

    return hook


def _alike(every: list[Tensor], own: list[Tensor], rank: int, size: int) -> bool:
    """Return whether arrays equal the whole model's, or this rank's slices of them along one axis."""
    if [one.ndim for one in every] != [mine.ndim for mine in own]:
        return False
    for one, mine in zip(every, own, strict=True):
        expected = one
        for at, (there, here) in enumerate(zip(one.shape, mine.shape, strict=True)):
            if there != here and there % here == 0:
                place = rank * (there // here) // size
                expected = expected.narrow(at, place * here, here)
        if expected.shape != mine.shape:
            return False
        apart, norm = (expected.double() - mine.double()).norm(), expected.double().norm()
        if not apart <= APART.get(one.dtype, 0.0) * norm:
            return False
    return True


def _refused(model: Any, path: str, why: str) -> PlanError:
    """Return the error, naming the plugin of a module, of its nearest ancestor, or of its submodules."""
    owners = {name: getattr(one, "owner", None) for name, one in named_modules(model)}
    above = path
    while above and owners.get(above) is None:
        above = above.rpartition(".")[0]
    inside = {owner for name, owner in owners.items() if owner and name.startswith(f"{path}.")}
    named = [owners[above]] if above else sorted(inside)
    whose = f"plugin {' or '.join(map(repr, named))}" if named else "the model"
    return PlanError(
        f"{whose} {why}, so tensor parallelism cannot split it",
        where=path,
        fix=f"--plugins {','.join(f'-{one}' for one in named)}, or mesh.tensor=1"
        if named
        else "mesh.tensor=1",
    )


def _line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


__all__ = ["validate"]
