"""The oracle: modules, models and ops in NumPy float64, forward only; and a plan's model built on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from minillm_core import Param, Plan, State
from minillm_core.inspection import CONTRACTS, Framework, Scope, declared, record
from minillm_core.inspection import materialise as materialise_on
from minillm_kit.check import NotApplicable
from minillm_kit.reference import NumPyArrays, reference_op
from minillm_kit.subject import Batch, moved, supervised

if TYPE_CHECKING:
    from minillm_kit.subject import Subject


class NumPyOps(NumPyArrays):
    """The ops of model code (``self.ops``) on NumPy: the float64 reference.

    Args:
        kernels: op -> function: ops declared by plugins, or replacements.
    """

    name = "numpy"

    def __init__(self, kernels: Mapping[str, Callable[..., Any]] | None = None) -> None:
        vars(self).update({op: reference_op(op) for op in CONTRACTS} | dict(kernels or {}))
        self.constant_of: Callable[[np.ndarray], np.ndarray] = np.asarray
        self.held_results: dict[Any, Any] = {}  # module -> its first result, which it repeats

    def stop_gradient(self, x: np.ndarray) -> np.ndarray:
        """Return ``x``, or its value at this call when :meth:`Oracle.held` was entered."""
        return self.constant_of(x)


class NumPyModule:
    """Base class of every module on NumPy."""

    def __setattr__(self, name: str, value: Any) -> None:
        # tests may set a State from outside; in forward that is refused on torch and MLX
        if not isinstance(vars(self).get("_declared", {}).get(name), State):
            record(self, name, value)
        object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call ``forward``; a module in ``held_results`` of the ops repeats its first result."""
        held = self.ops.held_results  # type: ignore[attr-defined]
        if held.get(self) is not None:
            return held[self]
        result = self.forward(*args, **named)  # type: ignore[attr-defined]
        if self in held:
            held[self] = result
        return result


class NumPyFramework(Framework):
    """The NumPy implementation of the framework interface of neutral modules.

    Args:
        ops: the ops; default: :class:`NumPyOps`.
    """

    def __init__(self, ops: NumPyOps | None = None) -> None:
        super().__init__({None: NumPyModule})
        self.ops = ops or NumPyOps()
        self.evidence: Counter[str] = Counter()

    def placing(self) -> AbstractContextManager[None]:
        """Return an empty context: NumPy has a single device."""
        return nullcontext()

    def fill(self, module: Any, attribute: str, value: np.ndarray) -> None:
        """Set an attribute to a declared array's value, in float64."""
        setattr(module, attribute, np.asarray(value, np.float64))

    def host(self, array: np.ndarray) -> np.ndarray:
        """Return an array as NumPy's."""
        return array

    def checkpoint(self, block: Callable[..., Any], *arguments: Any) -> Any:
        """Run a block directly: without a backward pass there is no recomputation."""
        return block(*arguments)

    def witness(self, key: str) -> None:
        """Count an event of evidence."""
        self.evidence[key] += 1

    def versions(self, arrays: Iterable[Any]) -> tuple[int, ...]:
        """Return a hash of each array's elements: a write in place is found, as by torch's counters."""
        return tuple(hash(a.tobytes()) for a in arrays if isinstance(a, np.ndarray))


def materialise(plan: Plan, seed: int, *, positions: int | None = None) -> Any:
    """Build the plan's model with its seeded initial values, float64 (drawn in float32).

    Args:
        plan: the plan.
        seed: the run's.
        positions: maximum row length; default: the plan's seq_len.
    """
    return materialise_on(plan, NumPyFramework(), seed, positions)


def last_logits(plan: Plan, model: Any) -> Callable[[Batch, Callable[..., Any]], np.ndarray]:
    """Return a function of (a batch of one row, its scope factory) to the last position's logits, float64 (V,)."""
    values = plan.values(1.0)

    def logits(batch: Batch, scope_of: Callable[..., Any]) -> np.ndarray:
        at = np.array([batch["ids"].shape[1] - 1], np.int32)
        return model.logits(dict(batch), values, at, scope_of)[0]

    return logits


class Oracle:
    """A plan's model with its weights, in NumPy float64.

    Args:
        subject: the plugin of the plan.
        plan: the plan to materialise.
        stirred: perturb every parameter by :func:`moved`, as in ``Subject.trainer``.

    Raises:
        NotApplicable: the plugin does not run on NumPy.
    """

    def __init__(self, subject: Subject, plan: Plan, *, stirred: bool = True) -> None:
        if not subject.on_numpy:
            raise NotApplicable("the plugin does not support numpy, the oracle")
        self.plan, self.model = plan, materialise(plan, 0)
        self.places = {
            name: (module, attribute)
            for name, module, attribute, _ in declared(self.model, Param)
            if name in plan.parameters
        }
        if stirred:
            self.load({name: moved(name, self.get(name)) for name in self.places})

    def get(self, name: str) -> np.ndarray:
        """Return a parameter, float64."""
        module, attribute = self.places[name]
        return getattr(module, attribute)

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set parameters by name."""
        for name, array in arrays.items():
            module, attribute = self.places[name]
            setattr(module, attribute, np.asarray(array, np.float64))

    @np.errstate(all="ignore")  # the check reports infinities and NaN
    def forward(self, batch: Batch) -> Any:
        """Return the decoder's result for a training batch: ``sums``, ``objective``, ..."""
        values = step_values(self.plan, batch)
        return self.model({**batch, **referred(self.plan, batch)}, values)

    @contextmanager
    def held(self, batch: Batch) -> Iterator[Callable[[], Any]]:
        """Freeze the results of stop_gradient at their current values; yield the forward pass of a batch.

        Its slopes are then the gradients that a straight-through estimator declares.
        """
        ops, kept = self.model.ops, list[np.ndarray]()

        def keep(x: np.ndarray) -> np.ndarray:
            kept.append(np.array(x))
            return x

        def forward() -> Any:
            left = iter(kept)
            ops.constant_of = lambda x: next(left)
            return self.forward(batch)

        try:
            ops.constant_of = keep
            self.forward(batch)
            yield forward
        finally:
            ops.constant_of = np.asarray

    @contextmanager
    def weights_held(self, batch: Batch) -> Iterator[None]:
        """Hold the weights of positions (``loss.weights``) at their current values: they have no gradient."""
        held = self.model.ops.held_results
        if self.model.weights is not None:
            held[self.model.weights] = None
            self.forward(batch)
        try:
            yield
        finally:
            held.clear()

    def loss(self, batch: Batch) -> float:
        """Return the main target's loss, as a step reports it."""
        return float(self.forward(batch).sums[0]) / supervised([batch])

    @np.errstate(all="ignore")
    def hidden(self, batch: Batch) -> np.ndarray:
        """Return the input of the head, (B, T, C)."""
        return self.model.hidden(dict(batch), step_values(self.plan, batch))[0]

    @np.errstate(all="ignore")
    def logits(self, row: Batch) -> np.ndarray:
        """Return the logits after the last column of one row, (V,)."""
        return last_logits(self.plan, self.model)(row, Scope)


def referred(plan: Plan, batch: Batch) -> dict[str, np.ndarray]:
    """Compute the batch fields of a plan's reference models (stand-ins), in float64."""
    return {
        one.name: getattr(one.model.model, one.method)(dict(batch), one.model.plan.values(1.0))
        for one in plan.references
    }


def step_values(plan: Plan, batch: Batch) -> dict[str, float]:
    """Return the schedule values that the first step's forward pass reads, by name."""
    values = plan.values(1 / (plan.config.train.steps or 1))
    return {**values, "normaliser": 1 / supervised([batch])}
