"""The layouts of model directories: their tensors and config.json; a new layout is added below."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minillm_core import Plan, Refusal
from minillm_core.directories import ModelConfig
from minillm_hf.scaling import Scaling

OWN_MODEL = "minillm"
"""``model_type`` of directories with their own modeling files."""

_QK = re.compile(r"(layers\.\d+\.attention)\.(qk|v_terms)\.\w+\.(q|k|[qkv]_bias)")
"""Weights of a norm on queries and keys, and biases, under any plugin's name."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a layout: of the model, or of each layer."""

    place: str  # minillm's parameter: layers.0.attention.q.weight; in Layout.layer attention.q...
    shape: tuple[Any, ...]  # sizes; in a layout the names of sizes, which tensors() resolves
    ones: bool = False  # a model without this parameter computes as with all ones


@dataclass(frozen=True)
class Layout:
    """A layout of tensors: an architecture of Transformers, vLLM and mlx-lm."""

    name: str  # as in a plugin's export=: llama
    architecture: str  # LlamaForCausalLM
    leaves: Mapping[str, Tensor]  # outside the layers, without the head
    head: tuple[str, Tensor]  # if it is not tied
    layer: Mapping[str, Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)  # further keys of config.json
    stated: tuple[str, ...] = ()  # required keys: Transformers' defaults differ from minillm's
    lacks: Callable[[Plan], str | None] = lambda plan: None  # why a plan does not fit
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # needed, with options

    def tensors(self, model: ModelConfig) -> dict[str, Tensor]:
        """Return every tensor of a directory by its name there."""
        width = model.head_width
        sizes = {
            "vocab": model.vocab,
            "dim": model.dim,
            "hidden": model.hidden,
            "queries": model.heads * width,
            "keys": model.kv_heads * width,
            "head_dim": width,
        }
        named = {name: ("", leaf) for name, leaf in self.leaves.items()}
        for index in range(model.layers):
            for name, leaf in self.layer.items():
                named[f"model.layers.{index}.{name}"] = (f"layers.{index}.", leaf)
        if not model.tied:
            named[self.head[0]] = ("", self.head[1])
        return {
            name: replace(leaf, place=at + leaf.place, shape=tuple(sizes[a] for a in leaf.shape))
            for name, (at, leaf) in named.items()
        }

    def document(
        self,
        model: ModelConfig,
        *,
        positions: int,
        boundary: int | None,
        scaling: Scaling | None = None,
    ) -> dict[str, Any]:
        """Build config.json.

        Args:
            model: the sizes.
            positions: the longest training row, in tokens.
            boundary: the token id before every document; None: unknown.
            scaling: of the rotary frequencies.
        """
        rope = {"rope_type": "default"} if scaling is None else scaling.table()
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            "dtype": "float32",
            "vocab_size": model.vocab,
            "hidden_size": model.dim,
            "intermediate_size": model.hidden,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_width,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_eps,
            "max_position_embeddings": positions,
            # Transformers 4, vLLM and mlx-lm read the first, Transformers 5 the second
            "rope_theta": model.rope_base,
            "rope_parameters": {**rope, "rope_theta": model.rope_base},
            **({} if scaling is None else {"rope_scaling": rope}),
            "tie_word_embeddings": model.tied,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": boundary,
            "eos_token_id": boundary,
            # Transformers gives a padding id's embedding row no gradient, and here that row is the
            # boundary token's; the tokenizer and generation_config.json name the padding token.
            "pad_token_id": None,
            **self.settings,
        }


def products(plan: Plan) -> dict[str, Any]:
    """Map linear layers to the plugin modules that replace their products, as outlines.

    Only modules that fold into the layer's weight are included: they have ``folded(weight, own)``.
    """
    made = ((leaf, node.make(plan.spec.geometry)) for leaf, node in plan.spec.linears)
    return {leaf: module for leaf, module in made if hasattr(module, "folded")}


def in_loss_alone(plan: Plan, name: str) -> bool:
    """Return whether only the loss reads a parameter or state of this name: exports leave it out."""
    return name.startswith(tuple(f"{path}." for path in plan.spec.training_alone))


def places(plan: Plan) -> dict[str, str]:
    """Map places to parameters of the plan; a place omits the plugin's name on queries and keys.

    Parameters that fold into others, or that only the loss reads, have no place.

    Raises:
        Refusal: two parameters have the same place.
    """
    found: dict[str, str] = {}
    inside = tuple(f"{leaf}.product." for leaf in products(plan))
    for name in plan.parameters:
        if name.startswith(inside) or in_loss_alone(plan, name):
            continue
        match = _QK.fullmatch(name)
        place = f"{match[1]}.{match[2]}.{match[3]}" if match else name
        if place in found:
            raise Refusal(
                f"{found[place]} and {name} are two of one kind in one place",
                where=place,
                fix="leave one of the plugins out",
            )
        found[place] = name
    return found


