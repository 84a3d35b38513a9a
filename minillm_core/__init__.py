"""minillm trains small language models fast; every technique is a plugin.

Names are imported when they are first used (PEP 562): ``import minillm_core`` itself brings in
neither torch, mlx, numpy nor pydantic, so that commands which need none of them start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm_core.errors import (
        BackendError,
        ConfigError,
        DataError,
        MinillmError,
        PlanError,
        PluginError,
        Refusal,
    )
    from minillm_core.nn.attention import Call, Layout
    from minillm_core.nn.decoding import EVERYTHING
    from minillm_core.nn.geometry import Geometry
    from minillm_core.nn.init import Constant, Init, Normal, Uniform, ones, zeros
    from minillm_core.nn.linear import Linear
    from minillm_core.nn.module import Module
    from minillm_core.nn.param import Buffer, Param, State
    from minillm_core.nn.residual import Learned
    from minillm_core.ops.contract import Rotary
    from minillm_core.ops.form import LossForm, SigmoidCap, TanhCap
    from minillm_core.ops.select import Candidate, Request
    from minillm_core.optim.schedules import cosine, piecewise, plateaus, scheduled, stages
    from minillm_core.optim.stage import INHERITED, Rule, stage
    from minillm_core.plugins.api import HOOK_API
    from minillm_core.plugins.layers import Layers
    from minillm_core.plugins.options import option
    from minillm_core.plugins.plugin import Plugin
    from minillm_core.plugins.streams import random_stream
    from minillm_core.train.events import (
        Ended,
        Evaluated,
        Event,
        Guarded,
        Resumed,
        Rewound,
        Saved,
        Skipped,
        Started,
        Stepped,
        Throughput,
        Unsaved,
    )

    __version__: str

__all__ = [
    "EVERYTHING",
    "HOOK_API",
    "INHERITED",
    "BackendError",
    "Buffer",
    "Call",
    "Candidate",
    "ConfigError",
    "Constant",
    "DataError",
    "Ended",
    "Evaluated",
    "Event",
    "Geometry",
    "Guarded",
    "Init",
    "Layers",
    "Layout",
    "Learned",
    "Linear",
    "LossForm",
    "MinillmError",
    "Module",
    "Normal",
    "Param",
    "PlanError",
    "Plugin",
    "PluginError",
    "Refusal",
    "Request",
    "Resumed",
    "Rewound",
    "Rotary",
    "Rule",
    "Saved",
    "SigmoidCap",
    "Skipped",
    "Started",
    "State",
    "Stepped",
    "TanhCap",
    "Throughput",
    "Uniform",
    "Unsaved",
    "__version__",
    "cosine",
    "ones",
    "option",
    "piecewise",
    "plateaus",
    "random_stream",
    "scheduled",
    "stage",
    "stages",
    "zeros",
]

_HOME = {
    "minillm_core.errors": (
        "BackendError",
        "ConfigError",
        "DataError",
        "MinillmError",
        "PlanError",
        "PluginError",
        "Refusal",
    ),
    "minillm_core.nn.attention": ("Call", "Layout"),
    "minillm_core.nn.decoding": ("EVERYTHING",),
    "minillm_core.nn.geometry": ("Geometry",),
    "minillm_core.nn.init": ("Constant", "Init", "Normal", "Uniform", "ones", "zeros"),
    "minillm_core.nn.linear": ("Linear",),
    "minillm_core.nn.module": ("Module",),
    "minillm_core.nn.param": ("Buffer", "Param", "State"),
    "minillm_core.nn.residual": ("Learned",),
    "minillm_core.ops.contract": ("Rotary",),
    "minillm_core.ops.form": ("LossForm", "SigmoidCap", "TanhCap"),
    "minillm_core.ops.select": ("Candidate", "Request"),
    "minillm_core.optim.schedules": ("cosine", "piecewise", "plateaus", "scheduled", "stages"),
    "minillm_core.optim.stage": ("INHERITED", "Rule", "stage"),
    "minillm_core.plugins.api": ("HOOK_API",),
    "minillm_core.plugins.layers": ("Layers",),
    "minillm_core.plugins.options": ("option",),
    "minillm_core.plugins.plugin": ("Plugin",),
    "minillm_core.plugins.streams": ("random_stream",),
    "minillm_core.train.events": (
        "Ended",
        "Evaluated",
        "Event",
        "Guarded",
        "Resumed",
        "Rewound",
        "Saved",
        "Skipped",
        "Started",
        "Stepped",
        "Throughput",
        "Unsaved",
    ),
}
"""Where each public name lives: a module -> its names."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Raises:
        AttributeError: the name is not public.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("minillm-core")
    for module, names in _HOME.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module 'minillm_core' has no attribute '{name}'")


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*__all__]
