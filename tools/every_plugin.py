"""Every plugin of this repository as it is run on a CPU, or why it is not: for tests and trials.

They are found through their entry points, so that a new one is run before anybody thinks of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from minillm_core.plugins.manager import find
from minillm_kit.runner import as_typed
from minillm_kit.subject import Subject
from tools.repository import ours

__all__ = ["ALONE", "APART", "MIXERS", "SPARSE", "WHOLE", "Form", "all_at_once", "forms"]

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
"""Of plugins that do nothing by default, or not in short rows; and where others make other code."""

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
"""Settings with which those that cannot be in one layer are in one model."""


MIXERS = ("attn_sink", "dc_mha", "diff_attn", "forgetting_attn", "gated_delta", "mla")
"""Plugins with a function of attention, or an attention, of their own: a layer has one at most."""

WHOLE = ("hyper_connections", "iha", "layer_drop", "layer_loop", "untie_head")
"""Plugins that do to whole layers, or to the head, what others of them cannot stand beside."""

ALONE = (
    *("adafactor", "adam8bit", "ademamix", "cautious_adam", "ema", "ema_nesterov", "galore"),
    *("infinite_lr", "lion", "lora", "mars", "schedule_free", "shampoo", "snoo", "soap"),
    *("soap_muon", "swa", "batch_schedule"),
    *WHOLE,
    *MIXERS,
)
"""Plugins with a rule, or none, for what others have rules for, with an average, a look-ahead, a schedule or
a momentum where another has one, with an attention of their own, or with lanes in the place of the stream;
with batches of several sizes, without an attention that others are in, with a head whose betas are the
embedding's: no model has all of them."""


READING = ("distill", "jest", "rho1")
"""Plugins that cannot run without the folder of another run; their own tests train one first."""


SPARSE = ("sparse_loss",)
"""Plugins that do nothing where every token is learnt, as in a text; their own tests train on chats."""


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
        """The plugin, and those that it builds on."""
        beside = Subject(self.name, self.options).companions
        return (self.name, *(one.name for one in beside))

    @property
    def settings(self) -> dict[str, str]:
        """``{"windows.start": "8"}``, as they are typed."""
        return {f"{self.name}.{key}": as_typed(value) for key, value in self.options.items()}

    @cached_property
    def observes(self) -> bool:
        """It has no part in what a step computes."""
        return set(find(self.name).cls.hooks) <= {"on_evaluated", "on_event"}

    @cached_property
    def left_out(self) -> str | None:
        """Why no step on a CPU shows what it computes; None where one does."""
        manifest = find(self.name).cls.manifest
        if self.name in READING:
            return "it reads a model that was trained before"
        if self.observes:
            return "it listens, and computes nothing"
        if set(find(self.name).cls.hooks) <= {"build_data", "on_batch"}:
            return "it chooses the rows of a step, and computes nothing in it"
        if manifest.devices and "cpu" not in manifest.devices:
            return f"it runs on {', '.join(manifest.devices)} alone"
        return None


def forms() -> list[Form]:
    """List each plugin, in every form that is to be tried."""
    return [Form(name, options) for name in ours() for options in OPTIONS.get(name, ({},))]


def all_at_once() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return everything that a step on a CPU shows and trains, in one model: names, settings.

    It has two layers or more.
    """
    first: dict[str, Form] = {}
    for one in forms():
        if one.left_out is None and one.name not in ALONE:
            first.setdefault(one.name, one)
    settings = {key: value for one in first.values() for key, value in one.settings.items()}
    apart = {key: value for key, value in APART.items() if key.partition(".")[0] in first}
    return tuple(first), {**settings, **apart}
