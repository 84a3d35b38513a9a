"""Soft-capped logits: smoothly bounded before the loss (Gemma 2, arXiv:2408.00118).

    tanh       cap tanh(z / cap)          30 in Gemma 2 and modded-nanogpt's record 9, 15 in 18
    sigmoid    a sigmoid((z + b) / c)     23, 5, 7.5 in modded-nanogpt's record 54

z is the product of the last norm and the head, times ``scale``. The sigmoid's range is (0, a); a shift
does not matter, as only differences of logits count. Its bias makes it asymmetric: differences between
unlikely tokens, far below 0, are compressed more than between likely ones. The record of 2025-02 has
a = 15, b = 0, c = 7.5, which is 7.5 tanh(z / 15) plus a constant, and scale = dim^-1/2.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from minillm_core import Plugin, SigmoidCap, TanhCap, option

__all__ = ["Softcap"]

OTHERS = {"tanh": ("a", "b", "c"), "sigmoid": ("cap",)}
"""Form -> the options that belong to the other form."""


class Softcap(Plugin, api=1):
    """Logits are bounded by a sigmoid or a tanh before the loss."""

    form: Literal["sigmoid", "tanh"] = option(
        "sigmoid", search=("sigmoid", "tanh"), help="shape of the cap: sigmoid or tanh"
    )
    cap: float = option(15.0, gt=0, help="tanh: bound of the logits, within (-cap, cap)")
    a: float = option(23.0, gt=0, help="sigmoid: upper bound of the logits, within (0, a)")
    b: float = option(5.0, help="sigmoid: shift, added to the product")
    c: float = option(7.5, gt=0, help="sigmoid: divisor of the shifted product")
    scale: float = option(1.0, gt=0, help="factor on the product, before the cap")

    @model_validator(mode="after")
    def _of_its_own_form(self) -> Softcap:
        fields = type(self).__pydantic_fields__
        if idle := [n for n in OTHERS[self.form] if getattr(self, n) != fields[n].default]:
            raise ValueError(f"form {self.form} does not read {' or '.join(idle)}")
        return self

    def compute_loss(self, loss):
        caps = {"tanh": TanhCap(self.cap), "sigmoid": SigmoidCap(self.a, self.b, self.c)}
        loss.logits(cap=caps[self.form], scale=self.scale)
