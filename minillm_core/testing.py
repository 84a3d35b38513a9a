"""The contract kit under its former name: ``from minillm_core.testing import conformance``.

The kit is the distribution minillm-kit, package ``minillm_kit``; this module forwards names to it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from minillm_core.install import pip_line


def __getattr__(name: str) -> Any:
    """Look a name up in the kit.

    Raises:
        ModuleNotFoundError: minillm-kit is not installed; the message has the pip line.
    """
    try:
        kit = import_module("minillm_kit")
    except ModuleNotFoundError as error:
        if error.name != "minillm_kit":
            raise
        raise ModuleNotFoundError(
            f"the contract kit is not installed: {pip_line('minillm-kit')}", name=error.name
        ) from None
    return getattr(kit, name)
