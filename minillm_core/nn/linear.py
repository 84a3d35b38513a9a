"""The leaf through which every product with a matrix parameter goes."""

from __future__ import annotations

from typing import Any

from minillm_core.nn.init import Init, fan_in
from minillm_core.nn.module import Module
from minillm_core.nn.param import Param

__all__ = ["Linear", "products"]


class Linear(Module):
    """x (..., C) -> x @ weight.T (..., O), on the framework's own linear class.

    ``product`` is a plugin's claim on this leaf (FP8, LoRA): ``product(x, weight) -> (..., O)``.
    ``share`` is that of the tokens which are multiplied here, for the count of FLOPs: less than 1 in
    an expert.
    ``joint`` is set by a backend on the first of several leaves that read the same input: one
    buffer of which their weights are row blocks, so that :func:`products` is one product.

    Args:
        in_features: C.
        out_features: O; the weight is (O, C).
        role: as of a :class:`Param`.
        axes: logical names of the weight's axes.
        init: how it starts; None: a normal with std C^-1/2.
        lr_mul: factor on the learning rate.
        wd_mul: factor on the weight decay.

    ::

        self.gate = Linear(geometry.dim, geometry.heads, role="gate", init=zeros)
    """

    leaf = "linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        role: str,
        axes: tuple[str, str] = ("out", "in"),
        init: Init | None = None,
        lr_mul: float = 1.0,
        wd_mul: float = 1.0,
        share: float = 1.0,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.share = share
        self.weight = Param(
            (out_features, in_features),
            axes=axes,
            init=init or fan_in(in_features),
            role=role,
            lr_mul=lr_mul,
            wd_mul=wd_mul,
        )
        self.product: Any = None
        self.joint: Any = None

    def forward(self, x: Any) -> Any:
        """x (..., C) -> (..., O)."""
        if self.product is None:
            return self.ops.linear(x, self.weight)
        self.framework.witness(f"node:{self.product.path}")
        return self.product(x, self.weight)


def products(x: Any, *leaves: Linear) -> list[Any]:
    """``[leaf(x) for leaf in leaves]``: x (..., C) -> (..., O) each; one product where joined."""
    first = leaves[0]
    if first.joint is None:
        return [leaf(x) for leaf in leaves]
    widths = [leaf.out_features for leaf in leaves]
    return first.ops.split(first.ops.linear(x, first.joint), widths, -1)
