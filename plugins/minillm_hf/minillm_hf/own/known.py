"""The fields of a model's specification and the attributes of modules that modeling files support.

Unlisted ones are refused by name if they are set: a slot that is added to the core needs code
generation (attention, blocks, decoder) and an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from minillm_core import Layout, Module
from minillm_hf.own.copying import CannotWriteError


def names(text: str) -> frozenset[str]:
    """Split a text into a set of words."""
    return frozenset(text.split())


KNOWN: Mapping[str, frozenset[str]] = {
    "DecoderSpec": names(
        "geometry tied embed streams blocks taps final final_norm loss linears loop"
    ),
    "BlockSpec": names(
        "attention mlp attention_norm mlp_norm site_in site_mid site_out taps apart seen"
    ),
    "AttentionSpec": names("rope before_rope after_rope v layout core window documents scale out"),
    "Loop": names("owner first last times"),
    "Masks": names("window documents"),
    "RopeSpec": names("base frequencies scaling positions"),
    "SiteSpec": names("name terms computed"),
    "ModelShape": names("layers dim heads kv_heads head_dim hidden vocab positions layer norm_eps"),
    "LossForm": names("cap scale smoothing z"),
    # everything after the logits is only for training
    "LossSpec": names("form form_owners targets terms rows weights gather"),
}
"""Specification -> its fields that are written, or that only training reads."""

KNOWN_ATTRIBUTES = names(
    "ops framework leaf reads keeps recurrent terms statistics lookback path owner bound "
    "forward next_state rope stretch joins enter leave"
)
"""Attributes that a module or a layout may set or override."""


def attributes() -> frozenset[str]:
    """Return the public attributes of the core's base classes of modules and layouts."""
    named = (
        name
        for base in (Module, Layout)
        for name in (*vars(base), *getattr(base, "__annotations__", {}))
    )
    return frozenset(name for name in named if not name.startswith("_"))


def check_known(spec: Any) -> None:
    """Check that every field of a specification is supported or has its default.

    Raises:
        CannotWriteError: a field is set and not supported.
    """
    kind = type(spec).__name__
    if kind not in KNOWN:
        raise CannotWriteError(f"the writer of modeling files does not know a {kind}")
    for one in fields(spec):
        if one.name in KNOWN[kind]:
            continue
        default = one.default
        if one.default_factory is not MISSING:
            default = one.default_factory()
        if default is MISSING or getattr(spec, one.name) != default:
            raise CannotWriteError(
                f"the slot {kind}.{one.name} is filled, which the writer of modeling files does not know"
            )
    if kind == "DecoderSpec":
        check_known(spec.loss)
        check_known(spec.geometry)
