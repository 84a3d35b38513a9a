"""Random generators for ``on_batch``: each plugin has its own, and checkpoints save their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from minillm_core.nn.init import generator

_current: ContextVar[Callable[[str], np.random.Generator] | None] = ContextVar(
    "random_stream", default=None
)


def random_stream(name: str = "") -> np.random.Generator:
    """Return the random generator of the plugin whose ``on_batch`` is running.

    In phase train its state carries over from batch to batch and is restored on resume; in the other
    phases it is reseeded for every batch, so that evaluations are reproducible. The seed depends only on
    the run's seed, the plugin and ``name``.

    Args:
        name: distinguishes several generators of one plugin.

    Raises:
        RuntimeError: called outside ``on_batch``.
    """
    streams = _current.get()
    if streams is None:
        raise RuntimeError("random_stream() is for on_batch: outside it there is no random stream")
    return streams(name)


class Streams:
    """The generators of a run's ``on_batch`` hooks, by ``<plugin>`` or ``<plugin>.<name>``.

    Args:
        seed: the run's seed.
        state: the result of an earlier :meth:`data`.
    """

    def __init__(self, seed: int, state: Mapping[str, Any] | None = None) -> None:
        self._seed = seed
        self._held: dict[str, np.random.Generator] = {}
        for name, one in (state or {}).items():
            self._made(name).bit_generator.state = one

    def data(self) -> dict[str, Any]:
        """Return every generator's state as JSON, by name."""
        return {name: _plain(self._held[name].bit_generator.state) for name in sorted(self._held)}

    @contextmanager
    def of(self, plugin: str, phase: str) -> Iterator[None]:
        """Make :func:`random_stream` return the plugin's generators inside the context."""

        def stream(name: str) -> np.random.Generator:
            full = f"{plugin}.{name}" if name else plugin
            if phase != "train":
                return generator(self._seed, f"{phase}/{full}")
            return self._held.get(full) or self._made(full)

        token = _current.set(stream)
        try:
            yield
        finally:
            _current.reset(token)

    def _made(self, name: str) -> np.random.Generator:
        self._held[name] = generator(self._seed, f"train/{name}")
        return self._held[name]


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
