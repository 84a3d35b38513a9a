"""Initial values of all declared arrays, the same bits on every backend, and the evidence that they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from minillm_core.deferred import Deferred
from minillm_core.nn.init import Init
from minillm_core.nn.module import declared
from minillm_core.nn.param import Buffer, Param, State

AT_ONCE = 8
"""Arrays that are drawn, and are in memory, at the same time; one thread draws some 100 M numbers a second."""


def _drawn(
    model: Any, inits: Mapping[str, Init], seed: int, kind: type[Param] | type[State]
) -> Iterator[tuple[str, Any, str, Deferred]]:
    """Yield (name, module, attribute, initial value) of every Param or State."""
    for name, module, attribute, one in declared(model, kind):
        init = inits.get(name, one.init) if kind is Param else one.init
        rows = partial(_rows, init, seed, name, one.shape)
        yield name, module, attribute, Deferred(one.shape, np.dtype(np.float32), rows)


def _rows(
    init: Init, seed: int, name: str, shape: tuple[int, ...], first: int, count: int
) -> np.ndarray:
    """Draw a whole array, since one generator draws all its numbers, and return some of its rows."""
    return np.atleast_1d(init.first(seed, name, shape))[first : first + count]


def initial_values(
    model: Any, inits: Mapping[str, Init], seed: int, *, parameters: bool = True
) -> Iterator[tuple[Any, str, np.ndarray]]:
    """Yield (module, attribute, initial value) of every array that ``model`` declares.

    Args:
        model: a materialised model.
        inits: parameter -> initialiser, of those that a plugin claimed.
        seed: the run's seed.
        parameters: False: leave parameters out.
    """
    kinds = (Param, State) if parameters else (State,)
    drawn = (one for kind in kinds for one in _drawn(model, inits, seed, kind))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while some := [*islice(drawn, AT_ONCE)]:
            arrays = pool.map(np.asarray, [value for *_, value in some])
            for (_, module, attribute, _), array in zip(some, arrays, strict=True):
                yield module, attribute, array
    for _, module, attribute, buffer in declared(model, Buffer):
        yield module, attribute, buffer.fn()


def initial_arrays(model: Any, inits: Mapping[str, Init], seed: int) -> dict[str, Any]:
    """Return the values of :func:`initial_values`, drawn when read, as ``model.<parameter>`` and ``state.<name>``.

    Args:
        model: a materialised model, or its outline.
        inits: parameter -> initialiser, of those that a plugin claimed.
        seed: the run's seed.
    """
    return {
        f"{kept}.{name}": value
        for kept, kind in (("model", Param), ("state", State))
        for name, _, _, value in _drawn(model, inits, seed, kind)
    }


def witness_inits(
    model: Any,
    inits: Mapping[str, Init],
    seed: int,
    host: Callable[[Any], np.ndarray],
    witness: Callable[[str], None],
) -> None:
    """Record ``init:<parameter>`` for each parameter that equals what its claimed initialiser draws.

    Args:
        model: materialised and filled, float32.
        inits: parameter -> initialiser, of those that a plugin claimed.
        seed: the run's seed.
        host: converts an array of the framework to NumPy.
        witness: called with the key of each parameter that equals its initialiser's values.
    """
    for name, module, attribute, param in declared(model, Param):
        if name in inits:
            drawn = inits[name].first(seed, name, param.shape)
            if np.array_equal(host(getattr(module, attribute)), drawn):
                witness(f"init:{name}")
