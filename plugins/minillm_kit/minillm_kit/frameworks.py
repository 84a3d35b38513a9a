"""Frameworks: torch and MLX train alike, as one compiled graph, with and without checkpointing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import Plan
from minillm_core.inspection import named_modules
from minillm_kit.check import Failed, HostRead, NotApplicable
from minillm_kit.numbers import norm, on_host
from minillm_kit.subject import Batch, Subject, states

Arrays = Mapping[str, np.ndarray]

STEPS, COMPILED = 5, 2
"""Steps of the comparison between frameworks, and of compiled with eager steps."""

TOGETHER, TENSOR, NUMBER = 2e-6, 1e-5, 1e-4
"""Tolerance of gradients relative to their norm: of all together, of one tensor, of a one-element tensor."""

LOSS = 1e-4
"""Tolerance of losses between both frameworks within ``STEPS``."""


def parity(subject: Subject) -> str:
    """Check that both frameworks start from the same bits and compute the same gradients."""
    backends = _both(subject)
    plan = subject.plan()
    starts = [subject.trainer(plan, backend).arrays() for backend in backends]
    for name in plan.parameters:
        first, second = (start[f"model.{name}"] for start in starts)
        if not np.array_equal(first, second):
            raise Failed(
                f"{name} starts {np.abs(first - second).max():.1e} apart",
                cause="initial values drawn from a framework's generator",
            )
    first, second = (subject.first_gradients(backend)[1] for backend in backends)
    cause = "a branch on the framework's name, or an op that is not of self.ops"
    return compare(first, second, f"{backends[0]} and {backends[1]}", cause=cause)


def alike(subject: Subject) -> str:
    """Check that five steps with the plugin's own optimizer are equal on both frameworks, including state."""
    backends, plan = _both(subject), subject.plan()
    batches = subject.batches(plan, STEPS)
    runs = [subject.trainer(plan, backend, stirred=True) for backend in backends]
    first, second = (subject.train(run, plan, batches) for run in runs)
    apart = np.abs(np.subtract(first, second))
    if not apart.max() <= LOSS:
        step = int(apart.argmax()) + 1
        raise Failed(
            f"step {step}: {backends[0]} {first[step - 1]:.6f}, {backends[1]} "
            f"{second[step - 1]:.6f} (bound {LOSS:.0e})",
            cause="a stage, or next_state, behaves otherwise on one of them",
        )
    ours, theirs = (states(run.arrays()) for run in runs)
    for name, value in ours.items():
        error = norm([value - theirs[name]]) / max(norm([value]), 1e-6)
        if not error <= 1e-3:
            raise Failed(
                f"{name} is {error:.1e} of its norm apart after {STEPS} steps (bound 1e-03)",
                cause="next_state, or a statistic, behaves otherwise on one of them",
            )
    return f"losses of {STEPS} steps {apart.max():.0e} apart, {len(ours)} states"


def checkpointing(subject: Subject) -> str:
    """Check that a step leaves nothing on nodes, and that checkpointing changes neither gradients nor state."""
    found, plan = [], subject.plan()
    (batch,) = subject.batches(plan, 1)
    cause = "a node keeps something on self, or reads what is neither an argument nor a parameter"
    for backend in subject.backends:
        _step_keeps_nothing(subject, plan, backend, batch)
        _, grads, states = subject.first_gradients(backend)
        _, again, states_again = subject.first_gradients(backend, train_checkpointing=True)
        whose = f"{backend}, with and without"
        found.append(compare(grads, again, whose, cause=cause))
        for name, value in states.items():
            if not np.array_equal(value, states_again[name]):
                error = np.abs(value - states_again[name]).max()
                raise Failed(f"{whose}: {name} differs by {error:.1e}", cause=cause)
    return "; ".join(found)


def _step_keeps_nothing(subject: Subject, plan: Plan, backend: str, batch: Batch) -> None:
    """Check that a step neither sets attributes of the plugin's modules nor writes to arguments.

    Raises:
        Failed: an attribute is new, or another object than before.
        PluginCodeError: an argument of a node was written to.
    """
    run = subject.trainer(plan, backend)
    if backend == "mlx":
        from minillm_kit.on_mlx import contents

        run.model.framework.versions = contents
    nodes = [
        one for _, one in named_modules(run.model) if getattr(one, "owner", "") == subject.name
    ]
    modules = {id(one): one for node in nodes for _, one in named_modules(node)}.values()
    before = [dict(_attributes(module)) for module in modules]
    subject.train(run, plan, [batch])
    for module, earlier in zip(modules, before, strict=True):
        for name, value in _attributes(module):
            if name not in earlier or not _same(earlier[name], value):
                did = "changed" if name in earlier else "set"
                raise Failed(
                    f"{backend}: {type(module).__name__}.{name} is {did} in a step",
                    cause="a node keeps something on self: hold what changes in a State, or take it "
                    "as an argument",
                )


