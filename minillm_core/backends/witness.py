"""Proof that a plugin's kernel served: its op tells the framework when it is traced, or run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from minillm_core.errors import PluginCodeError
from minillm_core.ops.select import Choice
from minillm_core.plan import Plan

__all__ = ["watch_kernels"]


def watch_kernels(framework: Any, plan: Plan, choices: Iterable[Choice]) -> None:
    """Let every op that a plugin's candidate serves witness ``kernel:<op>=<name>``.

    The core's own kernels stay as they are: nobody asks for evidence of those. What a plugin's
    gives that is no array, and what it changes of its arguments, is told as the plugin's.
    """
    offered = {(candidate.op, candidate.name): owner for owner, candidate in plan.candidates}
    for choice in choices:
        if (choice.op, choice.kernel) in offered:
            kernel = getattr(framework.ops, choice.op)
            key = f"kernel:{choice.op}={choice.kernel}"
            owner = offered[choice.op, choice.kernel]
            setattr(framework.ops, choice.op, _watched(kernel, key, framework, owner))


def _watched(
    kernel: Callable[..., Any], key: str, framework: Any, owner: str
) -> Callable[..., Any]:
    witness, versions = framework.witness, framework.versions

    def wrong(did: str, fix: str) -> PluginCodeError:
        return PluginCodeError(owner, kernel.__name__, did=did, where=key, fix=fix)

    @functools.wraps(kernel)
    def call(*arguments: Any, **named: Any) -> Any:
        witness(key)
        before = versions(arguments)
        result = kernel(*arguments, **named)
        if versions(arguments) != before:
            raise wrong("changed an argument in place in", "write into new arrays")
        for part in result if isinstance(result, tuple) else (result,):
            if not hasattr(part, "shape"):
                raise wrong(
                    f"returned {type(part).__name__} from", "return what the op's contract says"
                )
        return result

    return call
