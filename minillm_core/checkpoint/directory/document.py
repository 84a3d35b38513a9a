"""config.json of a model directory: what minillm's decoder has, and everything else by name."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minillm_core.checkpoint.directory.layout import Layout
from minillm_core.checkpoint.directory.layouts import LAYOUTS
from minillm_core.config.schema import ModelConfig
from minillm_core.errors import Refusal
from minillm_core.nn.norm import EPSILON

__all__ = ["model_of"]

Size = Annotated[int, Field(ge=1, lt=2**31)]
ROPE_BASE = 10_000.0  # where neither of its places says another one


class Document(BaseModel):
    """The keys that decide what a model computes; those with one value have no other here.

    Absent ones have the defaults that Transformers gives them.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    num_hidden_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    intermediate_size: Size
    vocab_size: Size
    head_dim: Size | None = None
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] | None = None
    sliding_window: int | None = None
    quantization_config: None = None
    quantization: None = None  # mlx-lm's name for it
    auto_map: None = None  # code that comes with the directory
    model_file: None = None  # the same, for mlx-lm


def model_of(config: dict[str, Any], where: str) -> tuple[Layout, ModelConfig]:
    """The layout and sizes of a config.json.

    Args:
        config: its content.
        where: its path.

    Raises:
        Refusal: another architecture, something that minillm's decoder does not have, or sizes
            that cannot be.
    """
    layout = _layout(config, where)
    try:
        document = Document.model_validate(config)
    except (ValidationError, OverflowError) as error:
        raise _refusal(_problem(error), where) from error
    for key in layout.stated:
        if getattr(document, key) is None:
            raise _refusal(f"{key} is missing", where)
    _check_attention(document, where)
    if not math.isclose(document.rms_norm_eps, EPSILON, rel_tol=1e-6):
        raise _refusal(f"rms_norm_eps is {document.rms_norm_eps:g}, not {EPSILON:g}", where)
    heads = document.num_attention_heads
    kv_heads = heads if document.num_key_value_heads is None else document.num_key_value_heads
    try:
        model = ModelConfig(
            layers=document.num_hidden_layers,
            dim=document.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            hidden=document.intermediate_size,
            vocab=document.vocab_size,
            tied=document.tie_word_embeddings,
            rope_base=_rope_base(document, where),
        )
    except (ValidationError, OverflowError) as error:
        raise _refusal(_problem(error), where) from error
    width, rest = divmod(model.dim, heads)
    if rest or width % 2 or heads % model.kv_heads or document.head_dim not in (None, width):
        raise _refusal(
            f"{model.dim} features, {heads} heads, {model.kv_heads} key-value heads and a head_dim "
            f"of {document.head_dim or width} do not go together (head_dim must be features / "
            "heads)",
            where,
        )
    return layout, model


def _layout(config: dict[str, Any], where: str) -> Layout:
    named, kind = config.get("architectures"), config.get("model_type")
    for layout in LAYOUTS.values():
        if named == [layout.architecture] and kind in (None, layout.name):
            return layout
    known = " and ".join(layout.architecture for layout in LAYOUTS.values())
    raise Refusal(
        f"minillm has no model of architecture {str(named)[:80]}, type {str(kind)[:40]}",
        where=where,
        fix=f"give a directory of {known}",
    )


def _check_attention(document: Document, where: str) -> None:
    """No layer may see less than all that came before."""
    others = set(document.layer_types or ()) - {"full_attention"}
    if others:
        raise _refusal(f"layer_types has {sorted(others)[0][:40]!r}", where)
    # Qwen3 states a window and does not use it unless use_sliding_window says so
    if document.sliding_window is not None and document.use_sliding_window is None:
        raise _refusal(f"sliding_window is {document.sliding_window}", where)


def _rope_base(document: Document, where: str) -> float:
    """The base, which two keys may say, and versions of Transformers say differently."""
    said: set[float] = set()
    if document.rope_theta is not None:
        said.add(document.rope_theta)
    for key in ("rope_parameters", "rope_scaling"):
        table = getattr(document, key) or {}
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default" or table.get("partial_rotary_factor", 1.0) != 1.0:
            raise _refusal(f"{key} is {str(table)[:80]}", where)
        theta = table.get("rope_theta")
        if isinstance(theta, (int, float)) and not isinstance(theta, bool):
            said.add(float(theta))
        elif table.keys() - {"rope_type", "type", "partial_rotary_factor"}:
            raise _refusal(f"{key} is {str(table)[:80]}", where)
    if len(said) > 1:
        raise _refusal(f"rope_theta is both {' and '.join(f'{s:g}' for s in sorted(said))}", where)
    return said.pop() if said else ROPE_BASE


def _problem(error: ValidationError | OverflowError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{key} is missing"
    return f"{key} is {str(first['input'])[:40]}: {first['msg'][:1].lower()}{first['msg'][1:]}"


def _refusal(problem: str, where: str) -> Refusal:
    return Refusal(
        f"minillm's decoder cannot be this model: {problem}",
        where=where,
        fix="give a directory of a plain Llama or Qwen3 model",
    )
