"""Initialisers: data in the plan, drawn on the host in float32, with one random generator per parameter.

The generator is keyed by the run's seed and the parameter's name, so that adding a plugin changes no
other parameter's value, and every backend starts from the same bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from minillm_core.errors import PlanError
from minillm_core.nn.reference import place_of, resolve


@dataclass(frozen=True)
class Init:
    """The base of all initialisers: ``draw`` fills an array, ``data`` describes it as JSON."""

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a float32 array of ``shape``."""
        raise NotImplementedError

    def first(self, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a parameter's initial values, float32, from the generator keyed by the seed and its name."""
        return self.draw(generator(seed, name), shape)

    def data(self) -> dict[str, Any]:
        """Return the initialiser as JSON: its name and its numbers."""
        return {"init": type(self).__name__.lower(), **asdict(self)}


@dataclass(frozen=True)
class Normal(Init):
    """A normal distribution with mean zero."""

    std: float

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw a float32 array of ``shape``."""
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(self.std)


@dataclass(frozen=True)
class Uniform(Init):
    """A uniform distribution on [-bound, bound)."""

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
            PlanError: the function returned another shape, or numbers that are not finite.
        """
        function = resolve(self.reference)
        value, where = np.asarray(function(rng, shape, **dict(self.arguments))), place_of(function)
        if value.shape != shape:
            what = f"the initialiser {self.reference} returned shape {value.shape}, not {shape}"
            raise PlanError(what, where=where, fix=f"return an array {shape}")
        if not np.isfinite(value).all():
            what = f"the initialiser {self.reference} returned NaN or infinity"
            raise PlanError(what, where=where)
        return value.astype(np.float32)


@dataclass(frozen=True)
class Same(Init):
    """The initial values of another parameter of this shape, bitwise."""

    parameter: str
    init: Init  # the other parameter's

    def first(self, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draw the other parameter's values."""
        return self.init.first(seed, self.parameter, shape)

    def data(self) -> dict[str, Any]:
        """Return the initialiser as JSON."""
        return {"init": "same", "parameter": self.parameter}


def fan_in(inputs: int) -> Normal:
    """Return a normal with std = inputs^-1/2: normalised inputs give outputs of unit variance at any width."""
    return Normal(inputs**-0.5)


def fan_in_residual(inputs: int, layers: int) -> Normal:
    """Return :func:`fan_in` with its std divided by sqrt(2 layers): 2 layers outputs add up to unit variance."""
    return Normal((inputs * 2 * layers) ** -0.5)


zeros = Constant(0.0)
ones = Constant(1.0)


def generator(seed: int, name: str) -> np.random.Generator:
    """Return the random generator of ``name`` in a run with ``seed``."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
