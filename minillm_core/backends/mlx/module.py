"""Neutral modules as real ``mlx.nn.Module``s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.utils import checkpoint

from minillm_core.backends.mlx import random
from minillm_core.backends.mlx.ops import MLXOps
from minillm_core.errors import BackendError
from minillm_core.nn.module import Natives, record
from minillm_core.nn.param import Buffer, Param, State

__all__ = ["MLXFramework"]


class MLXModule(nn.Module):
    """Base of every materialised module: declarations become arrays, plain values stay outside.

    mlx puts every list, tuple and dict into its tree of parameters; only those of modules belong.
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

    def __call__(self, *args: Any) -> Any:
        """``forward``."""
        return self.forward(*args)


def _plain_container(value: Any) -> bool:
    if isinstance(value, nn.Module) or not isinstance(value, (list, tuple, dict)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return not (items and all(isinstance(item, nn.Module) for item in items))


class MLXLinear(MLXModule, nn.Linear):
    """A leaf that tools which look for ``mlx.nn.Linear`` find."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class MLXEmbedding(MLXModule, nn.Embedding):
    """A lookup that tools which look for ``mlx.nn.Embedding`` find."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


BASES: Mapping[str | None, type] = {
    None: MLXModule,
    "linear": MLXLinear,
    "embedding": MLXEmbedding,
}


class MLXFramework(Natives):
    """What neutral modules stand on: one a binding, since it holds the chosen kernels."""

    def __init__(self, ops: MLXOps) -> None:
        super().__init__(BASES)
        self.ops = ops
        self.seen: Counter[str] = Counter()

    def checkpoint(self, block: Any, *arguments: Any) -> Any:
        """``block(*arguments)``, recomputed; its parameters are passed, not captured.

        Raises:
            BackendError: it draws from MLX's own key.
        """
        before = random.key()
        places: list[int] = []  # of each result among the distinct ones

        def distinct(*given: Any) -> list[Any]:
            # of one that is returned twice (x, and a tap of it) MLX would count one gradient and
            # lose the other without a word
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
                fix="train.checkpointing=false, or --backend torch, which draws the same again",
            )
        return result

    def witness(self, key: str) -> None:
        """Python runs only while tracing, or in eager."""
        self.seen[key] += 1
