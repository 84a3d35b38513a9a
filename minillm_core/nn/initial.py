"""Every declared array's first value, the same bits on every backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from minillm_core.nn.init import Init, generator
from minillm_core.nn.module import declared
from minillm_core.nn.param import Buffer, Param, State

__all__ = ["initial_values"]


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
