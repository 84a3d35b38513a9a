"""The check that the kernels have in common: they are for Hopper GPUs alone."""

from __future__ import annotations

import torch

from minillm_core import BackendError

__all__ = ["check_hopper"]


def check_hopper(device: torch.device, what: str, *, where: str, fix: str) -> None:
    """Check that a GPU is a Hopper.

    Args:
        device: the GPU.
        what: subject and verb of the error: "QuACK's products run".
        where: the option or plugin that selects the kernel, for the error.
        fix: what to do instead.

    Raises:
        BackendError: it is another GPU.
    """
    found = torch.cuda.get_device_capability(device)
    if found != (9, 0):
        raise BackendError(
            f"{what} on Hopper GPUs, of capability 9.0, not {found[0]}.{found[1]}",
            where=where,
            fix=fix,
        )