LLAMA = Layout(
    name="llama",
    architecture="LlamaForCausalLM",
    leaves={
        "model.embed_tokens.weight": Tensor("embedding.weight", ("vocab", "dim")),
        "model.norm.weight": Tensor("norm.weight", ("dim",)),
    },
    head=("lm_head.weight", Tensor("head.weight", ("vocab", "dim"))),
    layer={
        "input_layernorm.weight": Tensor("attention_norm.weight", ("dim",)),
        "self_attn.q_proj.weight": Tensor("attention.q.weight", ("queries", "dim")),
        "self_attn.k_proj.weight": Tensor("attention.k.weight", ("keys", "dim")),
        "self_attn.v_proj.weight": Tensor("attention.v.weight", ("keys", "dim")),
        "self_attn.o_proj.weight": Tensor("attention.o.weight", ("dim", "queries")),
        "post_attention_layernorm.weight": Tensor("mlp_norm.weight", ("dim",)),
        "mlp.gate_proj.weight": Tensor("mlp.gate.weight", ("hidden", "dim")),
        "mlp.up_proj.weight": Tensor("mlp.up.weight", ("hidden", "dim")),
        "mlp.down_proj.weight": Tensor("mlp.down.weight", ("dim", "hidden")),
    },
    settings={"mlp_bias": False},
)


def _lacks_norm(plan: Plan) -> str | None:
    """Name a layer without exactly one node on ``attn.qk`` (before the rotation), as in Qwen3.

    The node's weights, if any, are its parameters ``q`` and ``k``, each (head_dim,).
    """
    for index, block in enumerate(plan.spec.blocks):
        attention = block.core_attention
        if attention is None or len(attention.before_rope) != 1:
            return f"layer {index} has no norm on queries and keys, or more than one node there"
    return None


QWEN3 = Layout(  # arXiv:2505.09388: Llama with a norm on queries and keys
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    leaves=LLAMA.leaves,
    head=LLAMA.head,
    layer={
        **LLAMA.layer,
        "self_attn.q_norm.weight": Tensor("attention.qk.q", ("head_dim",), ones=True),
        "self_attn.k_norm.weight": Tensor("attention.qk.k", ("head_dim",), ones=True),
    },
    settings={"use_sliding_window": False, "sliding_window": None},
    stated=("head_dim", "num_key_value_heads"),
    lacks=_lacks_norm,
    plugins={"qk_norm": {"gains": True}},
)


def _lacks_bias(plan: Plan) -> str | None:
    """Name a layer without the biases of Qwen2; None: all have them."""
    known = places(plan)
    for index in range(plan.config.model.layers):
        for bias in ("qk.q_bias", "qk.k_bias", "v_terms.v_bias"):
            if f"layers.{index}.attention.{bias}" not in known:
                return f"layer {index} has no biases on queries, keys and values"
    return None


QWEN2 = Layout(  # arXiv:2407.10671: Llama with biases on queries, keys and values
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    leaves=LLAMA.leaves,
    head=LLAMA.head,
    layer={
        **LLAMA.layer,
        "self_attn.q_proj.bias": Tensor("attention.qk.q_bias", ("queries",)),
        "self_attn.k_proj.bias": Tensor("attention.qk.k_bias", ("keys",)),
        "self_attn.v_proj.bias": Tensor("attention.v_terms.v_bias", ("keys",)),
    },
    settings={"attention_bias": True, "use_sliding_window": False, "sliding_window": None},
    stated=("num_key_value_heads",),
    lacks=_lacks_bias,
    plugins={"qkv_bias": {}},
)


LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in (LLAMA, QWEN2, QWEN3)}
GPT2 = "GPT2LMHeadModel"
"""A common unsupported architecture: it is refused with the reason."""


# config.json of other programs: only features of minillm's decoder are accepted

Size = Annotated[int, Field(ge=1, lt=2**31)]
ROPE_BASE = 10_000.0  # the default
_ORIGINAL = "original_max_position_embeddings"


