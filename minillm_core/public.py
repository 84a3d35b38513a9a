"""The public names of a module, listed once: in the stub ``NAME.pyi`` beside ``NAME.py``.

Type checkers read the stub; at run time a name is imported on first use from the module that the stub
names (PEP 562). So ``import minillm_core`` imports neither torch, mlx, numpy nor pydantic, and commands
that need none of them start fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module


def public_names(module: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a module with a stub.

    The stub has lines ``from HOME import name as name`` and, if a name is public under another,
    ``from HOME import name`` with ``public = name``.

    Args:
        module: the module's ``__name__``.
        file: the module's ``__file__``; the stub is beside it.
    """

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        # public name -> the module that defines it, its name there
        import ast  # once per module, and not on a plain import of the package
        from pathlib import Path

        imported: dict[str, tuple[str, str]] = {}
        public: dict[str, tuple[str, str]] = {}
        for node in ast.parse(Path(file).with_suffix(".pyi").read_bytes()).body:
            match node:
                case ast.ImportFrom(module=str(home), names=names):
                    for one in names:
                        imported[one.name] = home, one.name
                        if one.asname:
                            public[one.asname] = home, one.name
                case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name(id=name)):
                    public[alias] = imported[name]
                case ast.AnnAssign(target=ast.Name(id=name)):  # the module itself defines it
                    public[name] = module, name
        return public

    def look_up(name: str) -> object:
        """Import a public name on first use.

        Raises:
            AttributeError: the name is not public.
        """
        if name == "__all__":
            return list_names()
        if name not in homes():
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        home, its_name = homes()[name]
        value = getattr(import_module(home), its_name)
        setattr(sys.modules[module], name, value)
        return value

    def list_names() -> list[str]:
        """Return the public names, for completion."""
        return sorted(homes())

    return look_up, list_names
