"""Tensor parallelism: the spec of a model of 1 / N of the heads and hidden units, and its checks; pure.

The model is the plan's own, built from a smaller geometry: H / N heads, K / N key-value heads (one, if N is a
multiple of K), hidden / N units inside the MLP; dim is unchanged. Each of its parameters is the whole
model's, or a slice along an axis named ``heads``, ``kv_heads`` or ``hidden``. So nodes are written for whole
geometries without special cases; a node whose parameters are no such slices is refused by name.

The outputs of leaves with a slice of their input are added up in the leaves' ``forward``. A module that computes
the products of its linear layers without calling them has ``own_products = True`` and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from minillm_core import ConfigError, Linear, Param, Plan, PlanError, Refusal, State
from minillm_core.inspection import declared, decoder, named_modules

AXES = ("heads", "kv_heads", "hidden")
"""Names of the divided axes."""

OF_LEAVES = ("in", "out")
"""Names of a leaf's own axes, in the node that replaces its product (an adapter)."""

OWN_PRODUCTS = "computes the products of its linear layers itself, without their all-reduce"

UNDIVIDED = "has no parameter that shrinks with the number of heads or hidden units"


@dataclass(frozen=True)
class Cut:
    """A slice of a parameter, one of ``parts`` along ``axis``."""

    axis: int
    parts: int

    def place(self, rank: int, size: int) -> int:
        """Return the part of a rank among ``size``; if there are fewer parts, several ranks share one."""
        return rank * self.parts // size


