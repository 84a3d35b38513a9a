"""Helpers for an author's own tests: a single module, a stage's ops, or one whole training step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm_core import Buffer, ModelShape, Module, Param, Refusal
from minillm_core.inspection import call_names, declared, initial_values, materialising
from minillm_kit.oracle import NumPyFramework, NumPyOps, materialise, step_values
from minillm_kit.subject import Batch, Subject, after, moved

GEOMETRY = ModelShape(
    layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocab=97, positions=13, layer=1
)
"""The sizes that :func:`run_module` passes to a constructor with an argument ``geometry``."""


def run_module(
    cls: type[Module], arguments: Mapping[str, Any] | None = None, /, **inputs: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    """Build one module, initialise it, and call its ``forward``, in NumPy float64.

    ::

        out, weights = run_module(HeadGate, {"bound": 2.0}, y=y, x=x)
        np.testing.assert_allclose(out, reference.gated(y, x, weights["gate.weight"], bound=2.0))

    :func:`conformance` checks that torch and MLX compute the same as NumPy.

    Args:
        cls: the module's class.
        arguments: of its constructor, a dictionary; ``geometry`` is :data:`GEOMETRY` unless given.
        inputs: of ``forward``, by name: arrays; floats are converted to float64.

    Returns:
        The result of ``forward``; and every parameter and state by name (``gate.weight``),
            perturbed from its initial value, so that parameters starting at 0 or 1 have an
            effect.

    Raises:
        Refusal: unexpected or missing inputs of ``forward``.
    """
    names = call_names(cls.forward)
    made_with = list(inspect.signature(cls.__init__).parameters)[1:]
    if set(names) != set(inputs):
        constructors = [name for name in inputs if name in made_with and name not in names]
        apart = f"run_module({cls.__name__}, {{{', '.join(f'{n!r}: ...' for n in constructors)}}}, "
        apart += ", ".join(f"{name}=..." for name in names) + ")"
        raise Refusal(
            f"{cls.__name__}.forward takes {', '.join(names) or 'nothing'}, "
            f"not {', '.join(inputs) or 'nothing'}",
            where="run_module",
            fix=f"the constructor's arguments are a dictionary of their own: {apart}"
            if constructors
            else "give each of forward's arguments by name, and no other",
        )
    given = dict(arguments or {})
    if "geometry" in made_with:
        given.setdefault("geometry", GEOMETRY)
    framework = NumPyFramework()
    with materialising(framework):
        module = cls(**given)
    for part, attribute, value in initial_values(module, {}, seed=0):
        framework.fill(part, attribute, value)
    weights: dict[str, np.ndarray] = {}
    for name, part, attribute, declaration in declared(module):
        if not isinstance(declaration, Buffer):
            weights[name] = moved(name, getattr(part, attribute)).astype(np.float64)
            setattr(part, attribute, weights[name])
    return module(*(_wide(inputs[name]) for name in names)), weights


def numpy_ops() -> NumPyOps:
    """Return the ops of a module (``self.ops``) or a stage (``ops``), on NumPy arrays."""
    return NumPyOps()


def _wide(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind == "O":  # the form of a loss
        return value
    return array.astype(np.float64) if array.dtype.kind == "f" else array


@dataclass(frozen=True)
class Step:
    """One step of a small model."""

    batch: Batch  # ids, labels, documents, positions: int32 (B, T), as on_batch left them
    values: dict[str, float]  # schedule value by name: "my_rule.lr"
    hidden: np.ndarray  # (B, T, C) float64, the input of the head, computed by NumPy
    head: np.ndarray  # (V, C) float64
    loss: float  # the main target's, nats per supervised label
    before: dict[str, np.ndarray]  # parameter -> float64
    gradients: dict[str, np.ndarray]  # of the loss, as they reach the optimizer; not clipped
    after: dict[str, np.ndarray]  # parameter -> float64


def one_step(spec: str, options: Mapping[str, Any] | None = None, *, backend: str) -> Step:
    """Train a small model with the plugin for one step, on a CPU.

    The model is the plain one, of odd sizes: two layers, C = 32, V = 97, rows of 13 tokens, some
    labels unsupervised; every parameter is perturbed from its initial value.

    ::

        step = one_step("my_loss", {"weight": 0.05}, backend="mlx")
        expected = reference.mean_loss(step.hidden, step.head, step.batch["labels"], 0.05)
        assert step.loss == pytest.approx(expected, rel=1e-5)

    Args:
        spec: the plugin's name, or a file and its class.
        options: its options, if not the defaults.
        backend: ``torch`` or ``mlx``.

    Raises:
        NotApplicable: the plugin does not support the backend, or it is not installed.
    """
    subject = Subject(spec, options, backend=backend)
    (backend,) = subject.backends
    plan = subject.plan()
    (batch,) = subject.batches(plan, 1)
    run = subject.trainer(plan, backend, stirred=True)
    before = _weights(run.arrays())
    (loss,) = subject.train(run, plan, [batch])
    model = materialise(plan, 0)
    for name, module, attribute, _ in declared(model, Param):
        setattr(module, attribute, before[name])
    values = step_values(plan, batch)
    hidden, _, _ = model.hidden(dict(batch), values)
    del values["normaliser"]
    return Step(
        batch,
        values,
        hidden,
        model.head_weight(),
        loss,
        before,
        subject.gradients(plan, backend, batch)[1],
        _weights(run.arrays()),
    )


def _weights(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters among a trainer's arrays, float64."""
    return {name: value.astype(np.float64) for name, value in after("model.", arrays).items()}
