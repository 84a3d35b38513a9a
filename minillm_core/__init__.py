"""minillm trains small language models fast; every technique is a plugin.

The public names stand in ``__init__.pyi``. They are imported when they are first used (PEP 562):
``import minillm_core`` itself brings in neither torch, mlx, numpy nor pydantic, so that commands which
need none of them start at once.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def _homes() -> dict[str, str]:
    """Map each public name to its module, as the stub beside this file has them."""
    import ast

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_bytes())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Raises:
        AttributeError: the name is not public.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("minillm-core")
    if name == "__all__":
        return sorted([*_homes(), "__version__"])
    if name.startswith("__") or (home := _homes().get(name)) is None:
        raise AttributeError(f"module 'minillm_core' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return __getattr__("__all__")
