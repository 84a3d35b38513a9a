"""ReLU squared MLP in fp8: two, or all, of its six matrix products in fp8, on NVIDIA GPUs from Ada on.

    y = relu(x Wup^T)^2 Wdown^T

replaces `relu2`, with its parameters, sizes and initial values. (modded-nanogpt, records of 2026-05-21 and
2026-07-17: its up- and its down-projection in fp8, the latter with the previous step's scale.)

Each operand is rounded to e4m3 with one scale for the whole array, a power of two. The weights' scales are
computed from their own largest values. Those of x and of relu(.)^2 would need another pass over each, so the
previous step's largest values are used: they are State, saved and resumed, and written by the update. Values up
to twice as large fit; larger ones are clipped. The backward pass uses bfloat16 and the unrounded operands; with
``backward=fp8`` its four products are in fp8 too, of gradients in e5m2 and the other operands in e4m3. Rounding is
of training alone: evaluation has bfloat16's products, as the exported model has.

Not on MLX: Apple's GPUs have no fp8 products, so that it would only round.
"""

from __future__ import annotations

from typing import Any, Literal

from minillm_core import Constant, Layers, Linear, Module, Normal, PlanError, Plugin, State, option

__all__ = ["MLP", "Fp8MLP", "MLPOfFp8Gradients"]

MULTIPLE = 16  # of the sides of an fp8 product
LARGEST_INPUT = 16.0  # of a normalised x, initially
LARGEST_SQUARE = 64.0  # of relu(.)^2, initially: the product is of order one


class Fp8MLP(Plugin, api=1, backends=("torch",), devices=("cuda",), capability=">=8.9"):
    """The ReLU squared MLP with fp8 products: relu2 except for rounding."""

    hidden: int | None = option(
        None, ge=1, help="hidden width; none: 3/2 of model.hidden, rounded up to a multiple of 16"
    )
    down_lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of Wdown")
    layers: Layers = option("all", help='layers with this MLP: "all", [0, -1], "every:2"')
    backward: Literal["bfloat16", "fp8"] = option(
        "bfloat16", help="the four products of the gradients: fp8 is faster and rounds more"
    )

    def build_model(self, model: Any) -> None:
        hidden = self.hidden or -(-3 * model.hidden // (2 * MULTIPLE)) * MULTIPLE
        for size, key in ((model.dim, "model.dim"), (hidden, "fp8_mlp.hidden")):
            if size % MULTIPLE:
                raise PlanError(
                    f"products of 8-bit numbers take multiples of {MULTIPLE}, but one side is {size}",
                    where=f"{key}={size}",
                    fix=f"{key}={-(-size // MULTIPLE) * MULTIPLE}, or relu2 in place of fp8_mlp",
                )
        mlp = {"bfloat16": MLP, "fp8": MLPOfFp8Gradients}[self.backward]
        for layer in self.layers.resolve(model.layers):
            model.mlp(layer, mlp, hidden=hidden, down_lr_mul=self.down_lr_mul)


class PlainMLP(Module):
    """x (B, T, C) -> relu(x Wup^T)^2 Wdown^T (B, T, C), without fp8, if nothing is trained."""

    def __init__(self, geometry: Any, hidden: int, down_lr_mul: float) -> None:
        super().__init__()
        self.up = Linear(geometry.dim, hidden, role="mlp.up", axes=("hidden", "dim"))
        self.down = Linear(
            hidden,
            geometry.dim,
            role="mlp.down",
            axes=("dim", "hidden"),
            init=Normal((hidden * 2 * geometry.layers) ** -0.5),  # as the plain MLP's
            lr_mul=down_lr_mul,
        )

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C)."""
        h = self.ops.square(self.ops.relu(self.up(x)))  # (B, T, hidden)
        return self.down(h)


class MLP(PlainMLP):
    """The MLP with fp8 products, and the largest values of the operands, () each."""

    statistics = {"of_x": "max", "of_h": "max"}  # noqa: RUF012
    written_as = PlainMLP  # a model directory needs no fp8 kernels
    own_products = True  # in training, those of its linear layers, which are not called
    narrow = False  # whether the products of the gradients are in fp8 too

    def __init__(self, geometry: Any, hidden: int, down_lr_mul: float) -> None:
        super().__init__(geometry, hidden, down_lr_mul)
        self.largest_x = State((), Constant(LARGEST_INPUT))
        self.largest_h = State((), Constant(LARGEST_SQUARE))

    def forward(self, x: Any) -> tuple[Any, Any, Any]:
        """x (B, T, C) -> (B, T, C), (), ().

        Raises:
            PlanError: a plugin has claimed a product of the MLP, which is not called here.
        """
        for leaf in (self.up, self.down):
            if leaf.product is not None:
                raise PlanError(
                    f"fp8_mlp computes the product of '{leaf.path}' in its own kernel, so "
                    f"'{leaf.product.owner}' cannot replace it",
                    where=f"model.linear[{leaf.path}]",
                    fix=f"relu2 in place of fp8_mlp, or leave '{leaf.product.owner}' out",
                )
        if hasattr(x, "is_cuda"):  # an array of torch, which MLX reads runs without
            from minillm_triton.kernels.mlp import relu2_mlp, served

            up: Any = self.up.weight
            down: Any = self.down.weight
            if served(x, up, down):
                expected: Any = (self.largest_x, self.largest_h)
                return relu2_mlp(x, up, down, *expected, narrow=self.narrow)
        h = self.ops.square(self.ops.relu(self.up(x)))  # (B, T, hidden)
        return self.down(h), self.largest(x), self.largest(h)

    def largest(self, x: Any) -> Any:
        """Return the largest absolute value, ()."""
        return self.ops.stop_gradient(self.ops.max(self.ops.abs(x)))

    def next_state(self, of_x: Any, of_h: Any) -> dict[str, Any]:
        """Use this step's largest values in the next step."""
        return {"largest_x": of_x, "largest_h": of_h}


class MLPOfFp8Gradients(MLP):
    """The MLP whose products of gradients are in fp8 too."""

    narrow = True
