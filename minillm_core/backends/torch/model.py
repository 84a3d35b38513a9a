"""A model on torch: neutral modules as real ``torch.nn.Module``s, master weights, evaluation.

In float32 a master weight *is* the parameter. In mixed precision the parameters are copies in the compute
dtype, refreshed once per step after the update, outside the micro-batch graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from minillm_core.backends.base import Batch, Binding
from minillm_core.backends.native import NativeModel, evaluating
from minillm_core.backends.torch.compiling import constant_result, own_code
from minillm_core.backends.torch.ops import TorchOps
from minillm_core.backends.torch.share import Share
from minillm_core.backends.torch.transfer import batch_to_device, copied, foreach_copy_
from minillm_core.nn.block import COLUMNS, PARTS
from minillm_core.nn.module import Framework, declared, record
from minillm_core.nn.node import MASKING
from minillm_core.nn.param import Buffer, Param, State
from minillm_core.plan import Plan

ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of SDPA that serve any length at once; cuDNN prepares each new length for a tenth of a second."""


class TorchModule(nn.Module):
    """The base of every materialised module: declarations become parameters and buffers."""

    framework: Any  # a TorchFramework

    def __setattr__(self, name: str, value: Any) -> None:
        record(self, name, value)
        if isinstance(value, Param):
            value = nn.Parameter(torch.empty(value.shape, device=self.framework.param_device))
        elif isinstance(value, (Buffer, State)):
            kept = isinstance(value, State)
            self.register_buffer(name, torch.empty(value.shape), persistent=kept)
            return
        super().__setattr__(name, _searched(value))


def _searched(value: Any) -> Any:
    """Convert a list or dict of modules to ModuleList or ModuleDict, in which torch finds parameters."""
    if isinstance(value, (list, tuple)) and any(isinstance(v, nn.Module) for v in value):
        return nn.ModuleList(value)
    if isinstance(value, dict) and any(isinstance(v, nn.Module) for v in value.values()):
        held = nn.ModuleDict()
        for name, module in value.items():  # ModuleDict refuses names of its methods, as "half"
            setattr(held, name, module)
        return held
    return value


class TorchLinear(TorchModule, nn.Linear):
    """A linear leaf that is an ``nn.Linear``, for tools that look for one."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_parameter("bias", None)


class TorchEmbedding(TorchModule, nn.Embedding):
    """An embedding that is an ``nn.Embedding``, for tools that look for one."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.padding_idx = self.max_norm = None
        self.scale_grad_by_freq = self.sparse = False

    def extra_repr(self) -> str:
        """Return rows and width, for ``repr``."""
        return ", ".join(str(n) for n in self.weight.shape)


BASES: Mapping[str | None, type] = {
    None: TorchModule,
    "linear": TorchLinear,
    "embedding": TorchEmbedding,
}


