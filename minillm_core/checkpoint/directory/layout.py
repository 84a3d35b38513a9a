"""A layout of model directories: which of its tensors is which parameter here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm_core.config.schema import ModelConfig
from minillm_core.errors import Refusal
from minillm_core.nn.norm import EPSILON
from minillm_core.plan import Plan

__all__ = ["Layout", "Leaf", "Tensor", "places"]

_QK = re.compile(r"(layers\.\d+\.attention\.qk)\.\w+\.(q|k)")
"""A norm's weights on queries and keys, whatever its plugin is called."""


@dataclass(frozen=True)
class Leaf:
    """A tensor of the model, or of each layer."""

    place: str  # the parameter here, from the layer on: attention.q.weight
    axes: tuple[str, ...]  # see _sizes
    ones: bool = False  # a model without this parameter behaves as if it were all ones


@dataclass(frozen=True)
class Tensor:
    """A tensor of a directory of a certain size."""

    place: str  # layers.0.attention.q.weight
    shape: tuple[int, ...]
    ones: bool = False


def _nothing(plan: Plan) -> str | None:
    return None


@dataclass(frozen=True)
class Layout:
    """What Transformers, vLLM and mlx-lm know under the name of an architecture."""

    name: str  # as plugins say it: llama
    architecture: str  # LlamaForCausalLM
    leaves: Mapping[str, Leaf]  # outside the layers, the head apart
    head: tuple[str, Leaf]  # where it is not tied
    layer: Mapping[str, Leaf]
    settings: Mapping[str, Any] = field(default_factory=dict)  # of config.json, its own
    stated: tuple[str, ...] = ()  # sizes whose defaults there are not ours: they must be given
    lacks: Callable[[Plan], str | None] = _nothing  # what a plan would need to be of this layout

    def tensors(self, model: ModelConfig) -> dict[str, Tensor]:
        """Every tensor of a directory, by its name there."""
        sizes = _sizes(model)
        named = {name: ("", leaf) for name, leaf in self.leaves.items()}
        for index in range(model.layers):
            for name, leaf in self.layer.items():
                named[f"model.layers.{index}.{name}"] = (f"layers.{index}.", leaf)
        if not model.tied:
            named[self.head[0]] = ("", self.head[1])
        return {
            name: Tensor(at + leaf.place, tuple(sizes[axis] for axis in leaf.axes), leaf.ones)
            for name, (at, leaf) in named.items()
        }

    def document(self, model: ModelConfig, *, positions: int, boundary: int | None) -> dict:
        """config.json.

        Args:
            model: the sizes.
            positions: the longest row that the model has seen.
            boundary: the id before every document; None where nobody knows.
        """
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
            "head_dim": model.dim // model.heads,
            "hidden_act": "silu",
            "rms_norm_eps": EPSILON,
            "max_position_embeddings": positions,
            # the first is read by Transformers 4, vLLM and mlx-lm, the second by Transformers 5
            "rope_theta": model.rope_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
            "tie_word_embeddings": model.tied,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": boundary,
            "eos_token_id": boundary,
            # Transformers would give the row of a padding id no gradient, and here it is the
            # boundary's; the tokenizer and generation_config.json name it.
            "pad_token_id": None,
            **self.settings,
        }


def places(plan: Plan) -> dict[str, str]:
    """Place -> parameter of the plan: its name without that of the plugin on queries and keys.

    Raises:
        Refusal: two parameters have one place.
    """
    found: dict[str, str] = {}
    for name in plan.parameters:
        match = _QK.fullmatch(name)
        place = f"{match[1]}.{match[2]}" if match else name
        if place in found:
            raise Refusal(
                f"{found[place]} and {name} are two norms in one place",
                where=place,
                fix="leave one of the plugins out",
            )
        found[place] = name
    return found


def _sizes(model: ModelConfig) -> dict[str, int]:
    width = model.dim // model.heads
    return {
        "vocab": model.vocab,
        "dim": model.dim,
        "hidden": model.hidden,
        "queries": model.heads * width,
        "keys": model.kv_heads * width,
        "head_dim": width,
    }
