"""Frameworks behind one seam (base.py). Only the folders here import torch or mlx.

``create`` is imported when it is first used (PEP 562): detect.py chooses what stands on a run's
first line, and that waits for neither NumPy nor the kernels' modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm_core.backends.bind import create

__all__ = ["create"]


def __getattr__(name: str) -> Any:
    if name != "create":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from minillm_core.backends.bind import create

    return create
