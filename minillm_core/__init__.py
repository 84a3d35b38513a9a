"""minillm trains small language models fast; every technique is a plugin.

Names are imported when they are first used (PEP 562): ``import minillm_core`` itself brings in
neither torch, mlx, numpy nor pydantic, so that commands which need none of them start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm_core.errors import BackendError as BackendError
    from minillm_core.errors import ConfigError as ConfigError
    from minillm_core.errors import DataError as DataError
    from minillm_core.errors import MinillmError as MinillmError
    from minillm_core.errors import PlanError as PlanError
    from minillm_core.errors import PluginError as PluginError
    from minillm_core.errors import Refusal as Refusal
    from minillm_core.plugins.api import HOOK_API as HOOK_API

    __version__: str

__all__ = [
    "HOOK_API",
    "BackendError",
    "ConfigError",
    "DataError",
    "MinillmError",
    "PlanError",
    "PluginError",
    "Refusal",
    "__version__",
]

_HOME = {
    "minillm_core.errors": (
        "BackendError",
        "ConfigError",
        "DataError",
        "MinillmError",
        "PlanError",
        "PluginError",
        "Refusal",
    ),
    "minillm_core.plugins.api": ("HOOK_API",),
}
"""Where each public name lives: a module -> its names."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Raises:
        AttributeError: the name is not public.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("minillm-core")
    for module, names in _HOME.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module 'minillm_core' has no attribute '{name}'")


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*__all__]
