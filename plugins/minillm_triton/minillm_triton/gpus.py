"""The GPUs that multiply 8-bit numbers."""

from __future__ import annotations

from minillm_core import gpu_capabilities

__all__ = ["FP8_FIRST", "without_fp8"]

FP8_FIRST = (8, 9)  # compute capability: Ada, Hopper and later


def without_fp8() -> str | None:
    """Return why products of 8-bit numbers do not run here; None: a GPU has them, or none is known.

    A plan may be for another machine, where the driver shows no GPU here.
    """
    found = set(gpu_capabilities()) - {(0, 0)}
    if not found or max(found) >= FP8_FIRST:
        return None
    here = ", ".join(f"{major}.{minor}" for major, minor in sorted(found))
    return (
        "multiplies 8-bit numbers, on GPUs of capability 8.9 or later (Ada, Hopper), "
        f"not on this machine's, of {here}"
    )
