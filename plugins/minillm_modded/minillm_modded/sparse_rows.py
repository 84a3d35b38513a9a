"""Sparse rows: embedding tables are read, differentiated and updated only in the rows that a step looks up.

A lookup needs at most B T rows of a table, yet autograd returns a gradient of all V rows, and the norm,
AdamW's moments, master weights and the compute copy are then read and written in full: 15 to 20 % of a step
at width 512 for the 5 vocabularies of ``bigram_hash``. Here a step gathers the rows that its micro-batches
look up, (S, C), from the float32 master weights; gradient and update have these rows only.

Updates that AdamW would have made to a row in between are applied when it is next looked up: moments and
weight decay exactly, and the remaining effect of momentum as one sum over those updates. Nothing is skipped,
unlike in torch's SparseAdam: at betas (0.75, 0.95) three quarters of a rare row's movement happen after the
step that saw it.

S is rounded up to one of a few sizes (``buckets``), each with a compiled graph of its own.
Checkpoints, evaluation, generation and exports have whole, up-to-date tables.

It applies to every table that declares its lookup, ``Param(..., rows="ids")``, and follows plain
AdamW; a table that follows another rule, or whose decay is changed by a plugin (``cautious_wd``) and is not
0, is refused. A checkpoint has
one more array per table, of the table's size, so that a resumed run has the same bits.

The rule. A row last brought up to date at update s, with p, m, v, is after update t, k = t - s
updates later,

    m_t = beta1^k m,    v_t = beta2^k v,    p_t = W p - m sum_i w_i c_i / (c_i sqrt(v) + epsilon)

    W   = prod_(i = s+1 .. t) (1 - lr_i wd)
    c_i = beta2^((i-s)/2) / sqrt(1 - beta2^i)                              sqrt(v^_i) = c_i sqrt(v)
    w_i = W_(i..t) lr_i beta1^(i-s) / (1 - beta1^i) / c_i                  W_(i..t): the decay after i

which equals AdamW. The sum is evaluated at two values of c instead of k: Gauss quadrature, whose nodes and
weights match the first four moments of all c (total, mean, variance and third). They depend on s only, not
on the row, and are stored for the last WINDOW updates. So the sum is exact for k up to 2, and both if epsilon
is small against sqrt(v^) and if it is large. In between, after 100 updates, its error is below
1e-5 of the distance that a row has moved at betas (0.75, 0.95), and 4e-4 at (0.9, 0.95); in the first ten, where
1 - beta2^i changes fast, up to 0.2 % and 1 %. Every step also brings the next group of rows up to date in
cyclic order, so that no row is older than WINDOW updates.

200 steps of 1,024 tokens of Python's standard library, 2 layers of 128 and ``bigram_hash``: held-out loss
5.62529, and 5.62531 with the whole table; 5.673 if unseen rows are not updated, 5.747 without the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from minillm_core import PlanError, Plugin, RowRule, option

__all__ = ["LazyAdamW", "SparseRows"]

WINDOW = 1024
"""Number of past updates for which the sums are stored."""

ROUND = 1000
"""Updates in which every row is brought up to date at least once, seen or not; fewer than WINDOW."""

TINY = 1e-30  # before the first update the total is 0
ALIKE = 1e-6
"""Variance of c, relative to its squared mean, below which a single c is used for all."""


class LazyAdamW(RowRule):
    """AdamW applied to one row at a time."""

    shared: ClassVar[Mapping[str, tuple[int, ...]]] = {"sums": (5, WINDOW)}
    """1 - W; the total of w; mean, variance and third central moment of c by w: update s at s mod WINDOW."""

    def refuses(self) -> str | None:
        """Refuse all but the core's AdamW, and betas whose momentum does not decay within WINDOW updates."""
        rule, without_decay = self.group.rule, self.group.members[0].wd_mul == 0
        others = {
            owner
            for anchor, owner, stage in rule.stages
            # a decay multiplied by 0 is not a decay, in whatever way it is computed
            if not (anchor == "decay" and without_decay and "wd_mul" in stage.supplied)
        } - {"core"}
        if others:
            who = ", ".join(sorted(others))
            return f"it follows the rule '{rule.name}' of {who}, not plain AdamW"
        beta1, beta2 = self.betas
        if beta1**2 >= beta2:
            return f"at betas ({beta1:g}, {beta2:g}) a row that is not seen moves ever faster"
        return None

    @property
    def betas(self) -> tuple[float, float]:
        """The decay rates of m and v."""
        return self.constant("precondition", "beta1"), self.constant("precondition", "beta2")

    def brought(
        self, ops: Any, held: Mapping[str, Any], shared: Mapping[str, Any], updates: Any
    ) -> dict[str, Any]:
        """Bring rows up to date."""
        beta1, beta2 = self.betas
        lag, slot = updates - held["last"], ops.astype(modulo(held["last"]), "int32")
        parts = shared["sums"][0], *_nodes(ops, shared["sums"])
        lost, w1, c1, w2, c2, lag = (
            ops.expand_dims(one, 1) for one in (*(ops.take(p, slot, 0) for p in parts), lag)
        )  # (S, 1)
        m, v = held["precondition.m"], held["precondition.v"]
        root, epsilon = ops.sqrt(v), self.constant("precondition", "epsilon")
        share = w1 * c1 / (c1 * root + epsilon) + w2 * c2 / (c2 * root + epsilon)
        return {
            "param": held["param"] * (1.0 - lost) - m * share,
            "precondition.m": m * _power(ops, beta1, lag),
            "precondition.v": v * _power(ops, beta2, lag),
        }

    def next_shared(
        self, ops: Any, shared: Mapping[str, Any], updates: Any, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the stored sums after one more update."""
        sums = shared["sums"]
        beta1, beta2 = self.betas
        rate, decay = self.rate(values)
        slots, now = ops.arange(WINDOW, "float32"), updates + 1.0
        age = modulo(updates - slots) + 1.0  # of each slot's update, relative to this one
        lost, total, mean, variance, third = (sums[part] for part in range(5))
        weight = c = ops.zeros_like(age)
        if beta1:
            unbiased = ops.sqrt(1.0 - ops.exp(now * math.log(beta2)))
            c = ops.exp(age * (0.5 * math.log(beta2))) / unbiased
            by = rate * unbiased / (1.0 - ops.exp(now * math.log(beta1)))
            weight = ops.exp(age * (math.log(beta1) - 0.5 * math.log(beta2))) * by
        total = total * (1.0 - decay) + weight
        f, far = weight / ops.maximum(total, TINY), c - mean  # moments with one more value
        found = ops.stack(
            [
                lost + (1.0 - lost) * decay,
                total,
                mean + far * f,
                (1.0 - f) * (variance + far * far * f),
                (1.0 - f) * (third + far * f * (far * far * (1.0 - 2.0 * f) - 3.0 * variance)),
            ],
            0,
        )
        return {"sums": ops.where(slots == modulo(now), ops.zeros_like(found), found)}

    def in_turn(self, ops: Any, updates: Any) -> Any:
        """Return the next rows in cyclic order, R / ROUND of a table of R."""
        rows = self.group.shape[0]
        count = -(-rows // ROUND)
        starts = -(-rows // count)
        start = ops.astype(modulo(updates, starts), "int32") * count
        index = start + ops.arange(count)
        return ops.where(index >= rows, index - rows, index)


def modulo(number: Any, by: int = WINDOW) -> Any:
    """Return the remainder of non-negative whole numbers in float32."""
    return number % float(by)


def _nodes(ops: Any, sums: Any) -> tuple[Any, Any, Any, Any]:
    """Return two c with their weights, w1, c1, w2, c2, whose moments equal ``sums``.

    Distances d from the mean solve d^2 - (third / variance) d - variance = 0. Where all c are equal, both
    nodes are the mean, as the variance is only rounding.
    """
    total, mean, variance, third = (sums[part] for part in range(1, 5))
    spread = variance > ALIKE * mean * mean
    variance = ops.where(spread, variance, ops.ones_like(variance))
    skew = ops.where(spread, third / variance, ops.zeros_like(third))
    root = ops.sqrt(skew * skew + 4.0 * variance)
    up, down = 0.5 * (root + skew), 0.5 * (root - skew)  # both positive
    upper = total * down / root
    near = ops.zeros_like(mean)
    return (
        upper,
        mean + ops.where(spread, up, near),
        total - upper,
        mean - ops.where(spread, down, near),
    )


def _power(ops: Any, beta: float, lag: Any) -> Any:
    """Compute beta^lag, 1 for lag 0."""
    if beta:
        return ops.exp(lag * math.log(beta))
    return ops.where(lag > 0, ops.zeros_like(lag), ops.ones_like(lag))


class SparseRows(Plugin, api=1):
    """Embedding tables read and updated only in the rows that a step looks up."""

    buckets: int = option(
        8, ge=1, le=256, help="number of sizes to which the rows looked up in a step are rounded up"
    )

    def optimizer_factory(self, optimizer):
        if not any(info.rows for info in optimizer.parameters.values()):
            raise PlanError(
                "sparse_rows: no table of this model is looked up by rows of a batch field",
                where="opt.rows, as of bigram_hash",
                fix="leave it out, or add one that has such a table: bigram_hash, value_embeds",
            )
        optimizer.rows(lambda _, p: bool(p.rows), LazyAdamW, buckets=self.buckets)
