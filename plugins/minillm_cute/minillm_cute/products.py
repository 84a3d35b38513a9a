"""Checks that MLPs with their activation in the matrix products have in common."""

from __future__ import annotations

from typing import Any

from minillm_core import Candidate, PlanError, Request
from minillm_cute.gpus import without_hopper

__all__ = ["MULTIPLE", "check_sizes", "check_unclaimed", "refuse_gpus"]

MULTIPLE = 8  # of the sides of QuACK's products


def check_sizes(sizes: dict[str, int], instead: str) -> None:
    """Check the sides of the products.

    Args:
        sizes: setting or option -> its value.
        instead: what to do where another size is no choice.

    Raises:
        PlanError: one is no multiple of 8.
    """
    for key, size in sizes.items():
        if size % MULTIPLE:
            raise PlanError(
                f"QuACK's products take multiples of {MULTIPLE}, and one side is {size}",
                where=f"{key}={size}",
                fix=f"{key}={-(-size // MULTIPLE) * MULTIPLE}, or {instead}",
            )


def refuse_gpus(kernels: Any, plugin: str, function: str, instead: str) -> None:
    """Refuse a run before it starts where none of this machine's GPUs can train the MLP.

    The MLP is no op's kernel. Where it cannot be computed it is offered as one nevertheless, required and never
    accepted: a run is refused then, and where a run is read, on any GPU, such a kernel is left out.

    Args:
        kernels: of the hook ``kernel_provider``.
        plugin: the plugin, for the error.
        function: the MLP's, in kernels/mlp.py.
        instead: what to do instead.
    """
    reason = without_hopper()
    if reason is None:
        return

    def accepts(request: Request) -> str:
        return f"{reason}: {instead}"

    kernels.candidate(
        Candidate(
            "linear",
            function,
            ("torch",),
            f"minillm_cute.kernels.mlp:{function}",
            devices=("cuda",),
            accepts=accepts,
            rank=last,
            disable_option=f"-{plugin}",
            provider="minillm-cute",
        )
    )


def last(request: Request) -> int:
    """Rank behind every other kernel."""
    return 9


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
