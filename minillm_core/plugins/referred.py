"""Whether there is what a reference names, found out without importing anything.

A kernel's module imports its framework: a plan may be made where that is not installed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from minillm_core.plugins.discover import find_module
from minillm_core.text import nearest

__all__ = ["missing"]

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def missing(reference: str) -> str | None:
    """Why ``package.module:function`` cannot be had; None: it can, or only an import could tell."""
    if not _REFERENCE.fullmatch(reference):
        return "it is not of the form package.module:function"
    module, _, name = reference.partition(":")
    loaded = sys.modules.get(module)
    if loaded is not None:
        return None if hasattr(loaded, name) else _lacks(module, name, set(vars(loaded)))
    spec = find_module(module)
    if spec is None:
        return f"there is no module {module}"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        names = set(_names(ast.parse(Path(spec.origin).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return None
    told = name in names or names & {"*", "__getattr__"}
    return None if told else _lacks(module, name, names)


def _lacks(module: str, name: str, names: set[str]) -> str:
    close = nearest(name, names)
    return f"{module} has no {name}" + (f"; did you mean {close}?" if close else "")


def _names(tree: ast.AST) -> Iterator[str]:
    """What a module may define: also under a condition, and too much rather than too little."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
