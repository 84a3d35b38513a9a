"""Every declared array's first value, the same bits on every backend, and the proof that it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from minillm_core.nn.init import Init, generator
from minillm_core.nn.module import declared
from minillm_core.nn.param import Buffer, Param, State

__all__ = ["initial_arrays", "initial_values", "witness_inits"]


def initial_values(
    model: Any, inits: Mapping[str, Init], seed: int
) -> Iterator[tuple[Any, str, np.ndarray]]:
    """(module, attribute, value) of everything that ``model`` declares.

    Args:
        model: a materialised model.
        inits: parameter -> initialiser, where a plugin claimed it.
        seed: the run's.
    """
    for name, module, attribute, param in declared(model, Param):
        init = inits.get(name, param.init)
        yield module, attribute, init.draw(generator(seed, name), param.shape)
    for name, module, attribute, state in declared(model, State):
        yield module, attribute, state.init.draw(generator(seed, name), state.shape)
    for _, module, attribute, buffer in declared(model, Buffer):
        yield module, attribute, buffer.fn()


def initial_arrays(model: Any, inits: Mapping[str, Init], seed: int) -> dict[str, np.ndarray]:
    """``model.<parameter>`` and ``state.<name>``, as :func:`initial_values` draws them.

    Args:
        model: materialised, or the outline alone.
        inits: parameter -> initialiser, where a plugin claimed it.
        seed: the run's.
    """
    parameters = {
        f"model.{name}": inits.get(name, param.init).draw(generator(seed, name), param.shape)
        for name, _, _, param in declared(model, Param)
    }
    return parameters | {
        f"state.{name}": state.init.draw(generator(seed, name), state.shape)
        for name, _, _, state in declared(model, State)
    }


def witness_inits(
    model: Any,
    inits: Mapping[str, Init],
    seed: int,
    host: Callable[[Any], np.ndarray],
    witness: Callable[[str], None],
) -> None:
    """Witness ``init:<parameter>`` where the model holds what a claimed initialiser draws.

    Args:
        model: materialised and filled, float32.
        inits: parameter -> initialiser, where a plugin claimed it.
        seed: the run's.
        host: one of the framework's arrays as NumPy's.
        witness: told of each parameter whose digest is its initialiser's.
    """
    for name, module, attribute, param in declared(model, Param):
        if name in inits:
            drawn = inits[name].draw(generator(seed, name), param.shape)
            if _digest(host(getattr(module, attribute))) == _digest(drawn):
                witness(f"init:{name}")


def _digest(array: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).digest()