class Document(BaseModel):
    """The keys of config.json that affect a model's computation; some have one supported value.

    Absent keys have Transformers' defaults.
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
    rms_norm_eps: float = Field(1e-6, gt=0, lt=1)
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | float | None = None
    partial_rotary_factor: float | None = None
    rope_interleaved: Literal[False] = False  # in SmolLM2's config.json
    layer_types: list[str] | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] | None = None
    sliding_window: int | None = None
    quantization_config: None = None
    quantization: None = None  # mlx-lm's name for it
    auto_map: None = None  # code that comes with the directory
    model_file: None = None  # the same, for mlx-lm


def model_of(config: dict[str, Any], where: str) -> tuple[Layout, ModelConfig, Scaling | None]:
    """Read the layout, sizes and rotary scaling of a config.json.

    Args:
        config: its content.
        where: its path.

    Raises:
        Refusal: an unsupported architecture or feature, or inconsistent sizes.
    """
    named, kind = config.get("architectures"), config.get("model_type")
    for layout in LAYOUTS.values():
        if named == [layout.architecture] and kind in (None, layout.name):
            break
    else:
        what = f"minillm has no model of architecture {str(named)[:80]}, type {str(kind)[:40]}"
        fix = f"give a directory of {' or '.join(one.architecture for one in LAYOUTS.values())}"
        if named == [GPT2]:
            what += ": it has learned positions, LayerNorm and biases in every product"
            fix += ", or train a new model of that size (minillm train --preset gpt2-124m)"
        if kind == OWN_MODEL:
            what = "a directory with its own modeling files is written by export, and not read"
            fix = "the folder of the run that it was exported from"
        raise Refusal(what, where=where, fix=fix)
    try:
        return layout, *_model_of(config, layout)
    except (ValueError, OverflowError) as error:  # pydantic's among them
        raise Refusal(
            f"minillm's decoder cannot be this model: {_problem(error)}",
            where=where,
            fix="give a directory of a plain Llama, Qwen2 or Qwen3 model",
        ) from error


def _model_of(config: dict[str, Any], layout: Layout) -> tuple[ModelConfig, Scaling | None]:
    """Read the sizes and the rotary scaling; raise ValueError with the reason."""
    document = Document.model_validate(config)
    for key in layout.stated:
        if getattr(document, key) is None:
            raise ValueError(f"{key} is missing")
    if others := sorted(set(document.layer_types or ()) - {"full_attention"}):
        raise ValueError(f"layer_types has {others[0][:40]!r}")
    if document.attention_bias and not layout.settings.get("attention_bias"):
        raise ValueError("attention_bias is true")
    # Qwen2 and Qwen3 contain a sliding window that takes effect only with use_sliding_window
    if document.sliding_window is not None and document.use_sliding_window is None:
        raise ValueError(f"sliding_window is {document.sliding_window}")
    heads = document.num_attention_heads
    kv_heads = heads if document.num_key_value_heads is None else document.num_key_value_heads
    base, scaling = _rope(document)
    divided = document.head_dim in (None, document.hidden_size / heads)
    model = ModelConfig(
        layers=document.num_hidden_layers,
        dim=document.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        hidden=document.intermediate_size,
        vocab=document.vocab_size,
        tied=document.tie_word_embeddings,
        rope_base=base,
        norm_eps=document.rms_norm_eps,
        head_dim=None if divided else document.head_dim,
    )
    if (model.head_dim is None and model.dim % heads) or model.head_width % 2 or heads % kv_heads:
        raise ValueError(
            f"{model.dim} features, {heads} heads, {kv_heads} key-value heads and a head_dim of "
            f"{model.head_width} do not go together"
        )
    return model, scaling


def _rope(document: Document) -> tuple[float, Scaling | None]:
    """Find the rotary base and scaling, which versions of Transformers write under different keys."""
    found: set[float] = set()
    scaled: dict[str, Scaling] = {}
    if document.partial_rotary_factor not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor is {document.partial_rotary_factor}")
    if document.rope_theta is not None:
        found.add(document.rope_theta)
    for key in ("rope_parameters", "rope_scaling"):
        table = getattr(document, key) or {}
        kind = table.get("rope_type", table.get("type", "default"))
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"{key} is {str(table)[:80]}")
        theta = table.get("rope_theta")
        if isinstance(theta, (int, float)) and not isinstance(theta, bool):
            found.add(float(theta))
        if kind == "default":
            known = {"rope_type", "type", "partial_rotary_factor", "rope_theta"}
            if theta is None and table.keys() - known:
                raise ValueError(f"{key} is {str(table)[:80]}")
        else:
            try:
                scaled[key] = Scaling.read(table)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
    if len(found) > 1:
        raise ValueError(f"rope_theta is both {' and '.join(f'{s:g}' for s in sorted(found))}")
    if len(set(map(repr, scaled.values()))) > 1:
        raise ValueError("rope_parameters and rope_scaling differ")
    scaling = next(iter(scaled.values()), None)
    stated = document.original_max_position_embeddings
    if scaling is not None and stated not in (None, scaling.options[_ORIGINAL]):
        raise ValueError(
            f"{_ORIGINAL} is {stated}, and {scaling.options[_ORIGINAL]} in {next(iter(scaled))}: "
            "Transformers 5 applies the first, other programs the second"
        )
    return found.pop() if found else ROPE_BASE, scaling


def _problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{key} is missing"
    return f"{key} is {str(first['input'])[:40]}: {first['msg'][:1].lower()}{first['msg'][1:]}"
