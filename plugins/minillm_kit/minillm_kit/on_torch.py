"""The parts of the checks that need torch: calling a kernel on a CPU, the process's state, tracing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from minillm_kit.check import HostRead


def traced() -> Callable[..., Any]:
    """Reset dynamo, which keeps eight graphs per function, and return a compile without code generation.

    A compiled step is then one graph or an error, on a CPU within seconds. Like ``aot_eager``, but the
    partition between forward and backward saves the activations that a minimal cut recomputes. Compiling
    raises HostRead if a graph reads a number of an array, which torch (2.13) accepts in one graph.
    """
    torch.compiler.reset()
    return partial(torch.compile, backend=_forward_and_backward)


def _forward_and_backward(graph: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import default_partition

    for node in graph.graph.nodes:
        if node.meta.get("unbacked_bindings"):  # a number, or a size, that only the values tell
            raise HostRead(node.stack_trace or "")
    return aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=default_partition)(
        graph, inputs
    )


def process_state() -> dict[str, Any]:
    """Return torch's per-process defaults, generators and flags: name -> value."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": str(torch.get_default_device()),
        "torch's seed": torch.initial_seed(),
        "torch's generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.set_grad_enabled": torch.is_grad_enabled(),
        "torch.set_num_threads": torch.get_num_threads(),
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "torch.backends.cudnn.deterministic": cudnn.deterministic,
        "torch.backends.cudnn.enabled": cudnn.enabled,
        "torch.backends.cuda.enable_flash_sdp": cuda.flash_sdp_enabled(),
        "torch.backends.cuda.enable_mem_efficient_sdp": cuda.mem_efficient_sdp_enabled(),
        "torch.backends.cuda.enable_math_sdp": cuda.math_sdp_enabled(),
    }


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to float32 values that ``dtype`` represents exactly."""
    return torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)).float().numpy()


def tried(
    kernel: Callable[..., Any],
    arrays: Mapping[str, Any],
    wanted: Sequence[str],
    upstream: Sequence[np.ndarray],
    dtype: str,
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Call a kernel on a CPU, and differentiate the sum of its outputs times ``upstream``.

    Args:
        kernel: with its op's signature.
        arrays: argument -> value; arrays, also within a named tuple, become tensors.
        wanted: the arguments to differentiate, passed in ``dtype``.
        upstream: float32, one of the shape of each differentiable output (the first outputs).
        dtype: the compute dtype.

    Returns:
        The outputs in float64; argument -> its gradient in float64, 0 where there is none.
    """
    given = {name: _tensor(value) for name, value in arrays.items()}
    for name in wanted:
        given[name] = given[name].to(getattr(torch, dtype)).requires_grad_()
    outputs = kernel(**given)
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    pairs = zip(outputs, upstream, strict=False)
    total = torch.stack([(y.double() * torch.from_numpy(c)).sum() for y, c in pairs]).sum()
    if total.requires_grad:
        total.backward()
    grads = {name: given[name].grad for name in wanted}
    return [y.detach().double().numpy() for y in outputs], {
        name: np.zeros(arrays[name].shape) if grad is None else grad.double().numpy()
        for name, grad in grads.items()
    }


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return type(value)(*map(_tensor, value)) if hasattr(value, "_fields") else value
