"""Checks for context parallelism: every part of a plan must be computable on some columns of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minillm_core import EVERYTHING, ConfigError, PlanError
from minillm_core.inspection import decoder, named_modules


def check(plan: Any, size: int) -> None:
    """Check that a plan's model can be computed on some columns of its rows.

    Args:
        plan: the plan.
        size: N.

    Raises:
        PlanError: a part cannot; names the plugin and the reason.
        ConfigError: the rows cannot be cut into this many columns.
    """
    loss = plan.spec.loss
    choices = {
        "rows to train on by the losses of whole rows": loss.rows and loss.rows.node.owner,
        "weights by the losses of whole micro-batches": loss.weights and loss.weights.owner,
        "the supervised positions, whose number is another on each": loss.gather
        and loss.gather.owner,
        "fields by another model, which reads whole rows": next(
            (one.owner for one in plan.references), None
        ),
    }
    for what, owner in choices.items():
        if owner:
            raise _refused(owner, f"chooses {what}", "loss")
    for shape in {*plan.config.train.shapes, *plan.course}:
        if shape.seq_len % (2 * size):
            raise ConfigError(
                f"rows of {shape.seq_len} tokens cannot be cut into {2 * size} chunks, two for each of "
                f"the {size} processes that share them",
                where=f"train.seq_len={shape.seq_len}, mesh.context={size}",
                fix=f"train.seq_len={-(-shape.seq_len // (2 * size)) * 2 * size}",
            )
    for path, module in named_modules(decoder(plan.spec)):
        owner = getattr(module, "owner", None)
        if module.terms:
            raise _refused(owner, f"makes {_listed(module.terms)} of whole rows", path)
        if module.keeps:
            raise _refused(
                owner, f"computes each column from {_listed(module.keeps)} of all before", path
            )
        if module.lookback >= EVERYTHING:
            raise _refused(owner, "computes each column from all of its row", path)
        if module.lookback and path.startswith("terms_nodes."):
            why = "reads earlier columns in a loss term, which is computed once per whole row"
            raise _refused(owner, why, path)
        if module.lookback and module.statistics:
            raise _refused(owner, "looks back, and emits statistics of what it is given", path)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)


def _refused(owner: str | None, why: str, path: str) -> PlanError:
    return PlanError(
        f"plugin '{owner}' {why}: processes that share rows have some columns each",
        where=path,
        fix=f"--plugins -{owner}, or mesh.context=1",
    )


__all__ = ["check"]
