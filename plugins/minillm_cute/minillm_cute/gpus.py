"""The GPUs that the kernels are for."""

from __future__ import annotations

from minillm_core import gpu_capabilities

__all__ = ["HOPPER", "without_hopper"]

HOPPER = (9, 0)  # compute capability


def without_hopper() -> str | None:
    """Return why kernels for Hopper do not run here; None: a GPU is a Hopper, or none is known.

    A plan may be for another machine, where the driver shows no GPU here.
    """
    found = set(gpu_capabilities()) - {(0, 0)}
    if not found or HOPPER in found:
        return None
    here = ", ".join(f"{major}.{minor}" for major, minor in sorted(found))
    return f"runs on Hopper GPUs, of capability 9.0, not on this machine's, of {here}"
