"""Hyper-connections: n residual streams (lanes), mixed around each sublayer (arXiv:2409.19606).

    A, a, b = A0 + s_a tanh(norm(H) W_A), a0 + s_a tanh(norm(H) W_a), b0 + s_b tanh(norm(H) W_b)
    h       = a^T H                                     the sublayer's input; H (n, C), per token
    H      <- A^T H + b y                               y: the sublayer's output

The strength of connections between layers, and whether layers act in sequence or in parallel, is
learned. A0 = 1, b0 = 1, a0 is 1 for lane s mod n of sublayer s, and every W is 0 at the start: all lanes
then equal the stream of the plain model. ``dynamic=false`` has no W. At the end the lanes are averaged;
the paper sums them, which the last norm makes equivalent.

The first lane is the model's residual stream, to which other plugins may add; the others are an array
(B, T, n - 1, C). Norms have no weights; A0, a0 and b0 do not decay. Layers that run again (``layer_loop``)
would read the lanes from before their first round, and are refused.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Constant, Linear, Module, Param, Plugin, option, zeros

__all__ = ["Further", "HyperConnections", "Mixing"]


class HyperConnections(Plugin, api=1, identity_at_init=True):
    """Several lanes of the stream, mixed by learned weights before and after each sublayer."""

    lanes: int = option(
        4,
        ge=2,
        le=16,
        search=(2, 4),
        help="number of lanes n, including the model's residual stream",
    )
    dynamic: bool = option(True, help="weights depend on the token; false: constant over tokens")
    lr_mul: float = option(1.0, gt=0, help="factor on the learning rate of the mixing weights")

    def build_model(self, model):
        n = self.lanes
        model.loop(0, model.layers - 1, 1)  # a further round would read the lanes of the first
        shape = {"lanes": n, "dynamic": self.dynamic, "lr_mul": self.lr_mul}
        model.stream("hyper_lanes", Copies, count=n - 1)
        lanes = "hyper_lanes"
        for layer in range(model.layers):
            for index, (part, site) in enumerate((("attention", "mid"), ("mlp", "out"))):
                at, behind = f"layers.{layer}.{part}", f"layers.{layer}.{site}"
                mixing, own = f"hyper_{part}_{layer}", (2 * layer + index) % n
                read, joined, new = (f"{mixing}_{one}" for one in ("read", "joined", "lanes"))
                held = {"lanes": lanes, "mixing": mixing}
                model.stream(mixing, Mixing, at=at, reads={"lanes": lanes}, own=own, **shape)
                model.stream(read, Share, at=at, reads=held, column=0)
                model.input(at, "carry", Entry, reads={"mixing": mixing}, column=0)
                model.input(at, read)
                model.stream(joined, Share, at=behind, reads=held, column=1)
                model.stream(new, Further, at=behind, reads=held)
                model.residual(behind, "carry", Entry, reads={"mixing": mixing}, column=1)
                model.residual(behind, "sublayer", Entry, reads={"mixing": mixing}, column=-1)
                model.residual(behind, joined)
                lanes = new
        model.stream("hyper_sum", Sum, at="final", reads={"lanes": lanes})
        model.residual("final", "carry", 1 / n)
        model.residual("final", "hyper_sum", 1 / n)


class Copies(Module):
    """Initial values of the further lanes: x0 (B, T, C) -> (B, T, n - 1, C)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x0: Any) -> Any:
        """x0 (B, T, C) -> (B, T, n - 1, C)."""
        return self.ops.stack([x0] * self.count, 2)


class Mixing(Module):
    """The weights of a sublayer, for each lane: a, A and b, (B, T, n, 1 + n + 1)."""

    def __init__(self, geometry: Any, lanes: int, own: int, dynamic: bool, lr_mul: float) -> None:
        super().__init__()
        self.lanes, self.dynamic, self.eps = lanes, dynamic, geometry.norm_eps
        start = [
            [float(i == own), *(float(i == j) for j in range(lanes)), 1.0] for i in range(lanes)
        ]
        self.start = tuple(number for row in start for number in row)
        self.static = Param(
            (lanes, lanes + 2), init=zeros, role="scalar", lr_mul=lr_mul, wd_mul=0.0
        )
        if dynamic:
            self.weight = Linear(
                geometry.dim, lanes + 2, role="gate", init=zeros, lr_mul=lr_mul, share=float(lanes)
            )  # for every lane
            self.scale_in = Param(
                (1,), init=Constant(0.01), role="scalar", lr_mul=lr_mul, wd_mul=0.0
            )
            self.scale_out = Param(
                (1,), init=Constant(0.01), role="scalar", lr_mul=lr_mul, wd_mul=0.0
            )

    def forward(self, x: Any, lanes: Any) -> Any:
        """x (B, T, C), lanes (B, T, n - 1, C) -> (B, T, n, n + 2); (1, 1, n, n + 2) with ``dynamic=false``."""
        ops: Any = self.ops
        shape = (self.lanes, self.lanes + 2)
        static = ops.astype_like(ops.constant(self.start, shape), x) + self.static
        static = ops.reshape(static, (1, 1, *shape))
        if not self.dynamic:
            return static
        normed = ops.rms_norm(whole(ops, x, lanes), None, self.eps)
        found = ops.tanh(self.weight(normed))  # (B, T, n, n + 2)
        found = ops.concat([found[..., :-1] * self.scale_in, found[..., -1:] * self.scale_out], -1)
        return static + found


class Entry(Module):
    """The first lane's own weight in one column of a sublayer's weights."""

    def __init__(self, column: int) -> None:
        super().__init__()
        self.column = column

    def forward(self, mixing: Any) -> Any:
        """mixing (B, T, n, n + 2) -> (B, T, 1)."""
        return mixing[:, :, :1, self.column]


class Share(Module):
    """The sum of the further lanes, weighted by one column of a sublayer's weights."""

    def __init__(self, column: int) -> None:
        super().__init__()
        self.column = column

    def forward(self, lanes: Any, mixing: Any) -> Any:
        """lanes (B, T, n - 1, C), mixing (B, T, n, n + 2) -> (B, T, C)."""
        return self.ops.sum(lanes * self.ops.expand_dims(mixing[:, :, 1:, self.column], -1), 2)


class Further(Module):
    """The further lanes after a sublayer."""

    def forward(self, x: Any, sublayer: Any, lanes: Any, mixing: Any) -> Any:
        """Return (B, T, n - 1, C); x, sublayer (B, T, C), lanes (B, T, n - 1, C), mixing (B, T, n, n + 2)."""
        ops: Any = self.ops
        kept = ops.matrix_transpose(mixing[:, :, :, 2:-1]) @ whole(ops, x, lanes)
        return kept + ops.expand_dims(mixing[:, :, 1:, -1], -1) * ops.expand_dims(sublayer, 2)


class Sum(Module):
    """The sum of lanes (B, T, n - 1, C), (B, T, C)."""

    def forward(self, lanes: Any) -> Any:
        """lanes (B, T, n - 1, C) -> (B, T, C)."""
        return self.ops.sum(lanes, 2)


def whole(ops: Any, x: Any, lanes: Any) -> Any:
    """Join x (B, T, C) and lanes (B, T, n - 1, C) -> (B, T, n, C), x first."""
    return ops.concat([ops.expand_dims(x, 2), lanes], 2)
