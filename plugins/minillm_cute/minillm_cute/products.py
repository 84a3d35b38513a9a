"""Checks that MLPs with their activation in the matrix products have in common."""

from __future__ import annotations

from typing import Any

from minillm_core import PlanError

__all__ = ["MULTIPLE", "check_sizes", "check_unclaimed"]

MULTIPLE = 8  # of the sides of QuACK's products


def check_sizes(sizes: dict[str, int], instead: str) -> None:
    """Check the sides of the products.

    Args:
        sizes: setting or option -> its value.
        instead: what to do if no other size can be chosen.

    Raises:
        PlanError: one is not a multiple of 8.
    """
    for key, size in sizes.items():
        if size % MULTIPLE:
            raise PlanError(
                f"QuACK's products take multiples of {MULTIPLE}, but one side is {size}",
                where=f"{key}={size}",
                fix=f"{key}={-(-size // MULTIPLE) * MULTIPLE}, or {instead}",
            )


def check_unclaimed(plugin: str, leaves: tuple[Any, ...], instead: str) -> None:
    """Check that no other plugin replaces a product of the MLP, which does not call its linear layers.

    Raises:
        PlanError: one does.
    """
    for leaf in leaves:
        if leaf.product is not None:
            raise PlanError(
                f"{plugin} computes the product of '{leaf.path}' in its own kernel, so "
                f"'{leaf.product.owner}' cannot replace it",
                where=f"model.linear[{leaf.path}]",
                fix=f"{instead}, or leave '{leaf.product.owner}' out",
            )
