"""Proof that a plugin's kernel served: its op tells the framework when it is traced, or run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from minillm_core.ops.select import Choice
from minillm_core.plan import Plan

__all__ = ["watch_kernels"]


def watch_kernels(framework: Any, plan: Plan, choices: Iterable[Choice]) -> None:
    """Let every op that a plugin's candidate serves witness ``kernel:<op>=<name>``.

    The core's own kernels stay as they are: nobody asks for evidence of those.
    """
    offered = {(candidate.op, candidate.name) for _, candidate in plan.candidates}
    for choice in choices:
        if (choice.op, choice.kernel) in offered:
            kernel = getattr(framework.ops, choice.op)
            key = f"kernel:{choice.op}={choice.kernel}"
            setattr(framework.ops, choice.op, _watched(kernel, key, framework.witness))


def _watched(
    kernel: Callable[..., Any], key: str, witness: Callable[[str], None]
) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*arguments: Any, **named: Any) -> Any:
        witness(key)
        return kernel(*arguments, **named)

    return call
