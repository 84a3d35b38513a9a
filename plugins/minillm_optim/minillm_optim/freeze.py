"""Freezing: parameters keep their values for the whole run, up to a fraction of it, or from one on.

    freeze.of=["layers.[0-3].*"]                        permanently: no gradient, no optimizer state
    freeze.of=["embedding.*"] freeze.until=0.1          trained from a tenth of the run on
    freeze.of=["norm"] freeze.after=0.5                 trained during the first half

With a fraction, the learning rate is 0 while they are frozen (and so is the decay, which it multiplies): the
gradient is still computed and the moments are updated, so that a thawed parameter continues normally. Permanently
frozen parameters are excluded from the backward pass, and another plugin's rule for them is skipped with a note.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from minillm_core import PlanError, Plugin, option, plateaus

__all__ = ["Freeze"]


class Freeze(Plugin, api=1):
    """Parameters, by name or role, keep their values permanently or for a part of the run."""

    of: tuple[str, ...] = option(
        ("embedding.*",),
        min_length=1,
        help='patterns of parameter names or roles: "layers.[0-3].*", "attention.q", "norm"',
    )
    until: float | None = option(
        None,
        gt=0,
        lt=1,
        help="fraction of the run up to which they are frozen; none: they are never thawed",
    )
    after: float | None = option(
        None,
        gt=0,
        lt=1,
        help="fraction of the run after which they are frozen; none: no later freezing",
    )

    def optimizer_factory(self, optimizer):
        for pattern in self.of:
            if not any(_fits(pattern, *one) for one in optimizer.parameters.items()):
                roles = sorted({info.role for info in optimizer.parameters.values()})
                raise PlanError(
                    f"freeze.of={pattern!r} is not a parameter's name or role",
                    where="opt.freeze",
                    fix=f"roles are {', '.join(roles)}; names are such as {next(iter(optimizer.parameters))}",
                )
        if self.until is None and self.after is None:
            optimizer.freeze(self._chosen, over=True)
            return
        if self.until is not None and self.after is not None and self.until >= self.after:
            raise PlanError(
                f"freeze.until={self.until} is not before freeze.after={self.after}",
                where="opt.set",
                fix="set freeze.until below freeze.after, or leave one of them out",
            )
        chosen = {
            info.lr_mul for name, info in optimizer.parameters.items() if self._chosen(name, info)
        }
        for factor in sorted(chosen):  # a parameter's own learning-rate factor, if it is trained
            optimizer.set(
                lambda name, info, own=factor: self._chosen(name, info) and info.lr_mul == own,
                lr_mul=self._between(factor),
            )

    def _chosen(self, name: str, info: Any) -> bool:
        return any(_fits(pattern, name, info) for pattern in self.of)

    def _between(self, factor: float) -> Any:
        """Schedule a factor on the learning rate: 0 while the parameters are frozen."""
        begin = [(0.0, factor)] if self.until is None else [(0.0, 0.0), (self.until, factor)]
        end = [] if self.after is None else [(self.after, 0.0)]
        return plateaus(*begin, *end)


def _fits(pattern: str, name: str, info: Any) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(info.role, pattern)