def _attributes(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield a module's attributes, containers as tuples, without its parameters, State and parts."""
    own = {*vars(module)["_declared"], *vars(module)["_children"], "training", "_training"}
    arrays = module if isinstance(module, dict) else {}  # MLX keeps arrays and modules as a dict
    for name, value in {**vars(module), **arrays}.items():
        if name not in own:
            listed = [*value.items()] if isinstance(value, dict) else value
            yield name, tuple(listed) if isinstance(listed, list | set) else listed


def _same(one: Any, two: Any) -> bool:
    """Return whether two attributes are one object, or hold the same objects."""
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    return one is two


def compiles(subject: Subject) -> str:
    """Check that compiled steps are one graph, with the losses and moments of eager steps."""
    found = []
    plans = [subject.plan(train_compile=word) for word in ("off", "on")]
    (batch,) = subject.batches(plans[0], 1)
    cause = "the graph depends on a value, or reads something that is not an argument"
    for backend in subject.backends:
        runs = [subject.trainer(plan, backend, stirred=True) for plan in plans]
        try:
            first, second = (
                subject.train(run, plan, [batch] * COMPILED)
                for run, plan in zip(runs, plans, strict=True)
            )
        except Exception as error:
            if failed := _untraced(error, subject, backend):
                raise failed from error
            raise
        whose = f"{backend}, eager and compiled"
        apart = float(np.abs(np.subtract(first, second)).max())
        if not apart <= 1e-5:
            raise Failed(
                f"{whose}: losses {_listed(first)} and {_listed(second)} (bound 1e-05)", cause=cause
            )
        eager, compiled = (run.arrays() for run in runs)
        moments = _moments(eager, compiled, whose, cause)
        found.append(f"{whose}: losses {apart:.0e}, {moments} apart")
    return "; ".join(found)


def _untraced(error: Exception, subject: Subject, backend: str) -> Failed | None:
    """Describe an error of torch's about the plugin's code that it traced; None: another error.

    The code's stack is in torch's message, and not in the traceback.
    """
    inner = getattr(error, "inner_exception", error)  # of torch's BackendCompilerFailed
    stack = inner.stack if isinstance(inner, HostRead) else str(inner)
    lines = re.findall(r'File "(.+?)", line (\d+), in (\S+)', stack)
    root = subject.found.origin.root
    own = [f"{file}:{n} in {name}" for file, n, name in lines if Path(file).is_relative_to(root)]
    if not own and not isinstance(inner, HostRead):
        return None
    return Failed(
        "\n".join([f"{backend}, compiled: {str(inner).splitlines()[0]}", *own[-1:]]),
        cause="the graph depends on a value: use ops, which take arrays (ops.where chooses), in place "
        "of .item(), float(), `if` and boolean indices of arrays",
    )


def _moments(eager: Arrays, compiled: Arrays, whose: str, cause: str) -> str:
    """Compare the optimizer's moments, element by element.

    Raises:
        Failed: they differ.
    """
    entries: dict[str, list[str]] = {}
    for name in sorted(eager):
        kind, *stage = name.split(".")[:3]
        if kind == "optimizer" and len(stage) == 2:
            entries.setdefault(".".join(stage), []).append(name)
    worst = 0.0
    for entry, names in entries.items():
        total = norm(on_host(eager[name]) for name in names)
        for name in names:
            first = on_host(eager[name])
            error = norm([first - on_host(compiled[name])])
            worst = max(worst, error / (total or 1.0))
            bound = 1e-3 * norm([first]) + 1e-5 * total
            if not error <= bound:
                raise Failed(
                    f"{whose}: {entry} of {name.split('.', 3)[3]} differs by {error:.1e} (bound "
                    f"{bound:.0e})",
                    cause=cause,
                )
    return f"moments {worst:.0e}"


def compare(first: Arrays, second: Arrays, whose: str, *, cause: str) -> str:
    """Compare gradients: per tensor, per element, and all together.

    Raises:
        Failed: they differ.
    """
    total = norm(first.values())
    errors = {name: float(np.linalg.norm(first[name] - second[name])) for name in first}
    for name, error in errors.items():
        share = NUMBER if first[name].size == 1 else TENSOR
        bound = share * float(np.linalg.norm(first[name])) + 1e-6 * total
        if not error <= bound:
            raise Failed(
                f"{whose}: the gradient of {name} differs by {error:.1e} (bound {bound:.0e})",
                cause=cause,
            )
    together = norm(errors.values()) / total
    if not together <= TOGETHER:
        raise Failed(
            f"{whose}: gradients differ by {together:.1e} of their norm (bound {TOGETHER:.0e})",
            cause=cause,
        )
    return f"{whose}: {together:.0e} of the gradients' norm"


def _both(subject: Subject) -> tuple[str, ...]:
    if len(backends := subject.backends) < 2:
        reason = "; ".join(subject.absent.values()) or "no other was asked for"
        raise NotApplicable(f"{', '.join(backends)} alone: {reason}")
    return backends


def _listed(losses: list[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)
