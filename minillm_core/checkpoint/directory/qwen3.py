"""The plain model with a norm on queries and keys: Qwen3's layout (arXiv:2505.09388).

The plugin puts one node a layer on ``attn.qk``, before the rotation. Its weights, if it has any,
are its parameters ``q`` and ``k``, each (head_dim,).
"""

from __future__ import annotations

from minillm_core.checkpoint.directory.layout import Layout, Leaf
from minillm_core.checkpoint.directory.llama import LLAMA
from minillm_core.nn.attention import AttentionSpec
from minillm_core.plan import Plan

__all__ = ["QWEN3"]


def _lacks(plan: Plan) -> str | None:
    for index, block in enumerate(plan.spec.blocks):
        normed = block.attention
        if not isinstance(normed, AttentionSpec) or len(normed.before_rope) != 1:
            return f"layer {index} has no norm on queries and keys, or more than one node there"
    return None


QWEN3 = Layout(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    leaves=LLAMA.leaves,
    head=LLAMA.head,
    layer={
        **LLAMA.layer,
        "self_attn.q_norm.weight": Leaf("attention.qk.q", ("head_dim",), ones=True),
        "self_attn.k_norm.weight": Leaf("attention.qk.k", ("head_dim",), ones=True),
    },
    settings={"use_sliding_window": False, "sliding_window": None},
    stated=("head_dim", "num_key_value_heads"),
    lacks=_lacks,
)
