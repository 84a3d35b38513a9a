"""Helpers that run an op, or a whole model, on each framework: NumPy arrays to NumPy outputs and gradients.

The frameworks are imported inside the functions: if this file is named on the command line, it is read
before a faster BLAS has been selected for MLX.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from minillm_core.backends.base import Trainer
from minillm_core.backends.bind import bind
from minillm_core.backends.detect import Detected
from minillm_core.config.load import load
from minillm_core.config.presets import read_preset
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.manager import load as load_plugins
from minillm_core.plugins.plugin import Plugin
from minillm_core.plugins.streams import Streams
from minillm_core.train.hooks import plan_hook
from minillm_kit.subject import spelt

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Ran:
    """Outputs in order, and the gradient of each differentiable argument; all float64."""

    outputs: list[np.ndarray]
    grads: dict[str, np.ndarray]


def cotangents(outputs: Sequence[Any]) -> list[np.ndarray]:
    """Return upstream gradients, equal for every framework: not 0, and exact in every dtype."""
    draw = np.random.default_rng(7)
    odd = (2 * draw.integers(-8, 8, tuple(y.shape)) + 1 for y in outputs)
    return [np.asarray(n / 16, np.float32) for n in odd]


def on_torch(
    op: Callable[..., Any],
    arrays: Arrays,
    wanted: Sequence[str],
    *,
    dtype: str = "float32",
    differentiable: int | None = None,
) -> Ran:
    """Call ``op(**arrays)`` on torch: floats of ``wanted`` in ``dtype``, the others unchanged.

    Args:
        op: the kernel.
        arrays: its arguments by name; NumPy arrays become tensors, others are passed unchanged.
        wanted: the arguments to differentiate.
        dtype: compute dtype.
        differentiable: number of differentiable outputs, from the first; None: all.
    """
    import torch

    given = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    given = {k: rotary(v, torch.from_numpy) if k == "table" else v for k, v in given.items()}
    for name in wanted:
        given[name] = given[name].to(getattr(torch, dtype)).requires_grad_()
    outputs = listed(op(**given))
    chosen = outputs[:differentiable]
    pairs = zip(chosen, cotangents(chosen), strict=True)
    torch.stack([(y.double() * torch.from_numpy(c)).sum() for y, c in pairs]).sum().backward()
    return Ran(
        [y.detach().double().numpy() for y in outputs],
        {name: as_double(given[name].grad) for name in wanted},
    )


def as_double(gradient: torch.Tensor | None) -> np.ndarray:
    """Move a gradient to the host; it must exist."""
    assert gradient is not None
    return gradient.double().numpy()


def on_mlx(
    op: Callable[..., Any],
    arrays: Arrays,
    wanted: Sequence[str],
    *,
    dtype: str = "float32",
    differentiable: int | None = None,
    compiled: bool = False,
) -> Ran:
    """Do the same on MLX, by value_and_grad, optionally within mx.compile."""
    import mlx.core as mx

    given = {k: mx.array(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    given = {k: rotary(v, mx.array) if k == "table" else v for k, v in given.items()}

    def loss(chosen: dict[str, Any]) -> Any:
        outputs = listed(op(**{**given, **chosen}))
        first = outputs[:differentiable]
        pairs = zip(first, cotangents(first), strict=True)
        return sum((y.astype(mx.float32) * mx.array(c)).sum() for y, c in pairs), outputs

    step = mx.value_and_grad(loss)
    step = mx.compile(step) if compiled else step
    (_, outputs), grads = step({name: given[name].astype(getattr(mx, dtype)) for name in wanted})
    return Ran(
        [np.array(y.astype(mx.float32), np.float64) for y in outputs],
        {name: np.array(grads[name].astype(mx.float32), np.float64) for name in wanted},
    )


def rotary(table: Any, convert: Callable[[np.ndarray], Any]) -> Any:
    return type(table)(*(None if x is None else convert(x) for x in table))


def listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to float32 values that ``dtype`` represents exactly."""
    import torch

    return torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)).float().numpy()


def assert_close(got: np.ndarray, reference: np.ndarray, tolerance: float, what: str) -> None:
    """Assert closeness as defined by the contract; a NaN is never close."""
    assert got.shape == reference.shape, what
    size = max(np.linalg.norm(reference), reference.size**0.5)
    error = np.linalg.norm(got - reference) / max(size, 1.0)
    assert error <= tolerance, f"{what}: {error:.2e} > {tolerance:.0e}"


