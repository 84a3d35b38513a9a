"""Every plugin of this repository in the forms that run on a CPU, or the reason for not running it.

Used by tests and trials. Plugins are found through their entry points, so that new ones are included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from minillm_core.plugins.manager import find
from minillm_core.plugins.plugin import Plugin
from minillm_kit.runner import as_typed
from minillm_kit.subject import Subject
from tools.repository import ours

__all__ = [
    "ALONE",
    "APART",
    "MIXERS",
    "SPARSE",
    "WHOLE",
    "Form",
    "all_at_once",
    "forms",
    "together",
]

OPTIONS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "bigram_hash": ({}, {"signs": 64, "behind_attention": True}),
    "cautious_wd": ({}, {"rules": ["adamw"], "squared": ["adamw"]}),
    "domain_tokens": ({"domains": ["code", "text"]},),
    "freeze": ({"of": ["norm"], "after": 0.5}, {"of": ["layers.0.*"]}),
    "galore": ({"rank": 4, "every": 2},),
    "head_muon": ({}, {"heads": 1, "of": ["q", "k", "v"]}),
    "infinite_lr": ({}, {"form": "inverse_root"}),
    "logit_rescale": ({"scale": 2.0},),
    "moe": ({}, {"chosen": 2, "layers": "all"}),
    "muon": ({}, {"momentum_start": 0.85, "cooldown": 0.5, "adjust": "match_rms"}),
    "muon_eq": ({}, {"of": "both"}),
    "normuon": ({}, {"neurons": "rows"}),
    "qk_norm": ({}, {"gains": True}),
    "role_lr": ({"embedding": 10, "betas": {"head": [0.5, 0.9]}, "decay": {"down": 0}},),
    "smear": ({}, {"across": True}),
    "softcap": ({}, {"form": "tanh"}),
    "unet_skip": ({}, {"attention": False}),
    "uw_floor": ({}, {"rows": True, "rules": ["*"]}),
    "value_embeds": ({}, {"mix": "lambdas"}),
    "windows": (
        {"start": 8, "window": 32, "block": 8},
        {"start": 8, "window": 32, "block": 8, "documents": True},
        {"start": 8, "window": 32, "block": 8, "yarn": True},
    ),
    "zero_init": ({}, {"head": True}),
}
"""Options for plugins without effect at their defaults or on short rows, and further forms with other code."""

APART: Mapping[str, str] = {
    "paired_heads.layers": "[0]",
    "xsa.layers": "[1]",
    "llama3_rope.layers": "[0]",
    "yarn_rope.layers": "[1]",
    "attn_scale.layers": "[0]",
    "relu2.layers": "[0]",
    "moe.layers": "[1]",
    "lora.layers": "[2]",
    "qat.layers": "[1]",
    "qat.targets": '["q", "k", "v", "o"]',
    "agc.rules": '["muon"]',
    "layer_clip.rules": '["muon"]',
    "cautious_wd.rules": '["adamw"]',
    "key_offset.layers": "[1]",
    "mudd.ways": '["q", "v"]',
    "zero_init.attention": "false",
}
"""Settings that place plugins in separate layers if they conflict within one layer."""


MIXERS = ("attn_sink", "dc_mha", "diff_attn", "forgetting_attn", "gated_delta", "mla", "prefix_kv")
"""Plugins that replace the attention function or module: at most one per layer."""

WHOLE = ("hyper_connections", "iha", "layer_drop", "layer_loop", "untie_head")
"""Plugins that transform whole layers or the head, and conflict with each other."""

ALONE = (
    *("adafactor", "adam8bit", "ademamix", "cautious_adam", "ema", "ema_nesterov", "galore"),
    *("infinite_lr", "lion", "lora", "mars", "schedule_free", "shampoo", "snoo", "soap"),
    *("soap_muon", "swa", "batch_schedule"),
    *WHOLE,
    *MIXERS,
)
"""Plugins that conflict with others and so cannot all be in one model: an update rule, or none, for parameters
that have another rule; a second average, look-ahead, schedule or momentum; their own attention; parallel
streams in place of the residual stream; a changing batch size; no attention where others extend it; a head
whose Adam betas are the embedding's.
"""


READING = ("distill", "jest", "rho1")
"""Plugins that need the folder of another run; their own tests train one first."""


SPARSE = ("sparse_loss",)
"""Plugins without effect if every token is supervised, as in plain text; their own tests train on chats."""


@dataclass(frozen=True)
class Form:
    """A plugin with some of its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.name}[{self.given}]" if self.given else self.name

    @property
    def given(self) -> str:
        """``window=32,block=8``."""
        return ",".join(f"{key}={as_typed(value)}" for key, value in self.options.items())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The plugin and its requirements."""
        beside = Subject(self.name, self.options).companions
        return (self.name, *(one.name for one in beside))

    @property
    def settings(self) -> dict[str, str]:
        """The options as command-line settings: ``{"windows.start": "8"}``."""
        return {f"{self.name}.{key}": as_typed(value) for key, value in self.options.items()}

    @cached_property
    def observes(self) -> bool:
        """Whether it only observes: no part of a training step depends on it."""
        return set(self.cls.hooks) <= {"on_evaluated", "on_event"}

    @cached_property
    def cls(self) -> type[Plugin]:
        """The plugin's class."""
        return find(self.name).cls

    @cached_property
    def left_out(self) -> str | None:
        """The reason why a CPU step does not exercise it; None if one does."""
        manifest = self.cls.manifest
        if self.name in READING:
            return "it reads a model that was trained before"
        if self.observes:
            return "it listens, and computes nothing"
        if set(self.cls.hooks) <= {"build_data", "on_batch"}:
            return "it chooses the rows of a step, and computes nothing in it"
        if manifest.devices and "cpu" not in manifest.devices:
            return f"it runs on {', '.join(manifest.devices)} alone"
        return None


@cache
def forms() -> tuple[Form, ...]:
    """Return each plugin in every form to run."""
    return tuple(Form(name, options) for name in ours() for options in OPTIONS.get(name, ({},)))


def together() -> tuple[Form, ...]:
    """Return the forms that train in one model of at least two layers: a plugin's first that a CPU step exercises."""
    first: dict[str, Form] = {}
    for one in forms():
        if one.left_out is None and one.name not in ALONE:
            first.setdefault(one.name, one)
    return tuple(first.values())


def all_at_once() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the plugins of :func:`together`, and the settings with which they train: names, settings."""
    chosen = together()
    names = tuple(one.name for one in chosen)
    settings = {key: value for one in chosen for key, value in one.settings.items()}
    apart = {key: value for key, value in APART.items() if key.partition(".")[0] in names}
    return names, {**settings, **apart}
