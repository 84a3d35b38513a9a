"""torch.compile without Inductor: whether a function is one graph, and what its gradients are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["traced"]


def traced() -> Callable[..., Any]:
    """What compiles by aot_eager; forgets earlier graphs, of which dynamo keeps eight a function."""
    torch.compiler.reset()
    return partial(torch.compile, backend="aot_eager")