def assert_slopes(
    op: Callable[..., Any],
    exact: Ran,
    floats: Arrays,
    others: Arrays,
    wanted: Sequence[str],
    *,
    differentiable: int | None = None,
) -> None:
    """Compare gradients with central differences of ``op`` in float64: h = 1e-4, random directions."""
    rng, h = np.random.default_rng(3), 1e-4
    upstream = cotangents(exact.outputs[:differentiable])

    def value(**moved: np.ndarray) -> float:
        outputs = listed(op(**{**floats, **others, **moved}))[:differentiable]
        return sum(float(np.sum(y * c)) for y, c in zip(outputs, upstream, strict=True))

    for name in wanted:
        direction = rng.standard_normal(floats[name].shape)
        direction *= h / max(1.0, float(np.abs(direction).max()))
        base = floats[name].astype(np.float64)
        slope = value(**{name: base + direction}) - value(**{name: base - direction})
        expected = 2.0 * float(np.sum(exact.grads[name] * direction))
        size = 2.0 * np.linalg.norm(exact.grads[name]) * np.linalg.norm(direction)
        assert abs(slope - expected) <= 1e-4 * size + 1e-12, name


@pytest.fixture(scope="session")
def side() -> Any:
    """Return the functions above, since tests do not import one another."""

    class Side:
        torch = staticmethod(on_torch)
        mlx = staticmethod(on_mlx)
        rounded = staticmethod(rounded)
        assert_close = staticmethod(assert_close)
        assert_slopes = staticmethod(assert_slopes)

    return Side


# Whole models

Batch = dict[str, np.ndarray]
SMALL = {
    **{"model.layers": 2, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2},
    **{"model.hidden": 48, "model.vocab": 97, "model.tied": False},
    **{"train.rows": 2, "train.seq_len": 16, "train.steps": 20, "train.lr": 1e-3},
    **{"train.compile": "off"},
}
"""The structure of preset tiny, at a size that every framework steps in milliseconds."""


def planned(*names: str, plugins: Mapping[str, Plugin] | None = None, **settings: Any) -> Plan:
    """Plan installed plugins (``names``) and plugins defined in a test (``plugins``).

    ``train_seq_len=8`` is the setting ``train.seq_len``; an option has its own name, with a dot.
    """
    given = SMALL | {
        key if "." in key else key.replace("_", ".", 1): value for key, value in settings.items()
    }
    loaded = load(
        preset=given.pop("preset", "tiny"),
        plugins=",".join(names) or None,
        assignments=[f"{key}={str(value).lower()}" for key, value in given.items()],
        default_preset=lambda: ("tiny", "test"),
    )
    ours = load_plugins(loaded.specs, loaded.config.plugins)
    made = [LoadedPlugin.of(name, plugin) for name, plugin in (plugins or {}).items()]
    return build_plan(loaded.config, (*ours, *made))


def planned_tiny(*names: str, **settings: Any) -> Plan:
    """Plan the same with the model of preset tiny."""
    model = read_preset("tiny", origin="test")["model"]
    return planned(*names, **{f"model_{key}": value for key, value in model.items()}, **settings)


def trainer(plan: Plan, backend: str = "torch", *, seed: int = 0, **options: Any) -> Any:
    """Build the plan's trainer on a CPU; ``options`` are the backend's own (fused, compiler)."""
    from minillm_core.backends.mlx.backend import MLXBackend
    from minillm_core.backends.torch.backend import TorchBackend

    made = {"torch": TorchBackend, "mlx": MLXBackend}[backend]
    return made(*bind(Detected(backend, "cpu", "test"), plan), **options).trainer(plan, seed)


