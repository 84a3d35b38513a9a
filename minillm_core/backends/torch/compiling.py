"""torch.compile for several trainers in one process, and not imported before it is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from threading import Thread
from types import FunctionType, MethodType
from typing import Any, TypeVar

Marked = TypeVar("Marked", bound=Callable[..., Any])


def constant_result(function: Marked) -> Marked:
    """Mark a function as :func:`torch.compiler.assume_constant_result` does, which imports Dynamo.

    That import takes as long as torch's own, and a run that is not compiled does without it.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@cache
def importing() -> Thread:
    """Start a thread that imports what torch.compile needs: seconds, in which initial values can be drawn."""

    def load() -> None:
        with suppress(Exception):  # torch.compile imports it again, and raises
            import_module("torch._inductor.compile_fx")

    thread = Thread(target=load, daemon=True)
    thread.start()
    return thread


def imported(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler that first waits for :func:`importing`, and whose graphs torch keeps on disk.

    Unless asked, torch's cache leaves out traced graphs with an autograd Function, such as the chunked loss,
    and every process traces the whole step again. The key is the graph, both directions of Functions included.
    """

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        importing().join()
        from torch._functorch import config  # its values are those of a thread

        with suppress(AttributeError):  # a torch that always keeps them may have dropped the name
            config.autograd_cache_allow_custom_autograd_functions = True
        return compiler(function, **options)

    return compiled


def selective(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler whose graphs keep fewer arrays for the backward pass (arXiv:2205.05198).

    torch's partitioner keeps what the backward pass multiplies, such as the results of norms and of SwiGLU,
    although it also keeps their arguments, of which they are cheap to compute again. Here it does so. No
    product or attention is computed twice.
    """
    from torch._functorch import config

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        again = config.patch(ban_recompute_materialized_backward=False)  # while a call compiles
        return again(compiler(function, **options))

    return compiled


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function or bound method, with a code object of its own.

    Dynamo caches its graphs per code object, and compiles each at most eight times: trainers that
    share a function would use up each other's limit.
    """
    if isinstance(function, MethodType):
        return MethodType(own_code(function.__func__), function.__self__)
    assert isinstance(function, FunctionType)
    rest = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    own = FunctionType(function.__code__.replace(), *rest)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