class TorchFramework(Framework):
    """The framework object of neutral modules on torch: one per binding, since it holds the chosen kernels."""

    def __init__(self, ops: TorchOps) -> None:
        super().__init__(BASES, ops)
        seen = self.evidence

        # Runs while Dynamo traces, and leaves nothing in the compiled step.
        @constant_result
        def witness(key: str) -> None:
            seen[key] += 1

        self.witness = witness

    def versions(self, arrays: Iterable[Any]) -> tuple[int, ...]:
        """Return torch's version counters; empty when compiling, where arguments are never written to."""
        if torch.compiler.is_compiling():
            return ()
        return tuple(a._version for a in arrays if isinstance(a, torch.Tensor))

    def placing(self) -> AbstractContextManager[Any]:
        """Return a context in which modules are built on the ops' device."""
        return self.ops.device

    def constant(self) -> AbstractContextManager[Any]:
        """Return a context without gradients."""
        return torch.no_grad()

    @torch.no_grad()
    def fill(self, module: Any, attribute: str, value: np.ndarray) -> None:
        """Write the initial value of a declared array."""
        # A copy, since torch warns about read-only arrays.
        getattr(module, attribute).copy_(torch.from_numpy(np.array(value, order="C")))

    @staticmethod
    def host(array: torch.Tensor) -> np.ndarray:
        """Copy an array to the host; waits."""
        return array.detach().cpu().numpy()

    def checkpoint(self, block: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``block(*arguments)`` with activation checkpointing: recomputed in the backward pass."""
        # The reentrant kind works only with backward(); the trainer uses autograd.grad.
        return checkpoint(block, *arguments, use_reentrant=False)


class Weights:
    """Master weights by name, and the model's parameters in the compute dtype.

    Args:
        model: materialised, filled, in float32; or with parameters that have no memory yet.
        dtype: the compute dtype.
        frozen: names of parameters without a gradient. In mixed precision their masters, which no
            update reads, are kept on the host.
    """

    def __init__(self, model: Any, dtype: torch.dtype, frozen: Set[str] = frozenset()) -> None:
        self.masters: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.narrow = dtype != torch.float32
        for name, module, attribute, _ in declared(model, Param):
            parameter = self.parameters[name] = getattr(module, attribute)
            self.masters[name] = parameter.data
            if name in frozen:
                parameter.requires_grad_(False)
            if self.narrow:
                parameter.data = parameter.data.to(dtype)
                if name in frozen and not parameter.is_meta:
                    self.masters[name] = self.masters[name].cpu()
        self.trained = {n: p for n, p in self.parameters.items() if n not in frozen}
        self.by_rows: Set[str] = frozenset()  # tables of which a step holds only some rows
        self.share: Share | None = None  # None: no sharding

    def stack(self, names: Sequence[str]) -> Tensor:
        """Make masters parts of one array (N, *shape), and return it."""
        stack = torch.stack([self.masters[name] for name in names])
        self.masters.update(zip(names, stack, strict=True))
        for name in () if self.narrow or self.share else names:  # parameters are masters
            self.parameters[name].data = self.masters[name]
        return stack

    @torch.no_grad()
    def refresh(self, *, every: bool = False) -> None:
        """Copy the masters of trained parameters, or of all, into the parameters in the compute dtype."""
        if self.share is not None:
            self.share.all_gather(self.masters)
        elif self.narrow:
            names = [name for name in self.trained if name not in self.by_rows]
            copies = [self.trained[name].data for name in names]
            foreach_copy_(copies, [self.masters[name] for name in names])
        if self.narrow:
            for name in self.parameters.keys() - self.trained if every else ():
                self.parameters[name].data.copy_(self.masters[name])


class TorchModel(NativeModel):
    """A model on one torch device."""

    def __init__(
        self,
        plan: Plan,
        binding: Binding,
        model: Any,
        framework: TorchFramework,
        *,
        compiler: Callable[..., Any] = torch.compile,
    ) -> None:
        super().__init__(plan, binding, model, framework)
        self.compiler = compiler
        self.device = torch.device(binding.device)
        self.weights = Weights(model, getattr(torch, binding.dtype), plan.frozen)
        self.states: dict[str, Tensor] = self.statistics.states()  # written in place

    @contextmanager
    def inferring(self) -> Iterator[None]:
        """Return a context for inference: evaluation mode, no gradients, attention for texts of any length."""
        with evaluating(self.model), torch.no_grad(), sdpa_kernel(ANY_LENGTH):
            yield

    def frozen(self, method: str) -> Callable[[Batch], Tensor]:
        """Freeze the weights, drop their float32 masters; return the method, compiled if the binding compiles."""
        self.model.eval().requires_grad_(False)
        self.weights.masters.clear()
        given, model = self.final_values(), self.model

        def compute(batch: dict[str, Tensor]) -> Tensor:
            return getattr(model, method)(batch, given)

        # torch compiles one code object for few sizes
        run = cache(lambda size: self.compiled(compute))
        return lambda host: run(host["ids"].shape)(self.to_device(host))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of arrays as one graph, if the binding compiles."""
        if not self.binding.compile:
            return function
        return self.compiler(own_code(function), fullgraph=True, dynamic=False)

    def to_device(self, host: Batch) -> dict[str, Tensor]:
        """Copy the fields that the model reads to its device; documents may stay on the host too."""
        held = self.binding.host_masks and "documents" in self.plan.fields and COLUMNS not in host
        own = {MASKING: torch.from_numpy(host["documents"])} if held else {}
        return batch_to_device(host, (*self.plan.fields, *PARTS), self.device) | own

    def scalars_to_device(self, numbers: Mapping[str, float]) -> dict[str, Tensor]:
        """Copy each number to the device as 0-d float32, in one transfer; some inputs stay on the host."""
        with np.errstate(over="ignore"):  # infinite beyond the range
            packed = copied(np.array([*numbers.values()], np.float32), self.device)
        host = self.binding.inputs if self.binding.host_masks else ()
        kept = {name: torch.tensor(numbers[name], dtype=torch.float32) for name in host}
        return dict(zip(numbers, packed.unbind(0), strict=True)) | kept

    def held(self) -> dict[str, Tensor]:
        """Return the tensors of ``model.<parameter>`` (masters) and ``state.<name>``."""
        masters, share = self.weights.masters, self.weights.share
        masters = masters if share is None else share.held(masters)
        held = {f"model.{name}": master for name, master in masters.items()}
        return held | {f"state.{name}": tensor for name, tensor in self.states.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the model's arrays."""
        self.fill(self.held(), arrays)

    @torch.no_grad()
    def fill(self, held: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
        """Copy arrays, or this rank's parts, into the tensors of the same names; refresh the parameters."""
        share = self.weights.share
        for name, tensor in held.items():
            part = arrays[name] if share is None else share.part(name, arrays[name])
            value = torch.from_numpy(np.array(part, order="C"))
            if value.shape != tensor.shape:
                raise ValueError(f"{name}: shape {tuple(value.shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(value)
        self.weights.refresh(every=True)
