"""The timed workload of each op: sizes, arguments, and the minimum work in FLOPs and elements moved.

Letters are those of the contracts; N is B * T. FLOPs are those of products, as in the contracts;
attention counts the visible query-key pairs. Elements are the arguments read once and the results
written once: the minimum of any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minillm_core import LossForm, Rotary
from minillm_kit.kernels.examples import Example

Sizes = Mapping[str, int]


class Work(NamedTuple):
    """The minimum work of a call."""

    flops: int
    numbers: int  # read or written, in the compute dtype


@dataclass(frozen=True)
class Workload:
    """A timed call of an op.

    ``forward`` and ``backward`` count the work of each pass; the second excludes the first.
    """

    small: Sizes  # for a CPU
    large: Sizes
    arguments: Callable[[np.random.Generator, Sizes], Example]
    forward: Callable[[Sizes], Work]
    backward: Callable[[Sizes], Work] | None  # None: nothing to differentiate


def _linear(rng: np.random.Generator, s: Sizes) -> Example:
    return Example({"x": _normal(rng, s["N"], s["C"]), "weight": _normal(rng, s["O"], s["C"])})


def _embedding(rng: np.random.Generator, s: Sizes) -> Example:
    ids = rng.integers(0, s["V"], s["N"]).astype(np.int32)
    return Example({"weight": _normal(rng, s["V"], s["C"])}, {"ids": ids})


def _rms_norm(rng: np.random.Generator, s: Sizes) -> Example:
    floats = {"x": _normal(rng, s["N"], s["C"]), "weight": _normal(rng, s["C"])}
    return Example(floats, {"eps": 1e-6})


def _rotate(rng: np.random.Generator, s: Sizes) -> Example:
    B, T, D = s["B"], s["T"], s["D"]
    frequencies = 1e4 ** (-np.arange(0, D, 2) / D)
    angles = np.outer(np.arange(T), frequencies)
    parts = (x.astype(np.float32) for x in (np.cos(angles), np.sin(angles), frequencies))
    floats = {"q": _normal(rng, B, T, s["H"], D), "k": _normal(rng, B, T, s["K"], D)}
    return Example(floats, {"table": Rotary(*parts)}, {"positions": None})


def _attention(rng: np.random.Generator, s: Sizes) -> Example:
    shapes = {"q": s["H"], "k": s["K"], "v": s["K"]}
    floats = {n: _normal(rng, s["B"], s["T"], heads, s["D"]) for n, heads in shapes.items()}
    window = s["window"] or None
    facts = {
        "window": "static" if window else None,
        "documents": False,
        **{"grouped": s["H"] > s["K"], "head_dim": s["D"], "length": s["T"]},
    }
    return Example(floats, {"window": window}, facts)


def _logits(rng: np.random.Generator, s: Sizes) -> Example:
    floats = {"hidden": _normal(rng, s["B"], s["C"]), "weight": _normal(rng, s["V"], s["C"])}
    return Example(floats, {"form": LossForm()})


def _swiglu(rng: np.random.Generator, s: Sizes) -> Example:
    return Example({name: _normal(rng, s["N"], s["F"]) for name in ("gate", "up")})


def _gram(rng: np.random.Generator, s: Sizes) -> Example:
    return Example({"x": _normal(rng, s["N"], s["R"], s["C"])}, {}, {"matrices": True})


def _loss(rng: np.random.Generator, s: Sizes) -> Example:
    floats = {
        "hidden": _normal(rng, s["N"], s["C"]),
        "weight": _normal(rng, s["V"], s["C"]) / np.float32(s["C"] ** 0.5),
    }
    targets = rng.integers(0, s["V"], (1, s["N"])).astype(np.int32)
    facts = {"targets": 1, "form": LossForm(), "weights": None}
    facts |= {"rows": s["N"], "width": s["C"], "vocab": s["V"]}
    return Example(floats, {"targets": targets}, facts)


def _token_losses(rng: np.random.Generator, s: Sizes) -> Example:
    whole = _loss(rng, s)
    return Example(whole.floats, {"targets": whole.others["targets"][0]})


def _pairs(s: Sizes) -> int:
    """Count the visible query-key pairs."""
    T, window = s["T"], min(s["window"] or s["T"], s["T"])
    return window * (window + 1) // 2 + (T - window) * window


def _queries(s: Sizes) -> int:
    return s["B"] * s["T"] * s["H"] * s["D"]


def _keys(s: Sizes) -> int:
    return s["B"] * s["T"] * s["K"] * s["D"]


def _product(s: Sizes) -> int:
    return s["N"] * s["C"] + s["V"] * s["C"]


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


WORKLOADS: Mapping[str, Workload] = {
    "linear": Workload(
        {"N": 1024, "C": 256, "O": 1024},
        {"N": 65536, "C": 768, "O": 3072},
        _linear,
        lambda s: Work(2 * s["N"] * s["C"] * s["O"], s["N"] * (s["C"] + s["O"]) + s["O"] * s["C"]),
        lambda s: Work(
            4 * s["N"] * s["C"] * s["O"], s["N"] * (2 * s["C"] + s["O"]) + 2 * s["O"] * s["C"]
        ),
    ),
    "embedding": Workload(
        {"N": 2048, "V": 4096, "C": 256},
        {"N": 65536, "V": 50304, "C": 768},
        _embedding,
        lambda s: Work(0, 2 * s["N"] * s["C"]),
        lambda s: Work(0, s["N"] * s["C"] + s["V"] * s["C"]),
    ),
    "rms_norm": Workload(
        {"N": 2048, "C": 256},
        {"N": 65536, "C": 768},
        _rms_norm,
        lambda s: Work(0, 2 * s["N"] * s["C"]),
        lambda s: Work(0, 3 * s["N"] * s["C"]),
    ),
    "rotate": Workload(
        {"B": 8, "T": 256, "H": 4, "K": 4, "D": 64},
        {"B": 32, "T": 1024, "H": 12, "K": 12, "D": 64},
        _rotate,
        lambda s: Work(0, 2 * (_queries(s) + _keys(s))),
        lambda s: Work(0, 2 * (_queries(s) + _keys(s))),
    ),
    "attention": Workload(
        {"B": 4, "T": 256, "H": 4, "K": 4, "D": 64, "window": 0},
        {"B": 32, "T": 1024, "H": 12, "K": 12, "D": 64, "window": 0},
        _attention,
        lambda s: Work(4 * s["B"] * s["H"] * s["D"] * _pairs(s), 2 * _queries(s) + 2 * _keys(s)),
        lambda s: Work(8 * s["B"] * s["H"] * s["D"] * _pairs(s), 4 * _queries(s) + 4 * _keys(s)),
    ),
    "logits": Workload(
        {"B": 1, "C": 256, "V": 4096},
        {"B": 1, "C": 768, "V": 50304},
        _logits,
        lambda s: Work(2 * s["B"] * s["C"] * s["V"], s["V"] * s["C"]),
        None,  # used in generation
    ),
    "swiglu": Workload(
        {"N": 2048, "F": 512},
        {"N": 65536, "F": 2048},
        _swiglu,
        lambda s: Work(0, 3 * s["N"] * s["F"]),
        lambda s: Work(0, 5 * s["N"] * s["F"]),
    ),
    "gram": Workload(
        {"N": 4, "R": 256, "C": 256},
        {"N": 48, "R": 768, "C": 768},
        _gram,
        lambda s: Work(
            s["N"] * s["R"] * (s["R"] + 1) * s["C"], s["N"] * s["R"] * (s["C"] + s["R"])
        ),  # one triangle
        None,
    ),
    "linear_cross_entropy": Workload(
        {"N": 1024, "C": 128, "V": 4096},
        {"N": 65536, "C": 768, "V": 50304},
        _loss,
        lambda s: Work(2 * s["N"] * s["C"] * s["V"], _product(s)),
        lambda s: Work(4 * s["N"] * s["C"] * s["V"], 2 * _product(s)),
    ),
    "token_losses": Workload(
        {"N": 1024, "C": 128, "V": 4096},
        {"N": 65536, "C": 768, "V": 50304},
        _token_losses,
        lambda s: Work(2 * s["N"] * s["C"] * s["V"], _product(s)),
        None,
    ),
}
"""Op -> its workload, for each op that has a contract."""
