"""Initial values: data in the plan, drawn on the host in float32, each parameter from a stream of its own.

The stream is keyed by the run's seed and the parameter's name, so that adding a plugin changes no
other parameter's value, and every backend starts from the same bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from minillm_core.nn.reference import resolve


@dataclass(frozen=True)
class Init:
    """The base of all initialisers: ``draw`` fills an array, ``data`` describes it as JSON."""

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a float32 array of ``shape``."""
        raise NotImplementedError

    def first(self, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draw the values of a parameter at the start of a run, from the stream of its name."""
        return self.draw(generator(seed, name), shape)

    def data(self) -> dict[str, Any]:
        """Return the initialiser as JSON: its name and its numbers."""
        return {"init": type(self).__name__.lower(), **asdict(self)}


@dataclass(frozen=True)
class Normal(Init):
    """Gaussian with mean zero."""

    std: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a float32 array of ``shape``."""
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(self.std)


@dataclass(frozen=True)
class Uniform(Init):
    """Uniform on [-bound, bound)."""

    bound: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a float32 array of ``shape``."""
        return (rng.random(shape, dtype=np.float32) * 2 - 1) * np.float32(self.bound)


@dataclass(frozen=True)
class Constant(Init):
    """One value everywhere."""

    value: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a float32 array of ``shape``."""
        return np.full(shape, self.value, np.float32)


@dataclass(frozen=True)
class Referenced(Init):
    """A plugin's function ``f(rng, shape, **arguments) -> float32 array``, by reference."""

    reference: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a float32 array of ``shape``.

        Raises:
            ValueError: the function returned another shape.
        """
        value = np.asarray(resolve(self.reference)(rng, shape, **dict(self.arguments)))
        if value.shape != shape:
            raise ValueError(f"{self.reference} returned shape {value.shape}, not {shape}")
        return value.astype(np.float32)


@dataclass(frozen=True)
class Same(Init):
    """The values of another parameter of this shape, bit by bit."""

    parameter: str
    init: Init  # of that one

    def first(self, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draw the other's values."""
        return self.init.first(seed, self.parameter, shape)

    def data(self) -> dict[str, Any]:
        """Return the initialiser as JSON."""
        return {"init": "same", "parameter": self.parameter}


def fan_in(inputs: int) -> Normal:
    """Scale a normal to std = inputs^-1/2: a product of normed inputs has size one, whatever the width."""
    return Normal(inputs**-0.5)


def fan_in_residual(inputs: int, layers: int) -> Normal:
    """Divide :func:`fan_in` by sqrt(2 layers): the sum of 2 layers products keeps the stream's size."""
    return Normal((inputs * 2 * layers) ** -0.5)


zeros = Constant(0.0)
ones = Constant(1.0)


def generator(seed: int, name: str) -> np.random.Generator:
    """Make the random generator that belongs to ``name`` in a run with ``seed``."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