def divided(spec: Any, size: int) -> Any:
    """Return the spec of the model of 1 / ``size`` of the heads and hidden units.

    A constructor argument ``hidden`` of a node is divided like the geometry's, and ``in_features`` and
    ``out_features`` of a leaf's product like the leaf's.
    """
    whole = spec.geometry
    own = replace(
        whole,
        heads=whole.heads // size,
        kv_heads=max(1, whole.kv_heads // size),
        hidden=whole.hidden // size,
    )
    blocks = tuple(replace(block, mlp=_narrower(block.mlp, size)) for block in spec.blocks)
    found = replace(spec, geometry=own, blocks=blocks)
    leaves = dict(named_modules(decoder(replace(found, linears=()))))
    linears = tuple((leaf, _fitted(node, leaves[leaf])) for leaf, node in spec.linears)
    return replace(found, linears=linears)


def _narrower(node: Any, size: int) -> Any:
    """Return a plugin's MLP with its ``hidden`` divided, if it has that argument."""
    given = dict(getattr(node, "arguments", ()))
    if not isinstance(given.get("hidden"), int):
        return node
    return _with(node, hidden=given["hidden"] // size)


def _fitted(node: Any, leaf: Linear) -> Any:
    """Return a leaf's product with the leaf's ``in_features`` and ``out_features``."""
    sizes = {"in_features": leaf.in_features, "out_features": leaf.out_features}
    return _with(node, **{name: sizes[name] for name in sizes.keys() & dict(node.arguments).keys()})


def _with(node: Any, **changed: Any) -> Any:
    return replace(node, arguments=tuple(sorted((dict(node.arguments) | changed).items())))


def cuts(whole: Any, part: Any) -> Iterator[tuple[str, Cut]]:
    """Yield each parameter of ``part`` that is a slice of one of ``whole``, with its cut.

    Raises:
        PlanError: a parameter is neither whole nor such a slice.
    """
    owners = {path: getattr(module, "owner", None) for path, module in named_modules(whole)}
    named = {name: one for name, _, _, one in declared(part, Param)}
    for name, _, _, one in declared(whole, Param):
        if name not in named:
            raise _refused(_owner(owners, name), "has other parameters for fewer heads", name)
        own, axes = named[name].shape, one.axes
        if own == one.shape:
            continue
        allowed = (*AXES, *OF_LEAVES) if ".product." in name else AXES
        apart = [
            at for at, sizes in enumerate(zip(own, one.shape, strict=False)) if len({*sizes}) > 1
        ]
        named_so = len(axes) == len(own) == len(one.shape) and len(apart) == 1
        if not named_so or axes[apart[0]] not in allowed or one.shape[apart[0]] % own[apart[0]]:
            why = (
                f"has a parameter {one.shape} that is {own} with fewer heads or hidden units, and no slice "
                f"of it by an axis that it names (axes={axes})"
            )
            raise _refused(_owner(owners, name), why, name)
        yield name, Cut(apart[0], one.shape[apart[0]] // own[apart[0]])


def _owner(owners: Mapping[str, str | None], name: str) -> str | None:
    """Return the plugin that owns a parameter's module or its nearest ancestor."""
    path = name.rpartition(".")[0]
    while path and owners.get(path) is None:
        path = path.rpartition(".")[0]
    return owners.get(path)


def check(plan: Plan, size: int) -> None:
    """Check that a plan's model can be computed with 1 / ``size`` of its heads and hidden units.

    Raises:
        PlanError: a part cannot; names the plugin and the reason.
        ConfigError: the sizes are not divisible.
    """
    spec = plan.spec
    _check_sizes(spec, size)
    loss = spec.loss
    choices = {
        "chooses rows to train on by the losses of whole micro-batches": loss.rows
        and loss.rows.node.owner,
        "weighs positions by the losses of whole micro-batches": loss.weights
        and loss.weights.owner,
        "gathers the supervised positions": loss.gather and loss.gather.owner,
    }
    for what, owner in choices.items():
        if owner:
            raise _refused(owner, what, "loss")
    try:
        part = decoder(divided(spec, size))
    except Refusal as refusal:
        raise PlanError(
            f"1 / {size} of the heads and hidden units is not a valid model: {refusal.what}",
            where=refusal.where or f"mesh.tensor={size}",
            fix=f"{refusal.fix}, or mesh.tensor=1" if refusal.fix else "mesh.tensor=1",
        ) from refusal
    _check_products(part)
    _check_parts(decoder(spec), part)


def _check_sizes(spec: Any, size: int) -> None:
    """Check that heads and hidden units are divisible by ``size``."""
    shape = spec.geometry
    rests = {"heads": shape.heads % size, "hidden": shape.hidden % size}
    rests["kv_heads"] = shape.kv_heads % size and size % shape.kv_heads
    for name, rest in rests.items():
        if rest:
            count = getattr(shape, name)
            raise ConfigError(
                f"{size} processes cannot share a model.{name} of {count}",
                where=f"model.{name}={count}, mesh.tensor={size}",
                fix=f"model.{name}={-(-count // size) * size}, or a mesh.tensor that divides it",
            )
    for index, block in enumerate(spec.blocks):
        width = dict(getattr(block.mlp, "arguments", ())).get("hidden")
        if isinstance(width, int) and width % size:
            raise _refused(block.mlp.owner, f"is {width} wide inside", f"layers.{index}.mlp")


def _check_products(part: Any) -> None:
    """Check that every module calls its linear layers, whose ``forward`` has the all-reduce."""
    for path, module in named_modules(part):
        if getattr(module, "own_products", False):
            raise _refused(getattr(module, "owner", None), OWN_PRODUCTS, path)


def _check_parts(whole: Any, part: Any) -> None:
    """Check that every layer has a slice for each process, and that no node is wrong on a slice."""
    sliced = {name.rpartition(".")[0] for name, _ in cuts(whole, part)}
    states = {name: one.shape for name, _, _, one in declared(part, State)}
    for name, module, _, one in declared(whole, State):
        if states.get(name) != one.shape:
            raise _refused(getattr(module, "owner", None), "keeps State of each head", name)
    own = part.geometry
    for index, block in enumerate(part.layers):
        layout = getattr(block.attention, "layout", None)
        if layout is not None and (own.heads % layout.joins or own.kv_heads % layout.joins):
            had = f"one process has {own.heads} query and {own.kv_heads} key heads"
            why = f"joins {layout.joins} heads, but {had}"
            raise _refused(layout.owner, why, f"layers.{index}.attention")
        for path in (f"layers.{index}.attention", f"layers.{index}.mlp"):
            module = getattr(block, path.rpartition(".")[2])
            inside = (f"{name}.".startswith(f"{path}.") for name in sliced)
            if module is not None and not any(inside):
                owner = getattr(module, "owner", None)
                raise _refused(owner, UNDIVIDED, path, so="there is nothing to split")


def summed(whole: Any, part: Any) -> set[str]:
    """Return the paths of leaves whose input is divided: their outputs need an all-reduce."""
    leaves = {path for path, module in named_modules(whole) if isinstance(module, Linear)}
    found = {name.rpartition(".")[0] for name, cut in cuts(whole, part) if cut.axis == 1}
    return found & leaves


def _refused(
    owner: str | None, why: str, path: str, *, so: str = "tensor parallelism cannot split it"
) -> PlanError:
    whose = f"plugin '{owner}'" if owner else "the model"
    others = f"--plugins -{owner}, or " if owner else ""
    return PlanError(
        f"{whose} {why}, so {so}",
        where=path,
        fix=f"{others}mesh.tensor=1",
    )


__all__ = ["OWN_PRODUCTS", "Cut", "check", "cuts", "divided", "summed"]
