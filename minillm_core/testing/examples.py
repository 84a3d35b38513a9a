"""Arguments for each op, small and odd, with the facts by which a kernel accepts or refuses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm_core.ops import LossForm, Rotary, TanhCap

__all__ = ["EXAMPLES", "Example"]


@dataclass(frozen=True)
class Example:
    """What an op is called with."""

    floats: Mapping[str, np.ndarray]  # in the compute dtype
    others: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the request


def _linear(rng: np.random.Generator) -> Iterator[Example]:
    for B, T, C, outputs in ((1, 1, 1, 1), (2, 3, 7, 5)):
        yield Example({"x": _normal(rng, B, T, C), "weight": _normal(rng, outputs, C)})


def _embedding(rng: np.random.Generator) -> Iterator[Example]:
    ids = rng.integers(0, 11, (2, 7)).astype(np.int32)  # some of them twice
    yield Example({"weight": _normal(rng, 11, 5)}, {"ids": ids})


def _rms_norm(rng: np.random.Generator) -> Iterator[Example]:
    x = {"x": _normal(rng, 2, 3, 7)}
    yield Example({**x, "weight": _normal(rng, 7)}, {"eps": 1e-2})
    yield Example(x, {"weight": None, "eps": 1e-2})


def _rotate(rng: np.random.Generator) -> Iterator[Example]:
    B, T, H, K, D = 2, 5, 3, 1, 6
    for positions, shape in ((None, None), ("row", (T,)), ("batch", (B, T))):
        frequencies = (1e4 ** (-np.arange(0, D, 2) / D)).astype(np.float32)
        angles = np.outer(np.arange(T + 3), frequencies.astype(np.float64))
        at = None if shape is None else rng.integers(0, T + 3, shape).astype(np.int32)
        turned = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
        table = Rotary(*turned, frequencies, at)
        floats = {"q": _normal(rng, B, T, H, D), "k": _normal(rng, B, T, K, D)}
        yield Example(floats, {"table": table}, {"positions": positions})


def _attention(rng: np.random.Generator) -> Iterator[Example]:
    B, K, D = 2, 1, 6
    documents = np.sort(rng.integers(0, 3, (B, 7))).astype(np.int32)
    for T, S, H, window, ids in (
        *((1, 1, 1, None, None), (7, 7, 3, None, None), (2, 7, 3, None, None)),
        *((7, 7, 1, 3, None), (7, 7, 3, None, documents), (7, 7, 3, 3, documents)),
    ):
        q, k, v = (_normal(rng, B, *shape, D) for shape in ((T, H), (S, K), (S, K)))
        facts = {
            "window": None if window is None else "static",
            "documents": ids is not None,
            **{"grouped": H > K, "head_dim": D, "length": S},
        }
        yield Example({"q": q, "k": k, "v": v}, {"window": window, "documents": ids}, facts)


def _logits(rng: np.random.Generator) -> Iterator[Example]:
    for form in (LossForm(), LossForm(cap=TanhCap(3.0))):
        floats = {"hidden": _normal(rng, 3, 5), "weight": _normal(rng, 11, 5)}
        yield Example(floats, {"form": form}, {"form": form})


def _swiglu(rng: np.random.Generator) -> Iterator[Example]:
    for shape in ((1, 1, 1), (2, 3, 7)):
        yield Example({"gate": _normal(rng, *shape), "up": _normal(rng, *shape)})


def _linear_cross_entropy(rng: np.random.Generator) -> Iterator[Example]:
    N, C, V = 7, 5, 11
    forms = (LossForm(), LossForm(cap=TanhCap(3.0), smoothing=0.1, z=1e-2))
    for K, form, weighted in ((1, forms[0], None), (1, forms[1], None), (2, forms[0], "position")):
        targets = rng.integers(-2, V, (K, N)).astype(np.int32)
        weights = None if weighted is None else rng.uniform(0, 2, (K, N)).astype(np.float32)
        facts = {"targets": K, "form": form, "weights": weighted, "rows": N, "width": C, "vocab": V}
        floats = {"hidden": _normal(rng, N, C), "weight": _normal(rng, V, C)}
        yield Example(floats, {"targets": targets, "weights": weights, "form": form}, facts)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


EXAMPLES: Mapping[str, Callable[[np.random.Generator], Iterator[Example]]] = {
    "linear": _linear,
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "rotate": _rotate,
    "attention": _attention,
    "logits": _logits,
    "swiglu": _swiglu,
    "linear_cross_entropy": _linear_cross_entropy,
}
"""Op -> its examples, for each op that has a contract."""
