"""A model on MLX: neutral modules as real ``mlx.nn.Module``s, master weights, evaluation.

MLX rebinds arrays instead of writing in place: a step takes float32 master weights and returns new ones,
and casts them to the compute dtype within its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.utils import checkpoint

from minillm_core.backends.base import Batch, Binding
from minillm_core.backends.mlx import random
from minillm_core.backends.mlx.ops import MLXOps
from minillm_core.backends.native import NativeModel, evaluating
from minillm_core.errors import BackendError
from minillm_core.nn.block import PARTS
from minillm_core.nn.module import Framework, declared, record
from minillm_core.nn.param import Buffer, Param, State
from minillm_core.plan import Plan

Arrays = dict[str, mx.array]


class MLXModule(nn.Module):
    """The base of every materialised module: declarations become arrays.

    MLX puts every list, tuple and dict into its parameter tree; here only containers of modules are.
    """

    forward: Callable[..., Any]

    def __setattr__(self, name: str, value: Any) -> None:
        record(self, name, value)
        if isinstance(value, Param):
            super().__setattr__(name, mx.zeros(value.shape))
        elif isinstance(value, (Buffer, State)):
            super().__setattr__(name, mx.zeros(value.shape))
            self.freeze(keys=[name], recurse=False)
        elif _plain_container(value):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run ``forward``."""
        return self.forward(*args, **named)


