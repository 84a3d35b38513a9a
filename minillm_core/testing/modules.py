"""For tests of an author's own: a module alone, or a stage, in NumPy float64."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from minillm_core.backends.numpy.model import NumPyFramework
from minillm_core.backends.numpy.ops import NumPyOps
from minillm_core.errors import Refusal
from minillm_core.nn.geometry import Geometry
from minillm_core.nn.initial import initial_values
from minillm_core.nn.module import Module, declared, materialising
from minillm_core.nn.node import call_names
from minillm_core.nn.param import Buffer, Declaration
from minillm_core.testing.subject import moved

__all__ = ["GEOMETRY", "numpy_ops", "run_module"]

GEOMETRY = Geometry(
    layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocab=97, positions=13, layer=1
)
"""The sizes that :func:`run_module` gives to a constructor that names ``geometry``."""


def run_module(
    cls: type[Module], arguments: Mapping[str, Any] | None = None, /, **inputs: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    """Make one module, fill it, and call its ``forward``, in NumPy float64.

    ::

        out, weights = run_module(HeadGate, {"bound": 2.0}, y=y, x=x)
        np.testing.assert_allclose(out, reference.gated(y, x, weights["gate.weight"], bound=2.0))

    That torch and MLX compute the same as NumPy is for :func:`conformance` to show.

    Args:
        cls: the module's class.
        arguments: of its constructor, a dictionary; ``geometry`` is :data:`GEOMETRY` unless given.
        inputs: of ``forward``, by name: arrays, floats are taken as float64.

    Returns:
        What ``forward`` gives, a tuple where it gives one; and every parameter and state by name
            (``gate.weight``), moved away from its initial value, so that what starts at 0 or 1
            takes part.

    Raises:
        Refusal: inputs that ``forward`` does not take, or lacks.
    """
    names = call_names(cls.forward)
    made_with = list(inspect.signature(cls.__init__).parameters)[1:]
    if set(names) != set(inputs):
        constructors = [name for name in inputs if name in made_with and name not in names]
        apart = f"run_module({cls.__name__}, {{{', '.join(f'{n!r}: ...' for n in constructors)}}}, "
        apart += ", ".join(f"{name}=..." for name in names) + ")"
        raise Refusal(
            f"{cls.__name__}.forward takes {', '.join(names) or 'nothing'}, "
            f"not {', '.join(inputs) or 'nothing'}",
            where="run_module",
            fix=f"the constructor's arguments are a dictionary of their own: {apart}"
            if constructors
            else "give each of forward's arguments by name, and no other",
        )
    given = dict(arguments or {})
    if "geometry" in made_with:
        given.setdefault("geometry", GEOMETRY)
    with materialising(NumPyFramework()):
        module = cls(**given)
    for part, attribute, value in initial_values(module, {}, seed=0):
        setattr(part, attribute, np.asarray(value, np.float64))
    weights: dict[str, np.ndarray] = {}
    for name, part, attribute, declaration in declared(module, Declaration):
        if not isinstance(declaration, Buffer):
            weights[name] = moved(name, getattr(part, attribute)).astype(np.float64)
            setattr(part, attribute, weights[name])
    return module(*(_wide(inputs[name]) for name in names)), weights


def numpy_ops() -> NumPyOps:
    """What a module has as ``self.ops`` and a stage is given as ``ops``, on NumPy arrays."""
    return NumPyOps()


def _wide(value: Any) -> Any:
    array = np.asarray(value)
    return array.astype(np.float64) if array.dtype.kind == "f" else array
