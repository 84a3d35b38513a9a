"""The base class of every plugin. The class is the manifest: no other file declares the plugin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from minillm_core.errors import PluginError
from minillm_core.nn.reference import place_of
from minillm_core.plugins.hookspecs import HOOKS
from minillm_core.plugins.manifest import HOOK_API, Manifest, ManifestError, summary
from minillm_core.text import did_you_mean


class Plugin(BaseModel):
    """A technique: options as typed fields, hooks as methods.

    ::

        class SparseGate(Plugin, api=1):
            \"\"\"One gate per token and head on the attention output.\"\"\"

            width: int = option(12, ge=1, help="input features that the gate reads")

            def build_attention(self, attn):
                attn.out.gate(Gate, width=self.width)

    The docstring's first line is the summary. Every public method must be a hook: an unknown name is
    refused, since a misspelt hook would never be called. Helpers start with an underscore;
    properties, static methods, class methods and pydantic's validators are allowed. Instances are
    frozen.

    Args of the class statement (literals, since ``minillm plugins list`` reads them without importing):
        api: the version of the hook API that the class is written for.
        backends: the supported backends, if not all: ``("torch",)``.
        devices: the supported kinds of device, if not all: ``("cuda",)``; others are cpu, mps and gpu (MLX's).
        capability: the compute capability of the NVIDIA GPUs that it needs: ``"==9.0"`` (Hopper alone) or
            ``">=8.9"`` (Ada, Hopper and later). On other GPUs a run is refused before it starts.
        identity_at_init: the model's output is unchanged before the first step.
        discrete: the output is discontinuous (routing, top-k): bfloat16 may choose differently from
            float32, which is not a fault.
        surrogate: it rounds values and uses a surrogate gradient through ``stop_gradient``
            (straight-through), not the true one; the last bit of float32 may change a rounding.
        export: the layout that the model fits with this plugin: ``"llama"`` (the plain layout still fits),
            or one that an installed distribution writes: ``"qwen2"``, ``"qwen3"``. Without it, an export
            contains modeling files, written from the plugin's source.
        task: the plugin provides the training data, so that ``--task`` may name it.
        unweighted: its ``on_batch`` adds no ``weights``, so that loss kernels that take no weights can be used.
        requires: pip requirements that its hooks import when they first run:
            ``("tensorboard>=2.16",)``. A run is refused before it starts if one is missing.

    Raises:
        PluginError: when the class is created: another API version, an unknown keyword, a misspelt hook,
            a wrong argument, an option that hides a name of this class.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    manifest: ClassVar[Manifest] = Manifest(api=HOOK_API)
    hooks: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__()
        try:
            cls.manifest = Manifest.of(keywords)
        except ManifestError as error:
            raise PluginError(f"{cls.__name__} {error}", where=_place(cls)) from None
        for name in inspect.get_annotations(cls):
            if name in _TAKEN:
                what = f"option '{name}' of {cls.__name__} would hide a name of the base class"
                raise PluginError(what, where=_place(cls), fix="give the option another name")
        for name, method in _public_methods(cls).items():
            _check_hook(cls, name, method)
        cls.hooks = tuple(name for name in HOOKS if name in _public_methods(cls))

    def options(self) -> dict[str, Any]:
        """Return every option with its value, as JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring."""
        return summary(cls.__dict__.get("__doc__"))


_TAKEN = frozenset(name for name in dir(Plugin) if not name.startswith("_")) | frozenset(HOOKS)


def _public_methods(cls: type[Plugin]) -> dict[str, Callable[..., Any]]:
    """Return the public plain functions of ``cls`` and its bases up to Plugin; the most derived one wins."""
    members: dict[str, Any] = {}
    for base in reversed([base for base in cls.__mro__ if base not in Plugin.__mro__]):
        members |= vars(base)
    return {
        name: member
        for name, member in members.items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or name in HOOKS)
        and name not in _OVERRIDABLE
    }


_OVERRIDABLE = frozenset({"model_post_init"})
"""Methods that pydantic calls."""


def _check_hook(cls: type[Plugin], name: str, method: Any) -> None:
    """Refuse a public method that is not a hook, or whose arguments do not fit its hook."""
    stated = f"def {name}(self, {', '.join(HOOKS.get(name, ()))})"
    if name not in HOOKS:
        helper = f"a helper of your own starts with an underscore: _{name}"
        problem, stated = "is not a hook", did_you_mean(name, HOOKS) + helper
    elif not inspect.isfunction(method):
        problem = "is a hook, and not a plain method"
    elif inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        problem = "is a generator or coroutine: its body would never run"
        stated += ", without yield, async and await"
    else:
        parameters = list(inspect.signature(method).parameters.values())
        problem = _arguments_problem(parameters, HOOKS[name])
    if problem:
        where = _place(method if inspect.isfunction(method) else cls)
        raise PluginError(f"{cls.__name__}.{name} {problem}", where=where, fix=stated)


def _arguments_problem(
    parameters: Sequence[inspect.Parameter], known: tuple[str, ...]
) -> str | None:
    """Describe the mistake in a hook's arguments, or return None; a hook may leave some out."""
    if not parameters:
        return "does not take self"
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return f"takes *{parameter.name}: every argument is named"
        if parameter.name not in known:
            return f"takes an argument '{parameter.name}', which its hook does not have"
        if parameter.default is not parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
            return f"should take '{parameter.name}' by name and without a default"
    return None


def _place(target: Any) -> str:
    """Return the place of a function as file and line, of a class being created as module and name."""
    return place_of(target) or f"{target.__module__}.{target.__qualname__}"