def batch(
    plan: Plan,
    seed: int = 0,
    *,
    rows: int | None = None,
    unsupervised: int = 0,
    rare_first: bool = False,
) -> Batch:
    """Draw slightly learnable ids, frequent ones first; row r lacks r x ``unsupervised`` labels.

    ``rare_first`` suits a BLAS that adds from first to last: the label's part of a position's
    gradient is by far the largest, and everything added after it is rounded at its magnitude.
    """
    train, rng = plan.config.train, np.random.default_rng(seed)
    rows, length = rows or train.rows, train.seq_len
    ids = (plan.config.model.vocab * rng.random((rows, length + 1)) ** 3).astype(np.int32)
    ids = plan.config.model.vocab - 1 - ids if rare_first else ids
    labels = ids[:, 1:].copy()
    for row in range(rows):
        labels[row, : row * unsupervised] = -1
    return {
        "ids": ids[:, :-1].copy(),
        "labels": labels,
        "documents": np.zeros((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }


def completed(plan: Plan, batch: Batch, phase: str = "train") -> Batch:
    """Apply the plan's installed plugins to the batch, with documents that start anywhere in it."""
    begins = np.random.default_rng(11).random(batch["ids"].shape) < 0.2
    batch = batch | {"documents": np.cumsum(begins, axis=1).astype(np.int32)}
    ours = installed(json.dumps({p.name: p.options for p in plan.plugins}))
    pieces = spelt(plan)
    hook = plan_hook(plan, ours, streams=Streams(0), pieces=pieces)
    return hook(batch, phase) if hook else batch


@lru_cache(maxsize=4)
def installed(options: str) -> Sequence[LoadedPlugin]:
    """Load plugins once for all batches of a plan: JSON of name -> options."""
    given = json.loads(options)
    return load_plugins([*given], given)


def split(whole: Batch, parts: int) -> list[Batch]:
    """Split into micro-batches with equal numbers of rows."""
    fields = {name: np.split(array, parts) for name, array in whole.items()}
    return [{name: pieces[i] for name, pieces in fields.items()} for i in range(parts)]


def supervised(micro: Iterable[Batch]) -> int:
    """Count labels >= 0 in all micro-batches."""
    return sum(int((one["labels"] >= 0).sum()) for one in micro)


def losses(run: Trainer, plan: Plan, steps: Iterable[Sequence[Batch]]) -> list[float]:
    """Return every step's loss, along the plan's schedule."""
    total, found = plan.config.train.steps or 1, []
    for index, micro in enumerate(steps):
        values = plan.values((index + 1) / total)
        found.append(run.read(run.step(micro, values, supervised(micro))).loss)
    return found


def gradients(run: Trainer, plan: Plan, micro: Sequence[Batch]) -> tuple[float, dict[str, Any]]:
    """Return (loss, parameter -> float64 gradient) of a first step, from the resulting first moments.

    These are the accumulated gradients that reach the optimizer; the plan must not clip.
    """
    assert plan.config.train.clip == 0
    (loss,) = losses(run, plan, [micro])
    first = {"precondition.m": 1 - plan.config.train.betas[0], "momentum.momentum": 1 - 0.95}
    found = {}
    for key, value in run.arrays().items():
        for prefix, share in first.items():
            if key.startswith(f"optimizer.{prefix}."):
                name = key.removeprefix(f"optimizer.{prefix}.")
                found[name] = value.astype(np.float64) / share
    assert set(found) == set(plan.parameters)
    return loss, found


def exact_gradients(plan: Plan, micro: Sequence[Batch], seed: int = 0) -> tuple[float, dict]:
    """Compute (objective, parameter -> gradient) with torch in float64, with the same kernels."""
    import torch

    from minillm_core.backends.native import materialise
    from minillm_core.backends.torch.model import TorchFramework
    from minillm_core.backends.torch.ops import TorchOps
    from minillm_core.nn.module import declared
    from minillm_core.nn.param import Param

    model = materialise(plan, TorchFramework(TorchOps()), seed)
    model.double()
    values = values_of(plan, micro)
    objectives = [
        model({k: torch.from_numpy(v) for k, v in one.items()}, values).objective for one in micro
    ]
    total = torch.stack(objectives).sum()
    total.backward()
    return total.item(), {
        name: np.zeros(p.shape)
        if (grad := getattr(module, attribute).grad) is None
        else grad.numpy()
        for name, module, attribute, p in declared(model, Param)
    }


def values_of(plan: Plan, micro: Sequence[Batch]) -> dict[str, float]:
    """Return the first step's inputs for a model of the oracles: schedule values and the normaliser."""
    values: dict[str, Any] = plan.values(1 / (plan.config.train.steps or 1))
    return values | {"normaliser": 1.0 / supervised(micro)}


def assert_gradients(
    got: Mapping[str, Any], expected: Mapping[str, Any], *, overall: float
) -> None:
    """Assert the contract's bounds: ``overall`` for all together, 1e-5 per tensor, 1e-4 per number."""
    assert got.keys() == expected.keys()
    errors = {name: np.linalg.norm(got[name] - expected[name]) for name in got}
    sizes = {name: np.linalg.norm(expected[name]) for name in got}
    together = np.hypot.reduce(list(errors.values())) / np.hypot.reduce(list(sizes.values()))
    assert together <= overall, f"all tensors together: {together:.1e}"
    for name, error in errors.items():
        bound = (1e-4 if expected[name].size == 1 else 1e-5) * sizes[name]
        assert error <= bound, f"{name}: {error:.1e} of a norm of {sizes[name]:.1e}"


@pytest.fixture(scope="session")
def lab() -> Any:
    """Return the functions above on whole models, since tests do not import one another."""

    class Lab:
        plan = staticmethod(planned)
        tiny = staticmethod(planned_tiny)
        trainer = staticmethod(trainer)
        batch = staticmethod(batch)
        completed = staticmethod(completed)
        split = staticmethod(split)
        supervised = staticmethod(supervised)
        losses = staticmethod(losses)
        gradients = staticmethod(gradients)
        exact_gradients = staticmethod(exact_gradients)
        values_of = staticmethod(values_of)
        assert_gradients = staticmethod(assert_gradients)

    return Lab


@pytest.fixture
def aot_trainer() -> Iterator[Callable[..., Any]]:
    """Return :func:`trainer`, whose compiled torch graphs run operation by operation: no code is generated."""
    import torch

    options = {"torch": {"compiler": partial(torch.compile, backend="aot_eager")}, "mlx": {}}
    torch.compiler.reset()
    yield lambda plan, backend="torch", **more: trainer(plan, backend, **options[backend], **more)
    torch.compiler.reset()
