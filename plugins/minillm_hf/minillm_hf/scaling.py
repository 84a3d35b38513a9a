"""Rotary scaling in a config.json and in a plan: a plugin with its options.

"rope_parameters": {"rope_type": "llama3", "factor": 32.0, ...}     llama3_rope.factor=32.0 ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm_core import Plan

PLUGINS: Mapping[str, tuple[str, str]] = {
    "llama3": ("llama3_rope", "minillm_hf.llama3_rope:llama3"),
    "yarn": ("yarn_rope", "minillm_hf.yarn_rope:yarn"),
}
"""rope_type -> the plugin, and its claim on ``attn.rope.scaling``."""

NUMBERS: Mapping[str, tuple[str, ...]] = {
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""rope_type -> its required keys."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama3": {},
    "yarn": {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "truncate": True},
}
"""rope_type -> its optional keys, and Transformers' default of each."""


@dataclass(frozen=True)
class Scaling:
    """A scaling of the rotary frequencies: ``options`` have the same keys in config.json and the plugin."""

    rope_type: str
    options: Mapping[str, Any]

    @property
    def plugin(self) -> str:
        """The plugin that implements the scaling."""
        return PLUGINS[self.rope_type][0]

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Scaling:
        """Read a table of config.json; ``rope_theta`` and the type are not options.

        Raises:
            ValueError: the type is unknown, or a key is missing, unknown or no number.
        """
        kind = table.get("rope_type", table.get("type"))
        if not isinstance(kind, str) or kind not in PLUGINS:
            raise ValueError(f"rope_type {str(kind)[:40]!r} is none of {', '.join(PLUGINS)}")
        own = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
        found = {key: value for key, value in table.items() if key not in own and value is not None}
        allowed = {*NUMBERS[kind], *DEFAULTS[kind]}
        if unknown := sorted(found.keys() - allowed):
            raise ValueError(f"rope_type {kind} with {unknown[0][:40]!r}")
        if missing := [key for key in NUMBERS[kind] if key not in found]:
            raise ValueError(f"rope_type {kind} without {missing[0]}")
        for key, value in found.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if not (isinstance(value, bool) if key == "truncate" else number):
                raise ValueError(f"rope_type {kind} with {key} {str(value)[:40]}")
        if found["factor"] < 1 or found["original_max_position_embeddings"] % 1:
            raise ValueError(f"rope_type {kind} with {str(found)[:80]}")
        return cls(kind, {key: found.get(key, DEFAULTS[kind].get(key)) for key in sorted(allowed)})

    def table(self) -> dict[str, Any]:
        """Return the table for config.json, without ``rope_theta``."""
        given = {key: value for key, value in self.options.items() if value is not None}
        return {"rope_type": self.rope_type, **given}


def scaling_of(plan: Plan) -> Scaling | None:
    """Find the scaling of a plan's model; None: the frequencies are unscaled.

    Raises:
        ValueError: config.json cannot express it, or layers differ.
    """
    found = {one.rope.scaling and one.rope.scaling[:2] for one in plan.spec.attentions.values()}
    if len(found) > 1:
        raise ValueError("rotary frequencies are scaled in some layers, not in others")
    (claim,) = found or {None}
    if claim is None:
        return None
    owner, reference = claim
    kind = next((kind for kind, (_, known) in PLUGINS.items() if known == reference), None)
    if kind is None:
        raise ValueError(f"{owner} scales the rotary frequencies by a function of its own")
    (plugin,) = (one for one in plan.plugins if one.name == owner)
    keys = sorted({*NUMBERS[kind], *DEFAULTS[kind]})
    return Scaling(kind, {key: plugin.options[key] for key in keys})


def flags(plugins: Mapping[str, Mapping[str, Any]]) -> str:
    """Format plugins and their options as command-line arguments: ``--plugins a,b a.x=1``."""
    words = (
        f"{name}.{key}={_typed(value)}"
        for name, options in plugins.items()
        for key, value in options.items()
        if value is not None
    )
    return " ".join((f"--plugins {','.join(plugins)}", *words))


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
