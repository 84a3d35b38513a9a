"""Calls of each op that are likely to expose a wrong kernel: odd sizes, edges, every fact of a request.

Values that a result must not depend on are *loud*, 1,000: keys that no query sees, embedding rows
whose id does not occur, angles of unused positions, hidden states and weights of positions without
supervision. They are finite: a contract defines a sum but not its order or method, and 0 times
infinity is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from minillm_core import LossForm, Rotary, SigmoidCap, TanhCap

LOUD = 1e3
MANY = 2**16 + 3
"""A number of rows that exceeds 16 bits."""

LONG = 2**14
"""Matrix rows from which on a sum over all of them would exceed float32's tolerance, since BLAS may add them
one by one: from here on only the first and the last row are not 0.
"""

Effort = Literal["usual", "once", "large"]


@dataclass(frozen=True)
class Example:
    """The arguments of a call of an op."""

    floats: Mapping[str, np.ndarray]  # in the compute dtype
    others: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the request


@dataclass(frozen=True)
class Case:
    """A call of an op with randomly drawn values."""

    op: str
    name: str  # "B=2 T=7 S=7 H=3 K=1 D=6 window=3"
    make: Callable[[np.random.Generator], Example] = field(repr=False)
    effort: Effort = "usual"  # once: in one dtype; large: only with --large
    places: tuple[str, ...] = ()  # "torch cuda": only there it adds coverage; none: everywhere


def _linear(rng: np.random.Generator, *, B: int, T: int, C: int, O: int) -> Example:  # noqa: E741
    return Example({"x": _ends(_normal(rng, B, T, C), axis=1), "weight": _normal(rng, O, C)})


def _embedding(rng: np.random.Generator, *, B: int, T: int, V: int, C: int) -> Example:
    ids = rng.integers(max(0, V - 2 * B * T), V, (B, T)).astype(np.int32)  # the last rows of many
    weight = _normal(rng, V, C)
    weight[np.setdiff1d(np.arange(V), ids)] = LOUD
    return Example({"weight": weight}, {"ids": ids})


def _rms_norm(
    rng: np.random.Generator, *, shape: tuple[int, ...], weight: bool, eps: float
) -> Example:
    x = _normal(rng, *shape)
    x.reshape(-1, shape[-1])[0] *= eps**0.5  # here eps is half of the normaliser
    gain = _normal(rng, shape[-1]) if weight else None
    if gain is None:
        return Example({"x": x}, {"weight": None, "eps": eps})
    return Example({"x": x, "weight": gain}, {"eps": eps})


def _rotate(
    rng: np.random.Generator,
    *,
    B: int,
    T: int,
    H: int,
    K: int,
    D: int,
    positions: str | None = None,
) -> Example:
    frequencies = (1e4 ** (-np.arange(0, D, 2) / D)).astype(np.float32)
    frequencies[len(frequencies) // 2 + 1 :] = 0.0  # half of them truncated, to 0
    length = T + 3
    angles = np.outer(np.arange(length), frequencies.astype(np.float64))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    shape = {None: None, "row": (T,), "batch": (B, T)}[positions]
    at = None if shape is None else rng.integers(1, length, shape).astype(np.int32)
    unused = np.setdiff1d(np.arange(length), np.arange(T) if at is None else at)
    cos[unused] = sin[unused] = LOUD
    floats = {"q": _normal(rng, B, T, H, D), "k": _normal(rng, B, T, K, D)}
    return Example(floats, {"table": Rotary(cos, sin, frequencies, at)}, {"positions": positions})


def _attention(
    rng: np.random.Generator,
    *,
    B: int,
    T: int,
    H: int,
    K: int,
    D: int,
    S: int | None = None,
    window: int | None = None,
    dynamic: bool = False,
    documents: str | None = None,
    scale: float | None = None,
) -> Example:
    keys = S or T
    ids = _documents(rng, B, keys, documents)
    q, k, v = (_normal(rng, B, *shape, D) for shape in ((T, H), (keys, K), (keys, K)))
    unseen = _unseen(T, keys, window, ids)  # (B or 1, S)
    hidden = np.broadcast_to(unseen, (B, keys))
    k[hidden], v[hidden] = LOUD, LOUD
    facts = {
        "window": None if window is None else "dynamic" if dynamic else "static",
        "documents": ids is not None,
        "adjacent": documents != "mixed",
        **{"grouped": H > K, "head_dim": D, "length": keys},
    }
    width = np.asarray(window, np.float32) if dynamic else window
    others = {"scale": scale, "window": width, "documents": ids}
    return Example({"q": q, "k": k, "v": v}, others, facts)


def _documents(
    rng: np.random.Generator, rows: int, keys: int, kind: str | None
) -> np.ndarray | None:
    """Build int32 (B, S): runs of documents, repeated ids, or one document per position."""
    if kind is None:
        return None
    drawn = rng.integers(0, 4, (rows, keys)).astype(np.int32)
    alone = np.tile(np.arange(keys, dtype=np.int32), (rows, 1))
    return {"runs": np.sort(drawn), "mixed": drawn, "alone": alone}[kind]


def _unseen(
    queries: int, keys: int, window: int | None, documents: np.ndarray | None
) -> np.ndarray:
    """Find the keys that no query sees: bool (1 or B, S)."""
    i = np.arange(keys - queries, keys)[:, None]
    distance = i - np.arange(keys)
    seen: np.ndarray = (distance >= 0) & (distance < (keys if window is None else window))
    if documents is None:
        return ~seen.any(0)[None]
    own = documents[:, keys - queries :, None] == documents[:, None, :]
    return ~(seen & own).any(1)


def _logits(rng: np.random.Generator, *, B: int, C: int, V: int, form: LossForm) -> Example:
    floats = {"hidden": _normal(rng, B, C), "weight": _ends(_normal(rng, V, C))}
    return Example(floats, {"form": form}, {"form": form})


def _swiglu(rng: np.random.Generator, *, shape: tuple[int, ...]) -> Example:
    return Example({"gate": _normal(rng, *shape), "up": _normal(rng, *shape)})


def _gram(
    rng: np.random.Generator,
    *,
    N: int,
    R: int,
    C: int,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
) -> Example:
    x = _normal(rng, N, R, C)
    if beta:  # then exactly symmetric
        x = np.tril(x[..., :R]) + np.swapaxes(np.tril(x[..., :R], -1), 1, 2)
    return Example({"x": x}, {"alpha": alpha, "beta": beta, "gamma": gamma}, {"matrices": True})


def _linear_cross_entropy(
    rng: np.random.Generator,
    *,
    N: int,
    C: int,
    V: int,
    K: int = 1,
    form: LossForm = LossForm(),  # noqa: B008  (frozen)
    weights: str | None = None,
    supervised: str = "most",
) -> Example:
    targets = _targets(rng, K, N, V, supervised)
    shape = {None: None, "target": (K,), "position": (K, N)}[weights]
    drawn = None if shape is None else rng.uniform(0.25, 2, shape).astype(np.float32)
    if drawn is not None and weights == "position":
        drawn[targets < 0] = LOUD
    hidden = _normal(rng, N, C)
    hidden[(targets < 0).all(0)] = LOUD
    facts = {"targets": K, "form": form, "weights": weights, "rows": N, "width": C, "vocab": V}
    others = {"targets": targets, "weights": drawn, "form": form}
    return Example({"hidden": hidden, "weight": _ends(_normal(rng, V, C))}, others, facts)


def _token_losses(
    rng: np.random.Generator,
    *,
    N: int,
    C: int,
    V: int,
    form: LossForm = LossForm(),  # noqa: B008  (frozen)
    supervised: str = "most",
) -> Example:
    (targets,) = _targets(rng, 1, N, V, supervised)
    hidden = _normal(rng, N, C)
    hidden[targets < 0] = LOUD
    floats = {"hidden": hidden, "weight": _ends(_normal(rng, V, C))}
    return Example(floats, {"targets": targets, "form": form})


UNSUPERVISED = np.array([-1, -2, -100, -(2**31)], np.int32)


def _targets(rng: np.random.Generator, K: int, N: int, V: int, supervised: str) -> np.ndarray:
    """Build int32 (K, N), with the first and last id; "few": only some rows at the beginning and the end."""
    targets = rng.integers(0, V, (K, N)).astype(np.int32)
    targets[:, -1], targets[:, 0] = V - 1, 0  # the last row, which faulty tail handling skips
    away: np.ndarray = {
        "all": np.zeros((K, N), bool),
        "most": rng.random((K, N)) < 0.25,
        "none": np.ones((K, N), bool),
        "few": np.broadcast_to((np.arange(N) >= 29) & (np.arange(N) < N - 70), (K, N)),
    }[supervised].copy()
    if supervised == "most":
        away[:, -1] = False
    targets[away] = rng.choice(UNSUPERVISED, int(away.sum()))
    return targets


def _ends(x: np.ndarray, axis: int = 0) -> np.ndarray:
    """Zero all rows but the first and the last, if there are LONG or more."""
    if x.shape[axis] >= LONG:
        x[(*[slice(None)] * axis, slice(29, -70))] = 0.0
    return x


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _cases(
    op: str,
    make: Callable[..., Example],
    *choices: Mapping[str, Any],
    effort: Effort = "usual",
    places: tuple[str, ...] = (),
) -> tuple[Case, ...]:
    return tuple(
        Case(op, " ".join(map(_word, one, one.values())), partial(make, **one), effort, places)
        for one in choices
    )


def _word(name: str, value: Any) -> str:
    """Format a size or a fact without a space: ``window=3``, ``form=TanhCap+z``."""
    if isinstance(value, LossForm):
        cap = [type(value.cap).__name__] if value.cap else []
        value = "+".join([*cap, *(one for one in value.named if one != "cap")]) or "plain"
    if isinstance(value, tuple):
        value = "x".join(map(str, value))
    return f"{name}={value}"


_TANH, _ALL = (
    LossForm(cap=TanhCap(3.0)),
    LossForm(cap=TanhCap(3.0), scale=0.5, smoothing=0.1, z=1e-2),
)
_FORMS = (
    LossForm(),
    _TANH,
    LossForm(cap=SigmoidCap(6.0, 1.0, 2.0)),
    LossForm(scale=0.3),
    LossForm(smoothing=0.1),
    LossForm(z=1e-2),
    _ALL,
)

_ALL_CASES = (
    *_cases(
        "linear",
        _linear,
        dict(B=1, T=1, C=1, O=1),
        dict(B=2, T=3, C=7, O=5),
        dict(B=1, T=33, C=65, O=31),
        dict(B=3, T=43, C=129, O=67),
        dict(B=1, T=MANY, C=16, O=8),
    ),
    *_cases(
        "embedding",
        _embedding,
        dict(B=1, T=1, V=1, C=1),
        dict(B=2, T=7, V=11, C=5),  # with repeated ids
        dict(B=3, T=127, V=131, C=65),
        dict(B=2, T=13, V=MANY, C=3),
    ),
    *_cases(
        "rms_norm",
        _rms_norm,
        dict(shape=(1, 1, 1), weight=True, eps=1e-2),
        dict(shape=(2, 3, 7), weight=True, eps=1e-2),
        dict(shape=(2, 3, 7), weight=False, eps=1e-2),
        dict(shape=(5, 33, 129), weight=True, eps=1e-5),
        dict(shape=(3, 4, 1, 31), weight=True, eps=1e-5),
        dict(shape=(3, 4099), weight=True, eps=1e-5),
        dict(shape=(1, MANY, 3), weight=False, eps=1e-5),
    ),
    *_cases(
        "rotate",
        _rotate,
        dict(B=1, T=1, H=1, K=1, D=2),
        dict(B=2, T=5, H=3, K=1, D=6),
        dict(B=2, T=5, H=3, K=1, D=6, positions="row"),
        dict(B=2, T=5, H=3, K=1, D=6, positions="batch"),
        dict(B=1, T=131, H=6, K=2, D=64),
        dict(B=3, T=37, H=2, K=2, D=128, positions="batch"),
        dict(B=4099, T=17, H=1, K=1, D=2),
    ),
    *_cases(
        "attention",
        _attention,
        dict(B=1, T=1, H=1, K=1, D=1),
        dict(B=2, T=7, H=3, K=1, D=6),
        dict(B=2, T=2, S=7, H=3, K=1, D=6),
        dict(B=2, T=7, H=6, K=3, D=6),
        dict(B=2, T=7, H=2, K=2, D=6, window=1),
        dict(B=2, T=13, H=4, K=2, D=16, window=3),
        dict(B=2, T=13, H=4, K=2, D=16, window=3, dynamic=True),
        dict(B=2, T=13, H=4, K=2, D=16, window=50),
        dict(B=2, T=37, H=6, K=3, D=16, documents="runs"),
        dict(B=2, T=37, H=6, K=3, D=16, documents="mixed"),
        dict(B=2, T=37, H=6, K=3, D=64, documents="alone"),
        dict(B=2, T=37, H=6, K=3, D=64, documents="runs", window=5),
        dict(B=3, T=5, S=131, H=2, K=1, D=64, documents="runs", window=40),
        dict(B=1, T=1, S=67, H=2, K=1, D=16, window=9),
        dict(B=1, T=129, H=4, K=1, D=64, scale=0.3),
        dict(B=1, T=65, H=2, K=2, D=128),
        dict(B=2, T=300, H=2, K=1, D=16, window=128),
        dict(B=2, T=300, H=2, K=1, D=16, documents="runs"),
        dict(B=4099, T=17, H=1, K=1, D=2),
    ),
    *_cases(
        "logits",
        _logits,
        *(dict(B=3, C=5, V=11, form=form) for form in _FORMS if not (form.smoothing or form.z)),
        dict(B=1, C=129, V=131, form=_TANH),
        dict(B=2, C=5, V=MANY, form=_FORMS[0]),
    ),
    *_cases(
        "swiglu",
        _swiglu,
        dict(shape=(1, 1, 1)),
        dict(shape=(2, 3, 7)),
        dict(shape=(5, 33, 129)),
        dict(shape=(3, 4099)),
        dict(shape=(1, MANY, 3)),
    ),
    *_cases(
        "gram",
        _gram,
        dict(N=1, R=1, C=1),
        dict(N=3, R=7, C=5, alpha=2.0315),
        dict(N=2, R=33, C=33, alpha=2.0315, beta=-4.775, gamma=3.4445),
        dict(N=1, R=129, C=67, gamma=-0.5),
        dict(N=2, R=257, C=257, alpha=-0.5, beta=0.25),
        dict(N=4099, R=3, C=2),
    ),
    *_cases(
        "linear_cross_entropy",
        _linear_cross_entropy,
        dict(N=1, C=1, V=2, supervised="all"),
        *(dict(N=7, C=5, V=11, form=form, supervised="all") for form in _FORMS),
        *(dict(N=37, C=16, V=67, form=form, weights="position") for form in _FORMS),
        dict(N=7, C=5, V=11, weights="target"),
        dict(N=7, C=5, V=11, K=2, weights="target", form=_ALL),
        dict(N=7, C=5, V=11, K=3, weights="position", form=_ALL),
        dict(N=7, C=5, V=11, supervised="none"),
        dict(N=7, C=5, V=11, K=2, weights="position", supervised="none"),
        dict(N=257, C=33, V=129),  # one row more than a chunk
        dict(N=523, C=37, V=131, weights="position", form=_ALL),
        dict(N=523, C=37, V=131, K=2, weights="position"),
        dict(N=5, C=5, V=MANY),
        dict(N=MANY, C=3, V=5, supervised="few"),
    ),
    *_cases(
        "linear_cross_entropy",
        _linear_cross_entropy,
        dict(N=2053, C=5, V=32771, weights="position", supervised="few"),
        effort="once",
        places=("mlx cpu", "mlx metal", "mlx cuda"),  # with chunks of 2^26 logits
    ),
    *_cases(
        "linear_cross_entropy",
        _linear_cross_entropy,
        dict(N=8209, C=5, V=32771, weights="position", supervised="few"),
        places=("torch cuda",),  # with chunks of 2^28 bytes of logits
    ),
    *_cases(
        "linear_cross_entropy",
        _linear_cross_entropy,
        dict(N=MANY, C=16, V=32771, weights="position", supervised="few"),  # 2^31 logits and more
        effort="large",
    ),
    *_cases(
        "linear_cross_entropy",
        _linear_cross_entropy,
        # whole tiles, which QuACK takes, and multiples of 16, which fp8 products take
        *(dict(N=301, C=40, V=384, form=form) for form in _FORMS),
        dict(N=301, C=48, V=384, weights="position"),
    ),
    *_cases(
        "token_losses",
        _token_losses,
        dict(N=1, C=1, V=2, supervised="all"),
        *(dict(N=7, C=5, V=11, form=form) for form in _FORMS),
        dict(N=7, C=5, V=11, supervised="none"),
        dict(N=523, C=37, V=131, form=_ALL),
        dict(N=5, C=5, V=MANY),
        dict(N=MANY, C=3, V=5, supervised="few"),
    ),
    *_cases(
        "token_losses",
        _token_losses,
        dict(N=8209, C=5, V=32771, supervised="few"),
        places=("torch cuda",),
    ),
    *_cases(
        "token_losses",
        _token_losses,
        dict(N=MANY, C=16, V=32771, supervised="few"),
        effort="large",
    ),
)

CASES: Mapping[str, tuple[Case, ...]] = {
    op: tuple(one for one in _ALL_CASES if one.op == op)
    for op in dict.fromkeys(one.op for one in _ALL_CASES)
}
"""Op -> its cases, for each op that has a contract."""