def _plain_container(value: Any) -> bool:
    if isinstance(value, nn.Module) or not isinstance(value, (list, tuple, dict)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return not (items and all(isinstance(item, nn.Module) for item in items))


class MLXLinear(MLXModule, nn.Linear):
    """A linear leaf that is an ``mlx.nn.Linear``, for tools that look for one."""

    def __init__(self) -> None:
        nn.Module.__init__(self)  # nn.Linear's would draw a weight, and so change MLX's random key


class MLXEmbedding(MLXModule, nn.Embedding):
    """An embedding that is an ``mlx.nn.Embedding``, for tools that look for one."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


BASES: Mapping[str | None, type] = {None: MLXModule, "linear": MLXLinear, "embedding": MLXEmbedding}


class MLXFramework(Framework):
    """The framework object of neutral modules on MLX: one per binding, since it holds the chosen kernels."""

    def __init__(self, ops: MLXOps) -> None:
        super().__init__(BASES, ops)

    def placing(self) -> AbstractContextManager[Any]:
        """Return an empty context: arrays are on MLX's default device."""
        return nullcontext()

    def fill(self, module: Any, attribute: str, value: np.ndarray) -> None:
        """Set the initial value of a declared array."""
        module[attribute] = mx.array(value)

    @staticmethod
    def host(array: mx.array) -> np.ndarray:
        """Copy an array to the host; waits."""
        return np.array(array)

    def checkpoint(self, block: Any, *arguments: Any) -> Any:
        """Run ``block(*arguments)`` with activation checkpointing; parameters are passed, not captured.

        Raises:
            BackendError: the block draws from MLX's own random key.
        """
        before = random.key()
        places: list[int] = []  # index of each result among the distinct ones

        def distinct(*given: Any) -> list[Any]:
            # if an array is returned twice (x, and a tap of it), MLX uses one of its gradients and
            # silently drops the other
            results = block(*given)
            found = {id(array): array for array in results}
            places[:] = [list(found).index(id(array)) for array in results]
            return list(found.values())

        arrays = checkpoint(block, distinct)(*arguments)
        result = tuple(arrays[place] for place in places)
        if random.key() is not before:
            raise BackendError(
                "a module inside a block draws random numbers without a key of its own: MLX would "
                "draw others where it recomputes the block, and its gradients would be wrong",
                where="train.checkpointing on mlx",
                fix="train.checkpointing=false, or --backend torch, which draws the same numbers again",
            )
        return result


class Weights:
    """The module and attribute of each parameter, and the cast of master weights to the compute dtype.

    Args:
        model: materialised and filled, float32.
        dtype: the compute dtype.
        frozen: names of parameters without a gradient. In mixed precision the masters contain them in
            the compute dtype, and their float32 originals are kept on the host.
    """

    def __init__(self, model: Any, dtype: mx.Dtype, frozen: Set[str] = frozenset()) -> None:
        self.dtype, self.frozen = dtype, frozen
        self.holders = {name: (module, attr) for name, module, attr, _ in declared(model, Param)}
        self.trained = tuple(name for name in self.holders if name not in frozen)
        self.originals: dict[str, np.ndarray] = {}

    def cast_frozen(self, masters: Arrays) -> Arrays:
        """Cast frozen parameters to the compute dtype; the float32 originals are kept on the host."""
        if self.dtype == mx.float32:
            return masters
        self.originals = {name: np.array(masters[name]) for name in self.frozen}
        return masters | {name: masters[name].astype(self.dtype) for name in self.frozen}

    def cast(self, masters: Mapping[str, mx.array]) -> Arrays:
        """Cast the masters to the compute dtype, by parameter; in float32 return the masters themselves."""
        return {name: masters[name].astype(self.dtype) for name in self.holders}


class MLXModel(NativeModel):
    """A model on MLX's default device."""

    def __init__(self, plan: Plan, binding: Binding, model: Any, framework: MLXFramework) -> None:
        super().__init__(plan, binding, model, framework)
        mx.eval(model.parameters())
        self.weights = Weights(model, getattr(mx, binding.dtype), plan.frozen)
        # the arrays that the modules were filled with; self.weights keeps no reference to them
        holders = self.weights.holders.items()
        self.masters = self.weights.cast_frozen({n: module[at] for n, (module, at) in holders})
        self.state: dict[str, Any] = {"states": self.statistics.states()}
        self.copies: tuple[Arrays, Arrays] | None = None  # masters, and their casts for inference

    @contextmanager
    def inferring(self) -> Iterator[None]:
        """Return a context for inference: real arrays in the modules, in which tracing leaves placeholders."""
        # once, and not for each generated token
        if self.copies is None or self.copies[0] is not self.masters:
            self.copies = self.masters, self.weights.cast(self.masters)
        assign(self.weights.holders, self.copies[1])
        assign(self.statistics.holders, self.state["states"])
        with evaluating(self.model):
            yield

    def frozen(self, method: str) -> Callable[[Batch], mx.array]:
        """Freeze the weights, drop their float32 masters; return the method, compiled if the binding compiles."""
        assign(self.weights.holders, self.weights.cast(self.masters))
        assign(self.statistics.holders, self.state["states"])
        self.model.eval()
        self.masters = {}
        given, run = self.final_values(), getattr(self.model, method)
        run = mx.compile(run) if self.binding.compile else run
        return lambda host: run(self.to_device(host), given)

    def enqueue(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Wait for a batch's results: otherwise all batches together would be one graph."""
        mx.eval(results)
        return results

    def to_device(self, host: Batch) -> Arrays:
        """Convert the fields that the model reads to MLX arrays."""
        return {name: mx.array(host[name]) for name in (*self.plan.fields, *PARTS) if name in host}

    def scalars_to_device(self, numbers: Mapping[str, float]) -> Arrays:
        """Convert each number to 0-d float32."""
        return {name: mx.array(number) for name, number in numbers.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the model's arrays."""
        self.masters = self.weights.cast_frozen(loaded("model", arrays, self.masters))
        states = loaded("state", arrays, self.state["states"])
        self.state = {**self.state, "states": states}
        mx.eval(self.masters, self.state)


def assign(holders: Mapping[str, tuple[Any, str]], arrays: Mapping[str, mx.array]) -> None:
    """Set the modules' arrays, by the names of their declarations."""
    for name, (module, attribute) in holders.items():
        module[attribute] = arrays[name]


def loaded(
    prefix: str, saved: Mapping[str, np.ndarray], old: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """Return the saved ``prefix.<name>`` of each name in ``old``, with the shape there.

    Raises:
        KeyError: an array is missing.
        ValueError: a shape differs.
    """
    return {n: checked(f"{prefix}.{n}", saved, tuple(array.shape)) for n, array in old.items()}


def checked(name: str, saved: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> mx.array:
    """Return a saved array after checking its shape; raises as :func:`loaded`."""
    value = saved[name]
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, not {shape}")
    return mx.array(np.asarray(value))
