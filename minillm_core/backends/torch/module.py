"""Neutral modules as real ``torch.nn.Module``s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minillm_core.backends.torch.ops import TorchOps
from minillm_core.nn.module import Natives, record
from minillm_core.nn.param import Buffer, Param, State

__all__ = ["TorchFramework"]


class TorchModule(nn.Module):
    """Base of every materialised module: declarations become parameters and buffers."""

    def __setattr__(self, name: str, value: Any) -> None:
        record(self, name, value)
        if isinstance(value, Param):
            value = nn.Parameter(torch.empty(value.shape))
        elif isinstance(value, (Buffer, State)):
            kept = isinstance(value, State)
            self.register_buffer(name, torch.empty(value.shape), persistent=kept)
            return
        super().__setattr__(name, _searched(value))


def _searched(value: Any) -> Any:
    """Containers of modules as torch's own, in which it looks for parameters."""
    if isinstance(value, (list, tuple)) and any(isinstance(v, nn.Module) for v in value):
        return nn.ModuleList(value)
    if isinstance(value, dict) and any(isinstance(v, nn.Module) for v in value.values()):
        return nn.ModuleDict(value)
    return value


class TorchLinear(TorchModule, nn.Linear):
    """A leaf that tools which look for ``nn.Linear`` find."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_parameter("bias", None)


class TorchEmbedding(TorchModule, nn.Embedding):
    """A lookup that tools which look for ``nn.Embedding`` find."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.padding_idx = self.max_norm = None
        self.scale_grad_by_freq = self.sparse = False

    def extra_repr(self) -> str:
        """Rows and width."""
        return ", ".join(str(n) for n in self.weight.shape)


BASES: Mapping[str | None, type] = {
    None: TorchModule,
    "linear": TorchLinear,
    "embedding": TorchEmbedding,
}


class TorchFramework(Natives):
    """What neutral modules stand on: one a binding, since it holds the chosen kernels."""

    def __init__(self, ops: TorchOps) -> None:
        super().__init__(BASES)
        self.ops = ops
        self.seen: Counter[str] = Counter()
        seen = self.seen

        # Runs while dynamo traces, and leaves nothing in the compiled step.
        @torch.compiler.assume_constant_result
        def witness(key: str) -> None:
            seen[key] += 1

        self.witness = witness

    def versions(self, arrays: Iterable[Any]) -> tuple[int, ...]:
        """Torch's own counts; a compiled step writes to nothing that it was given."""
        if torch.compiler.is_compiling():
            return ()
        return tuple(a._version for a in arrays if isinstance(a, torch.Tensor))

    def checkpoint(self, block: Callable[..., Any], *arguments: Any) -> Any:
        """``block(*arguments)``, recomputed in the backward pass."""
        return checkpoint(block, *arguments, use_reentrant=False)
